"""The command that shares a run's classifier."""

from pathlib import Path
from typing import Annotated

import typer

from exitwise.cli.options import JsonOption, NetOption, RunArgument, expand_options, print_json
from exitwise.runs.options import ClassifierOptions, join_nets


@expand_options
def share(
    options: ClassifierOptions,
    run: RunArgument,
    target: Annotated[
        str,
        typer.Argument(metavar="TO", help="A folder; with --hub a repository, such as me/flowers.", show_default=False),
    ],
    hub: Annotated[bool, typer.Option("--hub", help="Upload to the Hugging Face Hub, into the repository TO.")] = False,
    adapter: Annotated[
        bool | None,
        typer.Option(
            "--adapter/--whole",
            help="Write heads, calibration and thresholds, with the name and hash of the base network; or all weights.",
            show_default="adapter for pretrained weights that the net's library loads by name",
        ),
    ] = None,
    bundle: Annotated[bool, typer.Option("--bundle", help="Add an ONNX bundle.")] = False,
    about: Annotated[
        str | None, typer.Option(help="Description of the data, for the model card.", show_default=False)
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    net: NetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run's classifier for others: weights or an adapter, and a model card with its results.

    Without options it is the run's chosen classifier: that of the last `exitwise evaluate`. Others load it with
    `exitwise.Classifier.from_pretrained`. An existing model card is kept.
    """
    from exitwise.runs.run import Run
    from exitwise.runs.share import ShareOptions, share_run

    whole = None if adapter is None else not adapter
    message = share_run(Run(run), target, ShareOptions(hub, whole, bundle, about, private), options, join_nets(net))
    if as_json:
        files = [] if hub else sorted(path.name for path in Path(target).iterdir())
        return print_json(run=str(run), target=target, files=files)
    print(message)
    return None
