"""The methods that are compared on one trace: ours and those of others, each with its predictions and exit scores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from exitwise.calibration.calibration import Calibration
from exitwise.calibration.methods import AUTO, OURS, VANILLA, Method
from exitwise.calibration.overhead import ensemble_macs, laplace_macs, pool_macs, pool_update_macs
from exitwise.calibration.trace import Split, Trace
from exitwise.calibration.tuning import Tuner
from exitwise.core.errors import InputError, first_line
from exitwise.core.predictions import Array, ExitPrediction, Predictions, max_prob
from exitwise.core.stopping import stopping_is_right
from exitwise.core.ties import break_ties
from exitwise.policies.learned_score import EARLIER_FEATURES, FEATURES
from exitwise.policies.score_choice import fit_score
from exitwise.policies.scores import LEARNED, exit_scores
from exitwise.rival_methods import external
from exitwise.rival_methods.calibrators import CALIBRATORS, MAX_MATRIX_SIZE, Calibrator, Fit
from exitwise.rival_methods.geometric import combine, fit_geometric_ensemble
from exitwise.rival_methods.stopping_heads import StoppingHead, fit_stopping_head, head_macs

POE, POOL, POOL_W_OPT = "PoE Laplace T_opt sigma_opt", "Pool", "Pool W_opt"
METHODS_WITH_LAPLACE = (OURS, POE)
EARLYON_BUDGETS = 12  # budgets that earlyon searches thresholds for, evenly spaced over the range of costs


class NotRunError(Exception):
    """A rival that cannot run here, with the reason in one line."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A fitted method.

    Args:
        test: Predictions (K, m, c) on the test split.
        val_scores: Exit scores (K, n) on the validation split, with ties broken, which thresholds are fitted on.
        test_scores: Exit scores (K, m) on the test split, with ties broken.
        seconds: Time to fit it.
        macs: MACs that it adds to a sample that takes the last exit.
        thresholds: Thresholds (J, K) of its own, on these scores; None for those of the comparison.
    """

    test: Predictions
    val_scores: Array
    test_scores: Array
    seconds: float
    macs: int
    thresholds: Array | None = None


class Arena:
    """A trace with a test split, and what all contenders need of it."""

    def __init__(self, trace: Trace, seed: int = 0) -> None:
        if trace.test is None:
            raise InputError("the trace has no test split, which rivals are compared on")
        self.trace, self.val, self.test, self.seed = trace, trace.val, trace.test, seed
        self._calibrations: dict[str, tuple[Calibration, float]] = {}

    def logits(self, split: Split, k: int) -> Tensor:
        """Return the logits (n, c) of exit k in float64."""
        return self.trace.heads[k].logits(split.features[k]).double()

    def calibrated(self, split: Split, calibrators: Sequence[Calibrator]) -> Predictions:
        """Return the predictions of calibrators (K,) of logits."""
        return self.predictions(split, lambda k: calibrators[k].log_probs(self.logits(split, k)))

    def predictions(self, split: Split, log_probs: Callable[[int], Tensor]) -> Predictions:
        """Return predictions from a function of the exit to log-probabilities (n, c)."""

        def exits() -> Iterator[ExitPrediction]:
            for k in range(self.trace.num_exits):
                result = log_probs(k)
                if not bool(torch.isfinite(result).all()):
                    raise NotRunError(f"its predictions at exit {k + 1} are not finite")
                yield ExitPrediction.from_log_probs(result.float().numpy())

        return Predictions((self.trace.num_exits, len(split), self.trace.num_classes), exits)

    def calibrate(self, name: str) -> tuple[Calibration, float]:
        """Return the calibration by a method of ours, and the seconds that it took; a second call finds it done."""
        if name not in self._calibrations:
            start = perf_counter()
            calibration = Tuner(self.trace, seed=self.seed).calibrate(name)
            self._calibrations[name] = (calibration, perf_counter() - start)
        return self._calibrations[name]

    @cached_property
    def temperature(self) -> tuple[Calibrator, ...]:
        """Fitted temperatures (K,)."""
        return tuple(self.fit_exits(CALIBRATORS["temperature"]))

    def fit_exits(self, fit: Fit) -> list[Calibrator]:
        """Fit a calibrator at every exit."""
        return [fit(self.logits(self.val, k), self.val.labels) for k in range(self.trace.num_exits)]

    @cached_property
    def has_too_many_classes(self) -> bool:
        """True if a matrix of classes times classes would take minutes to fit."""
        return len(self.val) * self.trace.num_classes**2 > MAX_MATRIX_SIZE


@dataclass(frozen=True)
class Entry:
    """A method of the comparison: how to run it, its label in tables, its kind, its origin, and what it needs."""

    run: Callable[[Arena], Contender]
    label: str
    kind: str
    source: str
    package: str | None = None
    module: str | None = None

    def check(self) -> None:
        """Raise NotRunError if its package is not installed."""
        if self.module is not None and find_spec(self.module) is None:
            raise NotRunError(f"needs {self.package}: pip install 'exitwise[{external.EXTRA}]'")


def run_entry(entry: Entry, arena: Arena) -> Contender:
    """Run an entry; raise NotRunError if it cannot run here."""
    entry.check()
    if entry.module is None:
        return entry.run(arena)
    try:
        return entry.run(arena)
    except NotRunError:
        raise
    except Exception as error:  # of another package: any kind
        reason = first_line(error)
        hint = "; torchvision does not match torch: uninstall it" if "torchvision::" in reason else ""
        raise NotRunError(f"{entry.package} failed: {reason}{hint}") from None


def _by_confidence(val: Predictions, test: Predictions, seconds: float, macs: int) -> Contender:
    return Contender(test, exit_scores(val), exit_scores(test), seconds, macs)


def _run_method(name: str, score: str = "confidence") -> Callable[[Arena], Contender]:
    def run(arena: Arena) -> Contender:
        if not arena.trace.curvature and name in METHODS_WITH_LAPLACE:
            raise NotRunError("needs the curvature of training images, which the trace does not have")
        calibration, seconds = arena.calibrate(name)
        val, test = calibration.predict(arena.val), calibration.predict(arena.test)
        macs = method_macs(calibration.method, arena.trace)
        start = perf_counter()
        fitted = fit_score(val, arena.val.labels.numpy(), arena.trace.costs, score)
        seconds += perf_counter() - start
        if fitted.name == LEARNED:
            macs += learned_score_macs(arena.trace)
        return Contender(test, fitted.scores, exit_scores(test, fitted.name, fitted.model), seconds, macs)

    return run


def learned_score_macs(trace: Trace) -> int:
    """Return the MACs of the learned score: the three largest probabilities, then the weighted sum of features."""
    own, earlier = len(FEATURES), len(EARLIER_FEATURES)
    return sum(3 * trace.num_classes + own + earlier * k + 1 for k in range(trace.num_exits - 1))


def method_macs(method: Method, trace: Trace) -> int:
    """Return the MACs that a method adds to a sample that takes the last exit."""
    c, total = trace.num_classes, 0
    for k, head in enumerate(trace.heads):
        total += c if method.tune_temperature else 0
        total += laplace_macs(head.weight.shape[1], c) if method.laplace else 0
        if method.ensemble == "pool":
            total += pool_macs(c, k + 1)
            total += pool_update_macs(head.weight.shape[1], c) if method.tune_weights else 0
        elif method.ensemble is not None and k:
            total += ensemble_macs(c)
    return total


def _run_calibrator(name: str) -> Callable[[Arena], Contender]:
    def run(arena: Arena) -> Contender:
        if name in ("matrix", "Dirichlet", "structured matrix") and arena.has_too_many_classes:
            raise NotRunError(f"{arena.trace.num_classes:,} classes are too many for a matrix")
        start = perf_counter()
        fitted = arena.fit_exits(external.fit_structured_matrix if name == "structured matrix" else CALIBRATORS[name])
        seconds = perf_counter() - start
        macs = sum(calibrator.macs for calibrator in fitted)
        return _by_confidence(arena.calibrated(arena.val, fitted), arena.calibrated(arena.test, fitted), seconds, macs)

    return run


def _run_rule(score: str, macs: int) -> Callable[[Arena], Contender]:
    """Return a runner of the plain net with another exit rule, which adds `macs` per class and exit."""

    def run(arena: Arena) -> Contender:
        vanilla, _ = arena.calibrate(VANILLA)
        val, test = vanilla.predict(arena.val), vanilla.predict(arena.test)
        total = macs * arena.trace.num_classes * arena.trace.num_exits
        return Contender(test, exit_scores(val, score), exit_scores(test, score), 0.0, total)

    return run


def _run_geometric(arena: Arena) -> Contender:
    trace = arena.trace
    start = perf_counter()
    # Half of the memory of float64, in which the sums are.
    log_probs = [arena.logits(arena.val, k).log_softmax(dim=1).float() for k in range(trace.num_exits)]
    fitted = [fit_geometric_ensemble(log_probs[: k + 1], arena.val.labels) for k in range(trace.num_exits)]
    seconds = perf_counter() - start

    def predict(split: Split) -> Predictions:
        parts: list[Tensor] = []

        def exit_log_probs(k: int) -> Tensor:
            del parts[k:]  # another pass over the exits
            parts.append(arena.logits(split, k).log_softmax(dim=1).float())
            return combine(parts, *fitted[k])

        return arena.predictions(split, exit_log_probs)

    macs = sum((k + 2) * trace.num_classes for k in range(trace.num_exits))
    return _by_confidence(predict(arena.val), predict(arena.test), seconds, macs)


def _run_stopping_heads(arena: Arena) -> Contender:
    trace = arena.trace
    preds = [arena.calibrated(split, arena.temperature) for split in (arena.val, arena.test)]
    start = perf_counter()
    right = torch.from_numpy(stopping_is_right(preds[0].predicted == arena.val.labels.numpy()))
    confidence = [torch.from_numpy(pred.reduce("max_prob", max_prob)) for pred in preds]
    heads: list[StoppingHead | None] = [
        fit_stopping_head(arena.val.features[k], confidence[0][k], right[k]) for k in range(trace.num_exits - 1)
    ]
    seconds = perf_counter() - start
    if not any(heads):
        raise NotRunError("at no exit do the validation samples show both when to stop and when to continue")
    scores = []
    for split, pred, top, is_val in zip((arena.val, arena.test), preds, confidence, (True, False), strict=True):
        rows = []
        for k, probs in enumerate(pred.exits()):
            head = heads[k] if k < len(heads) else None
            values = top[k]
            if head is not None:
                score = head.out_of_fold_scores if is_val else head.scores
                values = score(split.features[k], top[k]).sigmoid()
            rows.append(break_ties(values.numpy(), probs.probs))
        scores.append(np.stack(rows))
    macs = head_macs([x.shape[1] for x in arena.val.features]) + trace.num_exits * trace.num_classes
    return Contender(preds[1], scores[0], scores[1], seconds, macs)


def _run_laplace_torch(arena: Arena) -> Contender:
    with external.quiet():
        import laplace  # noqa: F401 - its import is not part of the time to fit

    start = perf_counter()
    parts = zip(arena.trace.heads, arena.val.features, strict=True)
    fitted = [external.fit_laplace(head, features, arena.val.labels) for head, features in parts]
    seconds = perf_counter() - start
    preds = [
        arena.predictions(split, lambda k, split=split: fitted[k].log_probs(split.features[k]))  # type: ignore[misc]
        for split in (arena.val, arena.test)
    ]
    return _by_confidence(preds[0], preds[1], seconds, sum(calibrator.macs for calibrator in fitted))


def _run_earlyon(arena: Arena) -> Contender:
    costs = np.asarray(arena.trace.costs.values)
    if len(costs) < 2:
        raise NotRunError("a net with one exit has no thresholds")
    start = perf_counter()
    logits = [arena.logits(arena.val, k) for k in range(len(costs))]
    budgets = np.linspace(costs[0], costs[-1], EARLYON_BUDGETS) / costs[-1]
    temperatures, thresholds = external.earlyon_thresholds(
        logits, arena.val.labels, (costs / costs[-1]).tolist(), budgets.tolist()
    )
    seconds = perf_counter() - start
    # Its grid ends at .5. So that it pays for budgets that it does not reach, all samples may also take the first exit.
    thresholds = np.concatenate([np.full((1, len(costs)), -np.inf), thresholds])
    classes = arena.trace.num_classes
    fitted = [Calibrator(lambda z, t=t: (z / t).log_softmax(dim=1), classes) for t in temperatures]  # type: ignore[misc]
    val, test = arena.calibrated(arena.val, fitted), arena.calibrated(arena.test, fitted)
    return Contender(test, exit_scores(val), exit_scores(test), seconds, classes * len(costs), thresholds)


OUR_METHODS = (VANILLA, OURS, POE, POOL, POOL_W_OPT, AUTO)
_OURS_KIND, _CALIBRATION, _RULE, _SOFTWARE = "exitwise", "calibration", "exit rule", "software"

ENTRIES: Mapping[str, Entry] = {
    **{name: Entry(_run_method(name), name, _OURS_KIND, "exitwise") for name in OUR_METHODS},
    "learned score": Entry(_run_method(AUTO, LEARNED), "auto, learned score", _OURS_KIND, "exitwise"),
    **{
        name: Entry(_run_calibrator(name), name if name == "ETS" else f"{name} scaling", _CALIBRATION, source)
        for name, source in {
            "temperature": "Guo et al., 2017",
            "vector": "Guo et al., 2017",
            "matrix": "Guo et al., 2017, with the penalty of Berta et al., 2026",
            "Dirichlet": "Kull et al., 2019",
            "ETS": "Zhang et al., 2020",
        }.items()
    },
    "isotonic": Entry(_run_calibrator("isotonic"), "isotonic, top label", _CALIBRATION, "Zadrozny and Elkan, 2002"),
    "histogram": Entry(_run_calibrator("histogram"), "histogram, top label", _CALIBRATION, "Zadrozny and Elkan, 2001"),
    "structured matrix": Entry(
        _run_calibrator("structured matrix"),
        "structured matrix (probmetrics)",
        _CALIBRATION,
        "Berta et al., 2026, probmetrics",
        "probmetrics",
        "probmetrics",
    ),
    "geometric ensemble": Entry(_run_geometric, "geometric ensemble (ZTW)", "ensemble", "Wolczyk et al., 2021"),
    "patience": Entry(_run_rule("patience", 0), "patience (PABEE)", _RULE, "Zhou et al., 2020"),
    "entropy": Entry(_run_rule("entropy", 1), "entropy (BranchyNet)", _RULE, "Teerapittayanon et al., 2016"),
    "stopping heads": Entry(_run_stopping_heads, "stopping heads (Kubaty)", _RULE, "Kubaty et al., 2026"),
    "laplace-torch": Entry(
        _run_laplace_torch, "laplace-torch, every exit", _SOFTWARE, "laplace-torch", "laplace-torch", "laplace"
    ),
    "earlyon": Entry(_run_earlyon, "earlyon's thresholds", _SOFTWARE, "earlyon", "earlyon", "earlyon"),
}

NEEDS_TRAINING = ("JEI-DNN", "BoostNet", "L2W-DEN", "MetaGF", "the cascade connections of ZTW")
