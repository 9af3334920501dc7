"""From a network to an ONNX bundle with the same answers: one network of each family of three libraries.

usage: zoo_sweep.py [NAME ...] [--minutes M] [--again] [--fill]

The networks are the smallest of each of timm's and torchvision's families, and small ones of transformers' types, with
random weights. Each is attached (`at="auto"`, three exits), collected on 8 inputs, calibrated, exported, and run by
ONNX Runtime, in a process of its own with one thread. Its record is written to experiments/zoo_sweep/results.json; a
record that is there is kept, and the sweep continues with the next. `--minutes` stops after a time. The
tables of docs/networks.md are filled from the records; `--fill` does only that. Needs timm and transformers.
"""

import argparse
import copy
import fcntl
import functools
import json
import multiprocessing
import re
import resource
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo
from results import fill_tables, machine, rounded

import exitwise as ew
from exitwise.core.files import write_json
from exitwise.core.nested import map_tensors
from exitwise.runtime.bundle import OPSET
from exitwise.runtime.onnx import OnnxBackend, Session

FOLDER = Path(__file__).parent / "zoo_sweep"
RESULTS, NETWORKS = FOLDER / "results.json", FOLDER / "networks.json"
PAGE = Path(__file__).parent.parent / "docs" / "networks.md"
SAMPLES, EXITS, TOLERANCE = 8, 3, 1e-4
CPU_SECONDS, SECONDS = 300, 7200  # limits for one network; the second is for a machine that is busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="timm:MODEL, torchvision:MODEL or hf:TYPE")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further network after this time")
    parser.add_argument("--again", action="store_true", help="replace the records of these networks, or of all failed")
    parser.add_argument("--fill", action="store_true", help="only fill in the results that are there")
    options = parser.parse_args()
    if not options.fill:
        sweep(options.names, options.minutes, options.again)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page), encoding="utf-8")


def load_records() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())["networks"] if RESULTS.exists() else {}


def sweep(names: Sequence[str], minutes: float, again: bool) -> None:
    """Measure the networks that have no record, and write each record when it is there."""
    start = time.monotonic()
    zoo.define_operators()
    import timm  # noqa: F401  imported once, before the processes are forked
    import torchvision  # noqa: F401
    import transformers  # noqa: F401
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry  # the exporter makes it again for each graph, a fifth of its time
    registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))  # type: ignore[assignment]
    registry.from_torchlib(opset_version=OPSET)

    known = load_records()
    again_for = {n for n in known if again and (names or not known[n]["ok"])}
    for name in names or all_names():
        if name in load_records().keys() - again_for:  # another sweep may have added it
            continue
        if time.monotonic() - start > 60 * minutes:
            break
        record = measure_apart(name)
        print(json.dumps({"name": name, **rounded(record)}), flush=True)
        with (Path(tempfile.gettempdir()) / "exitwise-zoo-sweep.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_json(RESULTS, {"machine": machine(), "networks": {**load_records(), name: rounded(record)}})


def all_names() -> list[str]:
    networks = json.loads(NETWORKS.read_text())
    return [f"{library}:{name}" for library in ("torchvision", "hf", "timm") for name in networks[library]]


def measure_apart(name: str) -> dict[str, Any]:
    """Measure a network in a process of its own; if that dies, the record says during which step."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure_in_child, args=(name, sender))
    start = time.monotonic()
    process.start()
    sender.close()
    step, record = "build", None
    try:
        while record is None and receiver.poll(SECONDS - (time.monotonic() - start)):
            message = receiver.recv()
            step, record = (message, None) if isinstance(message, str) else (step, message)
    except EOFError:
        pass
    if record is None:
        process.kill()
        process.join()
        reason = "no result in time" if time.monotonic() - start > SECONDS or process.exitcode in (-24, -9) else "died"
        return {"ok": False, "step": step, "error": f"{reason} ({CPU_SECONDS} CPU seconds)"}
    process.join()
    return record


def measure_in_child(name: str, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    sender.send(measure(name, sender))


def measure(name: str, sender: Connection) -> dict[str, Any]:
    """Take a network from a module to a bundle; return its record."""
    record: dict[str, Any] = {"ok": False, "seconds": {}}
    started = time.process_time()

    def begin(step: str) -> None:
        nonlocal started
        if "step" in record:
            record["seconds"][record["step"]] = time.process_time() - started
        started, record["step"] = time.process_time(), step
        sender.send(step)

    try:
        with tempfile.TemporaryDirectory() as folder:
            run_steps(name, record, begin, Path(folder))
    except BaseException as error:
        while error.__cause__ is not None and not isinstance(error, ew.InputError):  # the exporter wraps errors
            error = error.__cause__
        lines = str(error).strip().splitlines() or [type(error).__name__]
        kind = "" if isinstance(error, ew.InputError) else f"{type(error).__name__}: "
        record["error"] = f"{kind}{lines[0]}"[:300]
        return record
    begin("done")
    del record["step"]
    record["ok"] = record["difference"] <= TOLERANCE
    if not record["ok"]:
        both = f"{record['difference']:.2g}, float32 and float64 in torch by {record['rounding']:.2g}"
        record |= {"step": "compare", "error": f"ONNX and torch differ by {both}"}
    return record


def run_steps(name: str, record: dict[str, Any], begin: Any, folder: Path) -> None:
    begin("build")
    module, example, shape = zoo.build(name)
    inputs = zoo.draw_inputs(example, SAMPLES)
    zoo.set_statistics(module, inputs)
    record |= {"parameters": sum(p.numel() for p in module.parameters()), "input": shape}
    begin("attach")
    net = ew.attach(module, "auto", exits=EXITS, example_inputs=map_tensors(lambda x: x[:1], inputs))
    begin("spread")
    spread_logits(net, inputs)
    begin("collect")
    trace = ew.collect(net, val=[(inputs, torch.arange(SAMPLES) % net.num_classes)])
    record["cost"] = [cost / trace.costs.values[-1] for cost in trace.costs.values]
    begin("calibrate")
    cal = ew.calibrate(trace, "MSDNet (vanilla)")  # a tuned temperature would hide or amplify differences
    probs = np.stack([np.asarray(pred.probs) for pred in cal.predict(trace.val).exits()])
    record["spread"] = min(float(rows.std(axis=0).mean()) for rows in probs)
    policy = ew.Policy((*(float(np.median(row.max(axis=1))) for row in probs[:-1]), -np.inf), costs=trace.costs.values)
    clf = ew.Classifier(net, cal, policy, costs=trace.costs)
    begin("classify")
    prediction = clf(inputs)
    begin("export")
    clf.export(folder / "bundle", example=map_tensors(lambda x: x[:2], inputs))
    begin("onnx")
    session = Session(folder / "bundle", threads=1)
    arrays = {k: v.numpy() for k, v in inputs.items()} if isinstance(inputs, dict) else inputs.numpy()
    backend = OnnxBackend(session)
    state, differences = backend.start(arrays), []
    for k in range(EXITS):  # every exit for every sample
        state, output = backend.run(k, state)
        differences.append(float(np.abs(output.probs - probs[k]).max()))
    record["difference"] = max(differences)
    exported = session(arrays)  # with early exits; a sample at a threshold may exit elsewhere
    same = exported.exits == prediction.exits.numpy()
    if same.any():
        early = np.abs(exported.probs - prediction.probs.numpy())[same].max()
        record["difference"] = max(record["difference"], float(early))
    if record["difference"] > TOLERANCE:
        record["rounding"] = measure_rounding(net, inputs, probs)
    if same.sum() < SAMPLES - EXITS:
        raise ValueError(f"{SAMPLES - same.sum()} of {SAMPLES} samples exit elsewhere")


def spread_logits(net: Any, inputs: Any) -> None:
    """Make last layers that read where features differ between samples, as training does; random ones read noise."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for exit, features in zip(net.exits, net.features(inputs), strict=True):
            mean = features.mean(dim=0)
            differences = features - mean
            weight = torch.randn(net.num_classes, SAMPLES, generator=rng) @ differences
            if exit.last.bias is None:  # logits without an offset that all samples share
                weight -= torch.outer(weight @ mean, mean) / mean.square().sum()
            spread = float((differences @ weight.T).std(dim=0).mean())
            if not spread > 0:
                raise ValueError("the features are equal for all inputs")
            exit.last.weight.copy_(weight * 2 / spread)
            if exit.last.bias is not None:
                exit.last.bias.copy_(-exit.last.weight @ mean)


def measure_rounding(net: Any, inputs: Any, probs: np.ndarray[Any, Any]) -> float:
    """Return how far probabilities (K, n, c) in float32 are from those that torch computes in float64."""
    exact = copy.deepcopy(net).double()
    with torch.no_grad():
        logits = exact(map_tensors(lambda x: x.double() if x.is_floating_point() else x, inputs))
    return max(float(np.abs(rows.softmax(1).numpy() - row).max()) for rows, row in zip(logits, probs, strict=True))


LIBRARIES = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}


