"""A small bundle, images, sources of each kind, and ways to end processes: for tests of `exitwise score`."""

import io
import tarfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from pyarrow import parquet

import exitwise as ew
from exitwise.runtime.bundle import InputSpec, Manifest, StageGraphInfo
from exitwise.scoring.attempts import DeathCounter
from exitwise.scoring.executors import Event
from exitwise.scoring.job import Job
from exitwise.scoring.shard_scorer import LoadedBundle, ShardScorer

SIDE, CLASSES = 8, ("cat", "dog", "owl")
POISON = b"ends the process"  # in a file


def write_bundle(folder: Path, seed: int = 0, threshold: float = 0.5, budget: float = 150.0) -> Path:
    """Write a bundle of two exits with random weights, with about half of noise at each exit."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)

    def weights(name: str, *shape: int) -> Any:
        return numpy_helper.from_array(rng.normal(0, 1.5 / shape[0] ** 0.5, shape).astype(np.float32), name)

    shape = [SIDE * SIDE * 3, 16]
    first = helper.make_graph(
        [
            helper.make_node("Flatten", ["image"], ["flat"]),
            helper.make_node("MatMul", ["flat", "w"], ["hidden"]),
            helper.make_node("Tanh", ["hidden"], ["next.0"]),
            helper.make_node("MatMul", ["next.0", "h"], ["logits"]),
            helper.make_node("Softmax", ["logits"], ["probs"]),
        ],
        "stage0",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, SIDE, SIDE])],
        [
            helper.make_tensor_value_info("next.0", TensorProto.FLOAT, ["n", 16]),
            helper.make_tensor_value_info("probs", TensorProto.FLOAT, ["n", 3]),
        ],
        [weights("w", *shape), weights("h", 16, 3)],
    )
    second = helper.make_graph(
        [helper.make_node("MatMul", ["state.0", "h"], ["logits"]), helper.make_node("Softmax", ["logits"], ["probs"])],
        "stage1",
        [helper.make_tensor_value_info("state.0", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("probs", TensorProto.FLOAT, ["n", 3])],
        [weights("h", 16, 3)],
    )
    infos = []
    for exit, (graph, inputs, outputs) in enumerate(
        ((first, ("image",), ("next.0", "probs")), (second, ("state.0",), ("probs",)))
    ):
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        onnx.checker.check_model(model)
        data = model.SerializeToString()
        (folder / f"stage{exit}.onnx").write_bytes(data)
        infos.append(StageGraphInfo(f"stage{exit}.onnx", sha256(data).hexdigest(), inputs, outputs))
    costs = (100.0, 200.0)
    Manifest(
        graphs=tuple(infos),
        memory=None,
        inputs=(InputSpec("image", (3, SIDE, SIDE)),),
        num_classes=len(CLASSES),
        policy=ew.Policy((threshold, -inf), costs=costs, budget=budget),
        costs=ew.Costs(costs),
        classes=CLASSES,
        preprocessing=ew.Preprocessing(SIDE, (0.5, 0.5, 0.5), (0.3, 0.3, 0.3), margin=1.25),
        method="random",
    ).save(folder)
    return folder


def image_bytes(number: int, side: int = SIDE, format: str = "PNG") -> bytes:
    """Return an image of noise that differs for every number."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side + number % 3, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, format)
    return data.getvalue()


