"""Calibrated predictions: every exit's last layer with its posterior and temperature, and their ensemble."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exitwise.calibration.calibrated_exit import POSTERIOR_TENSORS
from exitwise.calibration.calibrated_exit import CalibratedExit as CalibratedExit
from exitwise.calibration.dropout import DropoutMasks
from exitwise.calibration.ensembles import ENSEMBLES, ExitWeights
from exitwise.calibration.laplace import MODES, CurvatureEigen, Mode, Posterior
from exitwise.calibration.method_selection import MethodSelection
from exitwise.calibration.methods import Method
from exitwise.calibration.one_pass import (
    SharedExits,
    iterate_exits,
    sample_blocks,
    summarize_in_one_pass,
    take_block,
)
from exitwise.calibration.trace import HeadWeights, Split, Trace
from exitwise.core import tensorfiles
from exitwise.core.checks import check_choice, check_integer
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array, ExitPrediction, Predictions
from exitwise.core.seeds import as_generator
from exitwise.core.summaries import OF_TRUE_LABEL, SUMMARIES

if TYPE_CHECKING:
    import pandas

FORMAT, VERSION = "exitwise.calibration", 1


@dataclass(frozen=True)
class Grid:
    """Validation NLPD (T, V) at the grid points of one exit, temperatures outer, prior variances inner."""

    temperatures: tuple[float, ...]
    prior_vars: tuple[float, ...]
    nlpd: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration of every exit of a net, tuned on the validation split; `predict` applies it to features.

    Args:
        method: The calibration method.
        mode: Form of the Laplace posterior: "paper", "exact" or "naive".
        exits: Last layers (K,) with their temperatures and posteriors.
        weights: Ensemble weights (K,), the cost up to each exit; None without an ensemble and for a pool.
        val_nlpd: Validation NLPD (K,) of every exit at its chosen point; of the ensemble, if there is one.
        grids: Validation NLPD at all grid points, K tables (T, V) for T temperatures and V prior variances.
        settings: Seed, number of draws ("samples") and kind of search.
        pool: Fitted weights (K,) of a pool, for each exit those of the exits up to it; None for other methods.
        selection: How the method was chosen, if it was chosen by `method="auto"`.
    """

    method: Method
    mode: Mode
    exits: tuple[CalibratedExit, ...]
    weights: tuple[float, ...] | None
    val_nlpd: tuple[float, ...]
    grids: tuple[Grid, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    pool: tuple[ExitWeights, ...] | None = None
    selection: MethodSelection | None = None

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures (K,) by which the logits of each exit are divided."""
        return tuple(exit.temperature for exit in self.exits)

    @property
    def prior_vars(self) -> tuple[float, ...]:
        """Prior variances (K,) of each exit's last layer; without Laplace they have no effect."""
        return tuple(exit.prior_var for exit in self.exits)

    @property
    def exit_weights(self) -> tuple[ExitWeights, ...] | None:
        """Weights of the exits in the ensemble of each exit (K,); None without an ensemble."""
        return self.pool if self.weights is None else cost_weights(self.weights)

    @property
    def draws(self) -> Tensor | None:
        """Standard normals (S, c) that all exits share; None without Laplace."""
        return self.exits[0].draws

    def __repr__(self) -> str:
        temperatures = ", ".join(f"{t:.3g}" for t in self.temperatures)
        extra = f", prior variances [{', '.join(f'{v:.3g}' for v in self.prior_vars)}]" if self.method.laplace else ""
        if (dropout := self.exits[0].dropout) is not None:
            extra = f", {len(dropout.masks)} masks of rate {dropout.rate}"
        if self.pool is not None:
            extra += f", last weights [{', '.join(f'{weight:.3g}' for weight in self.pool[-1].weights)}]"
        return f"Calibration({self.method.name!r}, mode {self.mode!r}, temperatures [{temperatures}]{extra})"

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame with temperature, prior variance and validation NLPD, one row per exit; needs pandas."""
        import pandas

        prior = self.prior_vars if self.method.laplace else None
        columns = {"temperature": self.temperatures, "prior_var": prior, "val_nlpd": self.val_nlpd}
        return pandas.DataFrame({"exit": range(len(self.exits)), **columns})

    def to_dict(self) -> dict[str, Any]:
        """Return the chosen values and settings as a JSON-serializable dict; `save` also writes the tensors."""
        return {
            "method": self.method.name,
            "mode": self.mode,
            "temperatures": list(self.temperatures),
            "prior_vars": list(self.prior_vars) if self.method.laplace else None,
            "dropout": self.method.dropout,
            "ensemble_weights": list(self.weights) if self.weights else None,
            **({} if self.pool is None else {"pool": [_pool_to_dict(exit) for exit in self.pool]}),
            "val_nlpd": list(self.val_nlpd),
            **({} if self.selection is None else {"selection": self.selection.to_dict()}),
            **self.settings,
        }

    def belongs_to(self, trace: Trace) -> bool:
        """Return whether the last layers are those of this trace."""
        pairs = [(exit.head.weight, head.weight) for exit, head in zip(self.exits, trace.heads, strict=False)]
        return len(self.exits) == trace.num_exits and all(torch.equal(a, b.float()) for a, b in pairs)

    def predict(self, split: Split | Sequence[Tensor]) -> Predictions:
        """Predict with every exit; with an ensemble, with the ensemble of the exits so far.

        Args:
            split: A split of a trace, or K tensors of features (n, p_k).

        Returns:
            Predictions (K, n, c), computed when they are needed.

        Raises:
            InputError: The features do not match the exits, or are not finite.
        """
        features, labels = self._check_split(split), split.labels.numpy() if isinstance(split, Split) else None
        keys = SUMMARIES if labels is None else SUMMARIES | OF_TRUE_LABEL
        return self._predictions(features, labels, lambda: summarize_in_one_pass([self], features, labels, [keys])[0])

    def _check_split(self, split: Split | Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the features of a split; raise InputError unless they are those of the exits."""
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
        return features

    def _predictions(
        self,
        features: tuple[Tensor, ...],
        labels: Array | None,
        summarize: Callable[[], Mapping[str, Array]],
        keep: bool = True,
    ) -> Predictions:
        """Return predictions of checked features, whose summaries `summarize` computes."""
        shape = (len(features), len(features[0]), len(self.exits[0].head.weight))
        variance = (lambda classes: self._variance(features, classes)) if self.method.has_variance else None
        return Predictions(shape, lambda: self._predict_exits(features), variance, summarize, labels, keep)

    def _predict_exits(self, features: Sequence[Tensor]) -> Iterator[ExitPrediction]:
        """Predict all samples at once, exit by exit."""
        exits = [SharedExits([exit]) for exit in self.exits]
        return (preds[0] for preds in iterate_exits([self], exits, features, slice(0, len(features[0]))))

    def _variance(self, features: Sequence[Tensor], classes: Array) -> Array:
        """Variance (K, n) over draws of p(class) for classes (K, n), of each exit or of the ensemble up to it."""
        blocks = sample_blocks(len(features[0]), len(self.exits[0].head.weight))
        parts = [
            self._block_variance([take_block(x, block) for x in features], torch.from_numpy(classes[:, block]))
            for block in blocks
        ]
        return np.concatenate(parts, axis=1) if parts else np.empty(classes.shape, dtype=np.float32)

    def _block_variance(self, features: Sequence[Tensor], chosen: Tensor) -> Array:
        """Return `_variance` (K, m) of a block of samples."""
        probs: list[Tensor] = []
        with torch.no_grad():
            for k, (exit, x) in enumerate(zip(self.exits, features, strict=True)):
                if self.weights is None:
                    probs.append(exit.class_probs(x, chosen[k : k + 1])[0])
                    continue
                # All exits share the draws, so draw l of the ensemble is the weighted mean of every exit's draw l.
                later = exit.class_probs(x, chosen[k:])
                probs += [torch.zeros_like(row) for row in later] if k == 0 else []
                for j, row in enumerate(later, start=k):
                    probs[j] += row * (self.weights[k] / sum(self.weights[: j + 1]))
        return np.stack([row.var(dim=1, correction=0).numpy() for row in probs])

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the contents of its file: tensors by name, and the metadata as a JSON-serializable dict."""
        tensors: dict[str, Tensor] = {} if self.draws is None else {"draws": self.draws}
        tensors["temperatures"] = torch.tensor(self.temperatures, dtype=torch.float64)
        tensors["prior_vars"] = torch.tensor(self.prior_vars, dtype=torch.float64)
        tensors["val_nlpd"] = torch.tensor(self.val_nlpd, dtype=torch.float64)
        if self.weights is not None:
            tensors["weights"] = torch.tensor(self.weights, dtype=torch.float64)
        for k, pooled in enumerate(self.pool or ()):
            tensors[f"pool.{k}.weights"] = torch.tensor(pooled.weights, dtype=torch.float64)
            tensors |= {} if pooled.bias is None else {f"pool.{k}.bias": pooled.bias}
            tensors |= {} if pooled.update is None else {f"pool.{k}.update": pooled.update}
        for k, exit in enumerate(self.exits):
            parts = {"weight": exit.head.weight, "bias": exit.head.bias}
            if exit.posterior is not None:
                parts |= {name: getattr(exit.posterior, name) for name in POSTERIOR_TENSORS} | {"shifts": exit.shifts}
            if exit.dropout is not None:
                parts["masks"] = exit.dropout.masks.to(torch.uint8)
            tensors |= {f"exit.{k}.{name}": value for name, value in parts.items() if value is not None}
        method = asdict(self.method)
        for name in ("dropout", "tune_weights"):
            if not method[name]:
                del method[name]  # keeps the file readable by versions without it
        metadata = {
            "method": method,
            "mode": self.mode,
            "settings": dict(self.settings),
            "grids": [asdict(grid) for grid in self.grids],
            **({} if self.selection is None else {"selection": self.selection.to_dict()}),
        }
        return tensors, metadata

    def save(self, path: str | Path) -> None:
        """Write everything, including the last layers, to one safetensors file."""
        tensors, metadata = self.to_tensors()
        tensorfiles.write(Path(path), tensors, FORMAT, VERSION, metadata)

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read and check a calibration; an `InputError` names the file and the first problem found in it."""
        return tensorfiles.load(Path(path), FORMAT, VERSION, cls.from_tensors)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> "Calibration":
        """Build a calibration from the result of `to_tensors` and check it; a missing name is a `KeyError`."""
        method, mode, settings = Method(**metadata["method"]), metadata["mode"], metadata["settings"]
        check_choice("mode", mode, MODES)
        if not isinstance(settings, dict):
            raise InputError(f"settings must be an object, but are {settings!r}")
        grids = tuple(Grid(**{key: _to_tuples(value) for key, value in grid.items()}) for grid in metadata["grids"])
        is_fitted = method.ensemble is not None and ENSEMBLES[method.ensemble].is_fitted
        has_costs = method.ensemble is not None and not is_fitted
        per_exit = ("temperatures", "prior_vars", "val_nlpd", *(["weights"] if has_costs else []))
        for name in per_exit:
            _check_tensor(name, tensors[name], torch.float64, (len(grids),))
            if name != "val_nlpd" and not bool((tensors[name] > 0).all()):
                raise InputError(f"{name} must be positive, but are {tensors[name].tolist()}")
        if tensors["exit.0.weight"].dim() != 2:
            raise InputError(f"exit.0.weight must be a matrix, but is {tuple(tensors['exit.0.weight'].shape)}")
        c = len(tensors["exit.0.weight"])
        draws = tensors["draws"] if method.laplace else None
        if draws is not None:
            _check_tensor("draws", draws, torch.float32, (draws.shape[0] if draws.dim() else 0, c))
        exits = []
        for k in range(len(grids)):
            names = ("weight", "bias", *POSTERIOR_TENSORS, "shifts")
            parts = {name: tensors.get(f"exit.{k}.{name}") for name in names}
            head, posterior = _read_exit(k, parts, mode if method.laplace else None, c, draws)
            temperature, prior_var = float(tensors["temperatures"][k]), float(tensors["prior_vars"][k])
            dropout = None if method.dropout is None else _read_masks(k, tensors, method.dropout, head)
            exits.append(CalibratedExit(head, temperature, prior_var, posterior, draws, dropout, parts["shifts"]))
        return cls(
            method=method,
            mode=mode,
            exits=tuple(exits),
            weights=tuple(tensors["weights"].tolist()) if has_costs else None,
            val_nlpd=tuple(tensors["val_nlpd"].tolist()),
            grids=grids,
            settings=settings,
            selection=MethodSelection.from_dict(metadata["selection"]) if "selection" in metadata else None,
            pool=tuple(_read_pool(k, tensors, exits[k].head) for k in range(len(grids))) if is_fitted else None,
        )


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list) else value


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or 0 in shape:
        actual = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise InputError(f"{name} must be {dtype} of shape {shape}, but is {actual}")
    if not tensorfiles.all_finite(tensor):
        raise InputError(f"{name} holds values that are not finite")


