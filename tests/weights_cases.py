"""State dicts that are filled, compared and refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import exitwise as ew

State = dict[str, Tensor]


def fill(net: ew.MultiExitNet, seed: int = 0) -> ew.MultiExitNet:
    """Another value in every place, batch norm's statistics included, so that no two tensors can be mistaken."""
    generator = torch.Generator().manual_seed(seed)
    for value in net.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
        else:
            value.copy_(torch.randint(1, 1000, value.shape, generator=generator))
    return net


def snapshot(net: ew.MultiExitNet) -> State:
    return {key: value.clone() for key, value in net.state_dict().items()}


def same_bits(one: State, other: State) -> bool:
    def raw(tensor: Tensor) -> bytes:
        return tensor.contiguous().numpy().tobytes()

    return list(one) == list(other) and all(
        one[key].dtype == other[key].dtype and raw(one[key]) == raw(other[key]) for key in one
    )


def refused(net: ew.MultiExitNet, path: Path) -> str:
    """The one line with which a file is refused; the net must not have changed."""
    before = snapshot(net)
    with pytest.raises(ew.InputError) as caught:
        ew.load_checkpoint(net, path)
    message = str(caught.value)
    assert same_bits(snapshot(net), before)
    assert "\n" not in message
    assert path.name in message
    return message
