"""MACs that each calibration method adds to the net: the formulas of the paper's cost figure."""

from collections.abc import Sequence
from dataclasses import dataclass

from exitwise.calibration.methods import DEFAULT_DRAWS
from exitwise.models.macs import cumulative_parameters, macs
from exitwise.models.net import MultiExitNet


def laplace_macs(features: int, classes: int, samples: int = DEFAULT_DRAWS) -> int:
    """The Laplace predictive of one exit on top of the plain one: s(x), then `samples` scaled shifts of the logits."""
    return 2 * classes * samples + (features + 1) * (features + 2)


def naive_laplace_macs(features: int, classes: int, samples: int = DEFAULT_DRAWS) -> float:
    """The same with a Cholesky factor of every sample's c x c covariance and the bias kept apart."""
    c, p = classes, features
    return c**3 / 3 + c**2 * (samples + 1) + c**2 + c * samples + p * (p + 1)


def ensemble_macs(classes: int) -> int:
    """Model-internal ensembling at one exit after the first: weigh, add, normalise."""
    return 3 * classes


def mc_dropout_macs(features: int, classes: int, samples: int = DEFAULT_DRAWS) -> int:
    """Last-layer Monte Carlo dropout at one exit: the last layer once per mask."""
    return samples * (features + 1) * classes


@dataclass(frozen=True)
class ExitCost:
    """Cumulative MACs at one exit under each way of predicting, summed over the exits passed."""

    exit: int
    parameters: int
    vanilla: int
    laplace: float
    naive_laplace: float
    ensemble: float  # model-internal ensembling alone
    ours: float  # Laplace and ensembling together
    mc_dropout: float


def cost_table(net: MultiExitNet, input_shape: tuple[int, ...], samples: int = DEFAULT_DRAWS) -> list[ExitCost]:
    """Cost of every exit: each method pays its overhead at every exit on the way."""
    c = net.num_classes
    rows, laplace, naive, ensemble, dropout = [], 0, 0.0, 0, 0
    counts = zip(macs(net, input_shape), cumulative_parameters(net), net.exits, strict=True)
    for k, (vanilla, params, head) in enumerate(counts):
        p = head.last.in_features
        laplace += laplace_macs(p, c, samples)
        naive += naive_laplace_macs(p, c, samples)
        ensemble += ensemble_macs(c) if k else 0
        dropout += mc_dropout_macs(p, c, samples)
        rows.append(
            ExitCost(
                exit=k,
                parameters=params,
                vanilla=vanilla,
                laplace=vanilla + laplace,
                naive_laplace=vanilla + naive,
                ensemble=vanilla + ensemble,
                ours=vanilla + laplace + ensemble,
                mc_dropout=vanilla + dropout,
            )
        )
    return rows


def paper_figure_costs(
    vanilla: Sequence[float], features: Sequence[int], classes: int, samples: int = DEFAULT_DRAWS
) -> dict[str, list[float]]:
    """The bars of the paper's cost figure, as the figure computes them.

    The figure multiplies the current exit's overhead by the number of exits passed, where `cost_table` sums each
    exit's own, and starts from the printed, rounded vanilla costs. The two differ where feature widths differ.
    """
    passed = list(enumerate(zip(vanilla, features, strict=True), start=1))
    return {
        "vanilla": [cost for _, (cost, _) in passed],
        "efficient": [cost + k * laplace_macs(p, classes, samples) for k, (cost, p) in passed],
        "naive": [cost + k * naive_laplace_macs(p, classes, samples) for k, (cost, p) in passed],
    }