def _read_exit(
    k: int, parts: Mapping[str, Tensor | None], mode: Mode | None, c: int, draws: Tensor | None
) -> tuple[HeadWeights, Posterior | None]:
    """Return exit k's head and, with a mode, its posterior, after checking the tensors of the file."""
    present = {name: tensor for name, tensor in parts.items() if tensor is not None}
    has_shifts = "shifts" in present
    if has_shifts and (mode != "paper" or "root" in present):
        raise InputError(
            f"exit.{k}.shifts must replace exit.{k}.root in mode 'paper', but the mode is {mode!r} or both exist"
        )
    for name in ("weight", *(POSTERIOR_TENSORS if mode else ())):
        if name not in present and not (name == "root" and has_shifts):
            raise KeyError(f"exit.{k}.{name}")
    p = present["weight"].shape[-1] if present["weight"].dim() else 0
    q = p + ("bias" in present) if mode != "naive" else p
    shapes: dict[str, tuple[int, ...]] = {"weight": (c, p), "bias": (c,), "basis": (q, q), "offset": (), "root": (c, c)}
    shapes["inverse"] = (q, c) if mode == "exact" else (q,)
    shapes["shifts"] = (0 if draws is None else len(draws), c)
    for name, tensor in present.items():
        _check_tensor(f"exit.{k}.{name}", tensor, torch.float32, shapes[name])
    head = HeadWeights(present["weight"], present.get("bias"))
    if mode is None:
        return head, None
    posterior = Posterior(mode, present["basis"], present["inverse"], present["offset"], present.get("root"))
    if not bool((posterior.inverse >= 0).all()) or float(posterior.offset) < 0:
        raise InputError(f"exit.{k}.inverse and exit.{k}.offset must not be negative")
    return head, posterior


