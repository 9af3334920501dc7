"""Loaded and stored tensors are contiguous and aligned to 64 bytes, so that equal values give equal results."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import random_trace, small_net
from safetensors.torch import save_file
from torch import Tensor, nn

import exitwise as ew
from exitwise import data
from exitwise.calibration.dropout import DropoutMasks
from exitwise.calibration.laplace import MODES, Curvature, CurvatureEigen, Posterior
from exitwise.calibration.trace import HeadWeights, Split, Trace
from exitwise.core import tensorfiles
from exitwise.core.memory import ALIGNMENT, align, is_aligned
from exitwise.training.checkpoints import CheckpointDirectory

pytestmark = pytest.mark.numerical

MC_DROPOUT = ew.Method(laplace=False, tune_prior=False, ensemble=None, dropout=0.5)


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of a nested value, with their paths."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from value.state_dict().items()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{name}.{i}")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name), f"{name}.{field.name}")


def assert_aligned(value: Any) -> None:
    tensors = list(tensors_in(value))
    assert tensors
    for name, tensor in tensors:
        assert tensor.is_contiguous(), f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}"
        assert tensor.data_ptr() % 64 == 0, f"{name} starts {tensor.data_ptr() % 64} bytes past a boundary"


def unaligned(tensor: Tensor) -> Tensor:
    """Copy a tensor to memory that starts one value, 4 or 8 bytes, past a boundary."""
    buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return buffer[1:].view(tensor.shape).copy_(tensor)


def column_major(tensor: Tensor) -> Tensor:
    """Copy a tensor to column-major memory, as LAPACK returns it."""
    return tensor.mT.contiguous().mT


# -- align


def test_an_aligned_tensor_is_not_copied() -> None:
    tensor = torch.randn(3, 5)
    assert align(tensor) is tensor


@pytest.mark.parametrize("change", [unaligned, column_major])
def test_another_layout_is_copied_with_the_same_values(change: Any) -> None:
    tensor = torch.randn(3, 5)
    changed = change(tensor)
    assert not is_aligned(changed)
    assert is_aligned(align(changed))
    assert torch.equal(align(changed), tensor)


def test_pytorch_allocates_at_this_boundary() -> None:
    assert all(torch.empty(n).data_ptr() % ALIGNMENT == 0 for n in range(1, 40))


# -- stored tensors, from operands of any layout


@pytest.mark.parametrize("change", [unaligned, column_major])
def test_what_holds_tensors_aligns_them(change: Any) -> None:
    square, wide = change(torch.eye(6, dtype=torch.float64)), change(torch.randn(6, 6))
    row = unaligned(torch.arange(6))
    assert_aligned(Curvature(square, square, 6))
    assert_aligned(Posterior("paper", square, unaligned(torch.ones(6)), torch.tensor(0.0), square))
    assert_aligned(HeadWeights(wide, unaligned(torch.ones(6))))
    assert_aligned(Split((wide, wide), row, row))
    assert_aligned(DropoutMasks(0.5, change(torch.eye(6) > 0)))


@pytest.mark.parametrize("mode", MODES)
def test_posteriors_are_aligned_for_any_prior(mode: Any) -> None:
    trace = random_trace()
    for curvature in trace.curvature:
        spectrum = CurvatureEigen(curvature, mode)
        for prior_var in (0.5, 4.0):
            assert_aligned(spectrum.posterior(prior_var))
            assert_aligned(spectrum.posterior(prior_var).to_float32())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["MSDNet (vanilla)", "MIE Laplace T_opt sigma_opt", MC_DROPOUT], ids=str)
def test_everything_that_calibrate_returns_is_aligned(method: Any, mode: Any, bias: bool) -> None:
    assert_aligned(ew.calibrate(random_trace(bias=bias), method, mode=mode))


def test_draws_of_ones_own_are_aligned() -> None:
    draws = column_major(torch.randn(20, 5))
    assert_aligned(ew.calibrate(random_trace(), "Laplace", draws=draws))


def test_a_part_of_a_trace_is_aligned() -> None:
    trace = random_trace(n=101)
    assert_aligned(trace.hold_out(0.3))
    assert_aligned(Split(tuple(x[1:] for x in trace.val.features), trace.val.labels[1:]))


def test_a_collected_trace_is_aligned_whatever_the_net_is_made_of() -> None:
    net = small_net()
    for head in net.exits:
        head.last.weight = nn.Parameter(column_major(head.last.weight.detach()))
    batches = [(torch.randn(7, 6), torch.arange(7) % 4) for _ in range(3)]
    assert_aligned(ew.collect(net, train=batches, val=batches, test=batches))


# -- every kind of file


def saved(kind: str, folder: Path) -> Any:
    """Write a file of this kind, load it with the library's function, and return the loaded object."""
    path, trace = folder / f"{kind}.safetensors", random_trace()
    if kind == "trace":
        trace.save(path)
        return Trace.load(path)
    if kind == "trace16":
        trace.save(path, dtype=torch.float16)
        return Trace.load(path)
    if kind in ("calibration", "exact", "dropout"):
        method = MC_DROPOUT if kind == "dropout" else "MIE Laplace T_opt sigma_opt"
        ew.calibrate(trace, method, mode="exact" if kind == "exact" else "paper").save(path)
        return ew.Calibration.load(path)
    if kind == "split":
        train, _ = data.load("digits")
        data.HoldOut.random(train, 297, 0, 500).save(path)
        return [data.HoldOut.load(path), tensorfiles.read(path)[0]]
    if kind == "checkpoint":
        snapshots = CheckpointDirectory(folder)
        snapshots.save(0, 1, {"a": torch.randn(5, 3), "b": torch.randn(7)}, {"x": 1})
        return snapshots.load()[0]
    net = ew.models.msdnet("tiny-8")
    if kind == "net":
        ew.save_checkpoint(net, path)
        return ew.load_net(path)
    if kind == "pth":
        torch.save({"state_dict": net.state_dict()}, path.with_suffix(".pth"))
        return ew.load_checkpoint(ew.models.msdnet("tiny-8"), path.with_suffix(".pth"))
    images = torch.randn(40, 1, 8, 8)
    batches = [(images, torch.arange(40) % 10)]
    trace = ew.collect(net, train=batches, val=batches)
    calibration = ew.calibrate(trace, "Laplace")
    policy = ew.fit_policy(calibration.predict(trace.val), trace.val.labels, trace.costs, budget=trace.costs.values[1])
    ew.Classifier(net, calibration, policy).save(path)
    classifier = ew.Classifier.load(path)
    return [classifier.net, classifier.calibration, classifier.exits]


