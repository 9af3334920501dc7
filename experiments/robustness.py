"""What corrupted images and images of another dataset do to accuracy, calibration and cost.

usage: robustness.py CIFAR100_DIR CIFAR10_DIR [--run RUN] [--images 5000] [--fill]

The vanilla net, the paper's method and the default (`method="auto"`, with the score that it chooses) are calibrated on
clean validation images, with thresholds for half of the full cost. Then CIFAR-100's test images come with noise, blur,
less contrast or rotated (corruptions.py), each in five severities: with the thresholds as fitted, and in batches of 64
under `ew.BudgetController`. Last, images of CIFAR-10: how well a number per image tells them from CIFAR-100's (AUROC).
Without --run, the net is the shipped one. CIFAR10_DIR holds PNG files in folders. Results are written to
experiments/robustness/results.json, tables to docs/robustness.md.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corruptions import ROTATED, STRENGTHS
from image_features import compute_features, detection_auroc, read_images
from results import fill_tables, machine, rounded
from torch import Tensor

import exitwise as ew
from exitwise.core.files import write_json
from exitwise.core.seeds import derive_generator
from exitwise.data import cifar
from exitwise.data.batches import Normalize
from exitwise.policies.scores import exit_scores

HERE = Path(__file__).parent
RESULTS = HERE / "robustness" / "results.json"
PAGE = HERE.parent / "docs" / "robustness.md"
METHODS = {"vanilla": "MSDNet (vanilla)", "paper": "MIE Laplace T_opt sigma_opt", "auto": "auto"}
BUDGET = 0.5  # of the last exit's cost
SEVERITIES = (1, 2, 3, 4, 5)
BATCH_SIZE = 64
SEED = 0


@dataclass(frozen=True, eq=False)
class Model:
    """A calibrated net with thresholds for the budget."""

    calibration: ew.Calibration
    policy: ew.Policy
    costs: ew.Costs

    @classmethod
    def fit(cls, trace: ew.Trace, method: str) -> "Model":
        """Calibrate on the validation split; only `auto` chooses a score, the others use confidence."""
        calibration = ew.calibrate(trace, method, seed=SEED)
        policy = ew.fit_policy(
            calibration.predict(trace.val),
            labels=trace.val.labels,
            costs=trace.costs,
            budget=BUDGET * trace.costs.values[-1],
            score="auto" if method == "auto" else "confidence",
        )
        return cls(calibration, policy, trace.costs)

    def evaluate(self, features: Sequence[Tensor], labels: Tensor) -> dict[str, float]:
        """Return metrics at the exits that samples take, with thresholds as fitted and with a controller."""
        preds = self.calibration.predict(list(features))
        result = ew.evaluate(preds, labels=labels, policy=self.policy, costs=self.costs)
        full = self.costs.values[-1]
        row = {"top1": result.top1, "nlpd": result.nlpd, "ece": result.ece, "cost": result.cost / full}
        last = result.per_exit[-1]
        row |= {"last_top1": last.top1, "last_nlpd": last.nlpd, "last_ece": last.ece}
        return row | self._evaluate_controlled(preds, labels.numpy())

    def _evaluate_controlled(self, preds: ew.Predictions, labels: np.ndarray) -> dict[str, float]:
        """Stream the samples in batches; a controller moves the thresholds after each."""
        scores = exit_scores(preds, self.policy.score, self.policy.score_model)
        correct = preds.predicted == labels
        controller = ew.BudgetController(self.policy, BUDGET * self.costs.values[-1])
        taken = []
        for start in range(0, len(labels), BATCH_SIZE):
            batch = scores[:, start : start + BATCH_SIZE]
            exits = controller.policy.exits_from_scores(batch)
            controller.update(exits, batch[exits, np.arange(len(exits))])
            taken.append(exits)
        exits = np.concatenate(taken)
        cost = np.asarray(self.costs.values)[exits].mean() / self.costs.values[-1]
        top1 = correct[exits, np.arange(len(exits))].mean()
        return {"controlled_top1": float(top1), "controlled_cost": float(cost)}


def compute_signals(model: Model, features: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Compute numbers (K, n) that may be larger for images like those of the training: a name for each."""
    preds = model.calibration.predict(list(features))
    probs = preds.probs.numpy()
    signals = {
        "confidence": probs.max(axis=2),
        "negative entropy": (probs * preds.log_probs.numpy()).sum(axis=2),
    }
    if model.calibration.method.laplace:
        signals["negative predictive variance"] = exit_scores(preds, "variance")
        exits = zip(model.calibration.exits, features, strict=True)
        signals["negative Laplace scale s(x)"] = np.stack([-e.posterior.scale(x.float()).numpy() for e, x in exits])
    return signals


