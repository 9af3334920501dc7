"""INT8 stages in front of calibrated exits: what quantization does to speed, accuracy, calibration and exits.

usage: int8.py CIFAR100_DIR    measure; `int8.py --fill` only fills in the results that are there

The stages and heads of the shipped net are exported as ONNX graphs up to the features of every exit, and their
convolutions are quantized by onnxruntime: static QDQ, weights per channel, activation ranges from 512 training images.
The last layers stay in float32. The features of the INT8 graphs become a trace, and three ways to use it are compared
with the float32 graphs at half of the full cost: calibration and thresholds of the float32 net as they are, thresholds
fitted again, and everything fitted again. Times are those of the graphs on one thread, in turn, medians over rounds.
Results are written to experiments/int8/results.json, tables to docs/benchmarks.md.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnxruntime import quantization
from results import fill_tables, machine, rounded
from torch import Tensor, nn

import exitwise as ew
from exitwise.calibration.trace import Split
from exitwise.core.files import read_json, write_json
from exitwise.core.nested import iter_tensors, replace_tensors
from exitwise.data import cifar
from exitwise.data.batches import Normalize
from exitwise.models.net import Head
from exitwise.runtime.export import _prepare_net, _write_graph
from exitwise.runtime.onnx import inference_session

HERE = Path(__file__).parent
RESULTS = HERE / "int8" / "results.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
METHODS = {"vanilla": "MSDNet (vanilla)", "T_opt": "T_opt", "Pool": "Pool"}
BUDGET = 0.5  # of the last exit's cost
CALIBRATION_IMAGES, BATCH, ROUNDS = 512, 250, 31
Session = onnxruntime.InferenceSession


class StageFeatures(nn.Module):
    """A stage that takes and returns flat tensors: the stage state, and the features of its exit."""

    def __init__(self, stage: nn.Module, head: Head, structure: Any, last: bool) -> None:
        super().__init__()
        self.stage, self.head = stage, head
        self._structure, self._last = structure, last

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        output = self.stage(replace_tensors(self._structure, iter(inputs)))
        state = () if self._last else tuple(iter_tensors(output))
        return (*state, self.head.features(output))


def write_stages(net: ew.MultiExitNet, folder: Path) -> list[Path]:
    """Write a float32 graph per stage; its last output is the features."""
    prepared = _prepare_net(net)
    state: Any = torch.zeros(3, 3, 32, 32)
    files = []
    for k, (stage, head) in enumerate(zip(prepared.stages, prepared.exits, strict=True)):
        last = k == len(prepared.exits) - 1
        module, tensors = StageFeatures(stage, head, state, last), list(iter_tensors(state))
        with torch.no_grad():
            state = stage(state)
        outputs = [] if last else [f"next.{i}" for i, _ in enumerate(iter_tensors(state))]
        files.append(folder / f"stage{k}.onnx")
        _write_graph(module, tensors, files[-1], [f"state.{i}" for i in range(len(tensors))], [*outputs, "features"])
    return files


class StageInputs(quantization.CalibrationDataReader):
    """Inputs of one stage, one image after the other, for the ranges of its activations."""

    def __init__(self, names: Sequence[str], arrays: Sequence[np.ndarray]) -> None:
        self._feeds: Iterator[dict[str, np.ndarray]] = (
            {name: array[i : i + 1] for name, array in zip(names, arrays, strict=True)} for i in range(len(arrays[0]))
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def open_sessions(files: Sequence[Path]) -> list[Session]:
    return [inference_session(file.read_bytes(), 1, file) for file in files]


def run_stage(session: Session, state: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the next stage state and the features."""
    feed = {node.name: array for node, array in zip(session.get_inputs(), state, strict=True)}
    return list(session.run(None, feed))


