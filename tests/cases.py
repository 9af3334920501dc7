"""Small traces, nets and predictions that tests share: random, but shaped like the real thing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracles import random_probs
from safetensors import safe_open
from torch import Tensor, nn

import exitwise as ew
from exitwise.calibration.laplace import Curvature, CurvatureSum
from exitwise.calibration.trace import HeadWeights, Split, Trace
from exitwise.core.predictions import ExitPrediction, Predictions
from exitwise.core.tensorfiles import DIGEST_KEY
from exitwise.policies.scores import exit_scores


def features_and_labels(n: int, widths: list[int], classes: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """ReLU-like features that say something about the label, more at later exits."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    features = []
    for k, p in enumerate(widths):
        centres = torch.randn(classes, p, generator=torch.Generator().manual_seed(97 + k))
        noise = torch.randn(n, p, generator=generator)
        features.append((centres[labels] * (0.5 + 0.3 * k) + noise).relu())
    return tuple(features), labels


def random_trace(
    n: int = 300, widths: tuple[int, ...] = (6, 7, 9), classes: int = 5, seed: int = 0, bias: bool = True
) -> Trace:
    """A trace whose heads fit its features roughly and too confidently."""
    train, train_labels = features_and_labels(500, list(widths), classes, seed + 1)
    heads, curvature = [], []
    for k, x in enumerate(train):
        phi = torch.cat([x, torch.ones(len(x), 1)], dim=1) if bias else x
        target = nn.functional.one_hot(train_labels, classes).float() * 8
        solution = torch.linalg.lstsq(phi, target).solution.T * (1.5 + 0.2 * k)
        head = HeadWeights(solution[:, : x.shape[1]].contiguous(), solution[:, -1].contiguous() if bias else None)
        sums = CurvatureSum(x.shape[1], classes, bias)
        sums.update(x, head.logits(x))
        heads.append(head)
        curvature.append(sums.result())
    val, test = (Split(*features_and_labels(n, list(widths), classes, seed + 2 + i)) for i in range(2))
    costs = ew.Costs(tuple(1e6 * (k + 1) ** 1.5 for k in range(len(widths))))
    names = tuple(f"class {i}" for i in range(classes))
    return Trace(val, test, tuple(heads), tuple(curvature), costs, names)


SPOILED = (
    "fewer samples than weights",
    "one sample",
    "a class is absent",
    "one class only",
    "noise",
    "equal exits",
    "zeros and ones",
    "no information",
    "always right",
    "never right",
    "one exit",
)


def spoiled_trace(kind: str, n: int = 100) -> Trace:
    """A trace with something wrong about its samples or its exits; test features are spoiled alike."""
    if kind == "one exit":
        return random_trace(n, widths=(6,))
    trace = random_trace(n, widths=(6, 6, 6)) if kind == "equal exits" else random_trace(n)
    assert trace.test is not None
    labels = trace.val.labels
    chosen = {
        "fewer samples than weights": torch.arange(2),
        "one sample": torch.arange(1),
        "a class is absent": (labels != 2).nonzero()[:, 0],
        "one class only": (labels == 2).nonzero()[:, 0],
    }
    if kind in chosen:
        return replace(trace, val=trace.val.take(chosen[kind]))
    if kind == "equal exits":
        heads, curvature = trace.heads[:1] * 3, trace.curvature[:1] * 3
        splits = [Split(split.features[:1] * 3, split.labels) for split in (trace.val, trace.test)]
        return replace(trace, val=splits[0], test=splits[1], heads=heads, curvature=curvature)
    if kind in ("always right", "never right"):
        logits = trace.heads[-1].logits(trace.val.features[-1])
        labels = logits.argmax(dim=1) if kind == "always right" else logits.argmin(dim=1)
        return replace(trace, val=Split(trace.val.features, labels))
    generator = torch.Generator().manual_seed(0)
    splits = []
    for split in (trace.val, trace.test):
        features = list(split.features)
        if kind == "noise":
            features[1] = torch.randn(features[1].shape, generator=generator)
        elif kind == "zeros and ones":  # in float32
            features = [100 * x for x in features]
        else:
            features = [torch.zeros_like(x) for x in features]
        splits.append(Split(tuple(features), split.labels))
    return replace(trace, val=splits[0], test=splits[1])


