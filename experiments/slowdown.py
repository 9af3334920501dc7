"""Pictures made to slow a net down: projected gradient that makes every exit unsure."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Generator, Tensor

import exitwise as ew
from exitwise.data.batches import Normalize
from exitwise.data.images import ImageSet
from exitwise.runtime.exit_modules import RuntimeExit, runtime_exits

EPSILON, STEP, STEPS = 8 / 255, 2 / 255, 20
CHUNK = 125  # pictures attacked at a time
# Through plain logits at this temperature the same steps get further down on what each model itself says. Without that
# attack, one that merely stops half-way would look like a net that resists it.
HOT = 4.0

LogConfidences = Callable[[Tensor], Tensor]  # images (n, channels, height, width) in 0..1 -> (K, n)


def white_box(calibration: ew.Calibration) -> list[RuntimeExit]:
    """Exits through which gradients flow: those that go into ONNX graphs, which change nothing in place."""
    exits = runtime_exits(calibration, variance=False)
    for exit in exits:
        exit.branchless = True
    return exits


def predictive(exits: Sequence[RuntimeExit], features: Iterable[Tensor]) -> Tensor:
    """(K, n, c) probabilities."""
    rows, memory = [], None
    for exit, x in zip(exits, features, strict=True):
        probs, _, memory = exit(x, memory)
        rows.append(probs)
    return torch.stack(rows)


def log_confidences(net: ew.MultiExitNet, exits: Sequence[RuntimeExit], normalize: Normalize) -> LogConfidences:
    return lambda images: predictive(exits, net.features(normalize(255 * images))).amax(dim=2).log()


def slow_down(
    log_confidences: LogConfidences,
    images: Tensor,
    generator: Generator,
    epsilon: float = EPSILON,
    step: float = STEP,
    steps: int = STEPS,
) -> Tensor:
    """Images (n, channels, height, width) in 0..1, each value moved by at most epsilon so that no exit is sure of them.

    Projected gradient from a random start, down the sum over exits of the log of the largest probability.
    """
    low, high = (images - epsilon).clamp(min=0), (images + epsilon).clamp(max=1)
    moved = images + epsilon * (2 * torch.rand(images.shape, generator=generator) - 1)
    moved = moved.clamp(low, high)
    for _ in range(steps):
        moved.requires_grad_()
        (gradient,) = torch.autograd.grad(log_confidences(moved).sum(), moved)
        moved = (moved.detach() - step * gradient.sign()).clamp(low, high)
    return moved


def hot_log_confidences(net: ew.MultiExitNet, normalize: Normalize) -> LogConfidences:
    """Those of the net's own logits at the temperature HOT, calibrated in no way."""
    return lambda images: (torch.stack(net(normalize(255 * images))) / HOT).log_softmax(dim=2).amax(dim=2)


def attacked_features(
    net: ew.MultiExitNet, pictures: ImageSet, victim: LogConfidences, generator: Generator
) -> list[Tensor]:
    normalize, parts = Normalize(pictures), []
    for pixels in pictures.pixels.split(CHUNK):
        images = (pixels / 255).contiguous(memory_format=torch.channels_last)
        moved = slow_down(victim, images, generator)
        with torch.no_grad():
            parts.append(net.features(normalize(255 * moved)))
    return [torch.cat(rows) for rows in zip(*parts, strict=True)]


def check_white_box(calibration: ew.Calibration, features: Sequence[Tensor]) -> float:
    """How far what is attacked lies from what is used; an attack on something else would prove nothing."""
    with torch.no_grad():
        distance = float(
            (predictive(white_box(calibration), features) - calibration.predict(features).probs).abs().max()
        )
    if distance > 1e-5:
        raise RuntimeError(f"the attacked predictive is {distance:.1e} off the calibrated one")
    return distance
