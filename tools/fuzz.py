"""Read damaged files of every kind: python tools/fuzz.py [--count N] [--seed S] [--kind NAME ...] [--only NUMBER]

Each mutation damages one valid file and reads it with the public interface. There are four outcomes:

- refused: an InputError of one line, or an OSError;
- identical: the file is accepted, and gives exactly what the undamaged file gives;
- different: the file is accepted, and gives something else. For files with a digest this is a failure. In files
  of earlier versions and of other programs not every change can be noticed: there it is only counted;
- escaped: any other exception, a crash, more than 20 seconds of CPU time, more than 4 GB of memory, a message of
  several lines, or a refused file that changed the object it was to be loaded into.

Mutations are numbered, and each follows from the seed and its number: `--only NUMBER` repeats one. The mutations run in
a process of their own, which is started again if it dies. The status is 1 if anything failed.
"""

import argparse
import gzip
import io
import json
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

import exitwise as ew
from exitwise.core import tensorfiles
from exitwise.core.files import read_json, write_json
from exitwise.data import fashion_mnist
from exitwise.data.folders import decode
from exitwise.data.holdout import HeldOutPart, HoldOut
from exitwise.runs.chosen import ChosenClassifier
from exitwise.runs.row_file import FORMATS, RowFile
from exitwise.runs.run import Run, run_metadata
from exitwise.runtime.bundle import Manifest
from exitwise.runtime.external_data import has_external_data
from exitwise.training import checkpoints
from exitwise.training.checkpoints import CheckpointDirectory
from exitwise.training.history import EpochRecord, History
from exitwise.training.loop import TrainingState

BUNDLE = Path(__file__).resolve().parents[1] / "tests" / "former" / "bundle"
CPU_SECONDS = 20
MEMORY = 4 << 30  # bytes, beyond those in use when the first mutation begins
FAILURES = ("escaped", "different")

Use = Callable[[Path], Any]


@dataclass(frozen=True)
class Kind:
    """A kind of file: a valid example, the function that reads it, and whether a digest must notice every change."""

    name: str
    file: Path  # inside of a folder with all that reading it needs
    use: Use
    digest: bool
    text: bool = False  # JSON, whose values are also replaced one by one


# -- fingerprints


