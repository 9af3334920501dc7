"""The trace: features, labels, last layers, curvature and costs of a net; calibration needs nothing else."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from re import search
from typing import Any

import torch
from torch import Tensor

from exitwise.calibration.laplace import Curvature, is_symmetric
from exitwise.calibration.trace_folder import (
    TraceFolderWriter,
    check_feature_dtype,
    is_trace_folder,
    read_trace_folder,
)
from exitwise.core import tensorfiles
from exitwise.core.checks import check_integer, is_number
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.held_out import split_held_out
from exitwise.core.mapped_rows import MappedRows
from exitwise.core.memory import align_fields
from exitwise.core.predictions import Array

FORMAT, VERSION = "exitwise.trace", 1

_BLOCK = 1 << 22  # numbers of features that are read at once


@dataclass(frozen=True, eq=False)
class Split:
    """Samples of one split as every exit sees them.

    Features of a trace on disk stay in its files: slices such as `features[k][start:stop]` read only their rows, any
    other function of PyTorch reads all of them.

    Args:
        features: Inputs K x (n, p_k) of the last layer of every exit.
        labels: True classes (n,), int64.
        index: Positions (n,) of the samples in the dataset, if they are known.
    """

    features: tuple[Tensor, ...]
    labels: Tensor
    index: Tensor | None = None

    def __post_init__(self) -> None:
        align_fields(self, "features", "labels", "index")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self)} samples, {len(self.features)} exits)"

    def take(self, samples: Tensor | Array) -> "Split":
        """Return some of the samples, by their positions (m,) or a mask (n,); features on disk are not read."""
        samples = torch.as_tensor(samples)
        index = None if self.index is None else self.index[samples]
        features = tuple(x.take(samples) if isinstance(x, MappedRows) else x[samples] for x in self.features)
        return Split(features, self.labels[samples], index)

    def blocks(self) -> Iterator[slice]:
        """Yield slices of samples whose features together take little memory."""
        size = max(1, _BLOCK // max(1, sum(x.shape[1] for x in self.features)))
        return (slice(start, min(start + size, len(self))) for start in range(0, len(self), size))


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Last layer of one exit: weight (c, p), bias (c,) or None."""

    weight: Tensor
    bias: Tensor | None

    def __post_init__(self) -> None:
        align_fields(self, "weight", "bias")

    def to_float32(self) -> "HeadWeights":
        """Return the weights in float32."""
        return HeadWeights(self.weight.float(), None if self.bias is None else self.bias.float())

    def logits(self, features: Tensor) -> Tensor:
        """Compute logits (n, c) of features (n, p), in float32 for any dtype of weights and features."""
        weights = self.to_float32()
        return torch.nn.functional.linear(features.float(), weights.weight, weights.bias)


