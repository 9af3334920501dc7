"""Networks of runs: built by preset or by the user's function, rebuilt from run.json, loaded with their weights."""

from collections.abc import Callable
from functools import partial

from exitwise import models
from exitwise.core.errors import InputError
from exitwise.models.macs import macs
from exitwise.models.named.build import is_named
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import load_checkpoint, read_base_hash
from exitwise.runs.data import run_preprocessing
from exitwise.runs.members import call_function, rebuild_member_cascade
from exitwise.runs.run import Run


def net_input_size(preset: str | None) -> int | None:
    """Return the image size of a preset, None for a net of the user's own. A mistyped name is an error."""
    if is_named(preset):
        raise InputError(f"{preset} has one exit: `exitwise train-heads --model {preset}` adds exits, and makes a run")
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
    if "," in function:
        raise InputError(f"`--net` must name one net, but got {function!r}: several make a cascade, `exitwise cascade`")
    net = call_function(function)
    if not isinstance(net, MultiExitNet):
        kind = type(net).__name__
        raise InputError(
            f"`--net` {function} must return a MultiExitNet, but returned a {kind}: use exitwise.attach or a cascade"
        )
    return net


def rebuild_net(run: Run, function: str | None) -> MultiExitNet:
    """Rebuild the untrained net of a run from its preset or, for a net of the user's own, with `function`."""
    return net_builder(run, function)()


def net_builder(run: Run, function: str | None) -> Callable[[], MultiExitNet]:
    """Return the function that rebuilds the untrained net of a run; it can be sent to another process."""
    spec = run.metadata["model"]
    if "preset" in spec or "cascade" in spec or "module" in spec:
        if function is not None:
            name = repr(spec.get("preset") or spec.get("module") or "a cascade of presets")
            raise InputError(f"{run.directory} has the net {name}: --net is for other nets")
        return partial(models.rebuild, spec)
    if function is None:
        example = " --net ".join(str(spec.get("net") or "package.module:function").split(","))
        raise InputError(f"{run.directory} has a net of its own: give --net {example} again")
    if "cascade" not in run.metadata:
        return partial(import_net, function)
    names, preprocessing = function.split(","), run_preprocessing(run)
    return partial(rebuild_member_cascade, names, run.metadata["cascade"], preprocessing)


def load_run_net(run: Run, function: str | None) -> MultiExitNet:
    """Load the net of a run with its weights, in evaluation mode."""
    if not run.net_file.is_file():
        raise InputError(f"{run.directory} has no net.safetensors")
    net = load_checkpoint(rebuild_net(run, function), run.net_file).eval()
    net.base_sha256 = read_base_hash(run.net_file)
    return net
