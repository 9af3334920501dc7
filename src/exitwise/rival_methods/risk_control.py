"""Risk control for early exits after Jazbec et al. (2024), RC-EENN, beside our certificates.

RC-EENN has one threshold for all exits. It starts at full certainty, where all samples take the last exit, and lowers
the threshold until held-out samples no longer show that the loss in accuracy against the last exit is at most epsilon:

- in expectation, by conformal risk control: (m R + 1) / (m + 1) <= epsilon, with the mean loss R of m samples;
- with a probability, by an upper confidence bound on the mean loss; here the bound that our certificates use.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exitwise.calibration.methods import get_method
from exitwise.calibration.trace import Trace
from exitwise.calibration.tuning import Tuner
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array
from exitwise.core.results import Result
from exitwise.policies.bounds import choose_tightest_bound
from exitwise.policies.certificate import Certificate, NotCertifiedError
from exitwise.policies.fit import fit_policy
from exitwise.policies.scores import exit_scores

EPSILONS = (0.01, 0.02, 0.05)
DELTA = 0.05
METHOD = "T_opt"
EXPECTATION, PROBABILITY, OURS = "RC-EENN, in expectation", "RC-EENN, with 95 %", "exitwise certificate, with 95 %"
_STEPS = 500  # thresholds that are tried


@dataclass(frozen=True)
class RiskRow(Result):
    """A controlled policy: allowed loss, and cost and loss on the test split; None if no policy was certified.

    Args:
        name: Procedure.
        epsilon: Largest loss of accuracy against the last exit that is allowed.
        cost: Mean cost on the test split, as a share of the last exit's.
        loss: Loss of accuracy on the test split.
    """

    name: str
    epsilon: float
    cost: float | None
    loss: float | None


def compare_risk_control(trace: Trace, epsilons: Sequence[float] = EPSILONS) -> tuple[RiskRow, ...]:
    """Calibrate with temperatures on one half of the validation samples, and control the loss on the other half."""
    if trace.test is None or trace.num_exits < 2:
        return ()
    try:
        tune, held_out = trace.hold_out(0.5)
    except InputError:  # a single validation sample
        return ()
    calibration = Tuner(tune).calibrate(get_method(METHOD))
    preds = [calibration.predict(split) for split in (tune.val, held_out, trace.test)]
    labels = [split.labels.numpy() for split in (tune.val, held_out, trace.test)]
    correct = [pred.predicted == label for pred, label in zip(preds, labels, strict=True)]
    scores = [exit_scores(pred) for pred in preds]
    shares = np.asarray(trace.costs.values) / trace.costs.values[-1]

    def measure(name: str, epsilon: float, exits: Array | None) -> RiskRow:
        if exits is None:
            return RiskRow(name, epsilon, None, None)
        right = correct[2]
        loss = right[-1].mean() - right[exits, np.arange(len(exits))].mean()
        return RiskRow(name, epsilon, float(shares[exits].mean()), float(loss))

    thresholds = np.linspace(1, 0, _STEPS + 1)[1:]
    losses = [_losses(score, right, thresholds) for score, right in zip(scores[:2], correct[:2], strict=True)]
    rows = []
    for epsilon in epsilons:
        for name in (EXPECTATION, PROBABILITY):
            number = _controlled_threshold(losses[0], losses[1], epsilon, DELTA if name == PROBABILITY else None)
            exits = None if number is None else _exits(scores[2], thresholds[number])
            rows.append(measure(name, epsilon, exits))
        try:
            policy = fit_policy(
                preds[0],
                labels[0],
                trace.costs,
                budget=None,
                certify=Certificate(None, "accuracy", epsilon, DELTA),
                held_out=preds[1],
                held_out_labels=labels[1],
            )
        except InputError as error:  # too few samples, or none that certifies
            if not isinstance(error, NotCertifiedError) and len(tune.val) >= trace.num_exits:
                raise
            rows.append(measure(OURS, epsilon, None))
        else:
            rows.append(measure(OURS, epsilon, policy.exits_from_scores(scores[2])))
    return tuple(rows)


def _exits(scores: Array, threshold: float) -> Array:
    """Return the first exit (n,) whose score (K, n) reaches the threshold, the last exit if none does."""
    reached = scores >= threshold
    reached[-1] = True
    return np.asarray(reached.argmax(axis=0))


def _losses(scores: Array, correct: Array, thresholds: Array) -> Array:
    """Return the loss (J, n) of every sample against the last exit: -1, 0 or 1."""
    last, samples = correct[-1].astype(np.int8), np.arange(scores.shape[1])
    return np.stack([last - correct[_exits(scores, threshold), samples] for threshold in thresholds])


def _controlled_threshold(tune: Array, held_out: Array, epsilon: float, delta: float | None) -> int | None:
    """Return the number of the last threshold up to which all are controlled, or None.

    Args:
        tune: Losses (J, n) of the tuning samples, which choose the bound.
        held_out: Losses (J, m) of the held-out samples.
        epsilon: Largest loss that is allowed.
        delta: Probability with which it may be exceeded; None controls the expectation.
    """
    found = None
    for number, (tune_losses, losses) in enumerate(zip(tune, held_out, strict=True)):
        if delta is None:
            is_controlled = (losses.sum() + 1) / (len(losses) + 1) <= epsilon
        else:
            values, limit = np.array([0.0, 0.5, 1.0]), (1 + epsilon) / 2
            tune_counts, counts = (np.bincount(part + 1, minlength=3) for part in (tune_losses, losses))
            bound = choose_tightest_bound(values, tune_counts, len(losses), delta)
            is_controlled = bound.p_value(values, counts, limit) <= delta
        if not is_controlled:
            break
        found = number
    return found
