"""The manifest of an ONNX bundle, and its check before anything runs. Without torch, onnx or onnxruntime."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from re import fullmatch
from typing import Any

from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.files import read_json, write_json
from exitwise.core.preprocessing import Preprocessing
from exitwise.policies.policy import Policy

FORMAT, VERSION = "exitwise.bundle", 2
MANIFEST = "manifest.json"
OPSET = 20  # of the operators in the graphs
# Of what the first graph takes, as NumPy and onnxruntime call them.
DTYPES = {"float32": "tensor(float)", "int64": "tensor(int64)", "int32": "tensor(int32)", "bool": "tensor(bool)"}


@dataclass(frozen=True)
class InputSpec:
    """What the first graph takes of every sample: its image, or one of several things by their names."""

    name: str
    shape: tuple[int, ...]  # of one sample
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not isinstance(self.name, str) or self.dtype not in DTYPES:
            raise InputError(f"an input must have a name and be of {', '.join(DTYPES)}, but is {self}")
        if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in self.shape):
            raise InputError(f"the shape of {self.name} must be whole numbers, but is {self.shape}")


@dataclass(frozen=True)
class StageGraphInfo:
    """One stage with its calibrated exit: names of what goes in and what comes out, in order."""

    file: str
    sha256: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        # A name in a manifest must not reach out of the bundle.
        if not isinstance(self.file, str) or not fullmatch(r"[A-Za-z0-9_-]+\.onnx", self.file):
            raise InputError(f"a graph's file must have a plain name such as stage0.onnx, but has {self.file!r}")
        for value in (self.sha256, *self.inputs, *self.outputs):
            if not isinstance(value, str):
                raise InputError(f"{self.file} must be described by words, but has {value!r}")


def first_graph_inputs(inputs: Sequence[InputSpec]) -> tuple[str, ...]:
    """What the first graph calls its inputs: `image`, or their places, as other names may mean something to it."""
    if [each.name for each in inputs] == ["image"]:
        return ("image",)
    return tuple(f"input.{i}" for i in range(len(inputs)))


@dataclass(frozen=True)
class Manifest:
    """What a bundle holds.

    The first graph takes the `inputs`, the others the state that the one before put out, as `state.0`, `state.1` and so
    on what that calls `next.0`, `next.1`, and where exits are ensembled the `memory` of those before: the output that
    `memory` names here, "probs" or "drawn". Every graph puts out `probs`, those of the ensemble where there is one,
    and for a policy on it the `variance`.
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

    def __post_init__(self) -> None:
        classes = self.num_classes
        if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
            raise InputError(f"num_classes must be a whole number, but is {classes!r}")
        if not self.inputs or len({each.name for each in self.inputs}) < len(self.inputs):
            raise InputError("it must have inputs, no two with the same name")
        counts = {len(self.graphs), len(self.policy.thresholds), len(self.costs)}
        if len(counts) != 1 or not self.graphs:
            raise InputError("it must have as many graphs, thresholds and costs, one per exit")
        if self.policy.unit != self.costs.unit:
            raise InputError(f"its policy is in {self.policy.unit}, but its costs are in {self.costs.unit}")
        if self.classes is not None and len(self.classes) != self.num_classes:
            raise InputError(f"it must name {self.num_classes} classes, but names {len(self.classes)}")
        taken = [(each.shape, each.dtype) for each in self.inputs]
        if self.preprocessing is not None and taken != [(self.preprocessing.shape, "float32")]:
            raise InputError(f"its preprocessing gives {self.preprocessing.shape}, but its graphs take {taken}")
        if self.memory not in (None, "probs", "drawn"):
            raise InputError(f"its memory must be probs, drawn or nothing, but is {self.memory!r}")
        for exit, graph in enumerate(self.graphs):
            carried = self.carried_outputs(exit - 1) if exit else ()
            memory = ("memory",) if exit and self.memory else ()
            states = tuple(f"state.{i}" for i in range(len(carried) - len(memory)))
            if exit and graph.inputs != (*states, *memory):
                raise InputError(f"{graph.file} does not take what the graph before it puts out")
            if not exit and graph.inputs != first_graph_inputs(self.inputs):
                raise InputError(f"{graph.file} does not take the inputs that are named")
            said = ["probs", *(["variance"] if self.policy.score == "variance" else [])]
            if not set(said) <= set(graph.outputs) or len(set(graph.outputs)) < len(graph.outputs):
                raise InputError(f"{graph.file} must put out {' and '.join(said)}, but puts out {graph.outputs}")

    def carried_outputs(self, exit: int) -> tuple[str, ...]:
        """What of a graph's outputs the next one takes, in the order of its inputs."""
        outputs = self.graphs[exit].outputs
        states = tuple(name for name in outputs if name.startswith("next."))
        if exit == len(self.graphs) - 1 or self.memory is None:
            return states
        if self.memory not in outputs:
            raise InputError(f"{self.graphs[exit].file} must put out {self.memory}, but puts out {outputs}")
        return (*states, self.memory)

    def graph_mismatch(
        self, exit: int, inputs: Mapping[str, Any], outputs: Mapping[str, Any], types: Mapping[str, str]
    ) -> str | None:
        """What is wrong with a graph that takes and puts out these names, with their shapes, and the types of what it
        takes; None if nothing is."""
        graph = self.graphs[exit]
        if set(inputs) != set(graph.inputs) or set(outputs) != set(graph.outputs):
            return f"it takes {', '.join(inputs)} and puts out {', '.join(outputs)}"
        for name, each in () if exit else zip(graph.inputs, self.inputs, strict=True):
            if tuple(inputs[name][1:]) != each.shape:
                return f"it takes an {each.name} of {tuple(inputs[name][1:])}, not {each.shape}"
            if types[name] != DTYPES[each.dtype]:
                return f"its {each.name} is a {types[name]}, not {each.dtype}"
        if tuple(outputs["probs"][1:]) != (self.num_classes,):
            return f"it puts out probabilities of {tuple(outputs['probs'][1:])} classes, not {self.num_classes}"
        if "memory" in inputs and len(inputs["memory"]) != (3 if self.memory == "drawn" else 2):
            return f"its memory is not {self.memory}"
        return None

    def save(self, folder: Path) -> None:
        about = {
            "format": FORMAT,
            "version": VERSION,
            "opset": OPSET,
            "graphs": [asdict(graph) for graph in self.graphs],
            "memory": self.memory,
            "inputs": [asdict(each) for each in self.inputs],
            "num_classes": self.num_classes,
            "policy": self.policy.to_dict(),
            "costs": {"values": list(self.costs.values), "unit": self.costs.unit},
            "classes": None if self.classes is None else list(self.classes),
            "preprocessing": None if self.preprocessing is None else self.preprocessing.to_dict(),
            "method": self.method,
            "versions": dict(self.versions),
        }
        write_json(folder / MANIFEST, about)

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Read and check; everything that may be wrong with it is an `InputError` that names the file."""
        path = folder / MANIFEST
        if not path.is_file():
            raise InputError(f"{folder} is not a bundle: it has no {MANIFEST}")
        about = read_json(path)
        if about.get("format") != FORMAT:
            raise InputError(f"{path} must be of format {FORMAT!r}, but says {about.get('format')!r}")
        if about.get("version") != VERSION:
            raise InputError(f"{path} has version {about.get('version')!r}, but this exitwise reads version {VERSION}")
        if about.get("opset") != OPSET:
            raise InputError(f"{path} says opset {about.get('opset')!r}, but this exitwise runs opset {OPSET}")
        try:
            preprocessing, classes = about["preprocessing"], about["classes"]
            return cls(
                graphs=tuple(StageGraphInfo(**graph) for graph in about["graphs"]),
                memory=about["memory"],
                inputs=tuple(InputSpec(**each) for each in about["inputs"]),
                num_classes=about["num_classes"],
                policy=Policy.from_dict(about["policy"]),
                costs=Costs(**about["costs"]),
                classes=None if classes is None else tuple(str(name) for name in classes),
                preprocessing=None if preprocessing is None else Preprocessing.from_dict(preprocessing),
                method=str(about["method"]),
                versions={str(key): str(value) for key, value in about["versions"].items()},
            )
        except KeyError as error:
            raise InputError(f"{path} lacks {error.args[0]!r}") from None
        except (AttributeError, TypeError, InputError) as error:
            raise InputError(f"{path} is not usable: {error}") from None

    def read_graph(self, folder: Path, exit: int) -> bytes:
        """The graph of an exit, if it is the very one that was exported."""
        graph = self.graphs[exit]
        path = folder / graph.file
        if not path.is_file():
            raise InputError(f"{path} does not exist: the bundle is incomplete")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != graph.sha256:
            raise InputError(f"{path} is not the file that was exported: its SHA-256 differs from the manifest's")
        if (opset := opset_of(data)) != OPSET:
            raise InputError(f"{path} is of opset {opset}, but this exitwise runs opset {OPSET}")
        return data


def opset_of(data: bytes) -> int | None:
    """The version of ONNX's own operators that a model asks for: field 8 of its protocol buffer, without a library."""
    for number, value in _fields(data):
        if number == 8 and isinstance(value, bytes):
            parts = dict(_fields(value))
            if parts.get(1, b"") in (b"", b"ai.onnx"):
                version = parts.get(2)
                return version if isinstance(version, int) else None
    return None


def _fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """Numbers and values of the fields on the outermost level; nothing of what cannot be read so."""
    found: list[tuple[int, int | bytes]] = []
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
            found.append((key >> 3, value))
        elif kind == 2:
            size, place = _varint(data, place)
            found.append((key >> 3, data[place : place + size]))
            place += size
        elif kind in (1, 5):
            place += 8 if kind == 1 else 4
        else:
            return []
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(data):
        byte = data[place]
        value |= (byte & 127) << shift
        place += 1
        shift += 7
        if byte < 128:
            break
    return value, place