def random_curvature(p: int, c: int, n: int = 200, seed: int = 0, bias: bool = True) -> tuple[Curvature, Tensor]:
    """Curvature of random features (n, p) with random logits, and the features, in float64."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, p, generator=generator, dtype=torch.float64) + 0.7
    sums = CurvatureSum(p, c, bias)
    sums.update(features, torch.randn(n, c, generator=generator, dtype=torch.float64) * 2)
    return sums.result(), features


def small_net(classes: int = 4) -> ew.MultiExitNet:
    """Three exits on vectors of six numbers."""
    stages = [nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Identity()]
    heads = [ew.Head(nn.Identity(), nn.Linear(8, classes, bias=k != 1)) for k in range(3)]
    return ew.MultiExitNet(stages, heads)


COSTS = (1.0, 2.5, 3.0, 7.0, 8.0, 20.0)
MILLISECONDS = ew.Costs((2.0, 3.0, 12.0), unit="ms")


def with_draws(seed: int, exits: int, samples: int, kind: str = "float64") -> Predictions:
    """Predictions for which every score exists."""
    probs = random_probs(seed, exits, samples, 4, kind)
    variance = np.random.default_rng(seed).integers(0, 8, (exits, samples)) / 100
    return Predictions(probs.shape, lambda: (ExitPrediction(exit) for exit in probs), lambda predicted: variance)


def of_confidence(confidence: Any) -> np.ndarray:
    """(K, n, 2) probabilities with these confidences, each at least one half."""
    confidence = np.asarray(confidence)
    return np.stack([confidence, 1 - confidence], axis=2)


def without_ties(seed: int, exits: int, samples: int, dtype: str = "float64") -> np.ndarray:
    """(K, n, 2) whose confidences are evenly spaced at every exit, in another order at each."""
    rng = np.random.default_rng(seed)
    spaced = np.linspace(0.55, 0.95, samples)
    return of_confidence([rng.permutation(spaced) for _ in range(exits)]).astype(dtype)


def exact(preds: Any, score: str = "confidence") -> np.ndarray:
    """(K, n) scores without what parts equal ones."""
    return exit_scores(preds, score).astype(np.float32)


def runtime_exits(policy: ew.Policy, preds: Predictions) -> list[int]:
    """Exits as a runtime finds them: survivors only, exit by exit."""
    taken = np.full(preds.shape[1], -1)
    here, memory = np.arange(preds.shape[1]), None
    for k, said in enumerate(preds.exits(variance=True)):
        variance = None if said.variance is None else said.variance[here]
        gone, memory = policy.exit_mask(k, ExitPrediction(said.probs[here], variance=variance), memory)
        taken[here[gone]] = k
        here, memory = here[~gone], None if memory is None else memory[~gone]
    return taken.tolist()


def softmax_case(n: int, c: int, draws: int, seed: int, spread: float = 0.2, size: float = 5.0) -> tuple[Tensor, ...]:
    """Logits (n, c), labels (n,), t (n,) around 0.75, shifts (S, c)."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, c, generator=g) * size
    t = (0.75 * torch.exp(spread * torch.randn(n, generator=g))).clamp(min=1e-3)
    return logits, torch.randint(c, (n,), generator=g), t, torch.randn(draws, c, generator=g)


def header_without_digest(path: Path) -> dict[str, str]:
    """Header of a file, to write it again with other contents: without the digest of the former ones."""
    with safe_open(path, framework="pt") as file:
        return {key: value for key, value in file.metadata().items() if key != DIGEST_KEY}


THREE_EXITS = ew.Policy((0.6, 0.5, float("-inf")))  # for predictions such as the following ones


def probs_and_labels(seed: int, samples: int, exits: int = 3, classes: int = 6) -> tuple[Any, Any]:
    """Probabilities (K, n, c) and labels (n,) that are drawn from those of the last exit."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(1, samples, classes)) * 2 + rng.normal(size=(exits, samples, classes)) * 0.7
    probs = np.exp(logits)
    probs = (probs / probs.sum(axis=2, keepdims=True)).astype(np.float32)
    labels = np.array([rng.choice(classes, p=row.astype(float) / row.astype(float).sum()) for row in probs[-1]])
    return probs, labels
