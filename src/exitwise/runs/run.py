"""Run directories: the results of the commands and their provenance."""

import platform
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from exitwise.calibration.calibration import Calibration
from exitwise.calibration.method_selection import MethodSelection
from exitwise.calibration.methods import Method
from exitwise.calibration.trace import Trace
from exitwise.calibration.trace_folder import is_trace_folder
from exitwise.core import tensorfiles
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.files import read_json, write_json
from exitwise.core.version import __version__
from exitwise.policies.policy import Policy
from exitwise.runs.chosen import ChosenClassifier
from exitwise.training.history import History

FORMAT, VERSION = "exitwise.run", 1
TRACE_FILE, TRACE_FOLDER = "trace.safetensors", "trace"


def _is_valid_attach(attach: Any) -> bool:
    """Return whether `attach` is a valid entry of a model spec: None, or a dict with the positions of the exits."""
    if attach is None:
        return True
    at = attach.get("at") if isinstance(attach, dict) else None
    return isinstance(at, list) and all(isinstance(name, str) for name in at)


class Run:
    """An existing run directory. Its files are read on request."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / "run.json").is_file():
            raise InputError(f"{self.directory} is not a run: it has no run.json")
        self.metadata = read_json(self.directory / "run.json")
        if self.metadata.get("format") != FORMAT or self.metadata.get("version") != VERSION:
            actual = f"{self.metadata.get('format')!r} version {self.metadata.get('version')!r}"
            raise InputError(f"{self.directory / 'run.json'} must be {FORMAT} version {VERSION}, but is {actual}")
        data = self.metadata.get("data")
        if not isinstance(data, dict) or not isinstance(data.get("name"), str):
            raise InputError(f"{self.directory / 'run.json'} must name its dataset, but holds {data!r}")
        if not isinstance(data.get("root"), str | None):
            raise InputError(f"{self.directory / 'run.json'} must give a folder as root, but gives {data['root']!r}")
        model, training = self.metadata.get("model"), self.metadata.get("training")
        if not isinstance(model, dict) or not _is_valid_attach(model.get("attach")):
            raise InputError(f"{self.directory / 'run.json'} must describe its model, but holds {model!r}")
        described = isinstance(training, dict) and isinstance(training.get("recipe"), dict | None)
        if training is not None and not described:
            raise InputError(f"{self.directory / 'run.json'} must describe its training, but holds {training!r}")

    def command(self, name: str, *options: str) -> str:
        """Return a command on this run that can be pasted into a shell, with `--net` if it needs the user's own net."""
        words = ["exitwise", name, str(self.directory), *options]
        net = self.metadata["model"].get("net")
        if isinstance(net, str) and name in ("collect", "train", "bench", "export", "predict"):
            words += [word for name in net.split(",") for word in ("--net", name)]
        return shlex.join(words)

    def search_command(self, method: Method) -> str:
        """Return the command, in backticks, that tunes a method beyond the grid."""
        return f"`{self.command('calibrate', '--method', method.name, '--search', 'continuous')}`"

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def net_file(self) -> Path:
        return self.directory / "net.safetensors"

    @property
    def split_file(self) -> Path:
        return self.directory / "split.safetensors"

    @property
    def trace_file(self) -> Path:
        """The trace: the folder `trace` if there is one, else the file `trace.safetensors`, which may not exist."""
        folder = self.directory / TRACE_FOLDER
        return folder if is_trace_folder(folder) else self.directory / TRACE_FILE

    @property
    def has_trace(self) -> bool:
        return self.trace_file.exists()

    def calibration_file(self, method: Method) -> Path:
        return self.directory / "calibrations" / f"{method.slug}.safetensors"

    @property
    def selection_file(self) -> Path:
        return self.directory / "calibrations" / "auto.json"

    def selection(self) -> MethodSelection | None:
        """Load the method that "auto" chose, with the scores of the others, if it has chosen one."""
        if not self.selection_file.is_file():
            return None
        data = read_json(self.selection_file)
        try:
            return MethodSelection.from_dict(data.get("selection"))
        except InputError as error:
            raise InputError(f"{self.selection_file} is not usable: {error}") from None

    def save_selection(self, selection: MethodSelection) -> None:
        """Write the method that "auto" chose."""
        self.selection_file.parent.mkdir(exist_ok=True)
        data = {"format": "exitwise.selection", "version": 1, "selection": selection.to_dict()}
        write_json(self.selection_file, data)

    def training(self) -> dict[str, Any]:
        """Return the entry `training` of run.json."""
        training = self.metadata.get("training")
        if not isinstance(training, dict):
            raise InputError(f"{self.directory} was not made by training: there is nothing to resume")
        return training

    def epochs_done(self) -> tuple[int, int] | None:
        """Return how many epochs of how many are done; None if the run has no training that could stop half-way."""
        training = self.metadata.get("training") or {}
        planned = (training.get("recipe") or {}).get("epochs")
        file = self.directory / "history.csv"
        if training.get("freeze_backbone") or not isinstance(planned, int) or not file.is_file():
            return None
        return len(History.load(file).epochs), planned

    def trace(self) -> Trace:
        if not self.has_trace:
            raise InputError(f"{self.directory} has no trace yet: run `{self.command('collect')}` first")
        trace = Trace.load(self.trace_file)
        if self.net_file.is_file():
            weights, _ = tensorfiles.read(self.net_file)
            for k, head in enumerate(trace.heads):
                if not torch.equal(head.weight, weights.get(f"heads.{k}.last.weight", torch.empty(0)).float()):
                    raise InputError(
                        f"{self.trace_file} was made from another state of the net than {self.net_file.name}: "
                        f"run `{self.command('collect', '--force')}`"
                    )
        return trace

    def calibration(self, method: Method, trace: Trace) -> Calibration | None:
        """Load the saved calibration by a method, if there is one, and check that it belongs to the trace."""
        file = self.calibration_file(method)
        if not file.is_file():
            return None
        calibration = Calibration.load(file)
        if not calibration.belongs_to(trace):
            raise InputError(f"{file} is of another net than the run's trace: calibrate again")
        return calibration

    @property
    def chosen_file(self) -> Path:
        return self.directory / "chosen.safetensors"

    def chosen(self) -> ChosenClassifier | None:
        """Load the classifier of the last evaluation, if there was one."""
        return ChosenClassifier.load(self.chosen_file) if self.chosen_file.is_file() else None

    def choose(self, classifier: ChosenClassifier) -> None:
        """Make a classifier the one that later commands use; its policy is also written to policy.json."""
        classifier.save(self.chosen_file)
        classifier.policy.save(self.directory / "policy.json")

    def remove_derived(self) -> None:
        """Remove results of an earlier trace."""
        shutil.rmtree(self.directory / "calibrations", ignore_errors=True)
        for name in ("chosen.safetensors", "policy.json", "results.json", "bench.json"):
            (self.directory / name).unlink(missing_ok=True)

    @property
    def bench_file(self) -> Path:
        return self.directory / "bench.json"

    def measured_costs(self) -> Costs:
        """Return the cumulative milliseconds up to each exit that `exitwise bench` measured."""
        if not self.bench_file.is_file():
            raise InputError(
                f"{self.directory} has no times yet: run `{self.command('bench')}` on the machine that it is for"
            )
        try:
            return Costs(tuple(read_json(self.bench_file)["costs"]["values"]), "ms")
        except (KeyError, TypeError, InputError) as error:
            raise InputError(f"{self.bench_file} holds no usable costs ({error}): measure again") from None

    def policy(self) -> Policy | None:
        """Load the policy of the last evaluation, if there was one."""
        file = self.directory / "policy.json"
        return Policy.load(file) if file.is_file() else None

    def add_results(self, **results: Any) -> None:
        """Add results to results.json, beside those of other commands."""
        file = self.directory / "results.json"
        former = read_json(file) if file.is_file() else {"format": "exitwise.results", "version": 1}
        write_json(file, {**former, **results})


def run_metadata(
    model: Mapping[str, Any], data: Mapping[str, Any], training: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the contents of run.json."""
    metadata = {"format": FORMAT, "version": VERSION, "model": dict(model), "data": dict(data)}
    return {**metadata, **({"training": dict(training)} if training else {}), "versions": versions()}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    return {
        "exitwise": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