@dataclass(frozen=True, eq=False)
class Trace:
    """Features, labels, head weights, curvature and costs of one net on one dataset.

    Args:
        val: The validation split, which calibration and policies are tuned on.
        test: The test split, or None.
        heads: Last layers (K,): weight (c, p_k), bias (c,) or None.
        curvature: Sums (K,) over the `n` training samples: `A` (p_k + 1, p_k + 1), or (p_k, p_k) without a bias, and
            `B` (c, c). Empty if no training samples were collected.
        costs: Cumulative costs (K,) of the exits.
        classes: Names (c,) of the classes, if they are known.
        model: Description from which the net can be built again, such as its preset, if it has one.
        budget_range: Lowest and highest budget of the paper's tables, if they are known.

    Raises:
        InputError: Shapes, types or values do not belong together, or values are not finite.

    Example:
        >>> import exitwise as ew
        >>> ew.Trace.load(ew.zoo.path("trace.safetensors"))
        Trace(cifar100-small, 4 exits, 100 classes, 5000 val, 10000 test samples)
    """

    val: Split
    test: Split | None
    heads: tuple[HeadWeights, ...]
    curvature: tuple[Curvature, ...]
    costs: Costs
    classes: tuple[str, ...] | None = None
    model: Mapping[str, Any] | None = None
    budget_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise InputError(f"the trace is not usable: {problem}")

    @property
    def num_exits(self) -> int:
        """Number K of exits."""
        return len(self.heads)

    @property
    def num_classes(self) -> int:
        """Number c of classes."""
        return len(self.heads[0].weight)

    @property
    def preset(self) -> str | None:
        """Preset of the net; None for a custom net."""
        name = (self.model or {}).get("preset")
        return None if name is None else str(name)

    @property
    def num_train(self) -> int:
        """Number of training samples of the curvature; 0 without them."""
        return self.curvature[0].n if self.curvature else 0

    def __repr__(self) -> str:
        test = f", {len(self.test)} test" if self.test else ""
        spec = self.model or {}
        name = self.preset or spec.get("module") or ("cascade" if "cascade" in spec else "own net")
        return f"Trace({name}, {self.num_exits} exits, {self.num_classes} classes, {len(self.val)} val{test} samples)"

    def hold_out(self, share: float = 0.5, seed: int | torch.Generator = 0) -> tuple["Trace", Split]:
        """Hold out a share of the validation samples, for a certificate.

        A certificate needs samples that were used for neither temperature, prior nor thresholds. A seed holds out the
        same samples here as in `fit_policy`.

        Args:
            share: Fraction of the n validation samples to hold out.
            seed: Seed of the draw, or a generator to draw the seed from.

        Returns:
            The trace with the remaining validation samples, and the held-out samples.

        Raises:
            InputError: If no sample would be held out, or none would remain.
        """
        if isinstance(seed, torch.Generator):
            seed = int(torch.randint(2**63 - 1, (), generator=seed, device=seed.device))
        tune, held_out = split_held_out(len(self.val), share, check_integer("seed", seed, 0))
        return replace(self, val=self.val.take(tune)), self.val.take(held_out)

    def save(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write everything to one safetensors file, or to a folder from which features are read when they are needed.

        Args:
            path: A file such as "trace.safetensors"; a path without a suffix, such as "trace", is a folder. An existing
                trace there is replaced.
            dtype: Type of the stored features: torch.float32, or torch.float16 to halve their size.

        Raises:
            InputError: A feature is beyond float16, or `path` is a folder that is not a trace.
        """
        check_feature_dtype(dtype)
        path = Path(path)
        if not path.suffix:
            self._save_folder(path, dtype)
            return
        tensors = pack_layers(self.heads, self.curvature, self.costs)
        for name, split in (("val", self.val), ("test", self.test)):
            if split is None:
                continue
            tensors |= {f"{name}.features.{k}": x[:].to(dtype) for k, x in enumerate(split.features)}
            tensors[f"{name}.labels"] = split.labels
            if split.index is not None:
                tensors[f"{name}.index"] = split.index
        overflow = next((key for key, value in tensors.items() if not tensorfiles.all_finite(value)), None)
        if overflow:
            raise InputError(f"{overflow} holds values beyond float16; save the trace as float32")
        tensorfiles.write(
            path, tensors, FORMAT, VERSION, pack_metadata(self.classes, self.model, self.budget_range, self.costs)
        )

    def _save_folder(self, path: Path, dtype: torch.dtype) -> None:
        widths = [head.weight.shape[1] for head in self.heads]
        with TraceFolderWriter(path, widths, dtype, force=True) as writer:
            splits = {"val": self.val} if self.test is None else {"val": self.val, "test": self.test}
            for name, split in splits.items():
                for part in split.blocks():
                    features = [x[part] for x in split.features]
                    index = None if split.index is None else split.index[part]
                    writer.append(name, features, split.labels[part], index)
                writer.close_split(name)
            writer.finish(
                pack_layers(self.heads, self.curvature, self.costs),
                pack_metadata(self.classes, self.model, self.budget_range, self.costs),
            )

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read and check a trace; features of a folder stay in its files, which must not change while they are used.

        Args:
            path: A safetensors file, or a folder, see `save`.

        Raises:
            InputError: The file or folder is not a trace, or is damaged; the message names the first problem.
        """
        path = Path(path)
        if not path.is_dir():
            return tensorfiles.load(path, FORMAT, VERSION, cls._from_tensors)
        if not is_trace_folder(path):
            raise InputError(f"{path} is not a trace: it has no trace.json")
        tensors, metadata = read_trace_folder(path)
        return tensorfiles.build_from_file(path, cls._from_tensors, tensors, metadata)

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> "Trace":
        _check_tensor("costs", tensors["costs"], (torch.float64,), 1)
        for name in [key for key in tensors if key.endswith((".labels", ".index"))]:
            _check_tensor(name, tensors[name], (torch.int64,), 1)
        for name in [key for key in tensors if key.startswith("head.")]:
            dims = 2 if name.endswith("weight") else 1
            _check_tensor(name, tensors[name], (torch.float32, torch.float16, torch.float64), dims)
        exits = len(tensors["costs"])
        extra = next((key for key in tensors if (m := search(r"\.(\d{1,9})(\.|$)", key)) and int(m[1]) >= exits), None)
        if extra:
            raise InputError(f"it has {extra!r}, but costs of only {exits} exits")

        def read_split(name: str) -> Split:
            features = tuple(tensors[f"{name}.features.{k}"] for k in range(exits))
            return Split(features, tensors[f"{name}.labels"], tensors.get(f"{name}.index"))

        return cls(
            val=read_split("val"),
            test=read_split("test") if "test.labels" in tensors else None,
            heads=tuple(HeadWeights(tensors[f"head.{k}.weight"], tensors.get(f"head.{k}.bias")) for k in range(exits)),
            curvature=_read_curvature(tensors, exits),
            costs=Costs(tuple(tensors["costs"].tolist()), metadata.get("unit", "MACs")),
            classes=_read_classes(metadata.get("classes")),
            model=_read_model(metadata.get("model")),
            budget_range=_read_budget_range(metadata.get("budget_range")),
        )

    def _problems(self) -> Iterator[str]:
        """Yield a message for every problem; none for a valid trace."""
        exits = len(self.heads)
        if len(self.costs) != exits or len(self.curvature) not in (0, exits):
            counts = f"{exits} heads, {len(self.curvature)} curvatures and {len(self.costs)} costs"
            yield f"every exit must have a head, a curvature and a cost, but there are {counts}"
        c = len(self.heads[0].weight)
        for k, head in enumerate(self.heads):
            yield from self._exit_problems(k, head, self.curvature[k] if k < len(self.curvature) else None, c)
        if self.curvature and (len({curvature.n for curvature in self.curvature}) != 1 or self.num_train < 1):
            yield f"curvature.n must be one positive number for all exits, but is {[x.n for x in self.curvature]}"
        if self.classes is not None and len(self.classes) != c:
            yield f"classes must name {c} classes, but names {len(self.classes)}"
        for name, split in (("val", self.val), ("test", self.test)):
            if split is not None:
                yield from self._split_problems(name, split, c)

    def _exit_problems(self, k: int, head: HeadWeights, curvature: Curvature | None, c: int) -> Iterator[str]:
        shape = tuple(head.weight.shape)
        if len(shape) != 2 or shape[0] != c or c < 2:
            yield f"head.{k}.weight must be (classes, features) with {c} >= 2 classes at every exit, but is {shape}"
        q = shape[1] + (head.bias is not None)
        expected = {f"head.{k}.weight": (head.weight, shape)}
        if curvature is not None:
            expected |= {f"curvature.{k}.A": (curvature.A, (q, q)), f"curvature.{k}.B": (curvature.B, (c, c))}
        if head.bias is not None:
            expected[f"head.{k}.bias"] = (head.bias, (c,))
        for name, (tensor, size) in expected.items():
            if tuple(tensor.shape) != size:
                yield f"{name} must have shape {size}, but has {tuple(tensor.shape)}"
            if not tensor.is_floating_point():
                yield f"{name} must hold floating-point numbers, but holds {tensor.dtype}"
            if not tensorfiles.all_finite(tensor):
                yield f"{name} holds values that are not finite"
        for name, factor in () if curvature is None else (("A", curvature.A), ("B", curvature.B)):
            if not is_symmetric(factor):
                yield f"curvature.{k}.{name} must be symmetric, but is not"

    def _split_problems(self, name: str, split: Split, c: int) -> Iterator[str]:
        n = len(split.labels)
        if split.labels.dim() != 1 or split.labels.dtype != torch.int64 or n == 0:
            actual = f"{split.labels.dtype} of shape {tuple(split.labels.shape)}"
            yield f"{name}.labels must be a non-empty vector of int64, but is {actual}"
        low, high = int(split.labels.min()), int(split.labels.max())
        if low < 0 or high >= c:
            yield f"{name}.labels must lie in 0..{c - 1}, but reach from {low} to {high}"
        if split.index is not None and tuple(split.index.shape) != (n,):
            yield f"{name}.index must have shape {(n,)}, but has {tuple(split.index.shape)}"
        if len(split.features) != len(self.heads):
            yield f"{name}.features must have {len(self.heads)} exits, but has {len(split.features)}"
        for k, (features, head) in enumerate(zip(split.features, self.heads, strict=False)):
            size = (n, head.weight.shape[1])
            if tuple(features.shape) != size:
                yield f"{name}.features.{k} must have shape {size}, but has {tuple(features.shape)}"
            if features.dtype not in (torch.float16, torch.float32, torch.float64):
                yield f"{name}.features.{k} must be float16, float32 or float64, but is {features.dtype}"
            if not tensorfiles.all_finite(features):
                sample = int((~torch.isfinite(features)).any(dim=1).nonzero()[0])
                yield f"{name}.features.{k} holds a value that is not finite, first in sample {sample}"


def pack_layers(heads: Sequence[HeadWeights], curvature: Sequence[Curvature], costs: Costs) -> dict[str, Tensor]:
    """Return last layers (K,), curvature (K,) or none, and costs by the keys of a trace file."""
    tensors = {"costs": torch.tensor(costs.values, dtype=torch.float64)}
    if curvature:
        tensors["curvature.n"] = torch.tensor([curvature[0].n])
    for k, sums in enumerate(curvature):
        tensors |= {f"curvature.{k}.A": sums.A, f"curvature.{k}.B": sums.B}
    for k, head in enumerate(heads):
        tensors[f"head.{k}.weight"] = head.weight
        if head.bias is not None:
            tensors[f"head.{k}.bias"] = head.bias
    return tensors


def pack_metadata(
    classes: Sequence[str] | None,
    model: Mapping[str, Any] | None,
    budget_range: tuple[float, float] | None,
    costs: Costs,
) -> dict[str, Any]:
    """Return what is known of a trace, and the unit of its costs, as in the header of a trace file."""
    metadata: dict[str, Any] = {"classes": classes, "model": model, "budget_range": budget_range}
    metadata |= {"unit": costs.unit} if costs.unit != "MACs" else {}
    return {key: value for key, value in metadata.items() if value is not None}


def _check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], dims: int) -> None:
    if tensor.dtype not in dtypes or tensor.dim() != dims or tensor.numel() == 0:
        actual = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise InputError(f"{name} must be {dims}-dimensional {dtypes[0]}, but is {actual}")


