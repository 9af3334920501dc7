"""Stages of a cascade: its state carries the cascade's input, which every member converts for itself."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exitwise.core.predictions import Array
from exitwise.core.preprocessing import Preprocessing

IMAGE, STATE = "image", "state"  # keys of the stage state: the cascade's input, and the state of the running member


class MemberInput(nn.Module):
    """Conversion of a cascade's input to the size and the normalization of one member.

    Resizing is a product with a matrix for each side, with the weights of Pillow's bilinear filter, so that torch and
    ONNX compute the same.

    Args:
        given: Preprocessing of the cascade's input.
        wanted: Preprocessing of the member's input, with as many channels.
    """

    weights: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, given: Preprocessing, wanted: Preprocessing) -> None:
        super().__init__()
        self.given, self.wanted = given, wanted
        self.resizes = given.size != wanted.size
        self.normalizes = (given.mean, given.std) != (wanted.mean, wanted.std)
        scale, shift = (
            np.array(values, dtype=np.float32)[:, None, None]
            for values in zip(*(_rescale(given, wanted, i) for i in range(len(given.mean))), strict=True)
        )
        tensors = {"weights": resize_weights(given.size, wanted.size), "scale": scale, "shift": shift}
        for name, values in tensors.items():
            self.register_buffer(name, torch.from_numpy(values), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if self.resizes:
            weights = self.weights.to(images.dtype)
            images = weights @ (images @ weights.T)
        if self.normalizes:
            images = images * self.scale.to(images.dtype) + self.shift.to(images.dtype)
        return images

    def macs(self, inputs: tuple[Any, ...], output: Tensor) -> int:
        given, wanted, channels = self.given.size, self.wanted.size, len(self.given.mean)
        resizing = channels * wanted * given * (given + wanted) if self.resizes else 0
        return resizing + (output.numel() // len(output) if self.normalizes else 0)


def _rescale(given: Preprocessing, wanted: Preprocessing, channel: int) -> tuple[float, float]:
    """Return scale and shift of one channel from one normalization to the other."""
    std = wanted.std[channel]
    return given.std[channel] / std, (given.mean[channel] - wanted.mean[channel]) / std


def resize_weights(given: int, wanted: int) -> Array:
    """Return the weights (wanted, given) of bilinear resizing along one side, smoothed where the side gets shorter."""
    scale = given / wanted
    centers = (np.arange(wanted) + 0.5)[:, None] * scale
    distances = np.abs(np.arange(given) + 0.5 - centers) / max(scale, 1.0)
    if scale < 1:  # beyond the border, the outermost pixel continues
        distances = np.abs(np.arange(given) + 0.5 - np.clip(centers, 0.5, given - 0.5))
    weights = np.maximum(1 - distances, 0)
    normalized: Array = weights / weights.sum(axis=1, keepdims=True)
    return normalized.astype(np.float32)


class CascadeStage(nn.Module):
    """Stage of a member in a cascade.

    Args:
        stage: The member's own stage.
        is_start: Whether the stage is the first of its member, and so reads the cascade's input.
        is_first: Whether its member is the first, so that the input is not in a state yet.
        is_last: Whether its member is the last, so that the input is not needed any more.
        convert: Conversion of the cascade's input for the member, if it needs one.
    """

    def __init__(
        self, stage: nn.Module, is_start: bool, is_first: bool, is_last: bool, convert: MemberInput | None
    ) -> None:
        super().__init__()
        self.stage, self.convert = stage, convert
        self.is_start, self.is_first, self.is_last = is_start, is_first, is_last

    def forward(self, state: Any) -> Any:
        if self.is_start:
            image = state if self.is_first else state[IMAGE]
            output = self.stage(image if self.convert is None else self.convert(image))
        elif self.is_last:
            return self.stage(state)
        else:
            image, output = state[IMAGE], self.stage(state[STATE])
        return output if self.is_last else {IMAGE: image, STATE: output}


def _same_input(given: Preprocessing, wanted: Preprocessing) -> bool:
    """Return whether an input of one preprocessing is one of the other, however images of other sizes are scaled."""
    return (given.size, given.mean, given.std) == (wanted.size, wanted.mean, wanted.std)


def make_conversion(given: Preprocessing | None, wanted: Preprocessing | None) -> MemberInput | None:
    """Return the conversion from one preprocessing to the other, None if none is needed or one is not known."""
    if given is None or wanted is None or _same_input(given, wanted):
        return None
    return MemberInput(given, wanted)
