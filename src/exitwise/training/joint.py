"""Joint training of exits that were attached to a trained module.

The module is where the training starts, the teacher of all exits, and the limit to what the last exit may lose.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from exitwise.core.errors import AllRanksError, InputError
from exitwise.core.nested import map_tensors
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import load_checkpoint
from exitwise.training.history import EpochRecord, History
from exitwise.training.recipes import Recipe

ORIGINAL_FILE = "original.safetensors"  # weights of the net before the training, in the folder of the training

_TOLERANCE = 1e-9  # of accuracies: sums of floats differ in the last bits


class Distillation(Protocol):
    """Weight and temperature of distillation."""

    @property
    def distill(self) -> float: ...
    @property
    def temperature(self) -> float: ...


def exit_loss(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None, recipe: Distillation) -> Tensor:
    """Return the loss of an exit's logits (n, c): cross-entropy, and distillation from a teacher's logits (n, c)."""
    own_loss = cross_entropy(logits, labels)
    if teacher_logits is None or not recipe.distill:
        return own_loss
    T = recipe.temperature
    student, teacher = (logits / T).log_softmax(1), (teacher_logits / T).log_softmax(1)
    divergence = kl_div(student, teacher, log_target=True, reduction="batchmean")
    return (1 - recipe.distill) * own_loss + recipe.distill * T**2 * divergence


# -- the net before the training


def needs_original(recipe: Recipe) -> bool:
    """Return whether a training compares with the net before it: as the teacher, or for the limit to a loss."""
    return recipe.distill > 0 or recipe.max_drop is not None


def load_original(net: MultiExitNet, folder: Path) -> MultiExitNet:
    """Return a copy of a net with the weights before its training, which are in the folder of the training."""
    path = folder / ORIGINAL_FILE
    if not path.is_file():
        raise AllRanksError(f"{path} is missing, so the original network is lost: start a new training run")
    return load_checkpoint(copy.deepcopy(net), path)


def make_teacher(net: MultiExitNet, compile: bool = False) -> Callable[[Any], Tensor]:
    """Freeze a net and return its last exit as a function from inputs to logits (n, c)."""
    frozen = nn.Sequential(*net.stages, net.heads[-1]).eval().requires_grad_(False)
    teacher = torch.compile(frozen) if compile else frozen

    def compute_logits(inputs: Any) -> Tensor:
        with torch.no_grad():
            logits: Tensor = teacher(inputs)
            return logits.float()

    return compute_logits


# -- steps


def parameter_groups(net: MultiExitNet, recipe: Recipe) -> list[dict[str, Any]]:
    """Return the optimizer's groups of parameters, each with its learning rate relative to the recipe's."""
    if recipe.backbone_lr == 1:
        return [{"params": list(net.parameters()), "relative_lr": 1.0}]
    new = {id(parameter) for head in net.exits[:-1] for parameter in head.parameters()}
    backbone = [parameter for parameter in net.parameters() if id(parameter) not in new]
    heads = [parameter for parameter in net.parameters() if id(parameter) in new]
    groups = [
        {"params": backbone, "relative_lr": recipe.backbone_lr},
        {"params": heads, "relative_lr": 1.0},
    ]
    return [group for group in groups if group["params"]]


class ScaledGradients(nn.Module):
    """A net of which every stage gets the mean of the gradients of the exits after it, instead of their sum.

    Where K exits follow a stage, the gradient of its own head is divided by K, and that of the next stage, itself a
    mean over K - 1 exits, is multiplied by (K - 1) / K (gradient equilibrium; Li et al., Improved Techniques for
    Training Adaptive Deep Networks, ICCV 2019). Logits and the gradients of heads are unchanged.
    """

    def __init__(self, net: MultiExitNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any) -> list[Tensor]:
        """Return the logits (n, c) of every exit."""
        logits, state = [], x
        for k, (stage, head) in enumerate(zip(self.net.stages, self.net.exits, strict=True)):
            state = stage(state)
            exits = len(self.net.exits) - k
            logits.append(head(_scale_gradient(state, 1 / exits)))
            state = _scale_gradient(state, (exits - 1) / exits)
        return logits


class _Scale(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()  # a view could not be changed in place by the next stage

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def _scale_gradient(state: Any, factor: float) -> Any:
    """Return a state with equal values; gradients that pass it are multiplied by `factor`."""
    if factor == 1:
        return state

    def scale(tensor: Tensor) -> Tensor:
        scaled: Tensor = _Scale.apply(tensor, factor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
        return scaled

    return map_tensors(scale, state)


# -- the epoch that is kept


def find_kept_epoch(rows: Sequence[EpochRecord], original_top1: float, max_drop: float) -> int:
    """Return the epoch with the best mean accuracy over the exits, from 1, of those whose last exit loses little.

    Args:
        rows: Records of the epochs that are done.
        original_top1: Accuracy of the last exit before the training.
        max_drop: Accuracy that the last exit may lose.

    Returns:
        The first of equal epochs; 0 if the last exit loses more in all of them.
    """
    kept = [row for row in rows if row.val_top1[-1] >= original_top1 - max_drop - _TOLERANCE]
    return max(kept, key=lambda row: (sum(row.val_top1), -row.epoch)).epoch if kept else 0


def describe_drop(row: EpochRecord, original_top1: float, max_drop: float) -> str:
    """Return how far the last exit fell in an epoch that is not kept, as text for messages."""
    drop = 100 * (original_top1 - row.val_top1[-1])
    return (
        f"its last exit has {100 * row.val_top1[-1]:.2f} %, {drop:.2f} points less than the "
        f"{100 * original_top1:.2f} % of the original network, and may lose {100 * max_drop:g}"
    )


def check_kept(history: History, original_top1: float, max_drop: float) -> None:
    """Raise `InputError` if no epoch of a complete training was kept."""
    if any(history.kept):
        return
    nearest = max(history.epochs, key=lambda row: (row.val_top1[-1], -row.epoch))
    raise InputError(
        f"no epoch is kept: even in epoch {nearest.epoch} {describe_drop(nearest, original_top1, max_drop)}; "
        f"lower `lr`, train for more `epochs`, or allow more with `max_drop`"
    )
