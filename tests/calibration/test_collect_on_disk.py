"""Collecting into a folder: the trace that is collected in memory, also after processes were killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import small_net
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import exitwise as ew
from exitwise.calibration import trace_folder
from exitwise.calibration.trace_folder import partial_folder
from exitwise.core.mapped_rows import MappedRows

SIZES = {"train": 100, "val": 70, "test": 30}
COSTS = [1, 2, 3]


def loaders(shift: int = 0) -> dict[str, DataLoader[tuple[Tensor, ...]]]:
    generator = torch.Generator().manual_seed(0)
    batches = {}
    for name, n in SIZES.items():
        images = torch.randn(n, 6, generator=generator)
        labels = (torch.randint(4, (n,), generator=generator) + shift) % 4
        batches[name] = DataLoader(TensorDataset(images, labels, torch.arange(n) + 7), batch_size=16)
    return batches


def seeded_net(seed: int = 0) -> ew.MultiExitNet:
    torch.manual_seed(seed)
    return small_net()


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_folder, "SHARD_ROWS", 24)  # one and a half batches


def assert_same_trace(one: ew.Trace, other: ew.Trace) -> None:
    """Check that two traces are equal bit for bit: the same net ran on the same batches."""
    for name in ("val", "test"):
        a, b = getattr(one, name), getattr(other, name)
        assert all(torch.equal(x[:], y[:]) for x, y in zip(a.features, b.features, strict=True))
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.index, b.index)
    for k in range(3):
        assert torch.equal(one.curvature[k].A, other.curvature[k].A)
        assert torch.equal(one.curvature[k].B, other.curvature[k].B)
        assert torch.equal(one.heads[k].weight, other.heads[k].weight)
    assert (one.costs, one.num_train) == (other.costs, other.num_train)


class StoppedError(Exception):
    """Stands for anything that stops a collection."""


class StopAfter:
    """Batches that end in an error after some of them."""

    def __init__(self, loader: DataLoader[Any], batches: int) -> None:
        self._loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(self._loader):
            if i == self._batches:
                raise StoppedError
            yield batch


def test_the_folder_has_the_trace_in_memory(tmp_path: Path) -> None:
    net = seeded_net()
    trace = ew.collect(net, **loaders(), costs=COSTS, out=tmp_path / "trace")
    assert all(isinstance(x, MappedRows) for x in trace.val.features)
    assert_same_trace(trace, ew.collect(net, **loaders(), costs=COSTS))
    assert len(list((tmp_path / "trace").glob("val-*.labels.npy"))) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]
    half = ew.collect(net, **loaders(), costs=COSTS, out=str(tmp_path / "half"), dtype=torch.float16)
    assert torch.equal(half.val.features[0][:], trace.val.features[0].half())


def test_a_folder_without_train_and_test(tmp_path: Path) -> None:
    trace = ew.collect(small_net(), val=loaders()["val"], costs=COSTS, out=tmp_path / "trace")
    assert (trace.test, trace.curvature, len(trace.val)) == (None, (), 70)


@pytest.mark.parametrize(
    ("name", "batches", "skipped"),  # samples of batches that are completely in shards, or in sums that were kept
    [("val", 1, 0), ("val", 3, 48), ("val", 4, 48), ("test", 1, 70), ("train", 1, 100), ("train", 5, 164)],
)
def test_an_interrupted_collection_continues(tmp_path: Path, name: str, batches: int, skipped: int) -> None:
    net, calls, out = seeded_net(), [], tmp_path / "trace"
    interrupted = {**loaders(), name: StopAfter(loaders()[name], batches)}
    with pytest.raises(StoppedError):
        ew.collect(net, **interrupted, costs=COSTS, out=out)
    assert not out.exists()
    net.stages[0].register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    trace = ew.collect(net, **loaders(), costs=COSTS, out=out)
    assert sum(calls) == sum(SIZES.values()) - skipped
    assert_same_trace(trace, ew.collect(net, **loaders(), costs=COSTS))
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


@pytest.mark.parametrize(
    "changed",
    [{"net": 1}, {"dtype": torch.float16}, {"curvature": "average"}, {"costs": [1, 2, 4]}],
    ids=["net", "dtype", "curvature", "costs"],
)
def test_another_collection_starts_anew(tmp_path: Path, changed: dict[str, Any]) -> None:
    out = tmp_path / "trace"
    interrupted = {**loaders(), "train": StopAfter(loaders()["train"], 3)}
    with pytest.raises(StoppedError):
        ew.collect(seeded_net(), **interrupted, costs=COSTS, out=out)
    net, calls = seeded_net(changed.pop("net", 0)), []
    net.stages[0].register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    ew.collect(net, **{**loaders(), "costs": COSTS, **changed}, out=out)
    assert sum(calls) == sum(SIZES.values())


def test_damaged_sums_start_anew(tmp_path: Path) -> None:
    out, net = tmp_path / "trace", seeded_net()
    with pytest.raises(StoppedError):
        ew.collect(net, **{**loaders(), "train": StopAfter(loaders()["train"], 5)}, costs=COSTS, out=out)
    sums = partial_folder(out) / "sums.safetensors"
    sums.write_bytes(sums.read_bytes()[:-8])
    assert_same_trace(ew.collect(net, **loaders(), costs=COSTS, out=out), ew.collect(net, **loaders(), costs=COSTS))


def test_other_samples_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "trace"
    for name in ("val", "train"):
        interrupted = {**loaders(), name: StopAfter(loaders()[name], 4)}
        with pytest.raises(StoppedError):
            ew.collect(seeded_net(), **interrupted, costs=COSTS, out=out)
        changed = {**loaders(), name: loaders(shift=1)[name]}
        with pytest.raises(ew.InputError, match=f"`{name}` gives other samples or batches than before"):
            ew.collect(seeded_net(), **changed, costs=COSTS, out=out)
        shorter = {**loaders(), name: [next(iter(loaders()[name]))]}
        with pytest.raises(ew.InputError, match=f"`{name}` gives other samples or batches than before"):
            ew.collect(seeded_net(), **shorter, costs=COSTS, out=out)
    assert not out.exists()


def test_arguments_are_checked(tmp_path: Path) -> None:
    out, net = tmp_path / "trace", seeded_net()
    ew.collect(net, **loaders(), costs=COSTS, out=out)
    with pytest.raises(ew.InputError, match="already holds a trace"):
        ew.collect(net, **loaders(), costs=COSTS, out=out)
    other = ew.collect(seeded_net(1), **loaders(), costs=COSTS, out=out, force=True)
    assert_same_trace(other, ew.collect(seeded_net(1), **loaders(), costs=COSTS))
    with pytest.raises(ew.InputError, match=r"`dtype` must be torch\.float32 or torch\.float16"):
        ew.collect(net, **loaders(), costs=COSTS, out=tmp_path / "x", dtype=torch.int8)
    with pytest.raises(ew.InputError, match=r"`dtype` must be torch\.float32 without `out`"):
        ew.collect(net, **loaders(), costs=COSTS, dtype=torch.float16)
    bad = {**loaders(), "val": [(torch.full((2, 6), float("nan")), torch.tensor([0, 1]))]}
    with pytest.raises(ew.InputError, match="not finite"):
        ew.collect(net, **bad, costs=COSTS, out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


# A process that collects again and again in forks of itself, each killed just before it touches a file for the n-th
# time, and then once without a kill.
KILLED = """
import os, random, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import exitwise as ew
from exitwise.calibration import trace_folder
sys.path.insert(0, sys.argv[1])
from calibration_case import COSTS, loaders, seeded_net
trace_folder.SHARD_ROWS = 24
out, moments = Path(sys.argv[2]), random.Random(int(sys.argv[3]))
net, batches = seeded_net(), loaders()
EVENTS = ("open", "os.chmod", "os.rename", "os.remove", "os.mkdir")
kills = 0
while True:
    child, touches = os.fork(), moments.randrange(20, 160)
    if not child:
        def count(event, arguments):
            global touches
            if event in EVENTS and str(out.parent) in str(arguments[0]):
                touches -= 1
                if touches == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        ew.collect(net, **batches, costs=COSTS, out=out)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    kills += status != 0
    if out.exists():  # complete, perhaps killed after that
        break
    assert status != 0
print(kills)
"""


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_trace(tmp_path: Path, seed: int) -> None:
    (tmp_path / "case").mkdir()
    (tmp_path / "out").mkdir()
    source = Path(__file__).read_text()
    (tmp_path / "case" / "calibration_case.py").write_text(source[: source.index("@pytest.fixture")])
    expected, kills = ew.collect(seeded_net(), **loaders(), costs=COSTS), 0
    for i in range(3):
        out = tmp_path / "out" / str(i)
        command = [sys.executable, "-c", KILLED, str(tmp_path / "case"), str(out), str(seed + i)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        kills += int(done.stdout)
        assert_same_trace(ew.Trace.load(out), expected)
        assert not partial_folder(out).exists()
    assert kills >= 3
