"""Networks of runs: built by preset or by the user's function, rebuilt from run.json, loaded with their weights."""

import sys
from importlib import import_module
from pathlib import Path

from exitwise import models
from exitwise.core.errors import InputError, first_line
from exitwise.models.macs import macs
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import load_checkpoint
from exitwise.runs.run import Run


def net_input_size(preset: str | None) -> int | None:
    """Return the image size of a preset, None for a net of the user's own. A mistyped name is an error."""
    return models.config(preset).input_shape[1] if preset else None


def build_net(preset: str | None, function: str | None, shape: tuple[int, int, int], classes: int) -> MultiExitNet:
    """Build an untrained net for images of `shape`, by preset or with the user's `package.module:function`."""
    if function is None:
        net = models.build(str(preset), num_classes=classes, in_channels=shape[0])
    else:
        net = import_net(function)
    if net.num_classes != classes:
        raise InputError(f"the net must have the dataset's {classes} classes, but has {net.num_classes}")
    if function is None:
        macs(net, shape)  # fails for images that are too small for the net
    return net


def import_net(function: str) -> MultiExitNet:
    """Call `package.module:function` and return its net. The name comes from the command line, never from a file."""
    module, colon, name = function.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(import_module(module), name) if colon and module and name else None
    except (ImportError, AttributeError) as error:
        raise InputError(f"`--net` {function} could not be imported: {error}") from None
    finally:
        sys.path.pop(0)
    if not callable(make):
        raise InputError(f"`--net` must be like package.module:function, but got {function!r}")
    try:
        net = make()
    except InputError:
        raise
    except Exception as error:  # whatever the user's code may raise
        kind = type(error).__name__
        raise InputError(f"`--net` {function} failed with {kind}: {first_line(error)}") from error
    if not isinstance(net, MultiExitNet):
        kind = type(net).__name__
        raise InputError(f"`--net` {function} must return a MultiExitNet, but returned a {kind}: use exitwise.attach")
    return net


def rebuild_net(run: Run, function: str | None) -> MultiExitNet:
    """Rebuild the untrained net of a run from its preset or, for a net of the user's own, with `function`."""
    spec = run.metadata["model"]
    if "preset" in spec:
        if function is not None:
            raise InputError(f"{run.directory} has the net {spec['preset']!r}: --net is for other nets")
        return models.rebuild(spec)
    if function is None:
        example = spec.get("net") or "package.module:function"
        raise InputError(f"{run.directory} has a net of its own: give --net {example} again")
    return import_net(function)


def load_run_net(run: Run, function: str | None) -> MultiExitNet:
    """Load the net of a run with its weights, in evaluation mode."""
    if not run.net_file.is_file():
        raise InputError(f"{run.directory} has no net.safetensors")
    return load_checkpoint(rebuild_net(run, function), run.net_file).eval()
