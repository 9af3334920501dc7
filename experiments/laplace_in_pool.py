"""Where Laplace pays in a pool: clean and corrupted images, few labels, and images of other classes.

usage: laplace_in_pool.py CIFAR100_DIR CIFAR10_DIR [--images 2000]

The shipped net is calibrated on its validation split with T_opt, Laplace, Pool, Pool with Laplace and Pool W_opt.
Measured are the mean over exits of NLPD, ECE and top-1 on CIFAR-100's test images as they are and corrupted
(corruptions.py), the same after calibration with few labels, and how well confidence tells CIFAR-100 from CIFAR-10
(AUROC, mean over exits).
CIFAR10_DIR holds PNG files in folders. Results go to experiments/laplace_in_pool/results.csv.
"""

import argparse
import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from corruptions import CORRUPTIONS
from image_features import compute_features, detection_auroc, read_images
from torch import Tensor

import exitwise as ew
from exitwise.core.seeds import derive_generator
from exitwise.data import cifar
from exitwise.data.batches import Normalize

RESULTS = Path(__file__).parent / "laplace_in_pool" / "results.csv"
METHODS = ("T_opt", "Laplace T_opt sigma_opt", "Pool", "Pool Laplace T_opt sigma_opt", "Pool W_opt")
SEVERITIES = (1, 3, 5)
LABELS, DRAWS = (50, 100, 250, 1000), 5
COLUMNS = ("setting", "method", "nlpd", "ece", "top1", "confidence", "auroc")
SEED = 0


def measure(calibration: ew.Calibration, features: Sequence[Tensor], labels: Tensor) -> dict[str, float]:
    """NLPD, ECE, top-1 and confidence, each the mean over exits."""
    preds = calibration.predict(list(features))
    correct, confidence = preds.predicted == labels.numpy(), preds.probs.amax(dim=2).numpy()
    log_true = preds.log_probs[:, torch.arange(len(labels)), labels]
    return {
        "nlpd": -float(log_true.mean()),
        "ece": float(np.mean([ew.metrics.ece(c, r) for c, r in zip(confidence, correct, strict=True)])),
        "top1": float(correct.mean()),
        "confidence": float(confidence.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cifar100", type=Path)
    parser.add_argument("cifar10", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    options = parser.parse_args()
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    assert trace.test is not None
    net = ew.load_net(ew.zoo.path("net.safetensors")).eval().to(memory_format=torch.channels_last)
    calibrations = {name: ew.calibrate(trace, name, seed=SEED) for name in METHODS}
    rows: list[dict[str, object]] = []

    def add(setting: str, method: str, **values: float) -> None:
        rows.append({"setting": setting, "method": method, **{key: f"{value:.5g}" for key, value in values.items()}})

    for name, calibration in calibrations.items():
        add("clean", name, **measure(calibration, trace.test.features, trace.test.labels))
    for number, labels in enumerate(LABELS):
        drawn: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
        for draw in range(DRAWS):
            few = torch.randperm(len(trace.val), generator=derive_generator(SEED, number, draw))[:labels]
            small = replace(trace, val=trace.val.take(few))
            for name in METHODS:
                calibration = ew.calibrate(small, name, seed=SEED)
                drawn[name].append(measure(calibration, trace.test.features, trace.test.labels))
        for name, values in drawn.items():
            add(f"{labels} labels", name, **{key: float(np.mean([v[key] for v in values])) for key in values[0]})
    _, test = cifar.load(cifar.CIFAR100, options.cifar100)
    normalize, images = Normalize(test), test.pixels[: options.images]
    truth = test.labels[: options.images]
    for number, (name, corrupt) in enumerate(CORRUPTIONS.items()):
        for severity in SEVERITIES:
            worse = corrupt(images, severity, derive_generator(SEED, 100 + number, severity))
            features = compute_features(net, worse, normalize)
            for method, calibration in calibrations.items():
                add(f"{name} {severity}", method, **measure(calibration, features, truth))
    known = compute_features(net, images, normalize)
    other = compute_features(net, read_images(options.cifar10, options.images), normalize)
    for method, calibration in calibrations.items():
        confidences = [calibration.predict(x).probs.amax(dim=2).numpy() for x in (known, other)]
        auroc = float(np.mean([detection_auroc(a, b) for a, b in zip(*confidences, strict=True)]))
        values = {"confidence": float(confidences[1].mean()), "auroc": auroc}
        add("other images", method, **values)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
