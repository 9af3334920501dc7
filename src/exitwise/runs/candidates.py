"""Choose the best chain of several networks, and make it a run."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from exitwise import data
from exitwise.calibration.chain import chain_traces
from exitwise.calibration.collect import collect
from exitwise.calibration.trace import Trace
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.files import atomic_directory, write_json
from exitwise.core.results import to_jsonable
from exitwise.evaluation.best_cascades import CascadeRow, CascadeTable, best_cascades
from exitwise.models.cascade import cascade
from exitwise.models.input_batches import Progress
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import save_checkpoint
from exitwise.runs.budgets import parse_budget
from exitwise.runs.cascade import (
    NetworkCost,
    check_classes,
    count_networks,
    describe_cascade,
    load_cascade_data,
)
from exitwise.runs.leaks import warn_of_network
from exitwise.runs.machine_load import describe_load, measure_load
from exitwise.runs.members import build_members, find_members, read_classes
from exitwise.runs.options import CascadeOptions, DataOptions
from exitwise.runs.run import run_metadata
from exitwise.runtime.folding import optimize_for_cpu

SHARES = ("25%", "50%", "75%", "100%")  # default budgets, of the cost of the most expensive network
_BATCH_SIZE = 64
_ROUNDS = 5


@dataclass(frozen=True)
class ChosenCascade:
    """Table of all chains, the row that became the run, and its networks."""

    table: CascadeTable
    row: CascadeRow
    networks: list[NetworkCost]


def choose_cascade_run(
    directory: Path,
    source: DataOptions,
    options: CascadeOptions,
    budgets: Sequence[str],
    force: bool,
    progress: Progress,
) -> ChosenCascade:
    """Create the run of the chain that is best at the first budget, with its trace; compare it with all others.

    Every network runs once over the images. Chains are compared on the validation images only.
    """
    names = options.candidates or []
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError(f"--candidates must name at least two networks, each once, but got {', '.join(names)}")
    members = find_members(names)
    with atomic_directory(directory, force) as new:
        held_out, splits, metadata, given = load_cascade_data(source, options, members)
        classes = splits.train.classes
        pairs = build_members(members, given, len(classes), options.weights or ())
        named = read_classes(options.classes, members, classes) if options.classes else None

        def chain(chosen: Sequence[int]) -> Any:
            own = None if named is None else [named[i] for i in chosen]
            order = None if own is None else classes
            return cascade([pairs[i] for i in chosen], classes=own, class_order=order, preprocessing=given)

        nets = {name: chain([i]) for i, name in enumerate(names)}
        for net in nets.values():
            check_classes(net, len(classes))
        traces = {name: _collect(name, net, splits, options.train, progress) for name, net in nets.items()}
        for name, trace in traces.items():
            warn_of_network(name, trace)
        example = torch.rand(_BATCH_SIZE, *given.shape, generator=torch.Generator().manual_seed(0))
        load = measure_load()
        if warning := describe_load(load):
            print(f"exitwise: {warning}", file=sys.stderr)
        times = measure_networks(nets, example)
        amounts = _parse_budgets(budgets or SHARES, traces)
        table = best_cascades(traces, amounts, milliseconds=times)
        row = _choose_row(table, budgets)
        chosen = [names.index(name) for name in row.networks]
        net = chain(chosen)
        costs = count_networks(net, [members[i] for i in chosen], given)
        contents = run_metadata(net.spec or {"net": ",".join(row.networks)}, metadata)
        write_json(new / "run.json", {**contents, "cascade": describe_cascade(net, costs, [pairs[i] for i in chosen])})
        save_checkpoint(net, new / "net.safetensors")
        held_out.save(new / "split.safetensors")
        joined = chain_traces([traces[name] for name in row.networks])
        replace(joined, model=net.spec).save(new / "trace.safetensors")
        timing = {"batch_size": _BATCH_SIZE, "threads": torch.get_num_threads(), "load": load}
        report = {"format": "exitwise.cascades", "version": 1, "times": times, "timing": timing, **table.to_dict()}
        write_json(new / "cascades.json", to_jsonable(report))
    return ChosenCascade(table, row, costs)


def _collect(name: str, net: MultiExitNet, splits: data.Splits[Any], with_train: bool, progress: Progress) -> Trace:
    """Run one network over the images; its name is shown beside that of the split."""
    train, val, test = (data.Batches(images, _BATCH_SIZE) for images in (splits.train, splits.val, splits.test))

    def show(split: str, done: int, total: int | None) -> None:
        progress(f"{name}, {split}", done, total)

    return collect(net, train if with_train else None, val, test, classes=splits.train.classes, progress=show)


def measure_networks(nets: Mapping[str, MultiExitNet], images: Tensor) -> dict[str, list[float]]:
    """Return the milliseconds per image up to each exit of every network, optimized for the CPU; medians of rounds.

    The networks take turns, so that a change of the machine's speed concerns all of them.
    """
    optimized = {name: optimize_for_cpu(net) for name, net in nets.items()}
    rounds: dict[str, list[list[float]]] = {name: [] for name in nets}
    with torch.inference_mode():
        for i in range(_ROUNDS + 1):  # the first warms up
            for name, net in optimized.items():
                start, seconds = time.perf_counter(), []
                for head, state in net.states(images):
                    head(state)
                    seconds.append(time.perf_counter() - start)
                if i:
                    rounds[name].append(seconds)
    return {
        name: [1e3 * median(exits) / len(images) for exits in zip(*measured, strict=True)]
        for name, measured in rounds.items()
    }


def _parse_budgets(texts: Sequence[str], traces: Mapping[str, Trace]) -> list[float]:
    """Return budgets in MACs; shares are of the most expensive network."""
    cheapest, largest = (bound(trace.costs.values[-1] for trace in traces.values()) for bound in (min, max))
    costs = Costs((cheapest, largest) if cheapest < largest else (largest,), "MACs")
    amounts = [parse_budget(text, costs, check=False) for text in texts]
    lowest = min(trace.costs.values[0] for trace in traces.values())
    for text, amount in zip(texts, amounts, strict=True):
        if texts is not SHARES and amount < lowest:
            raise InputError(f"`--budget` {text} must be at least the cost of the cheapest network, {lowest:,.0f} MACs")
    return amounts


def _choose_row(table: CascadeTable, budgets: Sequence[str]) -> CascadeRow:
    """Return the best chain of several networks at the first given budget, or by default at 50 % or the next one."""
    indices = range(len(table.budgets)) if budgets else (SHARES.index("50%"), 2, 3)
    for first, i in enumerate(indices):
        rows = [row for row in table.rows if row.budget == table.budgets[i] and len(row.networks) > 1]
        if rows:
            if first and budgets:
                print(
                    f"exitwise: no chain costs as little as {budgets[0]}: the run is for {budgets[i]}", file=sys.stderr
                )
            return max(rows, key=lambda row: (row.top1, -row.cost))
    raise InputError("no chain of networks costs as little as the budgets: give a larger --budget")
