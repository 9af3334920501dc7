"""Error messages in the words of the command line: options as the user types them, and not too long to read."""

import inspect
import re
from collections.abc import Callable
from typing import Any

MAX_LENGTH = 300  # characters of an error message
_LONG_PATH = re.compile(r"(?:/[^\s/:;,'\"`]+){4,}")  # of at least four parts
_TAIL = 120  # characters at its end that a shortened message keeps: they say what to do

# Arguments of the library that are options by another name.
_ALIASES = {
    "at": "attach",
    "backends": "backend",
    "budget_delta": "certify",
    "budgets": "budget",
    "epsilon": "max_loss",
    "methods": "method",
    "num_draws": "samples",
    "risk_delta": "certify",
    "train_last": "last",
}


def name_options(message: str, command: Callable[..., Any] | None) -> str:
    """Replace arguments in backticks by the options of a command: `batch_size` becomes `--batch-size`."""
    if command is None:
        return message
    options = {
        name
        for name, parameter in inspect.signature(command).parameters.items()
        if any(type(part).__name__ == "OptionInfo" for part in getattr(parameter.annotation, "__metadata__", ()))
    }

    def replace_name(match: re.Match[str]) -> str:
        name = match[1] if match[1] in options else _ALIASES.get(match[1], "")
        return f"`--{name.replace('_', '-')}`" if name in options else match[0]

    return re.sub(r"`([a-z][a-z_]*)`", replace_name, message)


def shorten_message(message: str) -> str:
    """Return a message of at most `MAX_LENGTH` characters; a longer one loses the middle of its paths, then its own."""
    if len(message) > MAX_LENGTH:  # the middle of a long path says least
        message = _LONG_PATH.sub(lambda match: f".../{'/'.join(match[0].split('/')[-2:])}", message)
    if len(message) <= MAX_LENGTH:
        return message
    return f"{message[: MAX_LENGTH - _TAIL - 5]} ... {message[-_TAIL:]}"
