"""Traces: saving, loading, collecting and holding out samples."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import random_trace, small_net
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import exitwise as ew
from exitwise.calibration.laplace import CurvatureMovingAverage, CurvatureSum

pytestmark = pytest.mark.numerical

HEADER = {"format": "exitwise.trace", "version": "1"}


@pytest.mark.parametrize("bias", [True, False])
def test_a_saved_trace_comes_back_whole(tmp_path: Path, bias: bool) -> None:
    trace = random_trace(bias=bias)
    trace.save(tmp_path / "t.safetensors")
    loaded = ew.Trace.load(tmp_path / "t.safetensors")
    for k in range(3):
        assert torch.equal(loaded.val.features[k], trace.val.features[k])
        assert torch.equal(loaded.heads[k].weight, trace.heads[k].weight)
        assert torch.equal(loaded.curvature[k].A, trace.curvature[k].A)
        assert torch.equal(loaded.curvature[k].B, trace.curvature[k].B)
        assert (loaded.heads[k].bias is None) is not bias
    assert loaded.test is not None
    assert trace.test is not None
    assert torch.equal(loaded.test.labels, trace.test.labels)
    assert (loaded.costs, loaded.classes, loaded.curvature[0].n) == (trace.costs, trace.classes, 500)
    assert loaded.val.index is None


def test_keys_are_those_of_the_design(tmp_path: Path) -> None:
    random_trace(widths=(4,)).save(tmp_path / "t.safetensors", dtype=torch.float16)
    tensors = load_file(tmp_path / "t.safetensors")
    expected = {"val.features.0", "val.labels", "test.features.0", "test.labels", "head.0.weight", "head.0.bias"}
    assert set(tensors) == expected | {"curvature.0.A", "curvature.0.B", "curvature.n", "costs"}
    assert tensors["val.features.0"].dtype == torch.float16
    assert tensors["curvature.0.A"].dtype == tensors["costs"].dtype == torch.float64


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    trace = random_trace()
    trace.save(tmp_path / "t.safetensors")
    before = (tmp_path / "t.safetensors").read_bytes()
    trace.val.features[0][0, 0] = 1e6
    with pytest.raises(ew.InputError, match="float16"):
        trace.save(tmp_path / "t.safetensors", dtype=torch.float16)
    assert (tmp_path / "t.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"costs": None}, "lacks 'costs'"),
    ({"costs": torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)}, "must grow"),
    ({"costs": torch.tensor([1.0, 2.0, 3.0])}, "costs must be 1-dimensional torch.float64"),
    ({"costs": torch.tensor([1.0, 2.0], dtype=torch.float64), "head.2.weight": None}, "but costs of only 2 exits"),
    ({"head.1.weight": None}, "lacks 'head.1.weight'"),
    ({"head.1.weight": torch.zeros(4, 7)}, "head.1.weight"),
    ({"head.1.bias": torch.zeros(4)}, "head.1.bias must have shape"),
    ({"head.1.weight": torch.full((5, 7), float("nan"))}, "head.1.weight holds values that are not finite"),
    ({"curvature.0.A": torch.zeros(5, 5, dtype=torch.float64)}, "curvature.0.A must have shape"),
    ({"curvature.0.B": torch.zeros(5, 5)}, "curvature.0.B must be 2-dimensional torch.float64"),
    ({"curvature.0.B": torch.full((5, 5), float("inf"), dtype=torch.float64)}, "curvature.0.B holds values"),
    ({"curvature.0.B": torch.arange(25, dtype=torch.float64).view(5, 5)}, "curvature.0.B must be symmetric"),
    ({"curvature.n": torch.tensor([0])}, "curvature.n must be one positive number"),
    ({"curvature.n": torch.tensor([1, 2])}, "curvature.n must be one number"),
    ({"val.labels": torch.tensor(1)}, "val.labels must be 1-dimensional"),
    ({"val.index": torch.zeros(300)}, "val.index must be 1-dimensional torch.int64"),
    ({"head.0.weight": torch.tensor(1.0)}, "head.0.weight must be 2-dimensional"),
    ({"curvature.n": torch.tensor([5.0])}, "curvature.n must be 1-dimensional torch.int64"),
    ({"val.labels": None}, "lacks 'val.labels'"),
    ({"val.labels": torch.full((300,), 5)}, "val.labels must lie in 0..4, but reach from 5 to 5"),
    ({"val.labels": torch.full((300,), -1)}, "val.labels must lie in 0..4"),
    ({"val.labels": torch.zeros(300)}, "val.labels must be 1-dimensional torch.int64"),
    ({"val.labels": torch.zeros(299, dtype=torch.int64)}, "val.features.0 must have shape"),
    ({"val.features.1": None}, "lacks 'val.features.1'"),
    ({"val.features.1": torch.zeros(300, 8)}, "val.features.1 must have shape"),
    ({"val.features.1": torch.zeros(300, 7, dtype=torch.int64)}, "val.features.1 must be float16, float32 or float64"),
    ({"test.features.2": torch.full((300, 9), float("nan"))}, "test.features.2 holds a value that is not finite"),
    ({"test.index": torch.zeros(3, dtype=torch.int64)}, "test.index must have shape"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_trace_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "t.safetensors"
    random_trace().save(path)
    tensors = {**load_file(path), **changes}
    save_file({key: value for key, value in tensors.items() if value is not None}, path, metadata=HEADER)
    with pytest.raises(ew.InputError) as error:
        ew.Trace.load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": "pt"}, "must be of format 'exitwise.trace'"),
        ({"format": "exitwise.trace", "version": "2"}, "version '2'"),
        ({**HEADER, "classes": "[1, 2]"}, "`classes`"),
        ({**HEADER, "classes": '["a"]'}, "classes must name 5 classes, but names 1"),
        ({**HEADER, "classes": "[oops"}, "not valid JSON"),
        ({**HEADER, "model": '"x"'}, "`model`"),
        ({**HEADER, "budget_range": "[1]"}, "`budget_range`"),
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, header: dict[str, str], message: str) -> None:
    path = tmp_path / "t.safetensors"
    random_trace().save(path)
    save_file(load_file(path), path, metadata=header)
    with pytest.raises(ew.InputError) as error:
        ew.Trace.load(path)
    assert message in str(error.value)


@pytest.mark.parametrize("keep", [0, 4, 200, 5000])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "t.safetensors"
    random_trace().save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ew.InputError, match="not a complete safetensors file"):
        ew.Trace.load(path)


def loaders(batch: int = 16) -> dict[str, DataLoader[tuple[Tensor, ...]]]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"train": 100, "val": 40, "test": 30}
    return {
        name: DataLoader(
            TensorDataset(
                torch.randn(n, 6, generator=generator), torch.randint(4, (n,), generator=generator), torch.arange(n) + 7
            ),
            batch_size=batch,
        )
        for name, n in sizes.items()
    }


def test_collect_keeps_features_and_sums_curvature() -> None:
    net, data = small_net(), loaders()
    trace = ew.collect(net, **data, costs=[1, 2, 3])
    assert trace.test is not None
    for name in ("val", "test"):
        images, labels, index = data[name].dataset.tensors  # type: ignore[attr-defined]
        split = getattr(trace, name)
        for features, expected in zip(split.features, net.features(images), strict=True):
            torch.testing.assert_close(features, expected)
        assert torch.equal(split.labels, labels)
        assert torch.equal(split.index, index)
    images = data["train"].dataset.tensors[0]  # type: ignore[attr-defined]
    for k, (x, head) in enumerate(zip(net.features(images), net.exits, strict=True)):
        sums = CurvatureSum(8, 4, bias=k != 1)
        sums.update(x, head.last(x))
        torch.testing.assert_close(trace.curvature[k].A, sums.result().A, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(trace.curvature[k].B, sums.result().B, rtol=1e-6, atol=1e-6)
        assert trace.curvature[k].n == 100
        assert torch.equal(trace.heads[k].weight, head.last.weight)
    assert trace.heads[1].bias is None
    assert ew.calibrate(trace, "MIE Laplace T_opt sigma_opt", num_draws=4).predict(trace.test).probs.shape == (3, 30, 4)


def test_collect_runs_the_net_once_per_batch_and_reports_progress() -> None:
    net, calls, reports = small_net(), [], []
    net.stages[0].register_forward_hook(lambda *args: calls.append(len(args[1][0])))
    ew.collect(net, **loaders(), costs=[1, 2, 3], progress=lambda *report: reports.append(report))
    assert sum(calls) == 170
    assert len(calls) == 7 + 3 + 2
    assert reports[-1] == ("train", 100, 100)
    assert ("val", 40, 40) in reports


def test_collect_leaves_modes_and_gradients_as_they_were() -> None:
    net = small_net().train()
    net.stages[1].eval()
    trace = ew.collect(net, **loaders(), costs=[1, 2, 3])
    assert [module.training for module in net.stages] == [True, False, True]
    assert not trace.val.features[0].requires_grad
    assert net.exits[0].last.weight.requires_grad


def test_collect_never_holds_train_features() -> None:
    net, alive = small_net(), weakref.WeakSet[Tensor]()
    max_alive = 0

    def watch(module: object, args: object, output: Tensor) -> None:
        nonlocal max_alive
        gc.collect()
        max_alive = max(max_alive, len(alive))
        alive.add(output)

    def train() -> Iterator[tuple[Tensor, Tensor]]:
        net.heads[0].neck.register_forward_hook(watch)  # type: ignore[union-attr,operator]
        for _ in range(6):
            yield torch.randn(8, 6), torch.randint(4, (8,))

    data = loaders()
    trace = ew.collect(net, train(), data["val"], costs=[1, 2, 3])
    assert trace.curvature[0].n == 48
    assert trace.test is None
    assert max_alive <= 2


def test_collect_can_average_as_the_public_code_does() -> None:
    net, data = small_net(), loaders()
    trace = ew.collect(net, **data, costs=[1, 2, 3], curvature="average")
    average = CurvatureMovingAverage(8, 4)
    with torch.no_grad():
        for images, *_ in data["train"]:
            x = net.features(images)[0]
            average.update(x, net.exits[0].last(x))
    torch.testing.assert_close(trace.curvature[0].A, average.result().A)


def test_collect_counts_macs_and_knows_the_preset() -> None:
    net = ew.models.msdnet("tiny-8")
    batches = [(torch.rand(4, 1, 8, 8), torch.arange(4)) for _ in range(2)]
    trace = ew.collect(net, batches, batches)
    assert trace.costs.values == tuple(ew.macs(net, (1, 8, 8)))
    assert trace.model == {"preset": "tiny-8"}
    assert trace.budget_range is None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(2, 6), torch.tensor([0, 4])), "label 0 to 4 outside the net's 4 classes"),
        ((torch.zeros(2, 6), torch.tensor([0])), "one label per image"),
        ((torch.zeros(2, 6), torch.tensor([0.5, 1.5])), "whole numbers as labels"),
        (torch.zeros(2, 6), "must give (images, labels)"),
        ((torch.full((2, 6), float("nan")), torch.tensor([0, 1])), "not finite, first for sample 0 of `val`"),
    ],
)
def test_bad_batches_are_named(batch: Any, message: str) -> None:
    with pytest.raises(ew.InputError) as error:
        ew.collect(small_net(), [batch], [batch], costs=[1, 2, 3])
    assert message in str(error.value)


def test_a_net_that_cannot_be_counted_is_refused_before_any_pass() -> None:
    class Broken(torch.nn.Identity):
        def macs(self, inputs: tuple[Tensor, ...], output: Tensor) -> int:
            raise ew.InputError("no cost is known")

    net, calls = small_net(), []
    net.stages[2] = Broken()
    net.stages[0].register_forward_hook(lambda module, args, output: calls.append(output.device.type))
    with pytest.raises(ew.InputError, match="no cost is known; give `costs`"):
        ew.collect(net, **loaders())
    assert "cpu" not in calls
    assert ew.collect(net, **loaders(), costs=[1, 2, 3]).costs.values == (1, 2, 3)


def test_class_names_are_counted_before_any_pass() -> None:
    with pytest.raises(ew.InputError, match="`classes` must name the net's 4 classes, but names 1"):
        ew.collect(small_net(), [], [], costs=[1, 2, 3], classes=["cat"])


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(ew.InputError, match="`val` gave no samples"):
        ew.collect(small_net(), [], [], costs=[1, 2, 3])


def with_index(n: int = 101) -> ew.Trace:
    """Return a trace whose validation samples have an index, in random order."""
    trace = random_trace(n=n)
    index = torch.randperm(5 * n, generator=torch.Generator().manual_seed(9))[:n]
    return replace(trace, val=replace(trace.val, index=index))


def assert_taken(part: ew.Split, whole: ew.Split, rows: list[int]) -> None:
    """Check that a split has the features, labels and index of the samples at some positions of another split."""
    assert len(part) == len(rows)
    for taken, features in zip(part.features, whole.features, strict=True):
        assert taken.tolist() == [features[row].tolist() for row in rows]
    assert part.labels.tolist() == [whole.labels[row].item() for row in rows]
    assert (part.index is None) == (whole.index is None)
    if part.index is not None and whole.index is not None:
        assert part.index.tolist() == [whole.index[row].item() for row in rows]


@pytest.mark.parametrize("rows", [[], [0], [7, 3, 3, 100], list(range(101))])
def test_some_of_the_samples_of_a_split(rows: list[int]) -> None:
    for split in (with_index().val, random_trace(n=101).val):
        assert_taken(split.take(torch.tensor(rows, dtype=torch.int64)), split, rows)


@given(st.integers(2, 90), st.floats(0.01, 0.99), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_what_is_held_out_and_the_rest_are_the_whole(n: int, share: float, seed: int) -> None:
    trace = with_index(n)
    assert trace.val.index is not None
    if round(n * share) in (0, n):
        with pytest.raises(ew.InputError, match=f"{n} samples cannot be split"):
            trace.hold_out(share, seed)
        return
    tune, held_out = trace.hold_out(share, seed)
    assert len(held_out) == round(n * share)
    row_of = {index: row for row, index in enumerate(trace.val.index.tolist())}
    parts = []
    for part in (tune.val, held_out):
        assert part.index is not None
        rows = [row_of[index] for index in part.index.tolist()]
        assert_taken(part, trace.val, rows)
        assert rows == sorted(rows)
        parts += rows
    assert sorted(parts) == list(range(n))
    for name in ("test", "heads", "curvature", "costs", "classes", "model", "budget_range"):
        assert getattr(tune, name) is getattr(trace, name)
    assert len(trace.val) == n  # the trace itself is unchanged


def test_the_seed_says_who_is_held_out() -> None:
    trace = with_index()
    again = [trace.hold_out(seed=seed)[1].labels.tolist() for seed in (3, 3)]
    assert again[0] == again[1]
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    drawn = [trace.hold_out(seed=generator)[1].labels.tolist() for generator in generators]
    assert drawn[0] == drawn[1] != trace.hold_out(seed=generators[0])[1].labels.tolist()
    index = [trace.hold_out(seed=seed)[1].index for seed in range(400)]
    times_held_out = torch.bincount(torch.cat([part for part in index if part is not None]))
    counts = times_held_out[times_held_out > 0]
    assert len(counts) == 101  # every sample is held out, about equally often
    assert (counts.float() / 400 - 50 / 101).abs().max() < 4.5 * (0.25 / 400) ** 0.5


def test_a_calibration_does_not_see_what_is_held_out() -> None:
    """Changed held-out samples give the same temperatures and prior variances."""
    trace = with_index()
    tune, held_out = trace.hold_out(0.5, seed=1)
    assert held_out.index is not None
    assert trace.val.index is not None
    is_held_out = torch.isin(trace.val.index, held_out.index)
    spoilt = replace(
        trace.val,
        labels=torch.where(is_held_out, 4 - trace.val.labels, trace.val.labels),
        features=tuple(torch.where(is_held_out[:, None], x * 3, x) for x in trace.val.features),
    )
    other_tune, _ = replace(trace, val=spoilt).hold_out(0.5, seed=1)
    calibration, other_calibration = (
        ew.calibrate(part, "MIE Laplace T_opt sigma_opt", num_draws=10) for part in (tune, other_tune)
    )
    assert (calibration.temperatures, calibration.prior_vars) == (
        other_calibration.temperatures,
        other_calibration.prior_vars,
    )
    assert (
        ew.calibrate(replace(trace, val=spoilt), "MIE Laplace T_opt sigma_opt", num_draws=10).temperatures
        != ew.calibrate(trace, "MIE Laplace T_opt sigma_opt", num_draws=10).temperatures
    )


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5, 0.001, 0.999, float("nan"), float("inf")])
def test_a_share_must_leave_and_take_some(share: float) -> None:
    with pytest.raises(
        ew.InputError, match=f"101 samples cannot be split into some to tune on and a fraction of {share}"
    ):
        with_index().hold_out(share)
