"""The command `exitwise`: parse, call the library, print. `--help` does not import torch."""

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from exitwise.cli.calibrate import ablate, calibrate, cost
from exitwise.cli.cascade import cascade
from exitwise.cli.deploy import bench, export, predict
from exitwise.cli.option_names import name_options, shorten_message
from exitwise.cli.policies import evaluate, policies
from exitwise.cli.report import report
from exitwise.cli.rivals import rivals
from exitwise.cli.score import score
from exitwise.cli.serve import serve
from exitwise.cli.share import share
from exitwise.cli.start import demo, models
from exitwise.cli.train import collect, train, train_heads
from exitwise.core.errors import AllRanksError, InputError
from exitwise.core.rank import is_rank_zero
from exitwise.core.text import escape_controls
from exitwise.core.version import __version__

# Commands in the order of work, by the group under which `--help` lists them.
COMMANDS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Start": (demo, models),
    "Train": (train, train_heads, cascade, collect),
    "Calibrate": (calibrate, ablate),
    "Decide": (evaluate, policies, rivals),
    "Deploy": (bench, export, predict, score, serve, share),
    "Inspect": (report, cost),
}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode="markdown",
    help="Early-exit networks that can be trusted under a compute budget. "
    "A run is a directory with a net and its results. Start with: exitwise demo",
)
for _group, _commands in COMMANDS.items():
    for _command in _commands:
        app.command(rich_help_panel=_group)(_command)


def main() -> None:
    """Run the command. A user's mistake ends in one line on stderr and exit status 2."""
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    # Active samples come in batches of every size, and oneDNN prepares each convolution for each size: cache them all.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± prints a question mark
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        _fail(f"{_describe_usage_error(error)}. Try `exitwise --help`.")
    except AllRanksError as error:
        _fail(name_options(str(error), _typed_command()), silent=not is_rank_zero())
    except InputError as error:
        _fail(name_options(str(error), _typed_command()))
    except BrokenPipeError:
        sys.stderr.close()  # the reader is gone: no message, and none from the interpreter's last flush either
        sys.exit(141)
    except OSError as error:
        _fail(f"{error.strerror}: {error.filename}" if error.filename else error.strerror or str(error))
    except RuntimeError as error:
        if not any(word in str(error) for word in ("onnection closed", "onnection reset", "gloo", "NCCL")):
            raise
        _fail("another process ended: see its message", silent=not is_rank_zero())
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", status=130, silent=not is_rank_zero())
    if code == 130:  # typer's status after Ctrl-C, for which it prints nothing
        _fail("interrupted", status=130, silent=not is_rank_zero())
    sys.exit(code or 0)


def _describe_usage_error(error: typer.TyperException) -> str:
    """Return the message of a wrong option with the value that was given, which typer leaves out for numbers."""
    message = error.format_message().replace("Value error, ", "").rstrip(".")
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()  # typer converts with pydantic
    value = repr(details[0].get("input")) if details else ""
    return message if value in message else f"{message}, but got {value}"


def _typed_command() -> Callable[..., Any] | None:
    """Return the function of the command that the user typed."""
    functions = {command.__name__.replace("_", "-"): command for group in COMMANDS.values() for command in group}
    return next((functions[word] for word in sys.argv[1:] if word in functions), None)


def _exit_on_sigterm(*_: object) -> None:
    """End as after Ctrl-C, through every clean-up on the way."""
    raise SystemExit(143)


def _fail(message: str, status: int = 2, silent: bool = False) -> None:
    """Exit with one line on stderr; `silent` on ranks whose message rank 0 prints."""
    if not silent:
        print(f"exitwise: {shorten_message(escape_controls(' '.join(message.split())))}", file=sys.stderr)
    sys.exit(status)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"exitwise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version
