"""Calibration of many samples, block by block: as that of few samples, and the same from memory and from files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import random_trace

import exitwise as ew
from exitwise.calibration import exit_objective, trace_folder, tuning
from exitwise.core.mapped_rows import MappedRows

METHODS = [
    "MIE Laplace T_opt sigma_opt",
    "T_opt",
    "MIE T_opt",
    "PoE T_opt",
    "Pool",
    "Pool W_opt",
    "PoE Laplace T_opt sigma_opt",
    "Pool Laplace T_opt sigma_opt",
    "MC dropout T_opt",
]
N, CLASSES = 130, 5


def stream(patch: pytest.MonkeyPatch, samples: int) -> None:
    """Keep nothing of any sample, and compute in blocks of some samples."""
    patch.setattr(exit_objective, "_MAX_KEPT", 0)
    patch.setattr(exit_objective, "_BLOCK", samples * CLASSES)
    patch.setattr(tuning, "_MAX_POOLED", 0)


def on_disk(trace: ew.Trace, folder: Path, patch: pytest.MonkeyPatch) -> ew.Trace:
    patch.setattr(trace_folder, "SHARD_ROWS", 48)
    trace.save(folder / "trace")
    return ew.Trace.load(folder / "trace")


GRID: Any = {"num_draws": 5, "temperatures": (0.7, 1.0, 1.5, 2.5), "prior_vars": (0.7, 2.0)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow_after_first
def test_blocks_give_the_calibration_of_all_samples_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    trace = random_trace(n=N)
    expected = ew.calibrate(trace, method, **GRID)
    mapped = on_disk(trace, tmp_path, monkeypatch)
    direct = ew.calibrate(mapped, method, **GRID)
    # The same blocks, layouts and alignment: equal bit for bit.
    assert direct.val_nlpd == expected.val_nlpd
    assert direct.temperatures == expected.temperatures
    assert torch.equal(direct.predict(mapped.test).probs, expected.predict(trace.test).probs)
    stream(monkeypatch, 33)  # does not divide 130
    from_memory, from_files = (ew.calibrate(each, method, **GRID) for each in (trace, mapped))
    assert from_files.to_dict() == from_memory.to_dict()
    assert from_files.grids == from_memory.grids
    # Sums in another order: float32 in products of matrices, float64 in means over samples. Draws are interpolated
    # between other blocks, with a relative error of up to 1e-6.
    assert from_memory.val_nlpd == pytest.approx(expected.val_nlpd, abs=3e-6)
    assert from_memory.temperatures == expected.temperatures
    assert from_memory.prior_vars == expected.prior_vars
    # A pool's weights are where Newton's method stops: the NLPD is flat there.
    tolerance = 1e-3 if method.startswith("Pool") else 1e-5
    torch.testing.assert_close(
        from_memory.predict(trace.test).probs, expected.predict(trace.test).probs, atol=tolerance, rtol=0
    )


@pytest.mark.parametrize("mode", ["exact", "naive"])
@pytest.mark.parametrize("method", ["MIE Laplace T_opt sigma_opt", "PoE Laplace T_opt sigma_opt"])
@pytest.mark.slow
def test_blocks_of_other_posteriors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, method: str) -> None:
    trace = random_trace(n=N)
    expected = ew.calibrate(trace, method, num_draws=4, mode=mode)  # type: ignore[arg-type]
    stream(monkeypatch, 33)
    found = ew.calibrate(on_disk(trace, tmp_path, monkeypatch), method, num_draws=4, mode=mode)  # type: ignore[arg-type]
    assert found.val_nlpd == pytest.approx(expected.val_nlpd, abs=3e-6)


@pytest.mark.parametrize("method", ["T_opt", "PoE T_opt", "MIE Laplace T_opt sigma_opt"])
@pytest.mark.slow
def test_blocks_of_a_continuous_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Gradients are summed over blocks. The line search ends where float32 shows no further gain, which depends on the
    order of the sums and on the CPU's kernels: the NLPDs found differ by up to 2.5e-5."""
    trace = random_trace(n=N)
    expected = ew.calibrate(trace, method, num_draws=4, search="continuous")
    stream(monkeypatch, 33)
    found = ew.calibrate(on_disk(trace, tmp_path, monkeypatch), method, num_draws=4, search="continuous")
    assert found.val_nlpd == pytest.approx(expected.val_nlpd, abs=1e-4)
    grid = ew.calibrate(trace, method, num_draws=4)
    assert all(ours <= theirs + 3e-6 for ours, theirs in zip(found.val_nlpd, grid.val_nlpd, strict=True))


@pytest.mark.parametrize("samples", [1, 7, 40, 41])
def test_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    trace = random_trace(n=40)
    expected = ew.calibrate(trace, "Pool")
    stream(monkeypatch, samples)
    assert ew.calibrate(trace, "Pool").val_nlpd == pytest.approx(expected.val_nlpd, abs=3e-6)


@pytest.mark.slow
def test_the_choice_of_a_method_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(n=N)
    mapped = on_disk(trace, tmp_path, monkeypatch)
    expected, found = (ew.calibrate(each, **GRID) for each in (trace, mapped))
    assert found.selection == expected.selection
    assert found.to_dict() == expected.to_dict()


def test_held_out_samples_are_calibrated_without_reading_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of features in files, no more rows are read at once than are in a block."""
    trace = random_trace(n=N)
    mapped = on_disk(trace, tmp_path, monkeypatch)
    stream(monkeypatch, 20)
    sizes: list[int] = []
    read = MappedRows.read

    def count(rows: MappedRows, samples: slice | torch.Tensor) -> torch.Tensor:
        result = read(rows, samples)
        sizes.append(len(result))
        return result

    monkeypatch.setattr(MappedRows, "read", count)
    for method in ("T_opt", "PoE T_opt", "Pool"):
        found = ew.calibrate(mapped.hold_out(0.5)[0], method)
        assert found.val_nlpd == ew.calibrate(trace.hold_out(0.5)[0], method).val_nlpd
    assert 0 < max(sizes) <= 20


def test_half_precision_is_widened_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(n=N)
    trace.save(tmp_path / "half", dtype=torch.float16)
    halves = tuple(x.half() for x in trace.val.features)
    stream(monkeypatch, 33)
    found = ew.calibrate(ew.Trace.load(tmp_path / "half"), "MIE Laplace T_opt sigma_opt", **GRID)
    in_memory = replace(trace, val=replace(trace.val, features=halves))
    assert found.to_dict() == ew.calibrate(in_memory, "MIE Laplace T_opt sigma_opt", **GRID).to_dict()
