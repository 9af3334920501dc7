"""Networks of timm, torchvision and Hugging Face in runs: built for the classes of a dataset, with exits attached."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from exitwise import data, models
from exitwise.core.errors import InputError
from exitwise.core.seeds import temporary_seed
from exitwise.models.attach.attach import attach_named, split_classifier
from exitwise.models.named.build import PRETRAINED
from exitwise.models.named.module import NamedModule
from exitwise.models.named.weight_hash import hash_weights
from exitwise.models.net import MultiExitNet
from exitwise.runs.attached import choose_cuts
from exitwise.runs.options import AttachOptions, DataOptions

DEFAULT_EXITS = 4


def build_named_for(name: str, source: DataOptions, attached: AttachOptions, seed: int) -> NamedModule:
    """Build a network by name for the classes of a dataset, before any time is spent on its images.

    Args:
        name: Name with the prefix of its library, such as "timm:resnet50".
        source: The dataset, whose image size wins over the network's own.
        attached: The file of weights, and whether the last layer is trained, which may then have other classes.
        seed: Seed of a new last layer.
    """
    if attached.last and attached.attach == "best":
        raise InputError("--attach best compares cuts by the last layer, but --last trains it: give auto or names")
    dataset = data.get_dataset(str(source.data))
    images, _ = data.load(str(source.data), source.root, skip_unreadable=False, fetch=source.download)
    size = dataset.size or source.image_size
    weights = PRETRAINED if attached.weights is None else attached.weights
    with temporary_seed(seed):
        if attached.weights is None and not attached.last:
            named = models.build_named(name, weights=weights, image_size=size)
            _check_classes(named, len(images.classes))
        else:
            named = models.build_named(name, len(images.classes), weights, size)
    if named.preprocessing is None:
        raise InputError(f"{name} is a network on text, but --data holds images: attach exits to it from Python")
    return named


def attach_to_named(named: NamedModule, attached: AttachOptions, splits: data.Splits[Any], seed: int) -> MultiExitNet:
    """Attach exits to a network by name; its last layer gets the order of the dataset's classes.

    Args:
        named: The network.
        attached: Where exits are attached, and their heads. A last layer that is trained learns the dataset's order.
        splits: The images.
        seed: Seed of the new heads.
    """
    attached = replace(attached, attach=attached.attach or "auto")
    if attached.attach in ("auto", "best"):
        attached = replace(attached, exits=attached.exits or DEFAULT_EXITS)
    order = None
    if named.classes is not None and not attached.last:
        order = _order_of_rows([_fold(name) for name in named.classes], [_fold(name) for name in splits.train.classes])
    with temporary_seed(seed):
        if attached.attach == "best" and order is not None:  # the accuracy of the last exit counts, too
            named, order = _reorder_module(named, order), None
        at, exits = choose_cuts(named.module, attached, splits, named.example, seed)
        net = attach_named(named, at, attached.head or "mlp", exits=exits)
    if order is not None:
        _reorder_rows(net.exits[-1].last, order)
    return net


def _check_classes(named: NamedModule, num_classes: int) -> None:
    if named.num_classes != num_classes:
        raise InputError(
            f"{named.name} has {named.num_classes} classes, but the data have {num_classes}: give weights that were "
            f"trained on these classes with --weights, or train a new last layer with --last"
        )


def _order_of_rows(own: list[str], wanted: list[str]) -> Tensor | None:
    """Return the row of each wanted class if the network names the same classes in another order, None otherwise."""
    if own == wanted or sorted(own) != sorted(wanted) or len(set(own)) < len(own):
        return None
    return torch.tensor([own.index(name) for name in wanted])


def _reorder_module(named: NamedModule, rows: Tensor) -> NamedModule:
    """Reorder the rows of the module's own last layer."""
    _, last = split_classifier(named.module, named.example)
    if not any(weight is last.weight for weight in named.module.parameters()):
        raise InputError(
            f"{named.name} has its classes in another order than the data, and a last layer that --attach best cannot "
            f"reorder: give --attach auto, or names"
        )
    _reorder_rows(last, rows)
    return replace(named, sha256=None if named.sha256 is None else hash_weights(named.module))


def _reorder_rows(last: nn.Linear, rows: Tensor) -> None:
    with torch.no_grad():
        last.weight.copy_(last.weight[rows])
        if last.bias is not None:
            last.bias.copy_(last.bias[rows])


def _fold(name: str) -> str:
    return name.casefold().replace("_", " ").strip()
