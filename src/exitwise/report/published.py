"""The paper's published curves and costs, in the form that the report shows."""

from collections import defaultdict
from typing import Any

from exitwise import zoo

_NAMES = {
    "ours": "the paper's model",
    "vanilla": "the paper's vanilla MSDNet",
    "resnet": "ResNets",
    "densenet": "DenseNets",
    "vanilla predictions, our decisions": "vanilla predictions, the paper's decisions",
}


def curves(preset: str) -> list[dict[str, Any]]:
    """Return budget curves {name, model, own, metrics} for the dataset of a net; those of its size come first."""
    net = zoo.paper_names(preset)
    if net is None:
        return []
    dataset, net_size = net
    grouped: dict[tuple[str, str], dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for row in zoo.published("budget_curves"):
        if row["dataset"] == dataset and row["kind"] == "measured":
            value = round(float(row["value"]) * zoo.SCALES[row["metric"]], 6)
            grouped[row["model"], row["size"]][row["metric"]].append([float(row["flops"]), value])
    unsorted = [
        {
            "name": f"{_NAMES.get(model, model)}{f', {size}' if size else ''}",
            "model": model,
            "own": size == net_size,
            "metrics": {metric: sorted(points) for metric, points in metrics.items()},
        }
        for (model, size), metrics in grouped.items()
    ]
    return sorted(unsorted, key=lambda curve: not curve["own"])


def laplace_costs() -> list[dict[str, Any]]:
    """Return the bars {name, vanilla, efficient, naive} of the paper's cost figure for its nine nets."""
    bars: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in zoo.published("laplace_cost"):
        bars[f"{row['dataset']} {row['size']}"][row["kind"]].append(float(row["flops_cumulative"]))
    return [{"name": name, **kinds} for name, kinds in bars.items()]
