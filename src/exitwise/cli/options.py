"""Command-line options: those of several commands, and those made from the dataclasses of `exitwise.runs.options`."""

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from exitwise.runs.options import NET_HELP, RAY_HELP

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace existing output.")]
RayOption = Annotated[str | None, typer.Option(help=RAY_HELP, show_default=False)]
NetOption = Annotated[list[str] | None, typer.Option(help=NET_HELP)]
MethodOption = Annotated[
    str,
    typer.Option(
        help="Calibration method, such as Pool or 'MIE Laplace T_opt sigma_opt' (the paper's); auto chooses one by "
        "cross-validation."
    ),
]
ThreadsOption = Annotated[int | None, typer.Option(help="Number of threads.", show_default="one per core", min=1)]


def expand_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace every parameter of a command that is an options dataclass by one option per field.

    The command is called with instances of these dataclasses. A field keeps its name, its default and the
    `typer.Option` of its annotation.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _option_parameters(groups[name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=kind, annotation=hints[name]))

    @wraps(command)
    def call(**values: Any) -> Any:
        arguments = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        return command(**arguments, **values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del call.__wrapped__  # typer would read the signature of the command itself
    return call


def _option_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def print_json(**data: Any) -> None:
    """Print one line of JSON; non-finite numbers become null."""
    from exitwise.core.results import to_jsonable

    print(json.dumps(to_jsonable(data), allow_nan=False))
