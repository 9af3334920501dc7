"""A new calibration method, a new exit score and a new backend: each added as CONTRIBUTING describes, and used.

Each test copies the package, edits at most three of its files, and runs a script with the copy.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


class Copy:
    """A copy of the package that is edited file by file."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        self._folder, self.edited = folder, set[str]()

    def replace(self, file: str, old: str, new: str) -> None:
        """Replace the only occurrence of a text in a file of the package."""
        path = self._folder / "src" / "exitwise" / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} must hold {old!r} once"
        path.write_text(text.replace(old, new))
        self.edited.add(file)

    def add(self, file: str, text: str) -> None:
        (self._folder / "src" / "exitwise" / file).write_text(text)
        self.edited.add(file)

    def run(self, script: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self._folder / "src")}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=self._folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def package(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def files_named_for(heading: str) -> set[str]:
    """Return the files of the package that CONTRIBUTING names under a heading."""
    section = re.search(rf"^### {heading}\n(.*?)(?=^##|\Z)", CONTRIBUTING, flags=re.MULTILINE | re.DOTALL)
    assert section is not None, f"CONTRIBUTING has no section {heading!r}"
    return set(re.findall(r"`src/exitwise/([\w/]+\.py)`", section[1]))


def test_a_new_calibration_method(package: Copy) -> None:
    """The most confident exit so far, as an ensemble: by name, tuned, saved, and at run time."""
    package.replace(
        "calibration/ensembles.py",
        "ENSEMBLES: Mapping[str, Ensemble] = {",
        """class _MostConfident(RecursiveEnsemble):
    label = "Max"
    is_elementwise = False

    def combine_log_probs(self, earlier, log_probs, earlier_share, share):
        better = log_probs.amax(dim=-1, keepdim=True) > earlier.amax(dim=-1, keepdim=True)
        return log_probs.where(better, earlier)

    def combine_probs(self, earlier, probs, share):
        return probs.where(probs.amax(dim=-1, keepdim=True) > earlier.amax(dim=-1, keepdim=True), earlier)


ENSEMBLES: Mapping[str, Ensemble] = {
    "max": _MostConfident(),
    """,
    )
    out = package.run(
        """
import exitwise as ew, torch
trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
calibration = ew.calibrate(trace, "max t_opt")
calibration.save("max.safetensors")
calibration = ew.Calibration.load("max.safetensors")
confidence = calibration.predict(trace.val).probs.amax(dim=2)
assert bool((confidence[1:] >= confidence[:-1]).all())
net = ew.load_net(ew.zoo.path("net.safetensors"))
images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
policy = ew.Policy((2.0, 2.0, 2.0, float("-inf")))
with torch.no_grad():
    expected = calibration.predict(net.eval().features(images)).probs[-1]
torch.testing.assert_close(ew.Classifier(net, calibration, policy)(images).probs, expected, rtol=1e-4, atol=1e-5)
print(calibration.method.name)
"""
    )
    assert out == "Max T_opt\n"
    assert package.edited <= files_named_for("A calibration method")
    assert len(files_named_for("A calibration method")) <= 3


def test_a_new_exit_score(package: Copy) -> None:
    """Minus the second probability: for policies, evaluation, the runtime and the command."""
    package.replace(
        "policies/scores.py",
        "SCORES: Mapping[str, Score] = {\n",
        """def _compute_runner_up(pred: ExitPrediction, state: ScoreState) -> tuple[Array, ScoreState]:
    return -np.partition(pred.probs, -2, axis=1)[:, -2], state


SCORES: Mapping[str, Score] = {
    "runner_up": Score(_compute_runner_up),
""",
    )
    out = package.run(
        """
import sys
import exitwise as ew
from exitwise.cli.app import main
trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
calibration = ew.calibrate(trace, "T_opt")
val = calibration.predict(trace.val)
policy = ew.fit_policy(val, costs=trace.costs, budget=2e7, score="runner_up")
assert policy.cost <= 2e7
net = ew.load_net(ew.zoo.path("net.safetensors"))
assert ew.Classifier(net, calibration, policy).policy.score == "runner_up"
import shutil, pathlib
pathlib.Path("run").mkdir()
for name in ("run.json", "net.safetensors", "trace.safetensors", "split.safetensors"):
    shutil.copyfile(ew.zoo.path(name), f"run/{name}")
sys.argv = ["exitwise", "evaluate", "run", "--budget", "50%", "--method", "T_opt", "--score", "runner_up", "--json"]
main()
"""
    )
    assert '"score": "runner_up"' in out
    assert package.edited <= files_named_for("An exit score")
    assert len(files_named_for("An exit score")) <= 3


def test_a_new_backend(package: Copy) -> None:
    """A backend that counts the rows that each stage runs on; `exitwise bench` times it beside the others."""
    package.add(
        "runtime/counting_backend.py",
        '''"""The torch backend, with a count of the samples that each stage runs on."""

from exitwise.runtime.torch_backend import TorchBackend


class CountingBackend:
    def __init__(self, backend: TorchBackend) -> None:
        self._backend, self.counts = backend, [0] * backend.num_exits

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def run(self, exit, state):
        self.counts[exit] += self._backend.length(state)
        return self._backend.run(exit, state)
''',
    )
    package.replace(
        "runtime/bench.py",
        '    "torch": _make_torch_target,\n',
        '    "torch": _make_torch_target,\n    "counting": _make_counting_target,\n',
    )
    package.replace(
        "runtime/bench.py",
        "# Makes the target of each backend from a classifier",
        """def _make_counting_target(classifier: Classifier, shape: tuple[int, ...], threads: int) -> BenchTarget:
    from exitwise.runtime.counting_backend import CountingBackend

    target = _make_torch_target(classifier, shape, threads)
    return BenchTarget(lambda: CountingBackend(target.backend()), target.vanilla, target.images)


# Makes the target of each backend from a classifier""",
    )
    out = package.run(
        """
import sys
import exitwise as ew, torch
from exitwise.cli.app import main
from exitwise.runtime import engine
from exitwise.runtime.counting_backend import CountingBackend
trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
calibration = ew.calibrate(trace, "T_opt")
policy = ew.fit_policy(calibration.predict(trace.val), costs=trace.costs, budget=2e7)
classifier = ew.Classifier(ew.load_net(ew.zoo.path("net.safetensors")), calibration, policy)
images = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
backend = CountingBackend(classifier.backend())
exits = engine.classify(backend, policy, images)[2]
assert backend.counts == [int((exits >= k).sum()) for k in range(4)], (backend.counts, exits)
import shutil, pathlib
pathlib.Path("run").mkdir()
for name in ("run.json", "net.safetensors", "trace.safetensors", "split.safetensors"):
    shutil.copyfile(ew.zoo.path(name), f"run/{name}")
sys.argv = ["exitwise", "bench", "run", "--method", "T_opt", "--backend", "counting", "--batch-size", "1"]
sys.argv += ["--costs-of", "counting:1", "--repeats", "1", "--budget", "50%", "--json"]
main()
"""
    )
    assert '"backend": "counting"' in out
    named = files_named_for("A backend")
    assert {name for name in package.edited if name != "runtime/counting_backend.py"} <= named
    assert len(named) + 1 <= 3
