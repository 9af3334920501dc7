"""The kinds of errors that a user's input can cause."""

# What a net raises when it gets what it cannot take.
NET_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)


class InputError(ValueError):
    """An argument, a file or a setting is wrong; the message is one line that says what, and what was expected."""


class AllRanksError(InputError):
    """One that every process of several has found: one of them says it."""


def first_line(error: Exception) -> str:
    """What another library's error says, in a line; its kind, where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
