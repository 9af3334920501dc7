"""Costs with their unit."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from exitwise.core.checks import check_choice, is_number
from exitwise.core.errors import InputError, shorten

UNITS = ("MACs", "ms")


@dataclass(frozen=True)
class Costs:
    """Cumulative costs (K,) of a sample that exits at exit 1..K, with their unit.

    Args:
        values: Costs (K,), positive and increasing from exit to exit.
        unit: "MACs" or "ms".

    Raises:
        InputError: If the costs are not positive, finite and increasing, or if the unit is unknown.

    Example:
        >>> import exitwise as ew
        >>> costs = ew.Costs((7e6, 14e6, 28e6))
        >>> len(costs), costs.unit
        (3, 'MACs')
    """

    values: tuple[float, ...]
    unit: str = "MACs"

    def __post_init__(self) -> None:
        try:
            values = tuple(float(value) for value in self.values)
        except (OverflowError, TypeError, ValueError):
            raise InputError(
                f"`costs` must be positive, finite numbers, one per exit, but got {shorten(self.values)}"
            ) from None
        object.__setattr__(self, "values", values)
        if not values or not all(1e-100 < value < 1e100 for value in values):  # keeps sums and ratios finite
            raise InputError(f"`costs` must be positive, finite numbers, one per exit, but got {shorten(list(values))}")
        if any(later <= earlier for earlier, later in pairwise(values)):
            raise InputError(f"`costs` are cumulative and must grow from exit to exit, but got {shorten(list(values))}")
        check_choice("unit", self.unit, UNITS)

    @classmethod
    def of(cls, costs: "Costs | Sequence[float]") -> "Costs":
        """Return `costs` unchanged if it is a `Costs`, else make one from a sequence of cumulative MACs (K,)."""
        try:
            return costs if isinstance(costs, Costs) else cls(tuple(costs))
        except TypeError:
            raise InputError(f"`costs` must be Costs or a sequence of numbers, but got {costs!r}") from None

    def __len__(self) -> int:
        return len(self.values)

    def check_budget(self, budget: Any) -> None:
        """Raise InputError unless `budget` lies between the costs of the first and the last exit.

        Args:
            budget: Average cost per sample, in the unit of these costs.
        """
        low, high = self.values[0], self.values[-1]
        if not is_number(budget) or not low <= budget <= high:
            raise InputError(
                f"`budget` must lie between the cost of the first exit and that of the last, "
                f"{low:.10g} to {high:.10g} {self.unit}, but got {shorten(budget)}"
            )


def format_cost(value: float, unit: str = "MACs") -> str:
    """Return a cost with its unit, such as "38.04 million MACs" or "12.5 ms"."""
    if unit != "MACs":
        return f"{value:.4g} {unit}"
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.4g} {name} MACs"
    return f"{value:.6g} MACs"


def format_percent(share: float) -> str:
    """Return a share as a percentage without trailing zeros: 0.125 becomes "12.5 %"."""
    return f"{100 * share:.10g} %"


def evenly_spaced_budgets(costs: Costs, count: int) -> list[float]:
    """Return budgets spread over the range of costs, without its ends, where all strategies are equal."""
    low, high = costs.values[0], costs.values[-1]
    return [float(value) for value in np.linspace(low, high, count + 2)[1:-1]] if high > low else [high]
