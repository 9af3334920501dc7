"""Budget controller: keeps the mean cost at a budget while inputs change, by shifting a policy. NumPy only."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from exitwise.core.checks import check_between, check_integer, check_number
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.files import read_json, write_json
from exitwise.core.predictions import Array, to_array
from exitwise.policies.policy import Policy

FORMAT, VERSION = "exitwise.controller", 1

_MAX_SHIFT = 4.0  # distances to full certainty times 1/55 or 55: beyond that almost no exit changes
_MAX_HORIZON = 10**12  # samples
_SLOPE_PROBE = 0.25  # shift that estimates how steeply the cost grows


@dataclass(frozen=True)
class BudgetState:
    """State of a controller: the shift of its policy, the slope of the cost, and the accumulated overspend.

    Args:
        shift: Shift of the policy; see `Policy.shifted`.
        slope: Growth of the mean cost per unit of shift.
        debt: Accumulated overspend: cost of samples beyond the budget, summed, with exponential forgetting.
        samples: Number of samples so far.
        spent: Cost of all samples so far.
    """

    shift: float
    slope: float
    debt: float = 0.0
    samples: int = 0
    spent: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_number(name, value)
        if self.slope <= 0 or self.samples < 0:
            raise InputError(
                f"`slope` must be positive and `samples` not negative, but got {self.slope} and {self.samples}"
            )


class BudgetController:
    """Keeps the running mean cost at a budget, without labels, while inputs change.

    Use `policy` for a batch, then call `update` with the exits that its samples took and, if known, their scores:

        controller = ew.BudgetController(policy, budget)
        for images in batches:
            classifier.policy = controller.policy
            answers = classifier(images)
            controller.update(answers.exits, answers.probs.max(dim=1).values)

    `Classifier.stream` does this itself if it is given a controller.

    The controller moves along `Policy.shifted`, by the overspend of the last batch and by the accumulated overspend.
    Anti-windup: overspend is not accumulated while the shift is at its limit, so the controller reacts immediately when
    inputs change. A policy that is fitted to spend less than its budget is made cheaper if needed, never more
    expensive.

    Args:
        policy: A policy with costs, such as those of `fit_policy`. It stays available as `base_policy`.
        budget: Mean cost per sample to keep, in the policy's unit; by default the policy's own budget.
        horizon: Number of samples, at least ten batches, over which accumulated overspend is compensated.
        step: Largest change of the shift per batch.

    Raises:
        InputError: If the policy has no costs, the budget is out of reach, or a number is out of range.

    Example:
        >>> import exitwise as ew
        >>> policy = ew.Policy((0.8, float("-inf")), costs=(1.0, 3.0), budget=2.0)
        >>> controller = ew.BudgetController(policy)
        >>> cheaper = controller.update([1, 1, 1, 0])  # three of four samples took the expensive exit
        >>> controller.mean_cost, cheaper.thresholds[0] < 0.8
        (2.5, True)
    """

    def __init__(self, policy: Policy, budget: float | None = None, *, horizon: int = 640, step: float = 0.5) -> None:
        if not isinstance(policy, Policy):
            raise InputError(f"`policy` must be a Policy, but got {type(policy).__name__}")
        if policy.costs is None:
            raise InputError("`policy` must know its costs: use one that `fit_policy` made")
        budget = policy.budget if budget is None else budget
        Costs(policy.costs, policy.unit).check_budget(budget)
        self.horizon = check_integer("horizon", horizon, 1, _MAX_HORIZON)
        self.step = check_between("step", step, 0, _MAX_SHIFT)
        self.base_policy, self.budget = policy, float(budget or 0.0)
        self.state = BudgetState(shift=0.0, slope=self._default_slope)

    @property
    def fitted(self) -> Policy:
        """The policy without a shift: former name of `base_policy`."""
        return self.base_policy

    @property
    def policy(self) -> Policy:
        """Policy for the next batch."""
        return self.base_policy.shifted(self.state.shift)

    @property
    def mean_cost(self) -> float:
        """Mean cost of all samples so far."""
        return self.state.spent / self.state.samples if self.state.samples else 0.0

    def update(self, exits: Any, scores: Any = None) -> Policy:
        """Update the state with a batch.

        Args:
            exits: Exits (n,) that the samples took, in any order.
            scores: Scores (n,) of the samples at those exits, in the same order, to estimate the slope of the cost.

        Returns:
            The policy for the next batch.

        Raises:
            InputError: If `exits` are not valid exits, or `scores` are not n finite numbers.
        """
        taken = to_array("exits", exits)
        last = len(self.base_policy.thresholds) - 1
        if taken.shape == (0,):
            return self.policy
        if taken.ndim != 1 or not np.issubdtype(taken.dtype, np.integer):
            raise InputError(f"`exits` must be whole numbers (n,), but got {taken.dtype} {taken.shape}")
        if not 0 <= taken.min() <= taken.max() <= last:
            raise InputError(f"`exits` must lie in 0..{last}, but reach from {taken.min()} to {taken.max()}")
        if scores is not None:
            values = to_array("scores", scores)
            is_numeric = np.issubdtype(values.dtype, np.number)
            if values.shape != taken.shape or not is_numeric or not np.isfinite(values).all():
                raise InputError(f"`scores` must be {len(taken)} finite numbers, but got {values.dtype} {values.shape}")
            self._update_slope(taken, values.astype(np.float64))
        self._update_shift(taken)
        return self.policy

    def _update_shift(self, taken: Array) -> None:
        """Move the shift by the overspend of the batch and by the accumulated overspend."""
        state, n = self.state, len(taken)
        cost = float(np.asarray(self.base_policy.costs)[taken].sum())
        overspend = cost / n - self.budget
        horizon = max(self.horizon, 10 * n)
        debt = exp(-n / horizon) * state.debt + n * overspend
        # Both are weighted so that the response has no overshoot; a small batch gets little weight.
        batch_weight = n / (n + horizon / 10)
        correction = -(batch_weight * overspend + (1 - batch_weight) * debt / horizon)
        move = min(max(correction / state.slope, -self.step), self.step)
        shift = min(max(state.shift + move, -_MAX_SHIFT), self._max_shift)
        at_limit = shift == state.shift and move != 0
        self.state = BudgetState(
            shift, state.slope, state.debt if at_limit else debt, state.samples + n, state.spent + cost
        )

    @property
    def _max_shift(self) -> float:
        """Largest shift allowed: none for a policy that is fitted to spend less than its budget."""
        policy = self.base_policy
        saves = policy.cost is not None and policy.budget is not None and policy.cost < 0.98 * policy.budget
        return 0.0 if saves else _MAX_SHIFT

    @property
    def _default_slope(self) -> float:
        """Slope of the cost without any data: half of the cost range per unit of shift."""
        costs = self.base_policy.costs or (0.0, 1.0)
        return (costs[-1] - costs[0]) / 2 or 1.0

    def _update_slope(self, taken: Array, scores: Array) -> None:
        """Estimate the cost slope from samples that exited just above the threshold."""
        costs = np.asarray(self.base_policy.costs)
        extra_cost = np.append(np.diff(costs), 0.0)  # a lower bound: to the next exit only
        would_continue = scores < np.asarray(self.policy.shifted(_SLOPE_PROBE).thresholds)[taken]
        slope = float((extra_cost[taken] * would_continue).mean()) / _SLOPE_PROBE
        keep = exp(-len(taken) / self.horizon)
        average = keep * self.state.slope + (1 - keep) * slope
        self.state = replace(self.state, slope=max(average, self._default_slope / 8))

    def to_dict(self) -> dict[str, Any]:
        """Return the policy, the settings and the state as a JSON-serializable dict."""
        return {
            "policy": self.base_policy.to_dict(),
            "budget": self.budget,
            "horizon": self.horizon,
            "step": self.step,
            "state": asdict(self.state),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "BudgetController":
        """Make a controller from the result of `to_dict`; raise `InputError` if it is invalid."""
        try:
            policy = Policy.from_dict(data["policy"])
            controller = cls(policy, data["budget"], horizon=data["horizon"], step=data["step"])
            controller.state = controller._check_state(BudgetState(**data["state"]))
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"not a usable controller: {error}") from None
        return controller

    def _check_state(self, state: BudgetState) -> BudgetState:
        """Return a state from a file if samples with these costs can lead to it, up to rounding."""
        check_integer("samples", state.samples, 0, 2**53)
        check_number("shift", state.shift, -_MAX_SHIFT, _MAX_SHIFT)
        costs = self.base_policy.costs or (0.0, 1.0)
        difference, largest = costs[-1] - costs[0], 1.001 * state.samples * costs[-1]
        check_number("slope", state.slope, maximum=max(difference / _SLOPE_PROBE, 1.0) * 1.001)
        check_number("spent", state.spent, 0.999 * state.samples * costs[0], largest)
        check_number("debt", state.debt, -largest, largest)
        return state

    def save(self, path: str | Path) -> None:
        """Write everything to a JSON file, so that another process can resume."""
        write_json(Path(path), {"format": FORMAT, "version": VERSION, **self.to_dict()})

    @classmethod
    def load(cls, path: str | Path) -> "BudgetController":
        """Resume from a file that `save` wrote; raise `InputError` that names the file if it is invalid."""
        data = read_json(Path(path))
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise InputError(f"{path} must hold a controller of version {VERSION}")
        try:
            return cls.from_dict(data)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def __repr__(self) -> str:
        return (
            f"BudgetController(budget {self.budget:.4g} {self.base_policy.unit}, mean cost {self.mean_cost:.4g} of "
            f"{self.state.samples} samples, shift {self.state.shift:+.3f})"
        )
