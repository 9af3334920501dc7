"""A cascade of two ResNets in ONNX beside an ordinary ONNX export of the larger one.

usage: cascades.py [--small] [--images DIR --nets DIR --cache DIR] [--out FILE]

Images and weights as for experiments/cascades.py, which also fills the cache. ResNet20 in front of ResNet56, a pool,
thresholds for a mean cost of 42 % of ResNet56's MACs from one half of the images; the other half is classified, in
batches of 1 and 64, on one thread, in turn with the plain network. `--small` checks the benchmark itself with untrained
networks and noise.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from record import options, record, seconds

import exitwise as ew
from exitwise.calibration.chain import chain_traces
from exitwise.runs.machine_load import measure_load
from exitwise.runtime.export import export_last_exit
from exitwise.runtime.onnx import Session, inference_session

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))  # before this folder: cascades.py
from cascades import collect, split_trace
from cifar_resnet import MEAN, STD, ResNet, load

SHARE = 0.42  # of the larger network's MACs
COUNTS = {1: 200, 64: 1024}  # images per round by batch size


def public(given: Any) -> tuple[list[torch.nn.Module], ew.Trace, ew.Trace, np.ndarray]:
    """Networks, their joined trace, the larger one's, and the test images (n, 3, 32, 32) of the split."""
    names = ("ResNet20", "ResNet56")
    traces = [collect(name, given.images, given.nets, given.cache) for name in names]
    trace = split_trace(chain_traces(traces), 0)
    dataset, _ = ew.data.load(f"folder:{given.images}", None, 32)
    order = torch.randperm(len(trace.test), generator=torch.Generator().manual_seed(0))[: max(COUNTS.values())]
    images = next(iter(ew.data.Batches(dataset[trace.test.index[order]], len(order))))[0]
    return [load(name, given.nets) for name in names], trace, traces[1], images.numpy()


def untrained() -> tuple[list[torch.nn.Module], ew.Trace, ew.Trace, np.ndarray]:
    torch.manual_seed(0)
    modules: list[torch.nn.Module] = [ResNet(1).eval(), ResNet(2).eval()]
    images, labels = torch.randn(64, 3, 32, 32), torch.arange(64) % 10
    traces = [ew.collect(ew.cascade([m], example_inputs=images[:2]), val=[(images, labels)]) for m in modules]
    return modules, split_trace(chain_traces(traces), 0), traces[1], images.numpy()


def main() -> None:
    parser = options(__doc__, "cascades.json")
    for name in ("images", "nets", "cache"):
        parser.add_argument(f"--{name}", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    modules, trace, alone, images = untrained() if given.small else public(given)
    full = alone.costs.values[-1]
    share = max(SHARE, 1.1 * trace.costs.values[0] / full)
    cal = ew.calibrate(trace, "Pool")
    policy = ew.fit_policy(cal.predict(trace.val), trace.val.labels, trace.costs, budget=share * full)
    result = ew.evaluate(cal.predict(trace.test), labels=trace.test.labels, policy=policy, costs=trace.costs)
    own = ew.Preprocessing(32, MEAN, STD)
    net = ew.cascade([(module, own) for module in modules])
    plain = ew.cascade([(modules[-1], own)])
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        ew.Classifier(net, cal, policy).export(Path(folder) / "bundle")
        file = Path(folder) / "plain.onnx"
        export_last_exit(plain, torch.from_numpy(images[:1]), file)
        session = Session(Path(folder) / "bundle", threads=1)
        large = inference_session(file.read_bytes(), 1, file)
        load_before = measure_load()
        for size, count in COUNTS.items():
            batches = np.split(images[:count], range(size, min(count, len(images)), size))
            times: dict[str, list[float]] = {"cascade": [], "plain": []}
            costs: list[float] = []
            for repeat in range(2 if given.small else 8):
                answers: list[Any] = []
                runs = {
                    "cascade": lambda batches=batches, answers=answers: [answers.append(session(x)) for x in batches],
                    "plain": lambda batches=batches: [large.run(["probs"], {"image": x}) for x in batches],
                }
                for name, run in runs.items():
                    took = seconds(run)
                    if repeat:  # the first warms up
                        times[name].append(took)
                costs = [float(cost) for answer in answers for cost in answer.costs]
            ratios = [plain_time / ours for plain_time, ours in zip(times["plain"], times["cascade"], strict=True)]
            measured.append(
                {
                    "batch": size,
                    "images": sum(map(len, batches)),
                    "MACs / plain": float(np.mean(costs)) / full,
                    "ms per image": {name: 1e3 * median(t) / sum(map(len, batches)) for name, t in times.items()},
                    "median speed-up": median(ratios),
                    "speed-ups": ratios,
                }
            )
    record(
        given.out,
        {
            "command": "benchmarks/cascades.py --images DIR --nets DIR --cache DIR",
            "threads": 1,
            "load": load_before,
            "networks": ["ResNet20", "ResNet56"] if not given.small else ["untrained"] * 2,
            "test": {"top1": result.top1, "ece": result.ece, "MACs / plain": result.cost / full},
            "measured": measured,
        },
    )


if __name__ == "__main__":
    main()
