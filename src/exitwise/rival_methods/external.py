"""Other software on the same trace, in this process: probmetrics, laplace-torch and earlyon, if they are installed.

None of them is a dependency; the extra `rivals` installs them. Their own code fits and predicts.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from exitwise.calibration.trace import HeadWeights
from exitwise.core.predictions import Array
from exitwise.rival_methods.calibrators import Calibrator

EXTRA = "rivals"
LAPLACE_DRAWS = 50
_BATCH = 1000


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of other packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fit_structured_matrix(logits: Tensor, labels: Tensor) -> Calibrator:
    """Fit structured matrix scaling (Berta et al., 2026) with probmetrics: ridge penalty, its default strengths."""
    with quiet():
        from probmetrics.calibrators import SMSCalibrator

        calibrator = SMSCalibrator(opt="bfgs", penalty="ridge", print_init_info=False)
        calibrator.fit(logits.softmax(dim=1).numpy(), labels.numpy())
    classes = logits.shape[1]

    def log_probs(z: Tensor) -> Tensor:
        with quiet():
            probs = torch.from_numpy(np.asarray(calibrator.predict_proba(z.softmax(dim=1).numpy()))).double()
        tiny = torch.finfo(torch.float32).tiny
        return (probs / probs.sum(dim=1, keepdim=True)).clamp(min=tiny).log()

    return Calibrator(log_probs, classes * classes + 2 * classes)


def fit_laplace(head: HeadWeights, features: Tensor, labels: Tensor) -> Calibrator:
    """Fit laplace-torch's Kronecker-factored last-layer posterior; its predictions are means over sampled weights.

    The trace has no features of training samples, so that the curvature is that of the validation samples. The prior
    precision maximizes the marginal likelihood.
    """
    with quiet():
        from laplace import Laplace

        weights = head.to_float32()
        classes, width = weights.weight.shape
        layer = nn.Linear(width, classes, bias=weights.bias is not None)
        layer.load_state_dict({"weight": weights.weight} | ({} if weights.bias is None else {"bias": weights.bias}))
        model = nn.Sequential(nn.Identity(), layer)
        data = DataLoader(TensorDataset(features.float(), labels), batch_size=_BATCH)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            posterior: Any = Laplace(
                model, "classification", subset_of_weights="last_layer", hessian_structure="kron", last_layer_name="1"
            )
            posterior.fit(data)
            posterior.optimize_prior_precision(pred_type="nn", method="marglik", link_approx="mc")

    def log_probs(x: Tensor) -> Tensor:
        with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)  # the same draws for every split
            parts = [
                posterior(part, pred_type="nn", link_approx="mc", n_samples=LAPLACE_DRAWS)
                for part in torch.split(x.float(), _BATCH)
            ]
        return torch.cat(parts).double().clamp(min=torch.finfo(torch.float32).tiny).log()

    return Calibrator(log_probs, LAPLACE_DRAWS * (width + 1) * classes)


class _LogitsAsModel(nn.Module):
    """Stands in for a network of earlyon: its inputs (n, K * c) are the logits of all exits."""

    def __init__(self, config: Any, shares: dict[str, float], exits: int) -> None:
        super().__init__()
        self.config, self._flops_at, self._exits = config, shares, exits

    def forward(self, x: Tensor, mode: str = "training") -> list[Tensor]:
        return list(x.chunk(self._exits, dim=1))


def earlyon_thresholds(
    logits: Sequence[Tensor], labels: Tensor, shares: Sequence[float], budget_shares: Sequence[float]
) -> tuple[list[float], Array]:
    """Fit temperatures and thresholds with earlyon's greedy search, for every budget.

    Args:
        logits: Logits K x (n, c) of all exits.
        labels: True classes (n,).
        shares: Costs (K,) of the exits, as shares of that of the last.
        budget_shares: Budgets (J,), as shares of the last exit's cost.

    Returns:
        Temperatures (K,), and thresholds (J, K) on the largest probability; inf where an exit is switched off.
    """
    with quiet():
        from earlyon.core.thresholds import calibrate_thresholds_for_budget
        from earlyon.core.types import EarlyExitConfig, ExitPoint

        exits, classes = len(logits), logits[0].shape[1]
        names = [f"exit_{k}" for k in range(exits - 1)]
        inputs = torch.cat([z.float() for z in logits], dim=1)
        data = DataLoader(TensorDataset(inputs, labels), batch_size=_BATCH)
        rows = []
        for budget in budget_shares:
            points = [ExitPoint(name, f"layer{name}", 1) for name in names]
            config = EarlyExitConfig("trace", classes, points)
            fractions = {f"layer{name}": float(share) for name, share in zip(names, shares, strict=False)}
            model = _LogitsAsModel(config, fractions, exits)
            result = calibrate_thresholds_for_budget(
                model, data, target_computation=float(budget), fit_temperature=True, temperature_loader=data
            )
            pairs = zip(result.thresholds, result.enabled_exits, strict=True)
            rows.append([threshold if enabled else np.inf for threshold, enabled in pairs] + [-np.inf])
            temperatures = [float(config.temperatures[name]) for name in (*names, "final")]
    return temperatures, np.array(rows)