def _read_masks(k: int, tensors: Mapping[str, Tensor], rate: float, head: HeadWeights) -> DropoutMasks:
    """Return exit k's masks after checking them; every exit has the same number of masks as the first."""
    name, first = f"exit.{k}.masks", tensors["exit.0.masks"]
    masks = tensors[name]
    _check_tensor(name, masks, torch.uint8, (first.shape[0] if first.dim() else 0, head.weight.shape[1]))
    if bool((masks > 1).any()):
        raise InputError(f"{name} must hold zeros and ones, but holds {int(masks.max())}")
    return DropoutMasks(rate, masks.bool())


def _read_pool(k: int, tensors: Mapping[str, Tensor], head: HeadWeights) -> ExitWeights:
    """Return the pool of exit k after checking its weights, and its bias and its update if it has them."""
    weights, bias, update = (tensors.get(f"pool.{k}.{name}") for name in ("weights", "bias", "update"))
    if weights is None:
        raise KeyError(f"pool.{k}.weights")
    _check_tensor(f"pool.{k}.weights", weights, torch.float64, (k + 1,))
    if bool((weights < 0).any()):
        raise InputError(f"pool.{k}.weights must not be negative, but are {weights.tolist()}")
    if bias is not None:
        _check_tensor(f"pool.{k}.bias", bias, torch.float32, (len(head.weight),))
    if update is not None:
        _check_tensor(f"pool.{k}.update", update, torch.float32, tuple(head.weight.T.shape))
    return ExitWeights(tuple(weights.tolist()), bias, update)


