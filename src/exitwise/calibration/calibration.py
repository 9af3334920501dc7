"""What a calibrated net says: every exit's last layer with its posterior and temperature, and their ensemble."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exitwise.calibration.dropout import DropoutMasks
from exitwise.calibration.laplace import MODES, CurvatureEigen, Mode, Posterior
from exitwise.calibration.mc_softmax import chunk_slices, interpolated_log_mean_softmax, log_mean_softmax, sample_logits
from exitwise.calibration.methods import Ensemble, Method
from exitwise.calibration.trace import HeadWeights, Split, Trace
from exitwise.core import tensorfiles
from exitwise.core.errors import InputError
from exitwise.core.memory import align_fields
from exitwise.core.predictions import Array, ExitPrediction, Predictions
from exitwise.core.seeds import as_generator

if TYPE_CHECKING:
    import pandas

FORMAT, VERSION = "exitwise.calibration", 1

_LEAST = log(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, eq=False)
class CalibratedExit:
    """One exit's last layer with its temperature and its posterior or its dropout; it knows nothing of other exits."""

    head: HeadWeights
    temperature: float
    prior_var: float
    posterior: Posterior | None = None
    draws: Tensor | None = None  # (S, c)
    dropout: DropoutMasks | None = None

    def __post_init__(self) -> None:
        align_fields(self, "draws")

    def log_probs(self, features: Tensor) -> Tensor:
        """(n, c) from features (n, p), float32."""
        features = features.float()
        logits = self.head.logits(features)
        if (self.posterior is None and self.dropout is None) or not len(features):
            return (logits / self.temperature).log_softmax(dim=1)
        if self.posterior is not None and self.posterior.mode == "paper":
            return interpolated_log_mean_softmax(
                logits, self.posterior.scale(features).sqrt(), self._shifts, self.temperature
            )
        return torch.cat([log_mean_softmax(z, self.temperature) for _, z in self._sampled(features)])

    @cached_property
    def _shifts(self) -> Tensor:
        """(S, c): L g of every draw, multiplied once, before test time."""
        if self.posterior is None or self.draws is None:
            raise InputError("without Laplace there are no draws")
        shifts: Tensor = self.draws @ self.posterior.root.to(self.draws.dtype).T
        return shifts

    def class_probs(self, features: Tensor, classes: Tensor) -> Tensor:
        """(j, n, S): the probability that every draw gives to classes (j, n), j choices of one per sample."""
        parts = []
        for part, z in self._sampled(features.float()):
            chosen = classes[:, part, None].permute(1, 2, 0).expand(-1, z.shape[1], -1)  # (m, S, j)
            log_z = (z / self.temperature).logsumexp(dim=2, keepdim=True)
            parts.append((z.gather(2, chosen) / self.temperature - log_z).exp().permute(2, 0, 1))
        return torch.cat(parts, dim=1)

    def _sampled(self, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Sampled logits (m, S, c), chunk by chunk."""
        if self.dropout is not None:
            yield from self.dropout.sample_logits(self.head, features)
            return
        if self.posterior is None or self.draws is None:
            raise InputError("without Laplace there are no draws")
        size = self.draws.numel() + (self.draws.shape[1] ** 2 if self.posterior.mode == "naive" else 0)
        for part in chunk_slices(len(features), size):
            logits, scale = self.head.logits(features[part]), self.posterior.scale(features[part])
            yield part, sample_logits(logits, scale, self.posterior, self.draws)


@dataclass(frozen=True)
class Grid:
    """The search at one exit: validation NLPD (T, V), temperatures outer, prior variances inner."""

    temperatures: tuple[float, ...]
    prior_vars: tuple[float, ...]
    nlpd: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, eq=False)
class Calibration:
    """What is applied at every exit of a net, tuned on the validation split; `predict` applies it to features.

    `exits` (K,) are the last layers with their temperatures and posteriors. `weights` (K,) are those of the ensemble,
    None without one. `val_nlpd` (K,) is the validation NLPD of every exit at its chosen point; `grids` (K,) have it at
    all that were tried, (T, V) for T temperatures and V prior variances.
    """

    method: Method
    mode: Mode
    exits: tuple[CalibratedExit, ...]
    weights: tuple[float, ...] | None  # of the ensemble: the cost up to each exit
    val_nlpd: tuple[float, ...]  # at the chosen point, of the ensemble where there is one
    grids: tuple[Grid, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # seed, samples, search: how it was made

    @property
    def temperatures(self) -> tuple[float, ...]:
        """(K,) what each exit's logits are divided by."""
        return tuple(exit.temperature for exit in self.exits)

    @property
    def prior_vars(self) -> tuple[float, ...]:
        """(K,) the prior variance of each exit's last layer; without Laplace nothing depends on it."""
        return tuple(exit.prior_var for exit in self.exits)

    @property
    def draws(self) -> Tensor | None:
        """(S, c) standard normals that all exits share; None without Laplace."""
        return self.exits[0].draws

    def __repr__(self) -> str:
        temperatures = ", ".join(f"{t:.3g}" for t in self.temperatures)
        more = f", prior variances [{', '.join(f'{v:.3g}' for v in self.prior_vars)}]" if self.method.laplace else ""
        if (dropout := self.exits[0].dropout) is not None:
            more = f", {len(dropout.masks)} masks of rate {dropout.rate}"
        return f"Calibration({self.method.name!r}, mode {self.mode!r}, temperatures [{temperatures}]{more})"

    def to_pandas(self) -> "pandas.DataFrame":
        """A row per exit; needs pandas."""
        import pandas

        prior = self.prior_vars if self.method.laplace else None
        columns = {"temperature": self.temperatures, "prior_var": prior, "val_nlpd": self.val_nlpd}
        return pandas.DataFrame({"exit": range(len(self.exits)), **columns})

    def to_dict(self) -> dict[str, Any]:
        """What was chosen and how, as plain data for JSON; `save` writes the tensors, too."""
        return {
            "method": self.method.name,
            "mode": self.mode,
            "temperatures": list(self.temperatures),
            "prior_vars": list(self.prior_vars) if self.method.laplace else None,
            "dropout": self.method.dropout,
            "ensemble_weights": list(self.weights) if self.weights else None,
            "val_nlpd": list(self.val_nlpd),
            **self.settings,
        }

    def belongs_to(self, trace: Trace) -> bool:
        """Whether it was made for the heads of this trace."""
        pairs = [(exit.head.weight, head.weight) for exit, head in zip(self.exits, trace.heads, strict=False)]
        return len(self.exits) == trace.num_exits and all(torch.equal(a, b.float()) for a, b in pairs)

    def predict(self, split: Split | Sequence[Tensor]) -> Predictions:
        """Predictions (K, n, c) on a split of a trace, or on K plain tensors of features (n, p_k)."""
        if not isinstance(split, Split | Sequence):
            raise InputError(f"`split` must be a Split or a sequence of features, but got {type(split).__name__}")
        features = tuple(split.features if isinstance(split, Split) else split)
        if len(features) != len(self.exits):
            raise InputError(f"`split` must have features of {len(self.exits)} exits, but has {len(features)}")
        for k, (x, exit) in enumerate(zip(features, self.exits, strict=True)):
            if not isinstance(x, Tensor) or not tensorfiles.all_finite(x):
                kind = "values that are not finite" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise InputError(f"`split` features of exit {k} must be a tensor of finite numbers, but got {kind}")
            if x.dim() != 2 or x.shape[1] != exit.head.weight.shape[1] or len(x) != len(features[0]):
                expected = (len(features[0]), exit.head.weight.shape[1])
                raise InputError(f"`split` features of exit {k} must have shape {expected}, but have {tuple(x.shape)}")
        shape = (len(features), len(features[0]), len(self.exits[0].head.weight))
        variance = (lambda classes: self._variance(features, classes)) if self.method.has_variance else None
        return Predictions(shape, lambda: self._exits(features), variance)

    def _exits(self, features: Sequence[Tensor]) -> Iterator[ExitPrediction]:
        said: Tensor | None = None
        with torch.no_grad():
            for k, (exit, x) in enumerate(zip(self.exits, features, strict=True)):
                said = ensemble_step(self.method.ensemble, k, exit.log_probs(x), said, self.weights)
                if not tensorfiles.all_finite(said):
                    where = int((~torch.isfinite(said)).any(dim=1).nonzero()[0])
                    raise InputError(f"exit {k}: the features of sample {where} are too extreme for float32")
                yield ExitPrediction.from_log_probs(said.numpy())

    def _variance(self, features: Sequence[Tensor], classes: Array) -> Array:
        """(K, n): variance over draws of p(class) at each exit, of the ensemble where there is one; classes (K, n)."""
        chosen = torch.from_numpy(classes)
        probs: list[Tensor] = []
        with torch.no_grad():
            for k, (exit, x) in enumerate(zip(self.exits, features, strict=True)):
                if self.weights is None:
                    probs.append(exit.class_probs(x, chosen[k : k + 1])[0])
                    continue
                # Draws are shared by all exits, so that draw l of the ensemble is the mean of every exit's draw l.
                later = exit.class_probs(x, chosen[k:])
                probs += [torch.zeros_like(row) for row in later] if k == 0 else []
                for j, row in enumerate(later, start=k):
                    probs[j] += row * (self.weights[k] / sum(self.weights[: j + 1]))
        return np.stack([row.var(dim=1, correction=0).numpy() for row in probs])

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a file holds of it: tensors by name, and the rest as plain data."""
        tensors: dict[str, Tensor] = {} if self.draws is None else {"draws": self.draws}
        tensors["temperatures"] = torch.tensor(self.temperatures, dtype=torch.float64)
        tensors["prior_vars"] = torch.tensor(self.prior_vars, dtype=torch.float64)
        tensors["val_nlpd"] = torch.tensor(self.val_nlpd, dtype=torch.float64)
        if self.weights is not None:
            tensors["weights"] = torch.tensor(self.weights, dtype=torch.float64)
        for k, exit in enumerate(self.exits):
            parts = {"weight": exit.head.weight, "bias": exit.head.bias}
            if exit.posterior is not None:
                parts |= {name: getattr(exit.posterior, name) for name in _POSTERIOR}
            if exit.dropout is not None:
                parts["masks"] = exit.dropout.masks.to(torch.uint8)
            tensors |= {f"exit.{k}.{name}": value for name, value in parts.items() if value is not None}
        method = asdict(self.method)
        if self.method.dropout is None:
            del method["dropout"]  # an exitwise that knows no dropout reads the file, too
        metadata = {
            "method": method,
            "mode": self.mode,
            "settings": dict(self.settings),
            "grids": [asdict(grid) for grid in self.grids],
        }
        return tensors, metadata

    def save(self, path: str | Path) -> None:
        """Everything in one safetensors file, the last layers included."""
        tensors, metadata = self.to_tensors()
        tensorfiles.write(Path(path), tensors, FORMAT, VERSION, metadata)

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read and check a calibration; every way in which it may be broken is an `InputError` that names the file."""
        return tensorfiles.load(Path(path), FORMAT, VERSION, cls.from_tensors)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> "Calibration":
        """From what `to_tensors` gave, checked; a missing name is a `KeyError`."""
        method, mode, settings = Method(**metadata["method"]), metadata["mode"], metadata["settings"]
        if mode not in MODES:
            raise InputError(f"mode must be one of {', '.join(MODES)}, but is {mode!r}")
        if not isinstance(settings, dict):
            raise InputError(f"settings must be an object, but are {settings!r}")
        grids = tuple(Grid(**{key: _tuples(value) for key, value in grid.items()}) for grid in metadata["grids"])
        per_exit = ("temperatures", "prior_vars", "val_nlpd", *(["weights"] if method.ensemble else []))
        for name in per_exit:
            _expect(name, tensors[name], torch.float64, (len(grids),))
            if name != "val_nlpd" and not bool((tensors[name] > 0).all()):
                raise InputError(f"{name} must be positive, but are {tensors[name].tolist()}")
        if tensors["exit.0.weight"].dim() != 2:
            raise InputError(f"exit.0.weight must be a matrix, but is {tuple(tensors['exit.0.weight'].shape)}")
        c = len(tensors["exit.0.weight"])
        draws = tensors["draws"] if method.laplace else None
        if draws is not None:
            _expect("draws", draws, torch.float32, (draws.shape[0] if draws.dim() else 0, c))
        exits = []
        for k in range(len(grids)):
            parts = {name: tensors.get(f"exit.{k}.{name}") for name in ("weight", "bias", *_POSTERIOR)}
            head, posterior = _checked_exit(k, parts, mode if method.laplace else None, c)
            temperature, prior_var = float(tensors["temperatures"][k]), float(tensors["prior_vars"][k])
            dropout = None if method.dropout is None else _checked_dropout(k, tensors, method.dropout, head)
            exits.append(CalibratedExit(head, temperature, prior_var, posterior, draws, dropout))
        return cls(
            method=method,
            mode=mode,
            exits=tuple(exits),
            weights=tuple(tensors["weights"].tolist()) if method.ensemble else None,
            val_nlpd=tuple(tensors["val_nlpd"].tolist()),
            grids=grids,
            settings=settings,
        )


_POSTERIOR = ("basis", "inverse", "offset", "root")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or 0 in shape:
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise InputError(f"{name} must be {dtype} of shape {shape}, but is {found}")
    if not tensorfiles.all_finite(tensor):
        raise InputError(f"{name} holds values that are not finite")


def _checked_exit(
    k: int, parts: Mapping[str, Tensor | None], mode: Mode | None, c: int
) -> tuple[HeadWeights, Posterior | None]:
    """Exit k's head and, with a mode, its posterior, from tensors that may be anything."""
    needed = ("weight", *(_POSTERIOR if mode else ()))
    present = {name: tensor for name, tensor in parts.items() if tensor is not None}
    for name in needed:
        if name not in present:
            raise KeyError(f"exit.{k}.{name}")
    p = present["weight"].shape[-1] if present["weight"].dim() else 0
    q = p + ("bias" in present) if mode != "naive" else p
    shapes: dict[str, tuple[int, ...]] = {"weight": (c, p), "bias": (c,), "basis": (q, q), "offset": (), "root": (c, c)}
    shapes["inverse"] = (q, c) if mode == "exact" else (q,)
    for name, tensor in present.items():
        _expect(f"exit.{k}.{name}", tensor, torch.float32, shapes[name])
    head = HeadWeights(present["weight"], present.get("bias"))
    if mode is None:
        return head, None
    posterior = Posterior(mode, **{name: present[name] for name in _POSTERIOR})
    if not bool((posterior.inverse >= 0).all()) or float(posterior.offset) < 0:
        raise InputError(f"exit.{k}.inverse and exit.{k}.offset must not be negative")
    return head, posterior


def _checked_dropout(k: int, tensors: Mapping[str, Tensor], rate: float, head: HeadWeights) -> DropoutMasks:
    """Exit k's masks, as many as the first exit's, from tensors that may be anything."""
    name, first = f"exit.{k}.masks", tensors["exit.0.masks"]
    masks = tensors[name]
    _expect(name, masks, torch.uint8, (first.shape[0] if first.dim() else 0, head.weight.shape[1]))
    if bool((masks > 1).any()):
        raise InputError(f"{name} must hold zeros and ones, but holds {int(masks.max())}")
    return DropoutMasks(rate, masks.bool())


def ensemble_step(
    kind: Ensemble | None, k: int, log_probs: Tensor, earlier: Tensor | None, weights: Sequence[float] | None
) -> Tensor:
    """One exit further: log p_ens_k from exit k's own log p_k and log p_ens_(k-1), both of any shape for `mie`.

    A product of experts is normalised over the classes, which have to be the last dimension. In it a probability below
    float32's smallest normal number counts as that: the runtime keeps probabilities, and is to say the same.
    """
    if kind is None or weights is None or earlier is None:
        return log_probs
    before, here = sum(weights[:k]), weights[k]
    total = before + here
    if kind == "poe":
        earlier, log_probs = earlier.clamp(min=_LEAST), log_probs.clamp(min=_LEAST)
        return (earlier * (before / total) + log_probs * (here / total)).log_softmax(dim=-1)
    return torch.logaddexp(earlier + log(before / total), log_probs + log(here / total))


def standard_normals(samples: int, classes: int, seed: int | torch.Generator) -> Tensor:
    """Draws (S, c), shared by all exits, splits and grid points."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise InputError(f"`samples` must be a whole number of at least 1, but got {samples!r}")
    return torch.randn(samples, classes, generator=as_generator(seed))


def eigendecompositions(trace: Trace, mode: Mode) -> list[CurvatureEigen]:
    """Eigendecompositions of every exit's curvature."""
    found = []
    for k, (head, curvature) in enumerate(zip(trace.heads, trace.curvature, strict=True)):
        try:
            found.append(CurvatureEigen(curvature, mode, bias=head.bias is not None))
        except InputError as error:
            raise InputError(f"exit {k}: {error}") from None
    return found