def measure_detection(
    models: dict[str, Model], known: Sequence[Tensor], other: Sequence[Tensor]
) -> dict[str, dict[str, Any]]:
    """AUROC of telling images of another dataset, at each exit and in the mean, by model and signal."""
    rows: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        of_known, of_other = (compute_signals(model, features) for features in (known, other))
        for signal, values in of_known.items():
            per_exit = [detection_auroc(a, b) for a, b in zip(values, of_other[signal], strict=True)]
            rows[f"{name}, {signal}"] = {"per_exit": per_exit, "mean": float(np.mean(per_exit))}
    return rows


def main(options: argparse.Namespace) -> None:
    if options.run is None:
        trace, net = ew.Trace.load(ew.zoo.path("trace.safetensors")), ew.load_net(ew.zoo.path("net.safetensors"))
    else:
        trace = ew.Trace.load(options.run / "trace.safetensors")
        net = ew.load_net(options.run / "net.safetensors")
    net = net.eval().to(memory_format=torch.channels_last)
    models = {name: Model.fit(trace, method) for name, method in METHODS.items()}
    _, test = cifar.load(cifar.CIFAR100, options.cifar100)
    normalize, images, labels = Normalize(test), test.pixels[: options.images], test.labels[: options.images]

    def evaluate_all(features: Sequence[Tensor]) -> dict[str, dict[str, float]]:
        return {name: model.evaluate(features, labels) for name, model in models.items()}

    known = compute_features(net, images, normalize)
    corrupted: dict[str, dict[str, dict[str, float]]] = {"clean": evaluate_all(known)}
    for number, (name, corrupt) in enumerate(ROTATED.items()):
        for severity in SEVERITIES:
            worse = corrupt(images, severity, derive_generator(SEED, number, severity))
            corrupted[f"{name} {severity}"] = evaluate_all(compute_features(net, worse, normalize))
            print(name, severity, flush=True)
    other = compute_features(net, read_images(options.cifar10, options.images), normalize)
    RESULTS.parent.mkdir(exist_ok=True)
    results = {
        "command": "experiments/robustness.py",
        "machine": machine(),
        "images": options.images,
        "budget": BUDGET,
        "strengths": {name: STRENGTHS[name] for name in ROTATED},
        "chosen": {name: [model.calibration.method.name, model.policy.score] for name, model in models.items()},
        "corrupted": corrupted,
        "other_dataset": measure_detection(models, known, other),
    }
    write_json(RESULTS, rounded(results))


def mean_row(rows: Sequence[dict[str, float]]) -> list[str]:
    """Format the mean of rows of the same columns."""
    mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    controlled = f"{100 * mean['controlled_top1']:.1f}, {100 * mean['controlled_cost']:.0f} %"
    metrics = [f"{100 * mean['top1']:.1f}", f"{mean['nlpd']:.3f}", f"{mean['ece']:.3f}"]
    return [*metrics, f"{100 * mean['cost']:.0f} %", controlled]


def corruption_rows(results: dict[str, Any]) -> str:
    """Format the table of corruptions: rows of all methods for each corruption, means over its severities."""
    lines = ["| images | method | top-1 | NLPD | ECE | cost | with the controller: top-1, cost |", "|" + "---|" * 7]
    corrupted = results["corrupted"]
    groups = {"clean": ["clean"], **{name: [f"{name} {s}" for s in SEVERITIES] for name in ROTATED}}
    for group, keys in groups.items():
        for position, method in enumerate(METHODS):
            cells = ["" if position else group, method, *mean_row([corrupted[key][method] for key in keys])]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def detection_rows(results: dict[str, Any]) -> str:
    """Format the table of the other dataset."""
    rows = results["other_dataset"]
    exits = len(next(iter(rows.values()))["per_exit"])
    lines = [f"| number per image | {' | '.join(f'exit {k + 1}' for k in range(exits))} | mean |"]
    lines.append("|" + "---|" * (exits + 2))
    for name, row in rows.items():
        cells = [name, *(f"{value:.3f}" for value in row["per_exit"]), f"{row['mean']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(page: str) -> str:
    results = json.loads(RESULTS.read_text())
    return fill_tables(page, {"corrupted": corruption_rows(results), "other dataset": detection_rows(results)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cifar100", type=Path, nargs="?")
    parser.add_argument("cifar10", type=Path, nargs="?")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--fill", action="store_true", help="only fill in the results that are there")
    arguments = parser.parse_args()
    if not arguments.fill:
        main(arguments)
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