def _pool_to_dict(exit: ExitWeights) -> dict[str, Any]:
    return {"weights": list(exit.weights), "bias": None if exit.bias is None else exit.bias.tolist()}


def predict_together(
    calibrations: Mapping[str, Calibration], split: Split, keys: Mapping[str, Collection[str]]
) -> dict[str, Predictions]:
    """Predict a split with several calibrations of one net, by name; summaries of all come from a single pass.

    Args:
        calibrations: Calibrations by name.
        split: Split of a trace.
        keys: For each name, the summaries of that pass; others are computed when they are asked for.

    Returns:
        Predictions by name, which keep no probabilities.
    """
    checked = {name: calibration._check_split(split) for name, calibration in calibrations.items()}
    features, labels = next(iter(checked.values())), split.labels.numpy()
    names = list(calibrations)
    results: dict[str, Mapping[str, Array]] = {}

    def summaries_of(name: str) -> Mapping[str, Array]:
        if not results:
            values = summarize_in_one_pass(list(calibrations.values()), features, labels, [keys[n] for n in names])
            results.update(zip(names, values, strict=True))
        return results[name]

    return {
        name: calibration._predictions(features, labels, partial(summaries_of, name), keep=False)
        for name, calibration in calibrations.items()
    }


def cost_weights(costs: Sequence[float]) -> tuple[ExitWeights, ...]:
    """Return the weights of an ensemble that weights every exit by the cost up to it (K,)."""
    return tuple(ExitWeights(tuple(costs[: k + 1])) for k in range(len(costs)))


def standard_normals(num_draws: int, classes: int, seed: int | torch.Generator) -> Tensor:
    """Draw standard normals (S, c), which all exits, splits and grid points share."""
    return torch.randn(check_integer("num_draws", num_draws, minimum=1), classes, generator=as_generator(seed))


def eigendecompositions(trace: Trace, mode: Mode) -> list[CurvatureEigen]:
    """Compute the eigendecomposition of every exit's curvature; an error names the exit."""
    if not trace.curvature:
        raise InputError(
            "methods with Laplace need the curvature of training images, which the trace was collected without: "
            "collect it with `train`, or choose a method without Laplace, such as 'auto', 'Pool' or 'T_opt'"
        )
    results = []
    for k, (head, curvature) in enumerate(zip(trace.heads, trace.curvature, strict=True)):
        try:
            results.append(CurvatureEigen(curvature, mode, bias=head.bias is not None))
        except InputError as error:
            raise InputError(f"exit {k}: {error}") from None
    return results
