"""Networks of runs with exits attached: built, loaded with their weights, and cut as the options say."""

import sys
from typing import Any

import torch
from torch import nn

from exitwise import data
from exitwise.core.errors import InputError
from exitwise.core.rank import is_rank_zero
from exitwise.core.seeds import temporary_seed
from exitwise.evaluation.best_cuts import best_cuts
from exitwise.models.attach.attach import attach
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import load_checkpoint
from exitwise.runs.leaks import last_exit_accuracy, warn_of_accuracies
from exitwise.runs.nets import build_net
from exitwise.runs.options import AttachOptions, NetOptions

CHOICES = ("auto", "stages", "best")  # values of --attach that choose the cuts


def check_attach_options(net: NetOptions, attached: AttachOptions, is_named: bool = False) -> None:
    """Raise `InputError` for options that do not go together, before any data are read.

    Args:
        net: The network.
        attached: The exits.
        is_named: Whether it is a network of another library, which has defaults for the exits.
    """
    if is_named and attached.attach is None:
        return
    if attached.attach is not None and net.function is not None:
        raise InputError("--attach is for nets by name: let the function of --net return exitwise.attach(...)")
    if attached.attach == "stages" and not is_named:
        raise InputError("--attach stages is for networks of timm, such as --model timm:resnet50")
    if attached.exits is not None and attached.attach not in CHOICES:
        raise InputError(f"--exits is for --attach {', '.join(CHOICES[:-1])} and {CHOICES[-1]}")
    if attached.exits is None and attached.attach in ("auto", "best") and not is_named:
        raise InputError(f"--attach {attached.attach} needs the number of exits: give --exits")
    if attached.head is not None and attached.attach is None:
        raise InputError("--head is for exits that are attached: give --attach as well")


def build_attached_net(
    preset: str | None, net_options: NetOptions, attached: AttachOptions, splits: data.Splits[Any], seed: int
) -> MultiExitNet:
    """Build a net, load its weights and attach exits to it, each if the options say so; new heads are untrained."""
    shape = splits.train.shape
    with temporary_seed(seed):
        net = build_net(preset, net_options.function, shape, len(splits.train.classes))
    if attached.weights is not None:
        load_checkpoint(net, attached.weights)
    if attached.attach is None:
        return net
    with temporary_seed(seed):
        example = torch.rand(1, *shape)
        at, exits = choose_cuts(net.eval(), attached, splits, example, seed)
        return attach(net, at, head=attached.head or "mlp", exits=exits, example_inputs=example)


def choose_cuts(
    module: nn.Module, attached: AttachOptions, splits: data.Splits[Any], example: Any, seed: int
) -> tuple[str | list[str], int | None]:
    """Return where to attach exits to a trained module, and how many, as `attach` takes them; print the best cuts.

    Args:
        module: The module in evaluation mode.
        attached: The exits: auto, stages or best with their number, or names joined by commas.
        splits: The images on which cuts are compared.
        example: Inputs of the module for at least one sample.
        seed: Seed of the comparison.
    """
    at = str(attached.attach)
    if at in ("auto", "stages"):
        return at, attached.exits
    if at != "best":
        return at.split(","), attached.exits
    cuts = best_cuts(module, splits.train, splits.val, exits=attached.exits or 0, example_inputs=example, seed=seed)
    if is_rank_zero():
        print(cuts, file=sys.stderr)
    return list(cuts.names), None


def warn_of_last_exit(net: MultiExitNet, splits: data.Splits[Any]) -> None:
    """Warn if the accuracies of a trained last exit show that it knows held-out images, or does not fit the data."""
    parts: dict[str, Any] = {"validation": splits.val, "test": splits.test, "training": splits.train}
    accuracies = [last_exit_accuracy(net, images, name) for name, images in parts.items()]
    warn_of_accuracies(accuracies, net.num_classes)
