"""`exitwise bench` and budgets in milliseconds: the figures are consistent; their size is not tested."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command, zoo_run

import exitwise as ew
from exitwise.core.files import read_json
from exitwise.runtime import bench

pytestmark = pytest.mark.slow

SIZES = ("--batch-size", 1, "--batch-size", 8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo_run(tmp_path_factory.mktemp("bench") / "run")


@pytest.fixture
def measured(run: Path, exitwise: Command) -> Any:
    """JSON output of the command, which runs once for all tests."""
    if not (run / "bench.json").exists():
        order = ("bench", run, "--backend", "torch", "--backend", "optimized", *SIZES, "--repeats", 1, "--json")
        done = exitwise(*order, "--costs-of", "optimized:8", "--threads", 1)
        assert done.status == 0, done.err
        assert done.json == read_json(run / "bench.json")
    return json.loads((run / "bench.json").read_text())


def test_every_target_is_measured(measured: Any) -> None:
    rows = [(row["backend"], row["batch_size"], row["variant"]) for row in measured["timings"]]
    variants = ("vanilla", "full", "25%", "50%", "75%")
    assert rows == [(name, size, variant) for size in (1, 8) for name in ("torch", "optimized") for variant in variants]
    assert measured["threads"] == 1
    assert all(row["ms"] > 0 for row in measured["timings"])


def test_the_figures_follow_from_each_other(measured: Any) -> None:
    stages = {(row["backend"], row["batch_size"]): row["values"] for row in measured["stages"]}
    macs = measured["macs"]
    for row in measured["timings"]:
        cumulative = stages[row["backend"], row["batch_size"]]
        assert cumulative == sorted(cumulative)
        vanilla = next(
            timing["ms"]
            for timing in measured["timings"]
            if (timing["backend"], timing["batch_size"], timing["variant"])
            == (row["backend"], row["batch_size"], "vanilla")
        )
        assert row["speedup"] == pytest.approx(vanilla / row["ms"])
        if row["variant"] == "full":
            assert row["ms"] == pytest.approx(cumulative[-1])
        if row["variant"] in ("vanilla", "full"):
            assert row["bound_ms"] is None
            continue
        assert sum(row["exit_shares"]) == pytest.approx(1)
        pairs = list(zip(row["exit_shares"], cumulative, macs, strict=True))
        assert row["bound_ms"] == pytest.approx(sum(share * ms for share, ms, _ in pairs))
        assert row["reached"] == pytest.approx(row["bound_ms"] / row["ms"])
        assert row["mac_speedup"] == pytest.approx(macs[-1] / sum(share * exit_macs for share, _, exit_macs in pairs))
        # Exit shares are those of real data, so the mean cost is near the budget; a few dozen images vary.
        assert 1 / row["mac_speedup"] == pytest.approx(float(row["variant"][:-1]) / 100, abs=0.12)


def test_budgets_in_milliseconds(run: Path, measured: Any, exitwise: Command) -> None:
    values = measured["costs"]["values"]
    budget = (values[0] + values[-1]) / 2
    done = exitwise("evaluate", run, "--budget", f"{budget}ms", "--strategy", "geometric", "--json")
    assert done.status == 0, done.err
    assert done.json["unit"] == "ms"
    policy = done.json["methods"][done.json["method"]]["policy"]
    assert policy["costs"] == values
    assert policy["cost"] == pytest.approx(budget, rel=1e-3)
    assert policy["cost"] <= budget
    assert f"{budget:.4g} ms per sample" in exitwise("evaluate", run, "--budget", f"{budget}ms").out
    half = exitwise("evaluate", run, "--budget", "50%", "--json").json
    assert half["unit"] == "MACs"
    too_low = exitwise("evaluate", run, "--budget", f"{values[0] / 2}ms")
    assert too_low.status == 2
    assert "is below the cost of the first exit: it must lie in" in too_low.err


def test_a_budget_in_milliseconds_is_predicted_and_measured(run: Path, measured: Any, exitwise: Command) -> None:
    values = measured["costs"]["values"]
    budget = f"{(values[0] + values[-1]) / 2:.3f}ms"
    order = ("bench", run, "--backend", "optimized", "--batch-size", 8, "--repeats", 1, "--costs-of", "optimized:8")
    done = exitwise(*order, "--budget", budget, "--json", "--threads", 1)
    (run / "bench.json").write_text(json.dumps(measured))
    row = done.json["timings"][-1]
    assert row["variant"] == budget
    # The shares spend the budget according to the earlier times; a few dozen images vary.
    spent = sum(share * ms for share, ms in zip(row["exit_shares"], values, strict=True))
    assert spent == pytest.approx((values[0] + values[-1]) / 2, rel=0.25)
    assert row["bound_ms"] > 0
    assert row["ms"] > 0


def test_the_table(run: Path, measured: Any, exitwise: Command) -> None:
    """A second measurement of one batch size replaces the times in the file."""
    done = exitwise("bench", run, "--backend", "optimized", "--batch-size", 4, "--repeats", 1, "--costs-of", "torch:4")
    assert done.status == 0, done.err
    for word in (
        "predicted",
        "measured",
        "reached",
        "speed-up",
        "by MACs",
        "vanilla",
        "full",
        "50%",
        "torch:4",
        "Best speed-up of early exits:",
    ):
        assert word in done.out
    now = json.loads((run / "bench.json").read_text())
    assert now["costs"]["of"] == "torch:4"
    assert {row["backend"] for row in now["stages"]} == {"torch", "optimized"}
    (run / "bench.json").write_text(json.dumps(measured))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--costs-of", "optimized"], "`--costs-of` must be like optimized:64"),
        (["--costs-of", "optimized:0"], "`--costs-of` must be like optimized:64"),
        (["--costs-of", "fast:4"], "`--backend` must be among torch, optimized, onnx, but got 'fast'"),
        (["--backend", "gpu"], "`--backend` must be among torch, optimized, onnx, but got 'gpu'"),
        (["--repeats", "0"], "'--repeats': Input should be greater than or equal to 1"),
        (["--batch-size", "0"], "'--batch-size': Input should be greater than or equal to 1"),
        (["--budget", "5%"], "`--budget` 5% is below the cost of the first exit: it must lie in 18.1% to 100%"),
        (["--budget", "0.0001ms"], "`--budget` 0.0001ms is below the cost of the first exit"),
    ],
)
def test_wrong_arguments(arguments: list[str], problem: str, run: Path, measured: Any, exitwise: Command) -> None:
    assert measured
    done = exitwise("bench", run, *arguments)
    assert done.status == 2
    assert problem in done.err
    assert "Traceback" not in done.err


def test_broken_times_are_refused(run: Path, measured: Any, exitwise: Command) -> None:
    for broken in ({}, {"costs": 3}, {"costs": {"values": [2, 1]}}, {"costs": {"values": "abc"}}):
        (run / "bench.json").write_text(json.dumps(broken))
        done = exitwise("evaluate", run, "--budget", "1ms")
        assert done.status == 2
        assert "bench.json holds no usable costs" in done.err
    (run / "bench.json").write_text(json.dumps(measured))


def test_thresholds_for_wanted_shares() -> None:
    probs = torch.rand(3, 200, 5, generator=torch.Generator().manual_seed(0)).softmax(dim=2)
    policy = bench.match_exit_shares(ew.Policy((0.5, 0.5, float("-inf"))), probs, (0.25, 0.5, 0.25))
    assert [int((policy.exits(probs) == k).sum()) for k in range(3)] == [50, 100, 50]
