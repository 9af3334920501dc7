"""Tuned values that lie at a bound of their search, so that a better value may lie beyond it."""

from collections.abc import Sequence
from dataclasses import dataclass

from exitwise.calibration.calibration import Calibration
from exitwise.calibration.sequential_tuning import PRIOR_BOUNDS, TEMPERATURE_BOUNDS

_NEAR = 1.05  # the continuous search approaches its bounds, but does not reach them


@dataclass(frozen=True)
class ValueAtBound:
    """A tuned value of one exit at the lower or upper bound of its search."""

    quantity: str  # "temperature" or "prior variance"
    exit: int  # from 0
    bound: float
    is_lower: bool


def find_values_at_bounds(calibration: Calibration) -> list[ValueAtBound]:
    """Return the tuned values that lie at a bound: of the grid or, after a continuous search, of its range."""
    method, found = calibration.method, []
    for k, (exit, grid) in enumerate(zip(calibration.exits, calibration.grids, strict=True)):
        tuned = {
            "temperature": (exit.temperature, grid.temperatures, TEMPERATURE_BOUNDS, method.tune_temperature),
            "prior variance": (exit.prior_var, grid.prior_vars, PRIOR_BOUNDS, method.tune_prior),
        }
        for quantity, (value, values, limits, is_tuned) in tuned.items():
            is_continuous = _is_continuous(calibration)
            low, high = limits if is_continuous else (min(values), max(values))
            near = _NEAR if is_continuous else 1.0
            if is_tuned and low < high and not low * near < value < high / near:
                is_lower = value <= low * near
                found.append(ValueAtBound(quantity, k, low if is_lower else high, is_lower))
    return found


def describe_values_at_bounds(calibration: Calibration, command: str = "--search continuous") -> list[str]:
    """Return what was tuned to a bound, with the exits (from 1) and what to do; one line per quantity.

    Args:
        calibration: The tuned calibration.
        command: What searches beyond the grid: an option, or a command in backticks.
    """
    groups: dict[tuple[str, bool], list[ValueAtBound]] = {}
    for value in find_values_at_bounds(calibration):
        groups.setdefault((value.quantity, value.quantity == "temperature" and value.is_lower), []).append(value)
    is_continuous, num_exits = _is_continuous(calibration), len(calibration.exits)
    sentences = []
    for (quantity, is_low_temperature), values in groups.items():
        bounds = " or ".join(f"{bound:g}" for bound in sorted({value.bound for value in values}))
        place = f"the {'bound of its search' if is_continuous else 'edge of its grid'}, {bounds},"
        sentence = f"The {quantity} is at {place} at {_list_exits([value.exit for value in values], num_exits)}."
        sentences.append(f"{sentence} {_advise(quantity, is_low_temperature, is_continuous, command)}")
    return sentences


def _advise(quantity: str, is_low_temperature: bool, is_continuous: bool, command: str) -> str:
    advice = "" if is_continuous else f"Search further with {command}."
    if is_low_temperature:
        reason = "the net may have been trained on these validation images: calibrate on others"
        return f"{advice} If it stays there, {reason}." if advice else f"Probably {reason}."
    if is_continuous and quantity == "temperature":
        return "This exit is hardly better than chance: train its head longer, or move it to a later layer."
    if is_continuous:
        return "The validation NLPD hardly depends on it here: a method without sigma_opt does as well."
    return advice


def _list_exits(exits: Sequence[int], num_exits: int) -> str:
    numbers = [str(k + 1) for k in exits]
    if len(exits) == num_exits > 1:
        return "all exits"
    if len(exits) == 1:
        return f"exit {numbers[0]}"
    return f"exits {', '.join(numbers[:-1])} and {numbers[-1]}"


def _is_continuous(calibration: Calibration) -> bool:
    return calibration.settings.get("search") == "continuous"
