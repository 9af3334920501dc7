"""Runs stages and calibrated exits in torch: the classifier's backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exitwise.core import nested
from exitwise.core.costs import Costs
from exitwise.core.errors import NET_ERRORS, InputError, first_line
from exitwise.core.memory import ALIGNMENT
from exitwise.core.predictions import Array, ExitPrediction
from exitwise.core.preprocessing import Preprocessing
from exitwise.models.net import MultiExitNet


@dataclass(frozen=True, eq=False)
class StageState:
    """What is carried from stage to stage for the samples that have not left."""

    state: Any
    memory: Tensor | None = None


class SharedEvalMode:
    """The net's modules in evaluation mode while anyone is inside; the last who leaves puts their own modes back."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._modules = tuple(net.modules())
        self._lock = Lock()
        self._inside = 0
        self._training: list[nn.Module] = []

    def __reduce__(self) -> tuple[type["SharedEvalMode"], tuple[nn.Module]]:
        return SharedEvalMode, (self._net,)  # a copy has a lock of its own

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._training = [module for module in self._modules if module.training]
                for module in self._training:
                    module.training = False
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for module in self._training:
                    module.training = True


class TorchBackend:
    """Runs a net's stages and calibrated exits, for the engine; one for each call."""

    def __init__(
        self,
        net: MultiExitNet,
        exits: nn.ModuleList,
        evaluating: SharedEvalMode,
        preprocessing: Preprocessing | None,
        costs_of: Callable[[Any], Costs],
        channels_last: bool,
    ) -> None:
        self._net, self._exits, self._evaluating = net, exits, evaluating
        self._preprocessing, self._costs_of, self._channels_last = preprocessing, costs_of, channels_last
        parameter = next(net.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._costs: Sequence[float] = ()
        self._kind = ""  # of the images, for what there may be to say about them

    @property
    def num_exits(self) -> int:
        return len(self._exits)

    @property
    def num_classes(self) -> int:
        return self._net.num_classes

    @property
    def costs(self) -> Sequence[float]:
        return self._costs

    @torch.inference_mode()
    def start(self, images: Any) -> StageState:
        state = nested.map_tensors(self._ready, _tensor(images))
        nested.num_samples(state, "`images`")
        self._kind = nested.describe(nested.map_tensors(lambda tensor: tensor[0] if len(tensor) else tensor, state))
        if not self._costs:
            self._costs = self._costs_of(state).values
        return StageState(state)

    def _ready(self, images: Tensor) -> Tensor:
        images = images.to(self._device)
        if images.dtype == torch.uint8:
            known = _known(self._preprocessing)
            shift, scale = (torch.as_tensor(values, device=self._device) for values in (known.shift, known.scale))
            images = torch.addcmul(shift, images.float(), scale)
        if images.is_floating_point():
            images = images.to(self._dtype)
        if self._channels_last and images.dim() == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        # An array starts anywhere, a slice of a batch too: from memory of our own, equal images give equal answers.
        return images.clone() if images.data_ptr() % ALIGNMENT else images

    def stack(self, images: Sequence[Any]) -> Any:
        return nested.map_tensors(lambda *tensors: torch.stack(tensors), *map(_tensor, images))

    def describe(self, image: Any) -> str:
        image, known = _tensor(image), self._preprocessing
        found = list(nested.iter_tensors(image))
        if not found:
            raise InputError(f"an image must be a tensor or an array, but is a {type(image).__name__}")
        if known is not None and tuple(found[0].shape) != known.shape:
            raise InputError(f"an image must have shape {known.shape}, but has {tuple(found[0].shape)}")
        if any(tensor.dtype == torch.uint8 for tensor in found):
            _known(known)
        return nested.describe(image)

    def check(self, image: Any) -> None:
        live = self.start(self.stack([image]))
        for exit in range(self.num_exits):
            live, _ = self.run(exit, live)

    @torch.inference_mode()
    def run(self, exit: int, live: StageState) -> tuple[StageState, ExitPrediction]:
        with self._evaluating:
            try:
                state = self._net.stages[exit](live.state)
                said = self._exits[exit](self._net.exits[exit].features(state), live.memory)
            except NET_ERRORS as error:
                reason = first_line(error)
                raise InputError(f"the net cannot take images of {self._kind}: {reason}") from None
        probs = said.probs.float().cpu().numpy()
        variance = None if said.variance is None else said.variance.float().cpu().numpy()
        return StageState(state, said.memory), ExitPrediction.from_probs(probs, variance)

    @torch.inference_mode()
    def take(self, live: StageState, rows: Array) -> StageState:
        where = torch.from_numpy(rows).to(self._device)
        state = nested.map_tensors(lambda tensor: _select(tensor, where), live.state)
        return StageState(state, None if live.memory is None else _select(live.memory, where))

    def compact(self, live: StageState, gone: Array) -> tuple[StageState, Array]:
        """In place would be quicker, but a stage may hand its input on, and hooks may hold what it made."""
        rows = np.flatnonzero(~gone)
        return self.take(live, rows), rows

    @torch.inference_mode()
    def join(self, lives: Sequence[StageState]) -> StageState:
        state = nested.map_tensors(lambda *tensors: torch.cat(tensors), *(live.state for live in lives))
        memories = [live.memory for live in lives if live.memory is not None]
        return StageState(state, torch.cat(memories) if memories else None)

    def length(self, live: StageState) -> int:
        return nested.num_samples(live.state)


def _select(tensor: Tensor, where: Tensor) -> Tensor:
    """Some samples, in the same memory format; half again as fast as `tensor[where]`."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).index_select(0, where).permute(0, 3, 1, 2)
    return tensor.index_select(0, where)


def _tensor(images: Any) -> Any:
    """Arrays as tensors, whatever their strides and their byte order."""
    if isinstance(images, Mapping):
        return {name: _tensor(part) for name, part in images.items()}
    if type(images) in (list, tuple):
        return type(images)(map(_tensor, images))
    if not isinstance(images, np.ndarray):
        return images
    try:
        plain = images.astype(images.dtype.newbyteorder("="), order="C", copy=not images.flags.writeable)
        return torch.from_numpy(plain if plain.flags.c_contiguous else plain.copy())
    except TypeError:
        raise InputError(f"an image must hold numbers, but holds {images.dtype}") from None


def _known(preprocessing: Preprocessing | None) -> Preprocessing:
    if preprocessing is None:
        raise InputError("bytes must be normalised first: give the Classifier a `preprocessing`, or floats")
    return preprocessing
