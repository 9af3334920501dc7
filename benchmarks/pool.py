"""Time and memory of the pool, the learned score and the default method.

usage: pool.py [--small] [--out FILE]

On the shipped trace, on one thread: fitting the pool, the learned score and `method="auto"` beside a forward pass of
the zoo's net over as many images, in turn; the learned score of single images in the runtime, beside confidence. In a
process of its own: peak memory of all of it with 50,000 samples, 1,000 classes and 5 exits. Run it alone on the
machine. `--no-memory` leaves out the latter, a quarter of an hour, and keeps what the file of results has, with its
machine. `--small` checks the benchmark itself; its figures mean nothing.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import options, record, seconds, zoo_trace

import exitwise as ew
from exitwise.calibration.trace import HeadWeights, Split
from exitwise.runs.machine_load import measure_load
from exitwise.runtime.engine import classify

MEMORY = {"samples": 50_000, "classes": 1000, "exits": 5, "features": 256}
SMALL = {"samples": 300, "classes": 5, "exits": 3, "features": 16}


def compare(trace: ew.Trace, samples: int, repeats: int) -> dict[str, float]:
    """Median time of every fit as a share of a forward pass over as many images."""
    torch.set_num_threads(1)
    net = ew.load_net(ew.zoo.path("net.safetensors"))
    images = torch.randn(samples, 3, 32, 32)
    pool = ew.calibrate(trace, "Pool")
    preds, labels = pool.predict(trace.val), trace.val.labels

    @torch.inference_mode()
    def forward() -> None:
        for part in images.split(64):
            net(part)

    steps = {
        "Pool": lambda: ew.calibrate(trace, "Pool"),
        "Pool W_opt": lambda: ew.calibrate(trace, "Pool W_opt"),
        "learned score": lambda: ew.fit_policy(preds, labels, trace.costs, budget=2e7, score="learned"),
        "confidence": lambda: ew.fit_policy(preds, labels, trace.costs, budget=2e7),
        "auto": lambda: ew.calibrate(trace),
    }
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        whole = seconds(forward) * len(trace.val) / samples
        for name, step in steps.items():
            ratios[name].append(seconds(step) / whole)
    return {name: median(values) for name, values in ratios.items()}


def compare_answers(trace: ew.Trace, count: int, repeats: int) -> dict[str, dict[str, float]]:
    """Time that the learned score adds to answers if all images go to the end, as shares of answers by confidence.

    "decisions" is the time inside the policy: the score of every exit, its comparison with the threshold, and what it
    keeps for the next exit. "answers" is the whole time, in which such a difference is close to the noise.
    """
    net = ew.load_net(ew.zoo.path("net.safetensors"))
    cal = ew.calibrate(trace, "Pool")
    never = (*(float("inf") for _ in trace.costs.values[1:]), float("-inf"))
    policies = [
        _TimedPolicy(
            ew.fit_policy(cal.predict(trace.val), trace.val.labels, trace.costs, budget=2e7, score=score)
        ).with_thresholds(never)
        for score in ("confidence", "learned")
    ]
    backend = ew.Classifier(net, cal, policies[0].policy).optimize().backend()
    images = torch.randn(count, 3, 32, 32)
    found = {}
    for size in (1, 64):
        batches = images[: max(size, count if size > 1 else count // 4)].split(size)
        shares: dict[str, list[float]] = {"decisions": [], "answers": []}
        for repeat in range(repeats + 1):
            totals = dict.fromkeys(policies, 0.0)
            for policy in policies:
                policy.seconds = 0.0
            for batch in batches:
                # Both orders for every batch: the second of two finds the batch and the weights in the caches.
                for policy in (*policies, *reversed(policies)):
                    totals[policy] += seconds(lambda policy=policy, batch=batch: classify(backend, policy, batch))
            confidence, learned = policies
            if repeat:  # the first warms up
                shares["decisions"].append((learned.seconds - confidence.seconds) / totals[confidence])
                shares["answers"].append(totals[learned] / totals[confidence] - 1)
        found[f"batches of {size}"] = {name: median(values) for name, values in shares.items()}
    return found


class _TimedPolicy:
    """A policy that counts the seconds spent in its exit decisions."""

    def __init__(self, policy: ew.Policy) -> None:
        self.policy, self.seconds = policy, 0.0

    def with_thresholds(self, thresholds: tuple[float, ...]) -> "_TimedPolicy":
        return _TimedPolicy(self.policy.with_thresholds(thresholds))

    def exit_mask(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = self.policy.exit_mask(*arguments)
        self.seconds += time.perf_counter() - start
        return result


def measure_memory(samples: int, classes: int, exits: int, features: int) -> dict[str, float]:
    """Peak memory after every step, with random features that classes can be told from."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (samples,), generator=generator)
    all_features, heads = [], []
    for _ in range(exits):
        centers = torch.randn(classes, features, generator=generator)
        all_features.append((centers[labels] + 2 * torch.randn(samples, features, generator=generator)).relu_())
        heads.append(HeadWeights(centers * (14 / features), torch.zeros(classes)))
    costs = ew.Costs(tuple(float(k + 1) for k in range(exits)))
    trace = ew.Trace(Split(tuple(all_features), labels), None, tuple(heads), (), costs)
    found: dict[str, float] = {}

    def add(name: str, start: float) -> None:
        found[f"{name}, peak GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        found[f"{name}, CPU seconds"] = time.process_time() - start

    add("trace", time.process_time())
    start = time.process_time()
    cal = ew.calibrate(trace, "Pool")
    add("Pool", start)
    start = time.process_time()
    ew.fit_policy(cal.predict(trace.val), labels, costs, budget=float(exits) / 2, score="auto")
    add("policy, score chosen", start)
    start = time.process_time()
    ew.calibrate(trace)
    add("auto", start)
    return found


def recorded_memory(file: Path) -> dict[str, Any]:
    """The memory in a file of results, with the machine that it was measured on."""
    recorded = json.loads(file.read_text(encoding="utf-8"))
    memory = recorded["measured"]["memory"]
    return {"machine": recorded["machine"], **memory}


def main() -> None:
    parser = options(__doc__, "pool.json")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory", help="measure the memory of this case, JSON, and print it")
    given = parser.parse_args()
    if given.memory:
        print(json.dumps(measure_memory(**json.loads(given.memory))))
        return
    case = SMALL if given.small else MEMORY
    command = [sys.executable, str(Path(__file__)), "--memory", json.dumps(case)]
    load = measure_load()
    trace = zoo_trace(given.small)
    fits = compare(trace, *((64, 1) if given.small else (1000, 5)))
    answers = compare_answers(trace, *((64, 1) if given.small else (512, 7)))
    if given.no_memory:
        memory = recorded_memory(given.out)
    else:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        memory = {**case, **json.loads(done.stdout)}
    measured: dict[str, Any] = {
        "fit / forward pass over the validation images": fits,
        "added by the learned score / answers by confidence, no early exits": answers,
        "memory": memory,
    }
    record(given.out, {"command": "benchmarks/pool.py", "threads": 1, "load": load, "measured": measured})


if __name__ == "__main__":
    main()
