"""Files written before modules moved into packages still open, and give the same answers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command, with_paper_method
from paths import TESTS

import exitwise as ew
from exitwise.calibration.methods import OURS
from exitwise.runs.run import Run

FORMER = TESTS / "former"

# Another CPU sums in another order: answers differ in the last bits of float32.
TOLERANCE = 1e-5


@pytest.fixture
def exitwise(exitwise: Command) -> Command:
    return with_paper_method(exitwise)


@pytest.fixture(scope="module")
def expected() -> Any:
    return json.loads((FORMER / "expected.json").read_text())


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FORMER / "run", tmp_path / "run"))


def test_a_trace() -> None:
    trace = ew.Trace.load(FORMER / "run" / "trace.safetensors")
    assert (trace.num_exits, trace.num_classes, len(trace.val)) == (3, 10, 297)


def test_a_calibration(expected: Any) -> None:
    calibration = ew.Calibration.load(FORMER / "calibration.safetensors")
    assert calibration.method.name == OURS
    assert list(calibration.temperatures) == pytest.approx(expected["temperatures"])
    assert list(calibration.prior_vars) == pytest.approx(expected["prior_vars"])


def test_a_classifier(images: torch.Tensor, expected: Any) -> None:
    pred = ew.Classifier.load(FORMER / "classifier.safetensors")(images)
    assert pred.exits.tolist() == expected["exits"]
    torch.testing.assert_close(pred.probs, torch.tensor(expected["probs"]), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_bundle(images: torch.Tensor, expected: Any) -> None:
    pytest.importorskip("onnxruntime")
    from exitwise.runtime.onnx import Session

    pred = Session(FORMER / "bundle")(images.numpy())
    assert pred.exits.tolist() == expected["bundle_exits"]
    probs = torch.as_tensor(pred.probs)
    torch.testing.assert_close(probs, torch.tensor(expected["bundle_probs"]), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
def test_a_run_with_its_policy(run: Path, exitwise: Command, tmp_path: Path) -> None:
    """A former run has no chosen classifier: its policy's budget, score and certificate are fitted again."""
    assert Run(run).chosen() is None
    former = Run(run).policy()
    assert former is not None
    assert former.guarantee is not None
    done = exitwise("export", run, tmp_path / "bundle", "--json")
    assert done.status == 0, done.err
    assert done.json["policy"]["budget"] == former.budget
    assert done.json["policy"]["guarantee"]["budget_delta"] == former.guarantee.budget_delta
    assert f"{OURS}, budget" in done.err


@pytest.mark.slow_after_first
@pytest.mark.parametrize("command", [("evaluate", "--budget", "70%"), ("report",), ("ablate",)])
def test_commands_on_a_former_run(run: Path, exitwise: Command, command: tuple[str, ...]) -> None:
    done = exitwise(command[0], run, *command[1:])
    assert done.status == 0, done.err
