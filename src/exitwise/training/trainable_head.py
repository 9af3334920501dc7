"""One head under training: a fixed prefix, whose outputs can be cached, and a trainable part."""

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

# A head counts as untrained unless its accuracy exceeds the majority class's share by this many standard deviations.
_TRAINED_DEVIATIONS = 3.0
# Lower limit of a feature's deviation, relative to the mean one: features that hardly vary are not amplified.
_MIN_RELATIVE_DEVIATION = 0.1


class TrainableHead:
    """A head, and a copy of its trainable part on which the optimizer works.

    Where the copy begins with a linear layer, it reads standardized features (mean 0, deviation 1), so that one
    learning rate suits any backbone. `sync` converts its weights to those for the features themselves.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._parts: tuple[nn.Sequential, nn.Sequential] | None = None  # prefix and trainable part
        self._copy = nn.Sequential()
        self._moments: tuple[Tensor, Tensor] | None = None  # mean and deviation of the features (p,)
        self.best_nlpd, self.best_epoch = float("inf"), 0
        self._best_weights = _copy_weights(head)

    def precompute(self, state: Any) -> Any:
        """Return the input of the trainable part. The first call finds where that part begins."""
        if self._parts is None:
            self._parts = split_head(self._head, state)
        return self._parts[0](state)

    @property
    def _trainable(self) -> nn.Sequential:
        assert self._parts is not None, "`precompute` must be called first"
        return self._parts[1]

    @torch.no_grad()
    def start(self, inputs: Any, labels: Tensor) -> list[nn.Parameter]:
        """Create the trainable copy and return its parameters.

        Args:
            inputs: What `precompute` returned for some samples: gives the feature statistics.
            labels: Their labels (n,). They show whether the head is untrained; its linear layers are then reset.
        """
        self._copy = copy.deepcopy(self._trainable).requires_grad_(True).train()
        first = self._copy[0]
        if _is_linear(first) and inputs.dim() == 2:
            mean = torch.zeros_like(inputs[0]) if first.bias is None else inputs.mean(0)
            deviation = (inputs - mean).square().mean(0).sqrt()
            deviation = deviation.clamp_min(max(_MIN_RELATIVE_DEVIATION * float(deviation.mean()), 1e-12))
            self._moments = mean, deviation
            if _beats_majority_class(self.head_logits(inputs), labels):  # continue from these weights
                if first.bias is not None:
                    first.bias.add_(first.weight @ mean)
                first.weight.mul_(deviation)
            else:  # the scale of untrained weights need not suit standardized features
                for layer in filter(_is_linear, self._copy.modules()):
                    layer.reset_parameters()
        return list(self._copy.parameters())

    def logits(self, inputs: Any) -> Tensor:
        """Return logits (n, c) of the copy, in training mode."""
        if self._moments is not None:
            mean, deviation = self._moments
            inputs = (inputs - mean) / deviation
        logits: Tensor = self._copy(inputs)
        return logits

    @torch.no_grad()
    def sync(self) -> None:
        """Write the copy's weights to the head."""
        self._trainable.load_state_dict(self._copy.state_dict())
        first = self._trainable[0]
        if self._moments is not None and isinstance(first, nn.Linear):
            mean, deviation = self._moments
            first.weight.div_(deviation)
            if first.bias is not None:
                first.bias.sub_(first.weight @ mean)

    @torch.no_grad()
    def head_logits(self, inputs: Any) -> Tensor:
        """Return logits (n, c) of the head itself, in evaluation mode."""
        logits: Tensor = self._trainable.eval()(inputs)
        return logits

    def keep_if_best(self, nlpd: float, epoch: int) -> bool:
        """Remember the head's weights if its validation NLPD is the lowest so far; return whether it is."""
        if nlpd >= self.best_nlpd:
            return False
        self.best_nlpd, self.best_epoch, self._best_weights = nlpd, epoch, _copy_weights(self._head)
        return True

    def restore_best(self) -> None:
        """Load the best weights into the head, or the initial ones if no epoch was finished."""
        self._head.load_state_dict(self._best_weights)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is an ordinary linear layer: no subclass with its own forward, no parametrization."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and isinstance(module.weight, nn.Parameter)
    )


def _beats_majority_class(logits: Tensor, labels: Tensor) -> bool:
    """Return whether logits are correct significantly more often than the most frequent label."""
    share = float(labels.bincount().max()) / len(labels)
    accuracy = float((logits.argmax(1) == labels).double().mean())
    return accuracy > share + _TRAINED_DEVIATIONS * sqrt(share * (1 - share) / len(labels))


def split_head(head: Head, state: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """Split a head before its first module that has parameters or buffers or behaves differently in training mode.

    Args:
        head: A head of a net.
        state: A batch of its inputs, to compare each module's outputs in both modes.

    Returns:
        The modules before that one and those from it on, both in evaluation mode.
    """
    modules = list(_iter_modules(head))
    split = 0
    with torch.no_grad():
        while not any(True for _ in chain(modules[split].parameters(), modules[split].buffers())):
            outputs = [modules[split].train(mode)(map_tensors(Tensor.clone, state)) for mode in (True, False)]
            if not all(torch.equal(*pair) for pair in zip(*map(iter_tensors, outputs), strict=True)):
                break
            state = outputs[1]
            split += 1
    return nn.Sequential(*modules[:split]).eval(), nn.Sequential(*modules[split:]).eval()


def _iter_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a module runs one after the other."""
    if type(module) is Head:
        yield from _iter_modules(module.neck)
        yield module.last
    elif type(module) is Neck:
        yield module[:0]  # an empty Neck: selects the coarsest scale
        yield from chain.from_iterable(map(_iter_modules, module))
    elif type(module).forward is nn.Sequential.forward:
        yield from chain.from_iterable(map(_iter_modules, module.children()))
    else:
        yield module


def _copy_weights(head: Head) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in head.state_dict().items()}
