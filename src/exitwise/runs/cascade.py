"""Create a run whose net is a cascade of networks that are trained already."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exitwise import data
from exitwise.core.errors import InputError
from exitwise.core.files import atomic_directory, write_json
from exitwise.core.preprocessing import Preprocessing
from exitwise.core.results import to_jsonable
from exitwise.models.cascade import Cascade, cascade
from exitwise.models.macs import macs
from exitwise.models.weights import save_checkpoint
from exitwise.runs.data import load_new_data
from exitwise.runs.members import MemberNetwork, build_members, find_members, read_classes
from exitwise.runs.options import CascadeOptions, DataOptions
from exitwise.runs.run import run_metadata


@dataclass(frozen=True)
class NetworkCost:
    """A network of a cascade: its name, the size of its images, and its own MACs."""

    name: str
    size: int
    macs: int


def make_cascade_run(directory: Path, source: DataOptions, options: CascadeOptions, force: bool) -> list[NetworkCost]:
    """Create the run of a cascade; return its networks with their costs."""
    names = options.net or []
    if len(names) < 2:
        raise InputError(f"a cascade needs at least two networks: give --net for each, but got {len(names)}")
    members = find_members(names)
    with atomic_directory(directory, force) as new:
        held_out, splits, metadata, given = load_cascade_data(source, options, members)
        classes = splits.train.classes
        pairs = build_members(members, given, len(classes), options.weights or ())
        named = read_classes(options.classes, members, classes) if options.classes else None
        net = cascade(pairs, classes=named, class_order=None if named is None else classes, preprocessing=given)
        check_classes(net, len(classes))
        costs = count_networks(net, members, given)
        described = describe_cascade(net, costs, pairs)
        contents = run_metadata(net.spec or {"net": ",".join(names)}, metadata)
        write_json(new / "run.json", {**contents, "cascade": described})
        save_checkpoint(net, new / "net.safetensors")
        held_out.save(new / "split.safetensors")
    return costs


def load_cascade_data(
    source: DataOptions, options: CascadeOptions, members: list[MemberNetwork]
) -> tuple[data.HoldOut, data.Splits[Any], dict[str, Any], Preprocessing]:
    """Load the images, at the largest size that a network takes if all are known; return them, preprocessing last."""
    sizes = [member.image_size for member in members]
    size = None if None in sizes else max(size for size in sizes if size is not None)
    held_out, splits, metadata = load_new_data(source, size, pretrained=not options.train)
    given = data.get_dataset(str(source.data)).preprocessing(metadata["image_size"])
    counts = f"{len(splits.val)} images for calibration and {len(splits.test)} for testing"
    origin = ", both of the test set" if metadata.get("val_from_test") else ""
    train = "" if metadata.get("without_train") else f", {len(splits.train)} training images"
    print(f"exitwise: {counts}{origin}{train}", file=sys.stderr)
    return held_out, splits, metadata, given


def count_networks(net: Cascade, members: list[MemberNetwork], given: Preprocessing) -> list[NetworkCost]:
    """Return the cost of every network of a cascade on its own."""
    cumulative = macs(net, given.shape)
    ends = {member: cumulative[k] for k, member in enumerate(net.member_of_exit)}  # of its last exit
    spent, costs = 0, []
    for i, member in enumerate(members):
        costs.append(NetworkCost(member.name, member.image_size or given.size, ends[i] - spent))
        spent = ends[i]
    return costs


def describe_cascade(
    net: Cascade, costs: list[NetworkCost], pairs: Sequence[tuple[Any, Preprocessing | None]]
) -> dict[str, Any]:
    """Return the entry `cascade` of run.json, from the costs of the networks, and each one with its preprocessing."""
    return {
        "networks": [
            {**asdict(cost), "preprocessing": None if preprocessing is None else to_jsonable(preprocessing.to_dict())}
            for cost, (_, preprocessing) in zip(costs, pairs, strict=True)
        ],
        "exits": list(net.member_of_exit),
        "num_classes": net.num_classes,
    }


def check_classes(net: Cascade, num_classes: int) -> None:
    """Raise InputError unless a cascade has as many classes as the data."""
    if net.num_classes != num_classes:
        raise InputError(f"the networks must have the data's {num_classes} classes, but have {net.num_classes}")
