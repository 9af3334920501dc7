"""Checks of arguments: numbers, choices and names.

Each function returns the value if it is valid and raises `InputError` otherwise. The message names the argument, the
expectation and the value.
"""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from math import inf, isfinite
from typing import Any, TypeVar

import numpy as np

from exitwise.core.errors import InputError, shorten

T = TypeVar("T")


def is_integer(value: Any) -> bool:
    """Return whether `value` is a whole number; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether `value` is an integer or a float, perhaps non-finite; True and False are not."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Return whether `value` is a number that a float can hold."""
    try:
        return is_number(value) and isfinite(value)
    except OverflowError:  # an integer beyond 1e308
        return False


def check_integer(name: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return `value` if it is a whole number in `minimum..maximum`."""
    if not is_integer(value) or not _is_within(value, minimum, maximum):
        raise InputError(
            f"`{name}` must be a whole number{_describe_range(minimum, maximum)}, but got {shorten(value)}"
        )
    return int(value)


def check_number(name: str, value: Any, minimum: float | None = None, maximum: float | None = None) -> float:
    """Return `value` as a float if it is finite and lies in `minimum..maximum`."""
    if not is_finite(value) or not _is_within(value, minimum, maximum):
        raise InputError(f"`{name}` must be a number{_describe_range(minimum, maximum)}, but got {shorten(value)}")
    return float(value)


def check_between(name: str, value: Any, low: float, high: float) -> float:
    """Return `value` as a float if it lies strictly between `low` and `high`."""
    if not is_number(value) or not low < value < high:
        raise InputError(f"`{name}` must be a number between {low:g} and {high:g}, but got {shorten(value)}")
    return float(value)


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"`{name}` must be True or False, but got {shorten(value)}")
    return value


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return `value` if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"`{name}` must be one of {', '.join(choices)}, but got {shorten(value)}")
    return value


def get_named(name: str, value: Any, known: Mapping[str, T], kind: str, known_hint: str | None = None) -> T:
    """Return `known[value]`; for an unknown name the error suggests the nearest one.

    Args:
        name: The argument that is checked.
        value: The value of the argument.
        known: The choices by name.
        kind: Noun for a choice with its article, such as "a recipe".
        known_hint: End of the message if no name is near; by default the list of all names.
    """
    if not isinstance(value, str) or value not in known:
        hint = suggest(value, known, known_hint)
        raise InputError(f"`{name}` must be the name of {kind}, but got {shorten(value)}; {hint}")
    return known[value]


def suggest(value: Any, known: Iterable[str], known_hint: str | None = None) -> str:
    """Return "did you mean ...?" with the nearest `known` name; if none is near, `known_hint` or the list of names."""
    names = list(known)
    nearest = get_close_matches(str(value), names, n=1, cutoff=0.4)
    if nearest:
        return f"did you mean {nearest[0]!r}?"
    return known_hint or f"known are {', '.join(names)}"


def _is_within(value: float, minimum: float | None, maximum: float | None) -> bool:
    return (-inf if minimum is None else minimum) <= value <= (inf if maximum is None else maximum)


def _describe_range(minimum: float | None, maximum: float | None) -> str:
    """Return the range as the end of a phrase: " of at least 1", " from 0 to 10" or nothing."""
    if minimum is not None and maximum is not None:
        return f" from {minimum:.15g} to {maximum:.15g}"
    if minimum is not None:
        return f" of at least {minimum:.15g}"
    return "" if maximum is None else f" of at most {maximum:.15g}"