def filled(page: str) -> str:
    """The page with its tables made from the records."""
    networks, all_listed = load_records(), json.loads(NETWORKS.read_text())
    summary = [
        "| library | networks | measured | equal answers | share | attach, median s | longest s | all steps, min |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    failures = ["| network | parameters | step | what stopped it |", "|---|--:|---|---|"]
    missing = ["| library | without a record |", "|---|---|"]
    for library, title in LIBRARIES.items():
        listed = [f"{library}:{name}" for name in all_listed[library]]
        records = {name: networks[name] for name in listed if name in networks}
        good = sum(record["ok"] for record in records.values())
        share = f"{good / len(records):.0%}" if records else ""
        steps = [record.get("seconds", {}) for record in records.values()]
        times = sorted(seconds["attach"] for seconds in steps if "attach" in seconds) or [0.0]
        minutes = sum(sum(seconds.values()) for seconds in steps) / 60
        cells = [title, len(listed), len(records), good, share]
        cells += [f"{times[len(times) // 2]:.1f}", f"{times[-1]:.1f}", f"{minutes:.0f}"]
        summary.append(f"| {' | '.join(map(str, cells))} |")
        failures += [
            f"| `{name}` | {describe_size(record)} | {record['step']} | {describe_error(record['error'])} |"
            for name, record in records.items()
            if not record["ok"]
        ]
        if rest := [f"`{name.partition(':')[2]}`" for name in listed if name not in networks]:
            missing.append(f"| {title} | {', '.join(rest)} |")
    tables = {"summary": summary, "failures": failures, "missing": missing}
    return fill_tables(page, {name: "\n".join(rows) for name, rows in tables.items()})


def describe_size(record: Mapping[str, Any]) -> str:
    return f"{record['parameters'] / 1e6:.1f} M" if "parameters" in record else ""


def describe_error(error: str) -> str:
    """One line for a table, without what belongs to a terminal."""
    line = re.sub(r"\x1b\[\d+m", "", error).replace("|", "/").replace("<", "&lt;").replace("*", "")
    return line if len(line) <= 160 else line[:157] + "..."


if __name__ == "__main__":
    main()