KINDS = ("trace", "trace16", "calibration", "exact", "dropout", "split", "checkpoint", "net", "pth", "classifier")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_from_a_file_is_aligned(kind: str, tmp_path: Path) -> None:
    assert_aligned(saved(kind, tmp_path))


@pytest.mark.parametrize("padding", range(0, 64, 7))
def test_tensors_are_aligned_wherever_the_header_ends(padding: int, tmp_path: Path) -> None:
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    tensors = {str(dtype): (torch.arange(15).reshape(3, 5) % 2).to(dtype) for dtype in kinds}
    tensors |= {"none": torch.empty(0, 4), "one": torch.tensor(1.5), "odd": torch.arange(7, dtype=torch.uint8)}
    path = tmp_path / "any.safetensors"
    save_file(tensors, path, metadata={"filler": "x" * padding})
    loaded, header = tensorfiles.read(path)
    assert_aligned(loaded)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[key], tensors[key]) and loaded[key].dtype == tensors[key].dtype for key in tensors)
    assert header == {"filler": "x" * padding}


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "any.safetensors"
    save_file({"a": torch.ones(4000)}, path)
    loaded = tensorfiles.read(path)[0]["a"]
    path.write_bytes(bytes(path.stat().st_size))  # in place: a view of the file would follow, or crash
    path.write_bytes(b"")
    assert bool((loaded == 1).all())


LOAD = """
import re, sys
from pathlib import Path
from exitwise.calibration.trace import Trace

def kilobytes(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = kilobytes("VmRSS")
trace = Trace.load(sys.argv[1])
print(kilobytes("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure memory")
@pytest.mark.slow
def test_a_large_trace_is_not_held_twice(tmp_path: Path) -> None:
    trace = random_trace()
    generator = torch.Generator().manual_seed(0)
    n = 400_000  # 400,000 x (6 + 7 + 9) numbers: 35 MB for each split
    features = tuple(torch.randn(n, x.shape[1], generator=generator) for x in trace.val.features)
    split = Split(features, torch.randint(5, (n,), generator=generator))
    path = tmp_path / "trace.safetensors"
    Trace(split, split, trace.heads, trace.curvature, trace.costs).save(path)
    # A separate process with one thread: peaks of other tests and stacks of threads would be included.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, path], capture_output=True, text=True, check=True, env=environment
    )
    grown = int(done.stdout) * 1024
    size = path.stat().st_size
    assert grown > 0.8 * size
    assert grown < 1.2 * size  # 1.10 measured: rounding of the allocator, and the header


# -- one result from memory and from a file


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["Laplace T_opt sigma_opt", "MIE Laplace T_opt sigma_opt", MC_DROPOUT], ids=str)
def test_a_calibration_predicts_the_same_from_memory_and_from_a_file(method: Any, mode: Any, tmp_path: Path) -> None:
    trace = random_trace()
    trace.save(tmp_path / "trace.safetensors")
    calibration = ew.calibrate(trace, method, mode=mode)
    calibration.save(tmp_path / "calibration.safetensors")
    loaded = ew.Calibration.load(tmp_path / "calibration.safetensors")
    split = Trace.load(tmp_path / "trace.safetensors").test
    assert trace.test is not None
    assert split is not None
    expected = calibration.predict(trace.test).probs
    assert torch.equal(loaded.predict(trace.test).probs, expected)
    assert torch.equal(loaded.predict(split).probs, expected)
    repeated = ew.calibrate(Trace.load(tmp_path / "trace.safetensors"), method, mode=mode)
    assert repeated.val_nlpd == calibration.val_nlpd
    assert torch.equal(repeated.predict(split).probs, expected)


def test_equal_images_give_equal_answers_wherever_they_lie() -> None:
    net = small_net().eval()
    batches = [(torch.randn(50, 6), torch.arange(50) % 4)]
    trace = ew.collect(net, train=batches, val=batches)
    calibration = ew.calibrate(trace, "Laplace")
    policy = ew.fit_policy(calibration.predict(trace.val), trace.val.labels, trace.costs, budget=trace.costs.values[1])
    classifier = ew.Classifier(net, calibration, policy)
    images = torch.randn(9, 6)
    expected = classifier(images).probs
    array = np.frombuffer(b"1234" + images.numpy().tobytes(), np.float32, offset=4).reshape(9, 6)
    for inputs in (unaligned(images), array, images.numpy()):
        assert torch.equal(classifier(inputs).probs, expected)
