"""Budgets as users type them: 2e7 (MACs), 50% of the last exit's cost, or 12ms."""

from math import ceil, isfinite, nan

from exitwise.calibration.trace import Trace
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.runs.run import Run


def parse_budget(text: str, costs: Costs, check: bool = True) -> float:
    """Return the budget in the unit of `costs`, from text such as 2e7, 50% or 12ms.

    Args:
        text: The budget as it was typed.
        costs: Costs of the exits.
        check: Raise InputError if the budget lies outside of the costs of the exits, in the unit of `text`.
    """
    number = text.strip().lower()
    unit = "ms" if number.endswith("ms") else "%" if number.endswith("%") else "MACs"
    number = number.removesuffix("macs").removesuffix("ms").removesuffix("%").strip()
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value <= 0:
        raise InputError(f"`--budget` must be like 2e7, 50% or 12ms, but got {text!r}")
    if unit not in ("%", costs.unit):
        raise InputError(f"`--budget` {text} is in {unit}, but the costs of this run are in {costs.unit}")
    low, high = costs.values[0], costs.values[-1]
    budget = value / 100 * high if unit == "%" else value
    if not check or low <= budget <= high:
        return budget
    if len(costs.values) == 1:
        raise InputError(f"`--budget` {text.strip()} must be 100%: the net has only one exit")
    limits = f"{low:.10g} to {high:.10g} {unit}"
    if unit == "%":
        limits = f"{ceil(1000 * low / high) / 10:g}% to 100%"
    percentage = 100 * value if value <= 1 else value  # 0.5 and 50 were probably meant as 50 %
    is_percentage = unit != "%" and budget < low and 100 * low / high <= percentage <= 100
    meant = f"; did you mean {percentage:g}%?" if is_percentage else ""
    side = "below the cost of the first exit" if budget < low else "above the cost of the last exit"
    raise InputError(f"`--budget` {text.strip()} is {side}: it must lie in {limits}{meant}")


def parse_max_loss(text: str, *, with_budget: bool) -> float:
    """Return the value of `--max-loss` as a fraction.

    With a percent sign it is in percentage points. A number is in points, too, unless there is a budget to certify:
    then it is a fraction, as it was before `--max-loss` could be used without a budget.
    """
    number = text.strip()
    try:
        value = float(number.removesuffix("%"))
    except ValueError:
        value = nan
    is_fraction = with_budget and not number.endswith("%")
    loss = value if is_fraction else value / 100
    if not 0 <= loss < 1 or (with_budget and loss == 0):
        expected = "a fraction such as 0.01 or points such as 1%" if with_budget else "points such as 0.2"
        raise InputError(f"`--max-loss` must be {expected}, but got {text!r}")
    return loss


def is_in_milliseconds(text: str) -> bool:
    """Return whether a budget is given in milliseconds."""
    return text.strip().lower().endswith("ms")


def costs_in_budget_unit(budget: str, run: Run, trace: Trace) -> Costs:
    """Return costs in the unit of the budget: MACs of the trace, or the milliseconds of `exitwise bench`."""
    return run.measured_costs() if is_in_milliseconds(budget) and trace.costs.unit != "ms" else trace.costs
