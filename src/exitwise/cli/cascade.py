"""The command that chains networks."""

from typing import Any

from exitwise.cli.options import ForceOption, JsonOption, expand_options, print_json
from exitwise.cli.train import OutOption, configure_logging, new_run_path
from exitwise.core.errors import InputError
from exitwise.runs.options import CascadeOptions, DataOptions


@expand_options
def cascade(
    data: DataOptions,
    options: CascadeOptions,
    out: OutOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Chain networks that are trained already: a small one first, larger ones for images that it is not sure of.

    Nothing is trained, and no training images are needed: the images of --data, which the networks should not have been
    trained on, are for calibration and for testing. A function of --net returns a network that ends in a linear layer,
    or that network and its `exitwise.Preprocessing`.
    """
    configure_logging()
    path = new_run_path(out, data)
    if options.net and options.candidates:
        raise InputError("give either --net for the networks of a cascade, or --candidates to choose among them")
    if not options.net and not options.candidates:
        raise InputError("a cascade needs at least two networks: give --net for each, small ones first")
    _make_run(path, data, options, force, as_json)


def _make_run(path: Any, data: DataOptions, options: CascadeOptions, force: bool, as_json: bool) -> None:
    from dataclasses import asdict

    from exitwise.cli import tables
    from exitwise.runs.cascade import make_cascade_run
    from exitwise.runs.run import Run

    costs = make_cascade_run(path, data, options, force)
    if as_json:
        return print_json(run=str(path), networks=[asdict(cost) for cost in costs])
    tables.console().print(tables.networks(costs))
    print(f"The run is in {path}. Next: {Run(path).command('collect')}")
    return None
