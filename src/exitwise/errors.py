"""The one kind of error that a user's input can cause."""


class InputError(ValueError):
    """An argument, a file or a setting is wrong; the message is one line that says what, and what was expected."""
