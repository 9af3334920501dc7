"""A budget that holds while traffic changes: the policy is moved along its family by what it has cost. NumPy alone."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import exp, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from exitwise.core.checks import is_number
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.files import read_json, write_json
from exitwise.core.predictions import Array, to_array
from exitwise.policies.policy import Policy

FORMAT, VERSION = "exitwise.controller", 1

_MAX_SHIFT = 4.0  # doubt counts 55 times as much, or as little: beyond that nearly nothing changes any more
_SLOPE_PROBE = 0.25  # shifts within which who has just left is counted, to see how steeply the cost grows


@dataclass(frozen=True)
class BudgetState:
    """What a controller knows: the shift of its policy, what is owed, and how steeply the cost grows with the shift."""

    shift: float
    slope: float
    debt: float = 0.0  # what samples cost beyond the budget, summed, old ones forgotten little by little
    samples: int = 0
    spent: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not is_number(value) or not isfinite(value):
                raise InputError(f"{name} must be a finite number, but is {value!r}")
        if self.slope <= 0 or self.samples < 0:
            raise InputError(f"slope must be positive and samples not negative, but are {self.slope}, {self.samples}")


class BudgetController:
    """Keeps the running mean cost at a budget, without labels, whatever comes.

    Use `policy` for a batch, then tell `update` at which exits its samples left and, if known, with which scores:

        controller = ew.BudgetController(policy, budget)
        for images in batches:
            classifier.policy = controller.policy
            answers = classifier(images)
            controller.update(answers.exits, answers.probs.max(dim=1).values)

    It moves along `Policy.shifted`, by what the last samples cost beyond the budget and by what is still owed from
    before. `horizon` is over how many samples, and at least ten batches, a debt is paid back, `step` the most that one
    batch may move the policy. A debt that cannot be paid, the policy being at its end, is not added to: when traffic
    changes again, the controller is there at once. A policy that means to spend less than its budget is made cheaper
    where need be, never dearer. `Classifier.stream` does all this by itself if it is given a controller.
    """

    def __init__(self, policy: Policy, budget: float | None = None, *, horizon: int = 640, step: float = 0.5) -> None:
        if not isinstance(policy, Policy):
            raise InputError(f"`policy` must be a Policy, but got {type(policy).__name__}")
        if policy.costs is None:
            raise InputError("`policy` must know its costs: use one that `fit_policy` made")
        budget = policy.budget if budget is None else budget
        Costs(policy.costs, policy.unit).check_budget(budget)
        if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
            raise InputError(f"`horizon` must be a whole number of at least 1, but got {horizon!r}")
        if not is_number(step) or not 0 < step < _MAX_SHIFT:
            raise InputError(f"`step` must be a number between 0 and {_MAX_SHIFT:g}, but got {step!r}")
        self.base_policy, self.budget = policy, float(budget or 0.0)
        self.horizon, self.step = horizon, float(step)
        self.state = BudgetState(shift=0.0, slope=self._usual_slope)

    @property
    def policy(self) -> Policy:
        """For the next batch."""
        return self.base_policy.shifted(self.state.shift)

    @property
    def mean_cost(self) -> float:
        """Of all samples so far."""
        return self.state.spent / self.state.samples if self.state.samples else 0.0

    def update(self, exits: Any, scores: Any = None) -> Policy:
        """Learn from a batch: exits (n,), and scores (n,) at those exits, in any order. The policy for the next one."""
        taken = to_array("exits", exits)
        last = len(self.base_policy.thresholds) - 1
        if taken.shape == (0,):
            return self.policy
        if taken.ndim != 1 or not np.issubdtype(taken.dtype, np.integer):
            raise InputError(f"`exits` must be whole numbers (n,), but got {taken.dtype} {taken.shape}")
        if not 0 <= taken.min() <= taken.max() <= last:
            raise InputError(f"`exits` must lie in 0..{last}, but reach from {taken.min()} to {taken.max()}")
        if scores is not None:
            found = to_array("scores", scores)
            if found.shape != taken.shape or not np.issubdtype(found.dtype, np.number) or not np.isfinite(found).all():
                raise InputError(f"`scores` must be {len(taken)} finite numbers, but got {found.dtype} {found.shape}")
            self._learn_slope(taken, found.astype(np.float64))
        self._move(taken)
        return self.policy

    def _move(self, taken: Array) -> None:
        state, n = self.state, len(taken)
        paid = float(np.asarray(self.base_policy.costs)[taken].sum())
        over = paid / n - self.budget
        horizon = max(self.horizon, 10 * n)
        keep = exp(-n / horizon)
        debt = keep * state.debt + n * over
        # The last batch and the debt, weighted so that the way back has no overshoot; a small batch says little.
        trust = n / (n + horizon / 10)
        wanted = -(trust * over + (1 - trust) * debt / horizon)
        move = min(max(wanted / state.slope, -self.step), self.step)
        shift = min(max(state.shift + move, -_MAX_SHIFT), self._most)
        at_its_end = shift == state.shift and move != 0
        self.state = BudgetState(
            shift, state.slope, state.debt if at_its_end else debt, state.samples + n, state.spent + paid
        )

    @property
    def _most(self) -> float:
        """How careful the policy may become."""
        made = self.base_policy
        saves = made.cost is not None and made.budget is not None and made.cost < 0.98 * made.budget
        return 0.0 if saves else _MAX_SHIFT

    @property
    def _usual_slope(self) -> float:
        """What the cost grows by per unit of shift, where nothing is known: half of the way to the last exit."""
        costs = self.base_policy.costs or (0.0, 1.0)
        return (costs[-1] - costs[0]) / 2 or 1.0

    def _learn_slope(self, taken: Array, scores: Array) -> None:
        """Who left with a score just above the threshold would have gone on, had the policy been more careful."""
        costs = np.asarray(self.base_policy.costs)
        ahead = np.append(np.diff(costs), 0.0)  # at least to the next exit
        nearly = scores < np.asarray(self.policy.shifted(_SLOPE_PROBE).thresholds)[taken]
        slope = float((ahead[taken] * nearly).mean()) / _SLOPE_PROBE
        keep = exp(-len(taken) / self.horizon)
        mixed = keep * self.state.slope + (1 - keep) * slope
        self.state = replace(self.state, slope=max(mixed, self._usual_slope / 8))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON."""
        return {
            "policy": self.base_policy.to_dict(),
            "budget": self.budget,
            "horizon": self.horizon,
            "step": self.step,
            "state": asdict(self.state),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "BudgetController":
        """What `to_dict` gave, checked: it may come from a file."""
        try:
            policy = Policy.from_dict(data["policy"])
            controller = cls(policy, data["budget"], horizon=data["horizon"], step=data["step"])
            controller.state = BudgetState(**data["state"])
        except (KeyError, TypeError, InputError) as error:
            raise InputError(f"not a usable controller: {error}") from None
        return controller

    def save(self, path: str | Path) -> None:
        """Everything, so that another process goes on from here."""
        write_json(Path(path), {"format": FORMAT, "version": VERSION, **self.to_dict()})

    @classmethod
    def load(cls, path: str | Path) -> "BudgetController":
        """Read and check what `save` wrote; it goes on from there."""
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
