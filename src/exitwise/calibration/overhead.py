"""MACs that each calibration method adds to the net, by the formulas of the paper's cost figure."""

from collections.abc import Sequence
from dataclasses import dataclass

from exitwise.calibration.methods import DEFAULT_DRAWS
from exitwise.models.macs import cumulative_parameters, macs
from exitwise.models.net import MultiExitNet


def laplace_macs(features: int, classes: int, num_draws: int = DEFAULT_DRAWS) -> int:
    """MACs that the Laplace predictive adds to one exit: s(x), then `num_draws` scaled shifts of the logits."""
    return 2 * classes * num_draws + (features + 1) * (features + 2)


def naive_laplace_macs(features: int, classes: int, num_draws: int = DEFAULT_DRAWS) -> float:
    """MACs that the naive Laplace predictive adds to one exit: a Cholesky factor per sample, and a separate bias."""
    c, p = classes, features
    return c**3 / 3 + c**2 * (num_draws + 1) + c**2 + c * num_draws + p * (p + 1)


def ensemble_macs(classes: int) -> int:
    """MACs of model-internal ensembling at one exit after the first: weight, add, normalize."""
    return 3 * classes


def pool_macs(classes: int, exits: int) -> int:
    """MACs of a pool at an exit, with that of `exits` exits: weight and add their log-probabilities, normalize."""
    return (exits + 2) * classes


def pool_update_macs(features: int, classes: int) -> int:
    """MACs of the update of a pool with `W_opt` at one exit: a second last layer."""
    return (features + 1) * classes


def mc_dropout_macs(features: int, classes: int, num_draws: int = DEFAULT_DRAWS) -> int:
    """MACs of last-layer Monte Carlo dropout at one exit: the last layer once per mask."""
    return num_draws * (features + 1) * classes


@dataclass(frozen=True)
class ExitCost:
    """Cumulative MACs of one exit for each method, with the overhead of all exits up to it."""

    exit: int
    parameters: int
    vanilla: int
    laplace: float
    naive_laplace: float
    ensemble: float  # only model-internal ensembling
    ours: float  # Laplace and ensembling together
    mc_dropout: float
    pool: float  # a pool without Laplace
    pool_w_opt: float  # with the update of `W_opt` at every exit


def cost_table(net: MultiExitNet, input_shape: tuple[int, ...], num_draws: int = DEFAULT_DRAWS) -> list[ExitCost]:
    """Compute the cost of every exit; each method adds its overhead at that exit and at all exits before it."""
    c = net.num_classes
    rows, laplace, naive, ensemble, dropout, pool, updates = [], 0, 0.0, 0, 0, 0, 0
    counts = zip(macs(net, input_shape), cumulative_parameters(net), net.exits, strict=True)
    for k, (vanilla, params, head) in enumerate(counts):
        p = head.last.in_features
        laplace += laplace_macs(p, c, num_draws)
        naive += naive_laplace_macs(p, c, num_draws)
        ensemble += ensemble_macs(c) if k else 0
        dropout += mc_dropout_macs(p, c, num_draws)
        pool += pool_macs(c, k + 1)
        updates += pool_update_macs(p, c)
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
                pool=vanilla + pool,
                pool_w_opt=vanilla + pool + updates,
            )
        )
    return rows


def paper_figure_costs(
    vanilla: Sequence[float], features: Sequence[int], classes: int, num_draws: int = DEFAULT_DRAWS
) -> dict[str, list[float]]:
    """Compute the bars (K,) of the paper's cost figure from vanilla costs (K,) and numbers of features (K,).

    The figure multiplies the overhead of the current exit by the number of exits so far, and starts from the rounded
    vanilla costs in print. `cost_table` sums the overheads of all exits so far instead, so the two differ where exits
    have different numbers of features.
    """
    exits = list(enumerate(zip(vanilla, features, strict=True), start=1))
    return {
        "vanilla": [cost for _, (cost, _) in exits],
        "efficient": [cost + k * laplace_macs(p, classes, num_draws) for k, (cost, p) in exits],
        "naive": [cost + k * naive_laplace_macs(p, classes, num_draws) for k, (cost, p) in exits],
    }