def quantize_stages(files: Sequence[Path], images: np.ndarray, folder: Path) -> list[Path]:
    """Write INT8 graphs; every stage gets its ranges behind the float32 stages before it."""
    state, quantized = [images], []
    for file, session in zip(files, open_sessions(files), strict=True):
        quantized.append(folder / f"int8_{file.name}")
        quantization.quantize_static(
            file,
            quantized[-1],
            StageInputs([node.name for node in session.get_inputs()], state),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=["Conv"],
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
        state = run_stage(session, state)[:-1]
    return quantized


def collect_features(sessions: Sequence[Session], images: ew.data.ImageSet) -> Split:
    """Run all stages on all images."""
    normalize = Normalize(images)
    parts: list[list[np.ndarray]] = [[] for _ in sessions]
    for start in range(0, len(images.labels), BATCH):
        state = [normalize(images.pixels[start : start + BATCH]).numpy()]
        for session, features in zip(sessions, parts, strict=True):
            *state, last = run_stage(session, state)
            features.append(last)
    return Split(tuple(torch.from_numpy(np.concatenate(part)) for part in parts), images.labels)


def measure_speed(stages: dict[str, list[Session]], images: np.ndarray, batch_size: int) -> dict[str, list[float]]:
    """Return milliseconds per image of every stage, float32 and INT8 in turn, medians over rounds."""
    states: dict[str, list[list[np.ndarray]]] = {}
    for name, sessions in stages.items():
        states[name], state = [], [images[:batch_size]]
        for session in sessions:
            states[name].append(state)
            state = run_stage(session, state)[:-1]
    rounds: dict[str, list[list[float]]] = {name: [] for name in stages}
    for _ in range(ROUNDS):
        for name, sessions in stages.items():
            times = []
            for session, state in zip(sessions, states[name], strict=True):
                start = time.perf_counter()
                run_stage(session, state)
                times.append(1e3 * (time.perf_counter() - start) / batch_size)
            rounds[name].append(times)
    return {name: np.median(times, axis=0).tolist() for name, times in rounds.items()}


def summarize(preds: ew.Predictions, trace: ew.Trace, policy: ew.Policy) -> dict[str, Any]:
    """Return metrics at the budget and at every exit."""
    assert trace.test is not None
    result = ew.evaluate(preds, labels=trace.test.labels, policy=policy, costs=trace.costs)
    row = {name: getattr(result, name) for name in ("top1", "nlpd", "ece")}
    full = trace.costs.values[-1]
    return {**row, "cost": result.cost / full, "top1_per_exit": [exit.top1 for exit in result.per_exit]}


def compare(method: str, float32: ew.Trace, int8: ew.Trace) -> dict[str, Any]:
    """Return the rows of a method: float32, and INT8 with what is fitted again."""
    assert float32.test is not None
    assert int8.test is not None
    budget = BUDGET * float32.costs.values[-1]

    def fit(calibration: ew.Calibration, trace: ew.Trace) -> ew.Policy:
        return ew.fit_policy(calibration.predict(trace.val), trace.val.labels, trace.costs, budget=budget)

    former, again = ew.calibrate(float32, method), ew.calibrate(int8, method)
    policy = fit(former, float32)
    before, after = former.predict(float32.test), former.predict(int8.test)
    exits = policy.exits(before), policy.exits(after)
    rows = {
        "float32": summarize(before, float32, policy),
        "INT8, nothing fitted again": summarize(after, int8, policy),
        "INT8, thresholds fitted again": summarize(after, int8, fit(former, int8)),
        "INT8, all fitted again": summarize(again.predict(int8.test), int8, fit(again, int8)),
    }
    flips = {"other_exit": float((exits[0] != exits[1]).mean())}
    flips["other_class_at_last_exit"] = float((before.predicted[-1] != after.predicted[-1]).mean())
    return {"rows": rows, **flips}


def main(root: Path) -> None:
    torch.set_num_threads(1)
    shipped = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    net = ew.load_net(ew.zoo.path("net.safetensors")).eval()
    assert shipped.val.index is not None
    train, test = cifar.load(cifar.CIFAR100, root)
    known = torch.zeros(len(train.labels), dtype=torch.bool)
    known[shipped.val.index] = True
    ranges = (~known).nonzero()[:, 0][:: len(train.labels) // CALIBRATION_IMAGES][:CALIBRATION_IMAGES]
    images = Normalize(train)(train.pixels[ranges]).numpy()
    with tempfile.TemporaryDirectory() as folder:
        files = write_stages(net, Path(folder))
        logging.getLogger().setLevel(logging.ERROR)  # onnxruntime advises a step that the exporter has made
        int8_files = quantize_stages(files, images, Path(folder))
        stages = {"float32": open_sessions(files), "INT8": open_sessions(int8_files)}
        megabytes = {
            name: sum(file.stat().st_size for file in group) / 1e6
            for name, group in (("float32", files), ("INT8", int8_files))
        }
        speed = {f"batch {size}": measure_speed(stages, images, size) for size in (1, 8, 64)}
        print(speed, flush=True)
        traces = {}
        for name, sessions in stages.items():
            val, rest = (collect_features(sessions, part) for part in (train[shipped.val.index], test))
            traces[name] = ew.Trace(val, rest, shipped.heads, (), shipped.costs, shipped.classes)
    results = {
        "command": "experiments/int8.py",
        "machine": machine(),
        "budget": BUDGET,
        "megabytes": megabytes,
        "milliseconds": speed,
        "methods": {name: compare(method, *traces.values()) for name, method in METHODS.items()},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    write_json(RESULTS, rounded(results))


def speed_table(results: Mapping[str, Any]) -> str:
    """Format milliseconds per image of every stage with its head, and the ratio of the whole net."""
    lines = ["| stages | batch | exit 1 | exit 2 | exit 3 | exit 4 | all | float32 / INT8 |", "|" + "---|" * 8]
    for batch, rows in results["milliseconds"].items():
        for name, times in rows.items():
            ratio = f"{sum(rows['float32']) / sum(rows['INT8']):.2f}" if name == "INT8" else ""
            cells = [name, batch.removeprefix("batch "), *(f"{time:.2f}" for time in [*times, sum(times)]), ratio]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_table(results: Mapping[str, Any]) -> str:
    """Format metrics at the budget for every method and every way to use the INT8 stages."""
    lines = ["| method | stages | top-1 % | NLPD | ECE | cost | last exit % |", "|" + "---|" * 7]
    for method, found in results["methods"].items():
        for name, row in found["rows"].items():
            metrics = [
                f"{100 * row['top1']:.2f}",
                f"{row['nlpd']:.3f}",
                f"{row['ece']:.3f}",
                f"{100 * row['cost']:.1f} %",
            ]
            last = f"{100 * row['top1_per_exit'][-1]:.2f}"
            lines.append(f"| {method} | {name} | {' | '.join([*metrics, last])} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page with its tables made from the results."""
    results = read_json(RESULTS)
    return fill_tables(page, {"int8 speed": speed_table(results), "int8 accuracy": accuracy_table(results)})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] != "--fill":
        main(Path(sys.argv[1]))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
