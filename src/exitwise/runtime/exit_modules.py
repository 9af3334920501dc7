"""A calibrated exit as constants and a few tensor operations: fast on small batches, and exportable to ONNX."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from exitwise.calibration.calibration import CalibratedExit, Calibration
from exitwise.calibration.ensembles import ENSEMBLES, ExitWeights


class ExitOutput(NamedTuple):
    """Output of an exit for n samples.

    `probs` (n, c) are those of the ensemble if there is one. `variance` (n,) is None unless the exit computes it.
    `ensemble_state` is what the next exit needs of the exits so far: None without an ensemble, otherwise a tensor
    (n, ...), such as the probabilities (n, c) themselves, or with a variance those of every draw (n, S, c).
    """

    probs: Tensor
    variance: Tensor | None
    ensemble_state: Tensor | None


class RuntimeExit(nn.Module):
    """Compute `CalibratedExit` and the ensemble from features (n, p) and the ensemble state of the previous exit."""

    W: Tensor
    b: Tensor
    draws: Tensor
    inverse: Tensor
    root: Tensor
    factors: Tensor
    bias: Tensor | None

    def __init__(self, exit: CalibratedExit, weights: ExitWeights | None, variance: bool, ensemble: str | None) -> None:
        """Precompute the constants of an exit.

        Args:
            exit: The calibrated exit.
            weights: Weights of the exits up to this one in its ensemble; None without an ensemble.
            variance: Whether to compute the variance over draws.
            ensemble: Name of the ensemble in `ENSEMBLES`; None without one.
        """
        super().__init__()
        self.weights = None if weights is None else weights.weights
        self.register_buffer("bias", None if weights is None or weights.update is not None else weights.bias)
        self.ensemble = None if ensemble is None else ENSEMBLES[ensemble]
        self.branchless = False  # set for export: a graph cannot branch on values
        self.variance = variance
        self.classes = len(exit.head.weight)
        self.mode = _get_draw_mode(exit)
        weight, bias = exit.head.weight / exit.temperature, exit.head.bias
        blocks = [weight.T]
        shifts = [weight.new_zeros(self.classes) if bias is None else bias / exit.temperature]
        if exit.posterior is not None and exit.draws is not None:
            posterior, temperature = exit.posterior, exit.temperature
            basis = posterior.basis
            if self.mode == "exact":
                self.register_buffer("inverse", posterior.inverse)
                self.register_buffer("root", (posterior.dense_root() / temperature).T.contiguous())
                self.register_buffer("draws", exit.draws)
            else:  # one scalar per sample, t = |phi~ basis diag(inverse)^(1/2)|, times draws that are multiplied once
                basis = basis * posterior.inverse.sqrt()
                self.register_buffer("draws", exit.drawn_shifts / temperature)
            self.offset = float(posterior.offset)
            p = exit.head.weight.shape[1]
            blocks.append(basis[:p])
            shifts.append(basis[p] if len(basis) > p else basis.new_zeros(basis.shape[1]))
        self.has_update = weights is not None and weights.update is not None
        if weights is not None and weights.update is not None:
            blocks.append(weights.update)
            shifts.append(weight.new_zeros(self.classes) if weights.bias is None else weights.bias)
        if exit.dropout is not None:
            self.register_buffer("factors", exit.dropout.factors)
        # (p, c) for the logits, then (p, q) for the posterior's scale, or (p, c) for the update of a pool
        self.register_buffer("W", torch.cat(blocks, dim=1))
        self.register_buffer("b", torch.cat(shifts))

    def forward(self, features: Tensor, ensemble_state: Tensor | None) -> ExitOutput:
        features = features.to(self.W.dtype)
        bias = self.bias
        if self.mode is None:
            projections = torch.addmm(self.b, features, self.W)
            if self.has_update:
                projections, bias = projections[:, : self.classes], projections[:, self.classes :]
            exit_probs = projections.softmax(dim=1)
        elif self.variance:
            drawn, state = self._advance(ensemble_state, self._draw_probs(features), bias)
            probs = drawn.mean(dim=1)
            return ExitOutput(probs, _predicted_class_variance(drawn, probs), state)
        else:
            exit_probs = self._mean_probs(features)
        probs, state = self._advance(ensemble_state, exit_probs, bias)
        return ExitOutput(probs, None, state)

    def _mean_probs(self, features: Tensor) -> Tensor:
        """Return the probabilities (n, c) of this exit, averaged over draws."""
        # The fast path below rounds off tiny probabilities, on which an ensemble such as PoE depends.
        is_elementwise = self.ensemble is None or self.ensemble.is_elementwise
        if self.branchless or not is_elementwise or self.mode == "dropout":
            return self._draw_probs(features).mean(dim=1)
        drawn_logits, logits = self._draw_logits(features)
        # In place, and with the maximum of the mean logits for every draw: a third less time, unless float32 overflows.
        exponentials = drawn_logits.sub_(logits.amax(dim=1)[:, None, None]).exp_()
        weights = 1 / exponentials.sum(dim=2, keepdim=True)
        if bool(((weights > 0) & weights.isfinite()).all()):
            return torch.bmm(weights.mT, exponentials).squeeze(1) / len(self.draws)
        return self._draw_probs(features).mean(dim=1)

    def _draw_probs(self, features: Tensor) -> Tensor:
        """Return the probabilities (n, S, c) of this exit for every draw."""
        if self.mode == "dropout":
            return (torch.matmul(features[:, None] * self.factors, self.W) + self.b).softmax(dim=2)
        return self._draw_logits(features)[0].softmax(dim=2)

    def _advance(
        self, ensemble_state: Tensor | None, exit_probs: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Combine the probabilities of this exit with the ensemble state of the previous exit."""
        if self.ensemble is None or self.weights is None:
            return exit_probs, None
        return self.ensemble.advance_probs(ensemble_state, exit_probs, ExitWeights(self.weights, bias))

    def _draw_logits(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (n, S, c) of every draw and the mean logits (n, c), divided by the temperature."""
        projections = torch.addmm(self.b, features, self.W)
        logits, scale_projections = projections[:, : self.classes], projections[:, self.classes :]
        if self.mode == "exact":
            scale = (scale_projections.square() @ self.inverse + self.offset).sqrt()
            return logits[:, None] + torch.matmul(scale[:, None] * self.draws, self.root), logits
        t = torch.linalg.vector_norm(scale_projections, dim=1)
        if self.offset:
            t = (t.square() + self.offset).sqrt()
        return torch.addcmul(logits[:, None], t[:, None, None], self.draws), logits


def _get_draw_mode(exit: CalibratedExit) -> str | None:
    """Return "dropout", the mode of the posterior, or None if the exit has no draws."""
    if exit.dropout is not None:
        return "dropout"
    return None if exit.posterior is None else exit.posterior.mode


def _predicted_class_variance(drawn: Tensor, probs: Tensor) -> Tensor:
    """Variance (n,) over draws (n, S, c) of the probability of the class predicted by `probs` (n, c)."""
    predicted = probs.argmax(dim=1)[:, None, None].expand(-1, drawn.shape[1], 1)
    class_probs = drawn.gather(2, predicted).squeeze(2)
    return (class_probs - class_probs.mean(dim=1, keepdim=True)).square().mean(dim=1)


def runtime_exits(calibration: Calibration, variance: bool) -> list[RuntimeExit]:
    """Return the exits of a calibration as modules; with `variance` they also compute the variance over draws."""
    weights = calibration.exit_weights
    return [
        RuntimeExit(exit, None if weights is None else weights[k], variance, calibration.method.ensemble)
        for k, exit in enumerate(calibration.exits)
    ]
