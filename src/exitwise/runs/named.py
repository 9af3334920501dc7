"""Networks of timm, torchvision and Hugging Face in runs: built for the classes of a dataset, with exits attached."""

import torch

from exitwise import data, models
from exitwise.core.errors import InputError
from exitwise.core.seeds import temporary_seed
from exitwise.data.images import ImageDataset
from exitwise.models.attach.attach import attach_named
from exitwise.models.named.build import PRETRAINED
from exitwise.models.named.module import NamedModule
from exitwise.models.net import MultiExitNet
from exitwise.runs.options import DataOptions, HeadTrainOptions

DEFAULT_EXITS = 4


def build_named_for(name: str, source: DataOptions, options: HeadTrainOptions, seed: int) -> NamedModule:
    """Build a network by name for the classes of a dataset, before any time is spent on its images.

    Args:
        name: Name with the prefix of its library, such as "timm:resnet50".
        source: The dataset, whose image size wins over the network's own.
        options: The file of weights, and whether the last layer is trained.
        seed: Seed of a new last layer.
    """
    dataset = data.get_dataset(str(source.data))
    images, _ = data.load(str(source.data), source.root, skip_unreadable=False, fetch=source.download)
    size = dataset.size or source.image_size
    weights = PRETRAINED if options.weights is None else options.weights
    with temporary_seed(seed):
        if options.weights is None and not options.last:
            named = models.build_named(name, weights=weights, image_size=size)
            _check_classes(named, len(images.classes))
        else:
            named = models.build_named(name, len(images.classes), weights, size)
    if named.preprocessing is None:
        raise InputError(f"{name} is a network on text, but --data holds images: attach exits to it from Python")
    return named


def attach_to_named(named: NamedModule, images: ImageDataset, options: HeadTrainOptions, seed: int) -> MultiExitNet:
    """Attach exits to a network by name; its last layer gets the order of the dataset's classes.

    Args:
        named: The network.
        images: The training images.
        options: Where exits are attached.
        seed: Seed of the new heads.
    """
    is_auto = options.attach in (None, "auto")
    at = "auto" if is_auto else str(options.attach).split(",")
    exits = options.exits if options.exits is not None or not is_auto else DEFAULT_EXITS
    with temporary_seed(seed):
        net = attach_named(named, at, exits=exits)
    if named.classes is not None and not options.last:
        _reorder_classes(net, [_fold(name) for name in named.classes], [_fold(name) for name in images.classes])
    return net


def _check_classes(named: NamedModule, num_classes: int) -> None:
    if named.num_classes != num_classes:
        raise InputError(
            f"{named.name} has {named.num_classes} classes, but the data have {num_classes}: give weights that were "
            f"trained on these classes with --weights, or train a new last layer with --last"
        )


def _reorder_classes(net: MultiExitNet, own: list[str], wanted: list[str]) -> None:
    """Reorder the rows of the last layer if the network names the same classes in another order."""
    if own == wanted or sorted(own) != sorted(wanted) or len(set(own)) < len(own):
        return
    rows = torch.tensor([own.index(name) for name in wanted])
    last = net.exits[-1].last
    with torch.no_grad():
        last.weight.copy_(last.weight[rows])
        if last.bias is not None:
            last.bias.copy_(last.bias[rows])


def _fold(name: str) -> str:
    return name.casefold().replace("_", " ").strip()