def contents(count: int) -> dict[str, bytes]:
    """Return images by name, in two folders, one in twenty of which is damaged or blank."""
    found = {}
    for number in range(count):
        data = image_bytes(number)
        if number % 40 == 7:
            data = data[: len(data) // 2]
        found[f"{'ab'[number % 2]}/{number:04}.png"] = data
    return dict(sorted(found.items()))


def write_folder(folder: Path, images: dict[str, bytes]) -> Path:
    """Write images below a folder."""
    for name, data in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_tars(folder: Path, images: dict[str, bytes], files: int = 2) -> Path:
    """Write images and their labels to tar files, as WebDataset does."""
    folder.mkdir()
    names = list(images)
    for number, part in enumerate(np.array_split(np.arange(len(names)), files)):
        with tarfile.open(folder / f"{number:03}.tar", "w") as file:
            for position in part:
                for suffix, data in ((".cls", b"1"), (".png", images[names[position]])):
                    member = tarfile.TarInfo(names[position].removesuffix(".png") + suffix)
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
    return folder


def write_parquet(folder: Path, images: dict[str, bytes], files: int = 2, group: int = 10, **more: Any) -> Path:
    """Write images and their names to Parquet files with small row groups."""
    folder.mkdir()
    names = list(images)
    for number, part in enumerate(np.array_split(np.arange(len(names)), files)):
        chosen = [names[position] for position in part]
        columns = {"name": chosen, "image": [images[name] for name in chosen]}
        columns |= {key: [values[position] for position in part] for key, values in more.items()}
        parquet.write_table(pa.table(columns), folder / f"{number:03}.parquet", row_group_size=group)
    return folder


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a job, sorted by id."""
    rows: list[dict[str, Any]] = parquet.read_table(out / "parts").to_pylist()
    return sorted(rows, key=lambda row: row["id"])


def read_parts(out: Path) -> dict[str, bytes]:
    """Return the parts of a job, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted((out / "parts").glob("part-*"))}


class Death(BaseException):
    """Stands for the end of a process: nothing may catch it."""


class InProcess:
    """Runs shards in this process, and begins a new "worker" when one dies of `Death`."""

    def __init__(self, bundle: Path, order: Callable[[Sequence[int]], Sequence[int]] = lambda shards: shards) -> None:
        self.bundle, self.order, self.deaths = bundle, order, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, job: Job, shards: Sequence[int], on_event: Callable[[Event], None]) -> None:
        loaded, counter = LoadedBundle(self.bundle), DeathCounter(job.storage, job.attempts_folder)
        waiting = list(self.order(shards))
        while waiting:
            try:
                report = ShardScorer(job.location, loaded).score(waiting[0])
            except Death:
                self.deaths += 1
                if not counter.add(waiting[0]):
                    raise ew.InputError(f"workers died again and again on shard {waiting[0]}") from None
            else:
                on_event(report)
                waiting.pop(0)


# A file `sitecustomize.py` with this content, in a folder of PYTHONPATH, makes workers die: the product has no hook.
SITE = f'''
import os, signal, sys
from pathlib import Path

if "exitwise.scoring.worker" in sys.orig_argv:
    import PIL.Image

    open_image, replace_file = PIL.Image.open, Path.replace

    def open_or_die(file, *arguments, **options):
        data = file.getvalue() if hasattr(file, "getvalue") else Path(file).read_bytes()
        if {POISON!r} in data:
            os.abort()
        if b"takes all memory" in data:
            raise MemoryError
        return open_image(file, *arguments, **options)

    def replace_or_die(self, target):
        """Die between the data of a part and its commit, or after the commit, as often as there are files."""
        when = [path for path in Path(os.environ.get("DEATHS", "/nowhere")).glob("*") if "part-" in str(target)]
        if when and when[0].name.startswith("full"):
            raise OSError(28, "No space left on device", str(target))
        if when and when[0].name.startswith("before"):
            die(when[0])
        result = replace_file(self, target)
        if when:
            die(when[0])
        return result

    def die(ticket):
        try:
            ticket.unlink()
        except FileNotFoundError:  # another worker took it
            return
        os.kill(os.getpid(), signal.SIGKILL)

    PIL.Image.open, Path.replace = open_or_die, replace_or_die
'''


def run(source: object, bundle: Path, out: Path, **options: Any) -> ew.ScoreSummary:
    """Score in this process."""
    executor = options.pop("executor", None) or InProcess(bundle)
    options = {"shard_size": 40, "batch_size": 16, **options}
    return ew.score(str(source), bundle=bundle, out=out, executor=executor, **options)


def refused(problem: str, *arguments: Any, **options: Any) -> None:
    """Check that a job is refused with one line."""
    with pytest.raises(ew.InputError, match=problem) as error:
        run(*arguments, **options)
    assert "\n" not in str(error.value)
