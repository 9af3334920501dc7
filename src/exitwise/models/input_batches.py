"""Batches of inputs and labels, checked before a net runs on them."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from exitwise.core import distributed
from exitwise.core.errors import InputError
from exitwise.core.nested import iter_tensors, map_tensors, num_samples
from exitwise.models.net import MultiExitNet

# (images, labels), or (images, labels, positions in the dataset)
Batch = Sequence[Tensor]

# Called with the name of the split, the number of samples done, and their total number or None if it is unknown.
Progress = Callable[[str, int, int | None], None]


def validated_batches(
    net: MultiExitNet, loader: Iterable[Batch], name: str, progress: Progress | None, start: int = 0
) -> Any:
    """Yield (inputs, labels, index or None) of every batch of this rank's shard, inputs on the net's device.

    `name` is the argument that `loader` was given as, for messages, and `start` the number of its first
    sample there. `progress` is called after every batch.
    """
    device = next(net.parameters()).device
    total = _dataset_size(loader)
    done = 0
    for batch in distributed.shard_batches(loader):
        if not isinstance(batch, list | tuple) or len(batch) not in (2, 3):
            raise InputError(
                f"`{name}` must give (images, labels) or (images, labels, index), but gave {type(batch).__name__}"
            )
        is_nested = isinstance(batch[0], Mapping | list | tuple) and any(True for _ in iter_tensors(batch[0]))
        inputs = batch[0] if is_nested else torch.as_tensor(batch[0])
        labels = torch.as_tensor(batch[1]).cpu()
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise InputError(f"`{name}` must give whole numbers as labels, but gave {labels.dtype}")
        labels = labels.long()
        num_inputs = num_samples(inputs, f"a batch of `{name}`")
        if labels.dim() != 1 or num_inputs != len(labels):
            raise InputError(
                f"`{name}` must give one label per image, but gave {num_inputs} and labels {tuple(labels.shape)}"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < net.num_classes:
            raise InputError(
                f"`{name}` has a label {int(labels.min())} to {int(labels.max())} outside the net's "
                f"{net.num_classes} classes, at sample {start + done} or later"
            )
        index = torch.as_tensor(batch[2]).cpu().long() if len(batch) == 3 else None
        yield map_tensors(lambda tensor: tensor.to(device), inputs), labels, index
        done += len(labels)
        if progress:
            progress(name, min(done * distributed.world_size(), total or done), total)
    if not distributed.all_reduce_sum(torch.tensor(done)):
        raise InputError(f"`{name}` gave no samples")


def _dataset_size(loader: Iterable[Batch]) -> int | None:
    dataset = getattr(loader, "dataset", None)
    return len(dataset) if isinstance(dataset, Sized) else None
