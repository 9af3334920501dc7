"""Costs with their unit."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from exitwise.core.checks import check_choice, is_number
from exitwise.core.errors import InputError

UNITS = ("MACs", "ms")


@dataclass(frozen=True)
class Costs:
    """Cumulative cost of a sample that leaves at exit k: `values` (K,) that grow, with their unit ("MACs" or "ms")."""

    values: tuple[float, ...]
    unit: str = "MACs"

    def __post_init__(self) -> None:
        try:
            values = tuple(float(value) for value in self.values)
        except (OverflowError, TypeError, ValueError):
            raise InputError(
                f"`costs` must be positive, finite numbers, one per exit, but got {self.values!r}"
            ) from None
        object.__setattr__(self, "values", values)
        if not values or not all(1e-100 < value < 1e100 for value in values):  # so that sums and ratios are numbers too
            raise InputError(f"`costs` must be positive, finite numbers, one per exit, but got {list(values)}")
        if any(later <= earlier for earlier, later in pairwise(values)):
            raise InputError(f"`costs` are cumulative and must grow from exit to exit, but got {list(values)}")
        check_choice("unit", self.unit, UNITS)

    @classmethod
    def of(cls, costs: "Costs | Sequence[float]") -> "Costs":
        """Costs as they are, or a plain sequence of cumulative MACs (K,)."""
        try:
            return costs if isinstance(costs, Costs) else cls(tuple(costs))
        except TypeError:
            raise InputError(f"`costs` must be Costs or a sequence of numbers, but got {costs!r}") from None

    def __len__(self) -> int:
        return len(self.values)

    def check_budget(self, budget: Any) -> None:
        """Refuse what no policy can cost, and say what can be."""
        low, high = self.values[0], self.values[-1]
        if not is_number(budget) or not low <= budget <= high:
            raise InputError(
                f"`budget` must lie between the cost of the first exit and that of the last, "
                f"{low:.10g} to {high:.10g} {self.unit}, but got {budget}"
            )


def format_cost(value: float, unit: str = "MACs") -> str:
    """A cost in words: 38.04 million MACs, 12.5 ms."""
    if unit != "MACs":
        return f"{value:.4g} {unit}"
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.4g} {name} MACs"
    return f"{value:.6g} MACs"


def format_percent(share: float) -> str:
    """With as many digits as it has."""
    return f"{100 * share:.10g} %"
