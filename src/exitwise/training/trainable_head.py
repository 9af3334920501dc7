"""A head that learns alone: the part of it that can run ahead of time, and the part that learns."""

import copy
from collections.abc import Iterator
from itertools import chain
from math import sqrt
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from exitwise.core.nested import iter_tensors, map_tensors
from exitwise.models.msdnet import Neck
from exitwise.models.net import Head

_SURE = 3.0  # standard deviations above the share of the most frequent class: a head that is right no more often is new
_LEAST = 0.1  # of the mean deviation: a feature that hardly ever varies is not blown up


class TrainableHead:
    """A head, of which a copy learns and gives it its weights.

    Where the copy begins with a linear layer, it reads features brought to mean 0 and deviation 1, so that one learning
    rate suits any backbone; the head's own weights are for the features as they are.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._parts: tuple[nn.Sequential, nn.Sequential] | None = None
        self._copy = nn.Sequential()
        self._spread: tuple[Tensor, Tensor] | None = None  # mean and deviation of the features (p,)
        self.top1, self.epoch = -1.0, 0  # the best so far
        self._weights = _weights(head)

    def precompute(self, state: Any) -> Any:
        """What the part that learns reads; the first state tells which part that is."""
        if self._parts is None:
            self._parts = split_head(self._head, state)
        return self._parts[0](state)

    @property
    def _learning(self) -> nn.Sequential:
        assert self._parts is not None, "`ahead` comes first"
        return self._parts[1]

    @torch.no_grad()
    def start(self, inputs: Any, labels: Tensor) -> list[nn.Parameter]:
        """What there is to learn. Some samples tell how features are spread, and whether the head is new."""
        self._copy = copy.deepcopy(self._learning).requires_grad_(True).train()
        first = self._copy[0]
        if _linear(first) and inputs.dim() == 2:
            mean = torch.zeros_like(inputs[0]) if first.bias is None else inputs.mean(0)
            deviation = (inputs - mean).square().mean(0).sqrt()
            deviation = deviation.clamp_min(max(_LEAST * float(deviation.mean()), 1e-12))
            self._spread = mean, deviation
            if _knows(self.head_logits(inputs), labels):  # it goes on from what it is
                if first.bias is not None:
                    first.bias.add_(first.weight @ mean)
                first.weight.mul_(deviation)
            else:  # whatever scale its weights have, they are not for such features
                for part in filter(_linear, self._copy.modules()):
                    part.reset_parameters()
        return list(self._copy.parameters())

    def logits(self, inputs: Any) -> Tensor:
        """Of the copy, in training."""
        if self._spread is not None:
            mean, deviation = self._spread
            inputs = (inputs - mean) / deviation
        logits: Tensor = self._copy(inputs)
        return logits

    @torch.no_grad()
    def sync(self) -> None:
        """Give the head what its copy has learned."""
        self._learning.load_state_dict(self._copy.state_dict())
        first = self._learning[0]
        if self._spread is not None and isinstance(first, nn.Linear):
            mean, deviation = self._spread
            first.weight.div_(deviation)
            if first.bias is not None:
                first.bias.sub_(first.weight @ mean)

    @torch.no_grad()
    def head_logits(self, inputs: Any) -> Tensor:
        """Logits of the head itself, in evaluation."""
        logits: Tensor = self._learning.eval()(inputs)
        return logits

    def keep_if_best(self, top1: float, epoch: int) -> bool:
        """Whether this epoch is the best so far; if so, its weights are remembered."""
        if top1 <= self.top1:
            return False
        self.top1, self.epoch, self._weights = top1, epoch, _weights(self._head)
        return True

    def restore_best(self) -> None:
        """Put the best weights into the head, or those that it came with."""
        self._head.load_state_dict(self._weights)


def _linear(part: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer, and not one of another kind by that name."""
    return (
        isinstance(part, nn.Linear)
        and type(part).forward is nn.Linear.forward
        and isinstance(part.weight, nn.Parameter)
    )


def _knows(logits: Tensor, labels: Tensor) -> bool:
    """Whether logits are right more often than a guess would be."""
    share = float(labels.bincount().max()) / len(labels)
    right = float((logits.argmax(1) == labels).double().mean())
    return right > share + _SURE * sqrt(share * (1 - share) / len(labels))


def split_head(head: Head, state: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """A head's modules in a row, cut before the first that has weights or does something else in training.

    `state` is a batch of what the head reads, to see that by.
    """
    row = list(_row(head))
    ahead = 0
    with torch.no_grad():
        while not any(True for _ in chain(row[ahead].parameters(), row[ahead].buffers())):
            outputs = [row[ahead].train(mode)(map_tensors(Tensor.clone, state)) for mode in (True, False)]
            if not all(torch.equal(*pair) for pair in zip(*map(iter_tensors, outputs), strict=True)):
                break
            state = outputs[1]
            ahead += 1
    return nn.Sequential(*row[:ahead]).eval(), nn.Sequential(*row[ahead:]).eval()


def _row(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a module runs one after the other."""
    if type(module) is Head:
        yield from _row(module.neck)
        yield module.last
    elif type(module) is Neck:
        yield module[:0]  # picks the coarsest scale, and that is all
        yield from chain.from_iterable(map(_row, module))
    elif type(module).forward is nn.Sequential.forward:
        yield from chain.from_iterable(map(_row, module.children()))
    else:
        yield module


def _weights(head: Head) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in head.state_dict().items()}