def fingerprint(value: Any) -> str:
    """Return a hash of nested data with tensors: equal if and only if the data is the same bit by bit."""
    digest = sha256()
    for part in _parts(value):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + value.tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key).encode(errors="surrogateescape")
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}]".encode()
        for item in value:
            yield from _parts(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _parts({field.name: getattr(value, field.name) for field in fields(value)})
    else:
        yield repr(value).encode(errors="backslashreplace")


# -- mutations


ODD = (None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 0.5, 1e-320, 1e308, "@1e999", "@-1e999", "@NaN")
ODD += ("@huge", "@deep", "@wide", "", "inf", "nan", "x", "\u0000", "\ud800", "../x", "a\nb\u001b[31m", [], {}, [[]])
ODD += ([1, 2, 3], {"a": 1}, "F64", "BF16", "F8_E4M3", "BOOL", "I64", "C64", "U16")
TEXTS = {
    '"@1e999"': "1e999",
    '"@-1e999"': "-1e999",
    '"@NaN"': "NaN",
    '"@huge"': "1" + "0" * 400,
    '"@deep"': "[" * 3000 + "]" * 3000,
    '"@wide"': "[" + "0," * 20000 + "0]",
}


def mutate(kind: Kind, data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return damaged bytes, and the name of the damage."""
    mutators: list[Callable[[bytes, random.Random], bytes]] = [flip_bit, flip_bits, truncate, overwrite, splice, resize]
    if kind.file.suffix == ".safetensors":
        mutators += [flip_header_bit, edit_header, edit_header, edit_header, lie_about_length]
    elif kind.text:
        mutators += [edit_json, edit_json, edit_json]
    mutator = rng.choice(mutators)
    return mutator(data, rng), mutator.__name__


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    return _flip(data, rng.randrange(len(data)), rng)


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(2, 16)):
        data = _flip(data, rng.randrange(len(data)), rng)
    return data


def flip_header_bit(data: bytes, rng: random.Random) -> bytes:
    return _flip(data, rng.randrange(8 + _header_size(data)), rng)


def _flip(data: bytes, position: int, rng: random.Random) -> bytes:
    return data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def overwrite(data: bytes, rng: random.Random) -> bytes:
    """Replace some bytes by zeros, ones, huge numbers or anything."""
    position, size = rng.randrange(len(data)), rng.choice((1, 2, 4, 8, 16, 64))
    new = rng.choice((b"\0" * size, b"\xff" * size, b"\x7f" + b"\xff" * (size - 1), rng.randbytes(size)))
    return data[:position] + new + data[position + size :]


def splice(data: bytes, rng: random.Random) -> bytes:
    """Copy a part of the file over another part."""
    size = rng.randint(1, max(1, min(len(data) // 2, 1024)))
    source, target = rng.randrange(len(data)), rng.randrange(len(data))
    part = data[source : source + size]
    return data[:target] + part + data[target + len(part) :]


def resize(data: bytes, rng: random.Random) -> bytes:
    """Remove a part of the file, or insert one."""
    position, size = rng.randrange(len(data)), rng.randint(1, 256)
    if rng.random() < 0.5:
        return data[:position] + data[position + size :]
    return data[:position] + rng.choice((rng.randbytes(size), data[:size], b" " * size)) + data[position:]


def lie_about_length(data: bytes, rng: random.Random) -> bytes:
    size = rng.choice((0, 1, _header_size(data) + 1, len(data), 2**27, 2**31, 2**63, 2**64 - 1, rng.getrandbits(64)))
    return struct.pack("<Q", size) + data[8:]


def edit_header(data: bytes, rng: random.Random) -> bytes:
    """Change one value or key of a safetensors header, or of the JSON in its metadata, to valid JSON."""
    size = _header_size(data)
    header = json.loads(data[8 : 8 + size])
    metadata = header.get("__metadata__", {})
    inner = [key for key, value in metadata.items() if value.startswith(("{", "[", '"'))]
    if inner and rng.random() < 0.5:
        key = rng.choice(inner)
        metadata[key] = _edit(json.loads(metadata[key]), rng)
        text = json.dumps(header, separators=(",", ":"))
    else:
        text = _edit(header, rng)
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw + data[8 + size :]


def edit_json(data: bytes, rng: random.Random) -> bytes:
    return _edit(json.loads(data), rng).encode()


def _edit(tree: Any, rng: random.Random) -> str:
    """Return the text of JSON data in which one node is replaced, removed, renamed, swapped or there twice."""
    tree = json.loads(json.dumps(tree))
    nodes = list(_nodes(tree))
    if not nodes:
        return _text(rng.choice(ODD))
    parent, key = rng.choice(nodes)
    action = rng.randrange(6)
    if action == 0:
        del parent[key]
    elif action == 1:
        other, name = rng.choice(nodes)
        parent[key], other[name] = other[name], parent[key]
        try:
            return _text(tree)
        except ValueError:  # a node inside of itself
            return "{}"
    elif action == 2 and isinstance(parent, dict):
        parent[rng.choice(("", "x", f"{key}x", "format", "__metadata__"))] = parent.pop(key)
    elif action == 3 and isinstance(parent, dict):  # the same key twice, with another value
        text, name = _text(tree), json.dumps(key)
        return text.replace(f"{name}:", f"{name}:{_text(rng.choice(ODD))},{name}:", 1)
    elif action == 4 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] = rng.choice((parent[key] + 1, -parent[key], parent[key] * 2, parent[key] / 3, parent[key] * 1e9))
    else:
        parent[key] = rng.choice(ODD)
    return _text(tree)


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Iterate over all values inside of JSON data, as the object or list that holds them and their key."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _nodes(value)


def _text(tree: Any) -> str:
    text = json.dumps(tree, separators=(",", ":"))
    for name, value in TEXTS.items():
        text = text.replace(name, value)
    return text


def _header_size(data: bytes) -> int:
    return struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0


def without_digest(path: Path) -> None:
    """Make a file as earlier versions wrote it: so that damage reaches the checks after the digest."""
    if path.suffix == ".json":
        path.write_text(json.dumps(read_json(path)))
        return
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + _header_size(data)])
    del header["__metadata__"][tensorfiles.DIGEST_KEY]
    if header["__metadata__"]["format"] == checkpoints.FORMAT:  # former checkpoints have a digest of their tensors
        header["__metadata__"]["digest"] = json.dumps(checkpoints._digest(tensorfiles.read(path)[0]))
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + _header_size(data) :])


# -- kinds of files


def make_kinds(folder: Path) -> dict[str, Kind]:
    """Write a small valid file of every kind."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    net = ew.models.msdnet("tiny-8").eval()
    images = torch.randn(40, 1, 8, 8, generator=generator)
    labels = torch.arange(40) % 10
    batches = [(images, labels)]
    trace = ew.collect(net, batches, batches, batches, classes=[f"class {k}" for k in range(10)])
    calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt", samples=5)
    probs = calibration.predict(trace.val).probs
    budget = (trace.costs.values[0] + trace.costs.values[-1]) / 2
    policy = ew.fit_policy(probs, labels=labels, costs=trace.costs, budget=budget)
    preprocessing = ew.Preprocessing(8, (0.5,), (0.25,))
    few = [features[:4] for features in trace.val.features]
    kinds: dict[str, Kind] = {}

    def add(
        name: str, file: str, save: Callable[[Path], None], use: Use, digest: bool = True, text: bool = False
    ) -> None:
        for suffix in ("", " without digest") if digest else ("",):
            path = folder / f"{name}{suffix}".replace(" ", "-") / file
            path.parent.mkdir()
            save(path)
            if suffix:
                without_digest(path)
            kinds[name + suffix] = Kind(name + suffix, path, use, digest and not suffix, text)

    def save_checkpoint(path: Path) -> None:
        rows = [{"epoch": 1, "lr": 0.1, "train_loss": 2.0, "val_loss": 2.0, "val_top1": [0.5], "seconds": 1.0}]
        rows[0]["images_per_second"] = 9.0
        state = {"epoch": 1, "batch": 0, "rows": rows, "loss": 0.0, "seconds": 0.0, "speed": 0.0}
        CheckpointDirectory(path.parent).save(1, 0, {"net.w": torch.arange(30.0), "momentum.w": torch.ones(30)}, state)

    def use_checkpoint(path: Path) -> Any:
        tensors, state = CheckpointDirectory(path.parent).load()
        return tensors, state, TrainingState.from_dict(state)

    def use_trace(path: Path) -> Any:
        loaded = ew.Trace.load(path)
        return loaded, loaded.heads[0].logits(loaded.val.features[0][:4])

    def use_calibration(path: Path) -> Any:
        loaded = ew.Calibration.load(path)
        return loaded.to_tensors(), np.asarray(loaded.predict(few).probs)

    def use_chosen(path: Path) -> Any:
        loaded = ChosenClassifier.load(path)
        return loaded.calibration.to_tensors(), loaded.policy, loaded.classes, loaded.describe()

    def save_classifier(path: Path) -> None:
        names = [f"class {k}" for k in range(10)]
        ew.Classifier(net, calibration, policy, classes=names, preprocessing=preprocessing).save(path)

    def use_classifier(path: Path) -> Any:
        loaded = ew.Classifier.load(path)
        pred = loaded(images[:4])
        policy_, costs = loaded.policy.to_dict(), loaded.costs
        return pred.probs, pred.exits, policy_, costs, loaded.classes, loaded.preprocessing, loaded.net.state_dict()

    def use_policy(path: Path) -> Any:
        loaded = ew.Policy.load(path)
        exits = loaded.exits(probs) if len(loaded.thresholds) == len(probs) else None
        return loaded.to_dict(), exits, loaded.shifted(1.0).thresholds

    def use_controller(path: Path) -> Any:
        loaded = ew.BudgetController.load(path)
        state = loaded.to_dict()
        loaded.update([0, 0, len(loaded.policy.thresholds) - 1], [0.5, 0.9, 0.1])
        return state, loaded.to_dict(), repr(loaded)

    def save_controller(path: Path) -> None:
        controller = ew.BudgetController(policy)
        controller.update([0, 1, 2, 2])
        controller.save(path)

    def save_manifest(path: Path) -> None:
        shutil.copytree(BUNDLE, path.parent, dirs_exist_ok=True)
        Manifest.load(path.parent).save(path.parent)  # with a digest, which the former bundle has not

    def use_session(path: Path) -> Any:
        from exitwise.runtime.onnx import Session

        session = Session(path.parent, threads=1)
        return session(images[:4].numpy()).probs, session.manifest

    def load_into_net(path: Path) -> Any:
        target = ew.models.msdnet("tiny-8")
        before = fingerprint(target.state_dict())
        try:
            return ew.load_checkpoint(target, path).state_dict()
        except Exception:
            if fingerprint(target.state_dict()) != before:
                raise AssertionError("a refused file changed the net") from None
            raise

    def save_history(path: Path) -> None:
        rows = [EpochRecord(k, 0.1, 2.0, 2.5, (0.5, 0.25), 10.0, 3.0) for k in (1, 2, 3)]
        History(tuple(rows), (2, 3)).save(path)

    def use_history(path: Path) -> Any:
        loaded = History.load(path)
        return loaded.to_dict(), loaded.top1 if loaded.epochs else None

    def save_idx(path: Path) -> None:
        parts = {"train": 9, "t10k": 5}
        for part, count in parts.items():
            header = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28)
            pixels = bytes(k % 251 for k in range(count * 784))
            names = struct.pack(">4BI", 0, 0, 8, 1, count) + bytes(k % 10 for k in range(count))
            for name, content in ((f"{part}-images-idx3-ubyte", header + pixels), (f"{part}-labels-idx1-ubyte", names)):
                zipped = path.suffix == ".gz"
                file = path.parent / (f"{name}.gz" if zipped else name)
                file.write_bytes(gzip.compress(content, mtime=0) if zipped else content)

    def use_idx(path: Path) -> Any:
        train, test = fashion_mnist.load(path.parent)
        return train.pixels, train.labels, test.pixels

    def save_cifar(path: Path) -> None:
        record = bytes(k % 256 for k in range(3072))
        (path.parent / "batches.meta.txt").write_text("\n".join(f"name{k}" for k in range(10)))
        for name in (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"):
            (path.parent / name).write_bytes(b"".join(bytes([k]) + record for k in range(3)))

    def use_cifar(path: Path) -> Any:
        train, test = ew.data.load("cifar10", root=path.parent)
        return train.pixels, train.labels, test.labels, train.classes

    def save_rows(path: Path) -> None:
        with RowFile(path, FORMATS[path.suffix[1:]], ("file", "exit", "probability")) as rows:
            rows.add({"file": f"image {k}, {chr(34)}.png", "exit": k, "probability": 0.5} for k in range(6))

    def use_rows(path: Path) -> Any:
        with RowFile(path, FORMATS[path.suffix[1:]], ("file", "exit", "probability"), resume=True) as rows:
            return list(rows.existing_rows())

    def save_run(path: Path) -> None:
        write_json(path, run_metadata({"preset": "tiny-8"}, {"name": "digits", "root": None, "image_size": 8}))

    def save_bench(path: Path) -> None:
        save_run(path.parent / "run.json")
        write_json(path, {"format": "exitwise.bench", "version": 1, "costs": {"unit": "ms", "values": [1.0, 2.0, 6.0]}})

    def save_split(path: Path) -> None:
        parts = [HeldOutPart(torch.arange(k, 40, 4), torch.arange(k, 40, 4) * 7919) for k in (0, 1)]
        HoldOut(*parts).save(path)

    add(
        "net",
        "net.safetensors",
        lambda path: ew.save_checkpoint(net, path),
        lambda path: ew.load_net(path).state_dict(),
    )
    add("checkpoint", "00001-0000000.safetensors", save_checkpoint, use_checkpoint)
    add("trace", "trace.safetensors", trace.save, use_trace)
    add("calibration", "calibration.safetensors", calibration.save, use_calibration)
    add("classifier", "classifier.safetensors", save_classifier, use_classifier)
    chosen = ChosenClassifier(calibration, policy, trace.classes)
    add("chosen", "chosen.safetensors", chosen.save, use_chosen)
    add("split", "split.safetensors", save_split, HoldOut.load)
    add("policy", "policy.json", policy.save, use_policy, text=True)
    add("controller", "controller.json", save_controller, use_controller, text=True)
    add("run", "run.json", save_run, lambda path: Run(path.parent).metadata, text=True)
    add("times", "bench.json", save_bench, lambda path: Run(path.parent).measured_costs(), text=True)
    add("manifest", "manifest.json", save_manifest, lambda path: Manifest.load(path.parent), text=True)
    # A graph's hash is in the manifest. Without it, only our own reading is of interest, not onnxruntime's.
    graph = folder / "graph" / "stage1.onnx"
    graph.parent.mkdir()
    save_manifest(graph)
    kinds["graph"] = Kind("graph", graph, use_session, digest=True)
    add("graph without hash", "stage1.onnx", save_manifest, lambda path: has_external_data(path.read_bytes()), False)
    add("weights", "net.pth", lambda path: torch.save({"state_dict": net.state_dict()}, path), load_into_net, False)
    add("foreign weights", "net.safetensors", lambda path: save_foreign(net, path), load_into_net, False)
    add("history", "history.csv", save_history, use_history, False)
    add("rows", "rows.csv", save_rows, use_rows, False)
    add("rows as JSON", "rows.jsonl", save_rows, use_rows, False)
    add("IDX images", "train-images-idx3-ubyte", save_idx, use_idx, False)
    add("IDX labels, zipped", "t10k-labels-idx1-ubyte.gz", save_idx, use_idx, False)
    add("CIFAR", "data_batch_2.bin", save_cifar, use_cifar, False)
    for suffix in ("png", "jpg", "gif", "bmp", "webp", "tif", "ppm"):
        add(f"image {suffix}", f"image.{suffix}", save_image, lambda path: decode(path, 16, None, None), False)
    return kinds


def save_foreign(net: torch.nn.Module, path: Path) -> None:
    from safetensors.torch import save_file

    save_file({f"module.{key}": value for key, value in net.state_dict().items()}, path, metadata={"format": "pt"})


def save_image(path: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"exif": exif} if path.suffix in (".jpg", ".png", ".webp") else {}
    Image.fromarray(pixels).save(path, **options)


# -- running


class TooSlow(BaseException):
    """Raised by a timer; no `except Exception` catches it."""


def _on_timer(*_: Any) -> None:
    raise TooSlow(f"more than {CPU_SECONDS} seconds of CPU time")


def attempt(kind: Kind, path: Path, expected: str) -> tuple[str, str]:
    """Read a damaged file; return the outcome and a detail for people."""
    signal.signal(signal.SIGPROF, _on_timer)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        with warnings.catch_warnings(action="ignore"):
            found = fingerprint(kind.use(path))
    except (ew.InputError, OSError) as error:
        lines = len(str(error).splitlines())
        return ("refused", str(error)) if lines == 1 else ("escaped", f"a message of {lines} lines: {error!r}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "escaped", f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ("identical", "") if found == expected else ("different", "")


class Fuzzer:
    """Files of every kind in a folder, and what the undamaged ones give."""

    def __init__(self, folder: Path, names: list[str] | None = None) -> None:
        kinds = make_kinds(folder)
        unknown = [name for name in names or [] if name not in kinds]
        if unknown:
            raise SystemExit(f"fuzz.py: no kind is called {unknown[0]!r}; there are {', '.join(kinds)}")
        self.kinds = [kinds[name] for name in names or kinds]
        self.contents = {kind.name: kind.file.read_bytes() for kind in self.kinds}
        self.expected = {kind.name: fingerprint(kind.use(kind.file)) for kind in self.kinds}

    def run(self, seed: int, number: int) -> tuple[Kind, str, str, str]:
        """Return the kind, the damage, the outcome and a detail of one mutation."""
        kind = self.kinds[number % len(self.kinds)]
        rng = random.Random(f"{seed} {number}")
        whole = self.contents[kind.name]
        damaged, damage = mutate(kind, whole, rng)
        kind.file.write_bytes(damaged)
        try:
            outcome, detail = attempt(kind, kind.file, self.expected[kind.name])
        finally:
            kind.file.write_bytes(whole)
        return kind, damage, outcome, detail


def is_failure(kind: Kind, outcome: str) -> bool:
    return outcome == "escaped" or (outcome == "different" and kind.digest)


def work(seed: int, numbers: range, names: list[str] | None) -> None:
    """Run mutations, and print a line of JSON for each."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), names)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        for number in numbers:
            print(json.dumps({"begin": number}), flush=True)
            kind, damage, outcome, detail = fuzzer.run(seed, number)
            failed = is_failure(kind, outcome)
            row = {"number": number, "kind": kind.name, "damage": damage, "outcome": outcome, "failed": failed}
            print(json.dumps({**row, "detail": detail if failed else ""}), flush=True)


def drive(seed: int, numbers: range, names: list[str] | None) -> list[dict[str, Any]]:
    """Run mutations in processes of their own; a process that dies is a failure, and the next one continues."""
    rows: list[dict[str, Any]] = []
    position, started = numbers.start, time.monotonic()
    while position < numbers.stop:
        command = [sys.executable, __file__, "--worker", "--seed", str(seed), "--first", str(position)]
        command += [
            "--count",
            str(numbers.stop - position),
            *(part for name in names or [] for part in ("--kind", name)),
        ]
        begun = None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert isinstance(process.stdout, io.TextIOBase)
            for line in process.stdout:
                row = json.loads(line)
                if "begin" in row:
                    begun = row["begin"]
                    continue
                rows.append(row)
                position = row["number"] + 1
                if row["failed"]:
                    print(
                        f"{row['number']} {row['kind']}, {row['damage']}: {row['outcome']} {row['detail']}", flush=True
                    )
                if len(rows) % 1000 == 0:
                    print(f"{len(rows):,} in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if process.returncode and begun is None:
            raise SystemExit("fuzz.py: the process ended before the first mutation")
        if process.returncode:
            position = begun + 1 if begun is not None else position + 1
            detail = f"the process ended with status {process.returncode}"
            rows.append(
                {"number": begun, "kind": "?", "damage": "?", "outcome": "escaped", "failed": True, "detail": detail}
            )
            print(f"{begun}: {detail}", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the outcomes by kind as a table in Markdown."""
    names = list(dict.fromkeys(row["kind"] for row in rows))
    counts = Counter((row["kind"], row["outcome"]) for row in rows)
    outcomes = ("refused", "identical", "different", "escaped")
    lines = ["| kind | mutations | refused | identical | different | escaped |", "|---|---:|---:|---:|---:|---:|"]
    for name in [*sorted(names), "all"]:
        numbers = [sum(counts[kind, outcome] for kind in (names if name == "all" else [name])) for outcome in outcomes]
        lines.append(f"| {name} | {sum(numbers):,} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", help="only files of this kind; may be repeated")
    parser.add_argument("--only", type=int, help="repeat one mutation, with the same seed and kinds")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            kind, damage, outcome, detail = Fuzzer(Path(folder), options.kind).run(options.seed, options.only)
        print(f"{kind.name}, {damage}: {outcome} {detail}")
        return int(is_failure(kind, outcome))
    numbers = range(options.first, options.first + options.count)
    if options.worker:
        work(options.seed, numbers, options.kind)
        return 0
    started = time.monotonic()
    rows = drive(options.seed, numbers, options.kind)
    failures = sum(row["failed"] for row in rows)
    print(table(rows))
    print(f"\n{len(rows):,} mutations, {failures} failures, seed {options.seed}, {time.monotonic() - started:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
