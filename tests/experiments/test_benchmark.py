"""Small versions of the benchmarks, so that the real ones are known to work."""

import shutil
from pathlib import Path

import pytest
from small_benchmark import small

pytestmark = pytest.mark.slow


def test_the_methods_benchmark_measures_everything(tmp_path: Path) -> None:
    found = small("method.py", tmp_path)
    ratios = found["cifar"][0]["median ratios"]
    assert set(ratios) == {
        "search / forward pass over val",
        "plain search / forward pass over val",
        "predict / forward pass over test",
        "sweep and evaluation / forward pass over test",
    }
    # A factor of nine was measured between them: that the fast one is faster at all is safe to say on any machine.
    assert ratios["search / forward pass over val"] < ratios["plain search / forward pass over val"]
    assert found["imagenet"]["growth"] > 0


def test_the_trainings_benchmark_measures_everything(tmp_path: Path) -> None:
    found = small("training.py", tmp_path)
    speed = found["training, MSDNet-small, batches of 64"][0]["images per second"]
    assert {"plain loop, pillow", "tensor transforms", "and channels last", "ours, eager"} <= set(speed)
    # Measured at a hundred and more: that loading is far less than training is safe to say on any machine.
    assert found["loader, CIFAR"][0]["training step / loading its batch"] > 5
    assert found["loader, 224-pixel files"]["images per second"]["0 workers"] > 0
    assert len(found["collect, peak megabytes"]) == 2


def test_the_runtimes_benchmark_measures_everything(tmp_path: Path) -> None:
    found = small("runtime.py", tmp_path)["measured"][0]
    backends = {"torch", "optimized", "onnx"}
    assert {row["backend"] for row in found["timings"]} == backends
    assert set(found["decision, % of the stages at batch 64, half of the cost"]) == backends
    assert set(found["stream at 50%, batch 64, images per second"]) == backends
    assert set(found["stream at 25%, without pooling / with it, by batch size"]) == backends
    assert {row["variant"] for row in found["timings"]} == {"vanilla", "full", "25%", "50%", "75%"}
    # Measured at three and more: that it is faster at all is safe to say on any machine.
    assert found["batch 1, full calibrated net: torch eager / ONNX"] > 1


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: apt-get install chromium")
def test_the_reports_benchmark_measures_everything(tmp_path: Path) -> None:
    found = small("report.py", tmp_path)["measured"][0]
    assert (found["exits"], found["test samples"], found["pictures"]) == (2, 300, True)
    assert 0.1 < found["page megabytes"] < 8
    assert found["milliseconds per move of the slider"]["median"] > 0


def test_the_policies_benchmark_measures_everything(tmp_path: Path) -> None:
    found = small("policies.py", tmp_path)["measured"][0]
    assert set(found["median ratio to the forward pass"]) == {"geometric", "optimized", "label_free", "auto"}
    assert (found["exits"], found["samples"], found["budgets"]) == (8, 300, 4)


def test_the_classes_benchmark_measures_everything(tmp_path: Path) -> None:
    runs = small("classes.py", tmp_path)["runs"]
    assert [run["classes"] for run in runs] == [20, 60]
    for run in runs:
        assert {"Trace() of 8 samples", "full method", "its predictions", "its file"} <= set(run["steps"])
        assert {
            f"all {n} methods {kind}" for n, kind in [(12, "of the paper"), (4, "with MC dropout"), (6, "with PoE")]
        } <= (set(run["steps"]))
        assert run["dense posteriors / ours, CPU time"]["median"] >= 0  # the clock of a process may be too coarse
        assert run["megabytes of its file"] > 0


def test_the_cascades_benchmark_measures_everything(tmp_path: Path) -> None:
    found = small("cascades.py", tmp_path)
    assert [row["batch"] for row in found["measured"]] == [1, 64]
    assert all(row["median speed-up"] > 0 for row in found["measured"])


def test_the_answers_benchmark_measures_everything(tmp_path: Path) -> None:
    found = small("answers.py", tmp_path)["measured"]
    assert len(found.pop("fit / forward pass")) == 6
    assert len(found) == 4


def test_the_pools_benchmark_measures_everything(tmp_path: Path) -> None:
    found = small("pool.py", tmp_path)["measured"]
    fits = found["fit / forward pass over the validation images"]
    assert set(fits) == {"Pool", "Pool W_opt", "learned score", "confidence", "auto"}
    assert found["memory"]["auto, peak GB"] > 0
    again = small("pool.py", tmp_path, "--no-memory")
    assert again["measured"]["memory"] == {"machine": again["machine"], **found["memory"]}


def test_the_scoring_benchmark_measures_everything(tmp_path: Path) -> None:
    found = small("scoring.py", tmp_path)
    assert {"local, 1", "local, 2"} <= set(found["images_per_second"])
    assert 0 < found["read_share"]["local, 1"] < 1
    assert found["beside_local"]["local"] in (1.0, None)


def test_the_scale_benchmark_measures_everything(tmp_path: Path) -> None:
    """Only commands that others do not cover already; each starts a process."""
    found = small("scale.py", tmp_path, "--only", "calibrate-T_opt")
    assert len(found["measured"]) == 3
    for results in found["measured"].values():
        assert results["calibrate-T_opt"]["peak GB"] > 0
    assert found["growth"]["calibrate-T_opt"] > 0
