"""What prediction sets and abstention take beside the forward pass: to fit them, and in every answer.

usage: answers.py [--small] [--out FILE]

The zoo's net runs over random images. Sets and an abstention are fitted on as many of its validation samples, and the
classifier answers in batches of 1 and 64, in PyTorch and in ONNX, in turn with the computation of sets and abstention
for its answers, on one thread. Run it alone on the machine. `--small` checks the benchmark itself; its figures mean
nothing.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from record import options, record, seconds

import exitwise as ew
from exitwise.runs.machine_load import measure_load
from exitwise.runtime.engine import AnswerRules
from exitwise.runtime.onnx import Session

COUNTS = {1: 100, 64: 512}  # images per round by batch size


def main() -> None:
    given = options(__doc__, "answers.json").parse_args()
    torch.set_num_threads(1)
    load = measure_load()
    net = ew.load_net(ew.zoo.path("net.safetensors"))
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    tuning, held_out = trace.hold_out(0.5)
    cal = ew.calibrate(tuning, "Pool")
    policy = ew.fit_policy(cal.predict(tuning.val), tuning.val.labels, trace.costs, budget=2e7)
    samples, repeats = (64, 2) if given.small else (1000, 8)
    rows = torch.arange(min(samples, len(held_out)))
    probs = np.stack([pred.probs for pred in cal.predict(held_out.take(rows)).exits()])
    labels = held_out.labels[rows].numpy()
    images = torch.randn(samples, 3, 32, 32)

    @torch.inference_mode()
    def forward() -> None:
        for part in images.split(64):
            net(part)

    fits: dict[str, Callable[[], Any]] = {
        **{
            f"sets, {score}, per {per}": lambda score=score, per=per: ew.fit_sets(
                probs, labels, policy=policy, coverage=0.5, score=score, per=per
            )
            for score in ("thr", "raps")
            for per in ("all", "exit")
        },
        "abstention, share": lambda: ew.fit_abstention(probs, policy=policy, share=0.1),
        "abstention, risk": lambda: ew.fit_abstention(probs, labels, policy=policy, risk=0.6, held_out=True),
    }
    measured: dict[str, Any] = {"fit / forward pass": ratios({"forward": forward, **fits}, repeats)}
    clf = ew.Classifier(net, cal, policy)
    abstention = ew.fit_abstention(probs, policy=policy, share=0.1)
    with tempfile.TemporaryDirectory() as folder:
        clf.export(Path(folder) / "bundle")
        session = Session(Path(folder) / "bundle", threads=1)
        for size, count in COUNTS.items():
            batches = images[:count].split(size)[: 2 if given.small else None]
            arrays = [batch.numpy() for batch in batches]
            preds = [session(x) for x in arrays]
            for runtime, run, inputs in (("torch", clf, batches), ("ONNX", session, arrays)):
                steps: dict[str, Callable[[], Any]] = {
                    "answers": lambda run=run, inputs=inputs: [run(x) for x in inputs]  # type: ignore[misc]
                }
                for score in ("thr", "raps"):
                    sets = ew.fit_sets(probs, labels, policy=policy, coverage=0.5, score=score)
                    rules = AnswerRules(sets, abstention)
                    steps[score] = lambda rules=rules, preds=preds: [rules.apply(p.probs, p.exits) for p in preds]  # type: ignore[misc]
                measured[f"sets and abstention / answers without them, {runtime}, batch {size}"] = ratios(
                    steps, repeats
                )
    record(
        given.out,
        {"command": "benchmarks/answers.py", "threads": 1, "load": load, "samples": samples, "measured": measured},
    )


def ratios(steps: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median over repeats of every step's time as a share of the first one's, all in turn."""
    first, *others = steps
    found: dict[str, list[float]] = {name: [] for name in others}
    for repeat in range(repeats + 1):
        base = seconds(steps[first])
        for name in others:
            share = seconds(steps[name]) / base
            if repeat:  # the first warms up
                found[name].append(share)
    return {name: median(values) for name, values in found.items()}


if __name__ == "__main__":
    main()
