"""Errors that a user's input can cause."""

from collections.abc import Iterator
from contextlib import contextmanager

# Exceptions that a forward pass may raise on an unsupported input.
NET_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)


class InputError(ValueError):
    """Invalid argument, file or setting. The message is one line with the problem and the expectation."""


class UnreadableImageError(InputError):
    """An image file of a dataset that cannot be decoded."""


class AllRanksError(InputError):
    """Input error raised on every rank; only rank 0 prints it."""


def first_line(error: Exception) -> str:
    """Return the first line of another library's error message, or the error's type if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def shorten(value: object, length: int = 80) -> str:
    """Return the repr of a value for a message, with at most `length` characters; never raises."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nesting, or an integer of thousands of digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= length else f"{text[: length - 3]}..."


@contextmanager
def net_input_errors(
    description: str, net: str = "the net", errors: tuple[type[Exception], ...] = NET_ERRORS
) -> Iterator[None]:
    """Turn errors of a forward pass into one `InputError`: "the net cannot take inputs of ...: reason".

    An `InputError` is raised unchanged.

    Args:
        description: Types and shapes of the inputs, such as "float32 (3, 32, 32)".
        net: What runs on the inputs, for the message.
        errors: Exceptions that mean that the inputs do not fit.
    """
    try:
        yield
    except InputError:
        raise
    except errors as error:
        raise InputError(f"{net} cannot take inputs of {description}: {first_line(error)}") from None
