"""A calibrated exit as constants and a few tensor operations: quick on small batches, and ONNX can hold it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from exitwise.calibration.calibration import CalibratedExit, Calibration


class ExitOutput(NamedTuple):
    """What an exit says: probabilities (n, c), their ensemble's where there is one, and if asked the variance (n,).

    `memory` is what the next exit has to know of this one and those before: nothing, the probabilities, or where the
    variance is asked for those of every draw (n, S, c).
    """

    probs: Tensor
    variance: Tensor | None
    memory: Tensor | None


class RuntimeExit(nn.Module):
    """What `CalibratedExit` and `ensemble` compute, from features (n, p) and the memory of the exits before."""

    W: Tensor
    b: Tensor
    draws: Tensor
    inverse: Tensor
    root: Tensor
    factors: Tensor

    def __init__(self, exit: CalibratedExit, share: float | None, variance: bool, product: bool) -> None:
        """`share` is this exit's weight among those up to here; None where nothing is ensembled.

        With `product` the ensemble is a product of experts, which has no variance.
        """
        super().__init__()
        self.ensemble_weight = share
        self.product = product
        self.branchless = False  # as a graph must be
        self.variance = variance
        self.classes = len(exit.head.weight)
        self.mode = _mode(exit)
        weight, bias = exit.head.weight / exit.temperature, exit.head.bias
        blocks = [weight.T]
        shifts = [weight.new_zeros(self.classes) if bias is None else bias / exit.temperature]
        if exit.posterior is not None and exit.draws is not None:
            posterior, temperature = exit.posterior, exit.temperature
            basis = posterior.basis
            if self.mode == "exact":
                self.register_buffer("inverse", posterior.inverse)
                self.register_buffer("root", (posterior.root / temperature).T.contiguous())
                self.register_buffer("draws", exit.draws)
            else:  # one number per sample, t = |phi~ basis diag(inverse)^(1/2)|, times draws that are multiplied once
                basis = basis * posterior.inverse.sqrt()
                self.register_buffer("draws", exit.draws @ posterior.root.T / temperature)
            self.offset = float(posterior.offset)
            p = exit.head.weight.shape[1]
            blocks.append(basis[:p])
            shifts.append(basis[p] if len(basis) > p else basis.new_zeros(basis.shape[1]))
        if exit.dropout is not None:
            self.register_buffer("factors", exit.dropout.factors)
        self.register_buffer("W", torch.cat(blocks, dim=1))  # (p, c) for the logits, (p, q) for the posterior's scale
        self.register_buffer("b", torch.cat(shifts))

    def forward(self, features: Tensor, memory: Tensor | None) -> ExitOutput:
        features = features.to(self.W.dtype)
        if self.mode is None:
            own = torch.addmm(self.b, features, self.W).softmax(dim=1)
        elif self.variance:
            drawn = self._with(self._softmaxes(features), memory)
            probs = drawn.mean(dim=1)
            return ExitOutput(probs, _variance(drawn, probs), None if self.ensemble_weight is None else drawn)
        else:
            own = self._mean_softmax(features)
        probs = self._with(own, memory)
        return ExitOutput(probs, None, None if self.ensemble_weight is None else probs)

    def _mean_softmax(self, features: Tensor) -> Tensor:
        """(n, c) over draws."""
        # The quick way below rounds off tiny probabilities, which a product of experts depends on.
        if self.branchless or self.product or self.mode == "dropout":
            return self._softmaxes(features).mean(dim=1)
        sampled, logits = self._sampled(features)
        # In place, and with the logits' maximum for that of every draw: a third less time, unless float32 overflows.
        exponentials = sampled.sub_(logits.amax(dim=1)[:, None, None]).exp_()
        weights = 1 / exponentials.sum(dim=2, keepdim=True)
        if bool(((weights > 0) & weights.isfinite()).all()):
            return torch.bmm(weights.mT, exponentials).squeeze(1) / len(self.draws)
        return self._softmaxes(features).mean(dim=1)

    def _softmaxes(self, features: Tensor) -> Tensor:
        """(n, S, c) of every draw."""
        if self.mode == "dropout":
            return (torch.matmul(features[:, None] * self.factors, self.W) + self.b).softmax(dim=2)
        return self._sampled(features)[0].softmax(dim=2)

    def _with(self, own: Tensor, memory: Tensor | None) -> Tensor:
        """The ensemble with the exits before."""
        if self.ensemble_weight is None or memory is None:
            return own
        if self.product:
            return (_log(memory) * (1 - self.ensemble_weight) + _log(own) * self.ensemble_weight).softmax(dim=1)
        return memory * (1 - self.ensemble_weight) + own * self.ensemble_weight

    def _sampled(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(n, S, c) logits of every draw and (n, c) those without draws, divided by the temperature."""
        both = torch.addmm(self.b, features, self.W)
        logits, projected = both[:, : self.classes], both[:, self.classes :]
        if self.mode == "exact":
            scale = (projected.square() @ self.inverse + self.offset).sqrt()
            return logits[:, None] + torch.matmul(scale[:, None] * self.draws, self.root), logits
        t = torch.linalg.vector_norm(projected, dim=1)
        if self.offset:
            t = (t.square() + self.offset).sqrt()
        return torch.addcmul(logits[:, None], t[:, None, None], self.draws), logits


def _mode(exit: CalibratedExit) -> str | None:
    """What is drawn, if anything: one of the posterior's modes, or dropout."""
    if exit.dropout is not None:
        return "dropout"
    return None if exit.posterior is None else exit.posterior.mode


def _log(probs: Tensor) -> Tensor:
    """Finite: what is zero in float32 counts as its smallest normal number."""
    return probs.clamp(min=torch.finfo(torch.float32).tiny).log()


def _variance(drawn: Tensor, probs: Tensor) -> Tensor:
    """(n,) over draws, of the probability of the predicted class."""
    chosen = probs.argmax(dim=1)[:, None, None].expand(-1, drawn.shape[1], 1)
    of_class = drawn.gather(2, chosen).squeeze(2)
    return (of_class - of_class.mean(dim=1, keepdim=True)).square().mean(dim=1)


def runtime_exits(calibration: Calibration, variance: bool) -> list[RuntimeExit]:
    """All exits; with `variance` they also say the variance over draws."""
    product = calibration.method.ensemble == "poe"
    return [
        RuntimeExit(exit, _share(calibration.weights, k), variance, product) for k, exit in enumerate(calibration.exits)
    ]


def _share(weights: Sequence[float] | None, k: int) -> float | None:
    return None if weights is None else weights[k] / sum(weights[: k + 1])
