"""Manifest of an ONNX bundle, and its checks before any graph runs. Imports no torch, onnx or onnxruntime."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from re import fullmatch
from typing import Any

from exitwise.core.checks import check_integer, is_integer
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError, first_line
from exitwise.core.files import read_json, write_json
from exitwise.core.preprocessing import Preprocessing
from exitwise.policies.abstention import Abstention
from exitwise.policies.family import PolicyFamily
from exitwise.policies.policy import Policy
from exitwise.policies.prediction_sets import PredictionSets, check_fitted_for

FORMAT, VERSION = "exitwise.bundle", 2
MANIFEST = "manifest.json"
PROBS, DRAWN, EXITS = "probs", "drawn", "exits"  # outputs that can be the ensemble state
OPSET = 20  # version of the operators that `export` writes
# Types of the inputs of the first graph: NumPy's names and onnxruntime's.
DTYPES = {"float32": "tensor(float)", "int64": "tensor(int64)", "int32": "tensor(int32)", "bool": "tensor(bool)"}


@dataclass(frozen=True)
class InputSpec:
    """An input of the first graph: the image, or one of several named inputs. Fields are keys of the manifest."""

    name: str
    shape: tuple[int, ...]  # of one sample
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not isinstance(self.name, str) or self.dtype not in DTYPES:
            raise InputError(f"an input must have a name and one of the types {', '.join(DTYPES)}, but is {self}")
        if not all(is_integer(size) and size > 0 for size in self.shape):
            raise InputError(f"the shape of {self.name} must be whole numbers of at least 1, but is {self.shape}")


@dataclass(frozen=True)
class StageGraphInfo:
    """A stage with its calibrated exit: file, hash, input and output names. Fields are keys of the manifest."""

    file: str
    sha256: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        # The manifest must not name files outside of the bundle.
        if not isinstance(self.file, str) or not fullmatch(r"[A-Za-z0-9_-]+\.onnx", self.file):
            raise InputError(f"a graph's file must have a name such as stage0.onnx, but has {self.file!r}")
        for value in (self.sha256, *self.inputs, *self.outputs):
            if not isinstance(value, str):
                raise InputError(f"hash, inputs and outputs of {self.file} must be strings, but got {value!r}")


def first_graph_inputs(inputs: Sequence[InputSpec]) -> tuple[str, ...]:
    """Return the input names of the first graph: `image`, or else `input.0`, `input.1`, ...

    Other names of the user might clash with names inside the graph.
    """
    if [spec.name for spec in inputs] == ["image"]:
        return ("image",)
    return tuple(f"input.{i}" for i in range(len(inputs)))


@dataclass(frozen=True)
class Manifest:
    """Contents of a bundle. Fields are keys of `manifest.json`.

    The first graph takes the `inputs`. Every other graph takes the stage state: the outputs `next.0`, `next.1`, ... of
    the previous graph as `state.0`, `state.1`, ..., and with an ensemble the ensemble state as `memory`. The field
    `memory` names the output that is the ensemble state: "probs" (n, c), "drawn" (n, S, c) with the probabilities of
    every draw, or "exits" (n, k, c) with the log-probabilities of every exit so far; None without an ensemble. Every
    graph has the output `probs`, those of the ensemble if there is one, and for a policy on the variance `variance`.
    """

    graphs: tuple[StageGraphInfo, ...]
    memory: str | None
    inputs: tuple[InputSpec, ...]
    num_classes: int
    policy: Policy
    costs: Costs
    classes: tuple[str, ...] | None
    preprocessing: Preprocessing | None
    method: str
    versions: Mapping[str, str] = field(default_factory=dict)
    sets: PredictionSets | None = None
    abstention: Abstention | None = None
    family: PolicyFamily | None = None  # policies for other budgets, between which a service moves

    def __post_init__(self) -> None:
        check_integer("num_classes", self.num_classes, minimum=1)
        if not self.inputs or len({spec.name for spec in self.inputs}) < len(self.inputs):
            raise InputError("it must have at least one input, and input names must differ")
        counts = (len(self.graphs), len(self.policy.thresholds), len(self.costs))
        if len(set(counts)) != 1 or not self.graphs:
            raise InputError("graphs, thresholds and costs must be one per exit, but are {}, {} and {}".format(*counts))
        for fitted in (self.sets, self.abstention):
            if fitted is not None:
                check_fitted_for(fitted, self.policy, self.num_classes)
        if self.family is not None:
            self.family.check_fits(self.policy)
        if self.policy.unit != self.costs.unit:
            raise InputError(f"its policy is in {self.policy.unit}, but its costs are in {self.costs.unit}")
        if self.classes is not None and len(self.classes) != self.num_classes:
            raise InputError(f"it must name {self.num_classes} classes, but names {len(self.classes)}")
        input_types = [(spec.shape, spec.dtype) for spec in self.inputs]
        if self.preprocessing is not None and input_types != [(self.preprocessing.shape, "float32")]:
            raise InputError(f"its preprocessing gives {self.preprocessing.shape}, but its graphs take {input_types}")
        if self.memory not in (None, PROBS, DRAWN, EXITS):
            raise InputError(f"`memory` must be 'probs', 'drawn', 'exits' or null, but is {self.memory!r}")
        for exit, graph in enumerate(self.graphs):
            if graph.inputs != self._expected_inputs(exit):
                source = "the outputs of the previous graph" if exit else "the inputs of the manifest"
                raise InputError(f"the inputs of {graph.file} must be {source}, but are {', '.join(graph.inputs)}")
            required = ["probs", *(["variance"] if self.policy.score == "variance" else [])]
            if not set(required) <= set(graph.outputs) or len(set(graph.outputs)) < len(graph.outputs):
                raise InputError(
                    f"outputs of {graph.file} must differ and include {' and '.join(required)}, but are {graph.outputs}"
                )

    def _expected_inputs(self, exit: int) -> tuple[str, ...]:
        """Return the input names that a graph must have, by the graph before it."""
        if exit == 0:
            return first_graph_inputs(self.inputs)
        ensemble = ("memory",) if self.memory else ()
        num_states = len(self.carried_outputs(exit - 1)) - len(ensemble)
        return (*(f"state.{i}" for i in range(num_states)), *ensemble)

    def carried_outputs(self, exit: int) -> tuple[str, ...]:
        """Return the outputs of a graph that are the stage state of the next, in the order of its inputs."""
        outputs = self.graphs[exit].outputs
        states = tuple(name for name in outputs if name.startswith("next."))
        if exit == len(self.graphs) - 1 or self.memory is None:
            return states
        if self.memory not in outputs:
            raise InputError(f"{self.graphs[exit].file} must have the output {self.memory}, but has {outputs}")
        return (*states, self.memory)

    def graph_mismatch(
        self, exit: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any], types: Mapping[str, str]
    ) -> str | None:
        """Return how the graph of an exit differs from the manifest, as text, or None.

        Args:
            exit: The exit whose graph is checked.
            inputs: Names and shapes of the graph's inputs.
            outputs: Names and shapes of the graph's outputs.
            types: Types of the inputs, as onnxruntime names them.
        """
        graph = self.graphs[exit]
        if set(inputs) != set(graph.inputs) or set(outputs) != set(graph.outputs):
            return f"its inputs are {', '.join(inputs)} and its outputs {', '.join(outputs)}"
        for name, spec in () if exit else zip(graph.inputs, self.inputs, strict=True):
            if tuple(inputs[name][1:]) != spec.shape:
                return f"its {spec.name} has shape {tuple(inputs[name][1:])}, not {spec.shape}"
            if types[name] != DTYPES[spec.dtype]:
                return f"its {spec.name} is a {types[name]}, not {spec.dtype}"
        if tuple(outputs["probs"][1:]) != (self.num_classes,):
            return f"its probabilities have shape {tuple(outputs['probs'][1:])}, not ({self.num_classes},)"
        if "memory" in inputs and len(inputs["memory"]) != (2 if self.memory == PROBS else 3):
            return f"its ensemble state is not {self.memory}"
        return None

    def save(self, folder: Path) -> None:
        """Write `manifest.json`."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "opset": OPSET,
            "graphs": [asdict(graph) for graph in self.graphs],
            "memory": self.memory,
            "inputs": [asdict(spec) for spec in self.inputs],
            "num_classes": self.num_classes,
            "policy": self.policy.to_dict(),
            "costs": {"values": list(self.costs.values), "unit": self.costs.unit},
            "classes": None if self.classes is None else list(self.classes),
            "preprocessing": None if self.preprocessing is None else self.preprocessing.to_dict(),
            "method": self.method,
            "versions": dict(self.versions),
        }
        for name in ("sets", "abstention"):  # absent if there are none, as in former bundles
            if (fitted := getattr(self, name)) is not None:
                data[name] = fitted.to_dict()
        if self.family is not None:  # absent in former bundles
            data["family"] = self.family.to_dicts(self.policy)
        write_json(folder / MANIFEST, data)

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read and check `manifest.json`; raise an `InputError` that names the file if anything is wrong."""
        path = folder / MANIFEST
        if not path.is_file():
            raise InputError(f"{folder} is not a bundle: it has no {MANIFEST}")
        data = read_json(path)
        if data.get("format") != FORMAT:
            raise InputError(f"{path} must be of format {FORMAT!r}, but is of {data.get('format')!r}")
        if data.get("version") != VERSION:
            raise InputError(f"{path} has version {data.get('version')!r}, but this exitwise reads version {VERSION}")
        if data.get("opset") != OPSET:
            raise InputError(f"{path} has opset {data.get('opset')!r}, but this exitwise runs opset {OPSET}")
        try:
            preprocessing, classes = data["preprocessing"], data["classes"]
            sets, abstention, family = data.get("sets"), data.get("abstention"), data.get("family")
            policy = Policy.from_dict(data["policy"])
            return cls(
                graphs=tuple(StageGraphInfo(**graph) for graph in data["graphs"]),
                memory=data["memory"],
                inputs=tuple(InputSpec(**spec) for spec in data["inputs"]),
                num_classes=data["num_classes"],
                policy=policy,
                costs=Costs(**data["costs"]),
                classes=None if classes is None else tuple(str(name) for name in classes),
                preprocessing=None if preprocessing is None else Preprocessing.from_dict(preprocessing),
                method=str(data["method"]),
                versions={str(key): str(value) for key, value in data["versions"].items()},
                sets=None if sets is None else PredictionSets.from_dict(sets),
                abstention=None if abstention is None else Abstention.from_dict(abstention),
                family=None if family is None else PolicyFamily.from_dicts(family, policy),
            )
        except KeyError as error:
            raise InputError(f"{path} lacks {error.args[0]!r}") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"{path} is not usable: {first_line(error)}") from None

    def read_graph(self, folder: Path, exit: int) -> bytes:
        """Read the graph of an exit; raise `InputError` if its SHA-256 is not that of the manifest.

        The hash detects any change after the export. An attacker who also edits the manifest can supply any graph, so
        parsing it here would protect nothing; onnxruntime refuses opsets and operators that it does not know.
        """
        graph = self.graphs[exit]
        path = folder / graph.file
        if not path.is_file():
            raise InputError(f"{path} does not exist: the bundle is incomplete")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != graph.sha256:
            raise InputError(f"{path} is not the file that was exported: its SHA-256 differs from the manifest's")
        return data
