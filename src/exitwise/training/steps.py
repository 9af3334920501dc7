"""Steps of a training: gradients of a batch, an optimizer step, and accuracy on validation samples."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exitwise.core import distributed
from exitwise.core.errors import AllRanksError, InputError, first_line
from exitwise.data.batches import MicroBatches
from exitwise.models.net import MultiExitNet
from exitwise.training.joint import ScaledGradients, exit_loss, make_teacher, parameter_groups
from exitwise.training.recipes import Recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric


class TrainingSteps:
    """Optimizer steps and validation of one rank.

    Args:
        net: The net to train, in place.
        recipe: Losses and optimizer.
        fabric: Launched Fabric: devices, ranks, precision.
        compile: Use torch.compile.
    """

    def __init__(self, net: MultiExitNet, recipe: Recipe, fabric: "Fabric", compile: bool) -> None:
        self._net, self._recipe, self._fabric, self._compile = net, recipe, fabric, compile
        self._has_run = False  # whether a forward pass of the net has succeeded
        self._teacher: Callable[[Any], Tensor] | None = None
        fast = compile or fabric.device.type == "cuda"  # on a CPU, channels-last without compiling is slower
        self._memory_format = torch.channels_last if fast else torch.contiguous_format
        if fast:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._optimizer = torch.optim.SGD(
            parameter_groups(net, recipe),
            lr=recipe.lr,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov and recipe.momentum > 0,
            weight_decay=recipe.weight_decay,
            fused=fabric.device.type in ("cpu", "cuda"),
        )
        module: nn.Module = ScaledGradients(net) if recipe.scale_gradients else net
        module = torch.compile(module) if compile else module  # type: ignore[assignment]
        self.module, self._fabric_optimizer = fabric.setup(module, self._optimizer)

    def set_teacher(self, net: MultiExitNet) -> None:
        """Distill from the last exit of a net from now on."""
        self._teacher = make_teacher(net, self._compile)

    # -- the optimizer

    def set_lr(self, lr: float) -> None:
        """Set the learning rate; each group of parameters has its own factor."""
        for group in self._optimizer.param_groups:
            group["lr"] = group["relative_lr"] * lr

    def momentum(self) -> dict[str, Tensor]:
        """Return the momentum by the name of its parameter, of those that have been updated."""
        states = {name: self._optimizer.state[parameter] for name, parameter in self._net.named_parameters()}
        buffers = {name: state.get("momentum_buffer") for name, state in states.items()}
        return {name: buffer for name, buffer in buffers.items() if buffer is not None}

    def load_momentum(self, momentum: Mapping[str, Tensor]) -> None:
        """Load what `momentum` returned."""
        for name, parameter in self._net.named_parameters():
            if name in momentum:
                buffer = torch.empty_like(parameter, requires_grad=False).copy_(momentum[name])
                self._optimizer.state[parameter]["momentum_buffer"] = buffer

    # -- a step

    def compute_gradients(self, micro_batches: MicroBatches) -> Tensor:
        """Compute the gradients of a batch; return its loss on this rank, a float64 scalar."""
        self._fabric_optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64)
        for count, (images, labels) in enumerate(micro_batches, start=1):
            images = self._fabric.to_device(images)
            if images.dim() == 4:
                images = images.contiguous(memory_format=self._memory_format)
            with self._fabric.no_backward_sync(self.module, enabled=count < len(micro_batches)):
                logits, labels = self._compute_logits(images), self._check_labels(labels, "train")
                part = self._sum_losses(logits, labels, self._compute_teacher_logits(images)) / len(micro_batches)
                self._fabric.backward(part)
            loss += part.detach().double().cpu()
        return loss

    def update(self) -> None:
        """Update the net with the gradients."""
        self._fabric_optimizer.step()

    def _compute_logits(self, images: Tensor) -> list[Tensor]:
        """Return the exits' logits; raise InputError if the first batch shows that the net cannot take such images."""
        try:
            logits: list[Tensor] = self.module(images)
        except (RuntimeError, ValueError) as error:
            if self._has_run:
                raise
            reason = first_line(error)
            shape = tuple(images.shape[1:])
            raise AllRanksError(f"the net cannot be trained on images of shape {shape}: {reason}") from None
        self._has_run = True
        return logits

    def _check_labels(self, labels: Tensor, name: str) -> Tensor:
        """Return labels on the net's device; raise InputError if the net has no such class."""
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self._net.num_classes:
            found = f"{int(labels.min())} to {int(labels.max())}"
            raise InputError(f"`{name}` must have labels 0 to {self._net.num_classes - 1}, but has some from {found}")
        moved: Tensor = self._fabric.to_device(labels)
        return moved

    def _compute_teacher_logits(self, images: Tensor) -> Tensor | None:
        """Return the logits of the net before the training, None without distillation."""
        if self._teacher is None:
            return None
        with self._fabric.autocast():
            return self._teacher(images)

    def _sum_losses(self, logits: list[Tensor], labels: Tensor, teacher_logits: Tensor | None = None) -> Tensor:
        """Return the sum of the exits' losses; without a teacher's logits, of their cross-entropies."""
        losses = [exit_loss(exit_logits.float(), labels, teacher_logits, self._recipe) for exit_logits in logits]
        return torch.stack(losses).sum()

    # -- validation

    def validate(self, val: Iterable[Any], after_batch: Callable[[], None]) -> tuple[tuple[float, ...], float]:
        """Return the top-1 accuracy of every exit and the mean of the summed losses over all ranks' samples.

        Args:
            val: Batches (images, labels), the same on every rank.
            after_batch: Called after every batch of this rank.
        """
        exits = len(self._net.exits)
        sums = torch.zeros(exits + 2, dtype=torch.float64)  # correct predictions per exit, loss, samples
        self._net.eval()
        with torch.inference_mode(), self._fabric.autocast():
            for images, labels, *_ in distributed.shard_batches(val):
                images, labels = self._fabric.to_device(images), self._check_labels(labels, "val")
                logits = self._net(images)
                correct = torch.stack([(exit_logits.argmax(1) == labels).sum() for exit_logits in logits])
                loss = self._sum_losses(logits, labels) * len(labels)
                sums += torch.cat([correct.double(), loss[None].double(), correct.new_tensor([len(labels)])]).cpu()
                after_batch()
        sums = distributed.all_reduce_sum(sums)
        samples = float(sums[-1])
        if not samples:
            raise InputError("`val` gave no samples")
        return tuple((sums[:exits] / samples).tolist()), float(sums[exits]) / samples