def _read_curvature(tensors: Mapping[str, Tensor], exits: int) -> tuple[Curvature, ...]:
    """Return the curvature (K,) of a file; empty if it has none at all."""
    if not any(key.startswith("curvature.") for key in tensors):
        return ()
    _check_tensor("curvature.n", tensors["curvature.n"], (torch.int64,), 1)
    if len(tensors["curvature.n"]) != 1:
        raise InputError(f"curvature.n must be one number, but is {tensors['curvature.n'].tolist()}")
    for k in range(exits):
        for factor in "AB":
            _check_tensor(f"curvature.{k}.{factor}", tensors[f"curvature.{k}.{factor}"], (torch.float64,), 2)
    n = int(tensors["curvature.n"][0])
    return tuple(Curvature(tensors[f"curvature.{k}.A"], tensors[f"curvature.{k}.B"], n) for k in range(exits))


def _read_classes(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError("`classes` in the header must be a list of names")
    return tuple(value)


def _read_model(value: Any) -> Mapping[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise InputError(f"`model` in the header must be an object, but is {value!r}")
    return value


def _read_budget_range(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2 and all(is_number(number) for number in value)
    if not is_pair or not 0 <= value[0] < value[1] < 1e300:
        raise InputError(f"`budget_range` in the header must be two growing numbers, but is {str(value)[:80]}")
    return (float(value[0]), float(value[1]))
