"""What the paper published, in the shape that the report shows it in: beside our own, and marked as published."""

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
    """Budget curves for the data set of a net, those of its own size first: {name, model, own, metrics}."""
    found = zoo.place(preset)
    if found is None:
        return []
    grouped: dict[tuple[str, str], dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for row in zoo.published("budget_curves"):
        if row["dataset"] == found[0] and row["kind"] == "measured":
            value = round(float(row["value"]) * zoo.SCALES[row["metric"]], 6)
            grouped[row["model"], row["size"]][row["metric"]].append([float(row["flops"]), value])
    made = [
        {
            "name": f"{_NAMES.get(model, model)}{f', {size}' if size else ''}",
            "model": model,
            "own": size == found[1],
            "metrics": {metric: sorted(points) for metric, points in metrics.items()},
        }
        for (model, size), metrics in grouped.items()
    ]
    return sorted(made, key=lambda curve: not curve["own"])


def laplace_costs() -> list[dict[str, Any]]:
    """The bars of the paper's cost figure for its nine nets: {name, vanilla, efficient, naive}."""
    bars: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in zoo.published("laplace_cost"):
        bars[f"{row['dataset']} {row['size']}"][row["kind"]].append(float(row["flops_cumulative"]))
    return [{"name": name, **kinds} for name, kinds in bars.items()]
