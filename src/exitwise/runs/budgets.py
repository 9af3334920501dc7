"""Budgets as users type them: 2e7 (MACs), 50% of the last exit's cost, or 12ms."""

from math import isfinite

from exitwise.calibration.trace import Trace
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.runs.run import Run


def parse_budget(text: str, costs: Costs) -> float:
    """Return the budget in the unit of `costs`, from text such as 2e7, 50% or 12ms."""
    number = text.strip().lower()
    unit = "ms" if number.endswith("ms") else "%" if number.endswith("%") else "MACs"
    number = number.removesuffix("macs").removesuffix("ms").removesuffix("%").strip()
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value <= 0:
        raise InputError(f"`--budget` must be like 2e7, 50% or 12ms, but got {text!r}")
    if unit == "%":
        return value / 100 * costs.values[-1]
    if unit != costs.unit:
        raise InputError(f"`--budget` {text} is in {unit}, but the costs of this run are in {costs.unit}")
    return value


def is_in_milliseconds(text: str) -> bool:
    """Return whether a budget is given in milliseconds."""
    return text.strip().lower().endswith("ms")


def costs_in_budget_unit(budget: str, run: Run, trace: Trace) -> Costs:
    """Return costs in the unit of the budget: MACs of the trace, or the milliseconds of `exitwise bench`."""
    return run.measured_costs() if is_in_milliseconds(budget) and trace.costs.unit != "ms" else trace.costs
