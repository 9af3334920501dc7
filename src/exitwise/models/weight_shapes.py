"""Shapes of weights of networks that differ in their number of classes."""

from torch import Tensor


def differs_only_in_classes(given: Tensor, expected: Tensor, num_classes: int) -> bool:
    """Return whether weights are those of a last layer (num_classes, ...) for another number of classes."""
    return given.shape != expected.shape and [num_classes, *given.shape[1:]] == list(expected.shape)
