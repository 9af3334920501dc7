"""Networks of a cascade by name: functions of the user, presets, runs and files, each perhaps at a size of its own."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from exitwise import models
from exitwise.core.checks import suggest
from exitwise.core.errors import InputError, first_line
from exitwise.core.preprocessing import Preprocessing
from exitwise.core.results import to_jsonable
from exitwise.models.cascade import Cascade, cascade
from exitwise.models.named.build import is_named
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import load_checkpoint, load_module_weights, load_net
from exitwise.runs.data import run_preprocessing
from exitwise.runs.run import Run

NO_FILE = "-"  # stands for a file that a network does not need


@dataclass(frozen=True, eq=False)
class MemberNetwork:
    """A network of a cascade, before it is known how many classes the data have.

    Args:
        name: The name as it was given, with its size.
        network: The network; None for a preset, which is built when the number of classes is known.
        preprocessing: Preprocessing of its images, if the user's function gives one.
        size: Size of its images, given with the name or by the preset.
    """

    name: str
    network: nn.Module | None
    preprocessing: Preprocessing | None
    size: int | None

    @property
    def source(self) -> str:
        """The name without a size: networks of one source share their weights."""
        return _split_size(self.name)[0]

    @property
    def image_size(self) -> int | None:
        """Size of its images, if it is known."""
        return self.size or (None if self.preprocessing is None else self.preprocessing.size)


def call_function(function: str) -> Any:
    """Call `package.module:function` and return its result. The name comes from the command line, never from a file."""
    module, colon, name = function.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(import_module(module), name) if colon and module and name else None
    except (ImportError, AttributeError) as error:
        raise InputError(f"`--net` {function} could not be imported: {error}") from None
    finally:
        sys.path.pop(0)
    if not callable(make):
        raise InputError(f"`--net` must be like package.module:function, but got {function!r}")
    try:
        return make()
    except InputError:
        raise
    except Exception as error:  # whatever the user's code may raise
        kind = type(error).__name__
        raise InputError(f"`--net` {function} failed with {kind}: {first_line(error)}") from error


def find_members(names: Sequence[str]) -> list[MemberNetwork]:
    """Return the networks with these names; presets are not built yet. Networks of one source are one network."""
    found: dict[str, tuple[nn.Module | None, Preprocessing | None, int | None]] = {}
    members = []
    for name in names:
        source, size = _split_size(name)
        if source not in found:
            found[source] = _find_network(source)
        network, preprocessing, own_size = found[source]
        members.append(MemberNetwork(name, network, preprocessing, size or own_size))
    return members


def _split_size(name: str) -> tuple[str, int | None]:
    """Return the source and the size of a name like mine:net@160."""
    source, at, size = name.rpartition("@")
    if not at:
        return name, None
    if not size.isdecimal() or not int(size):
        raise InputError(f"`--net` {name!r} must end in a size of images, such as @160, or have no @")
    return source, int(size)


def _find_network(source: str) -> tuple[nn.Module | None, Preprocessing | None, int | None]:
    """Return a network, None for a preset; its preprocessing and its size, if they are known."""
    if source in models.list_presets():
        return None, None, models.config(source).input_shape[1]
    path = Path(source)
    is_run = (path / "run.json").is_file()
    file = path / "net.safetensors" if is_run else path
    if file.is_file():
        net = load_net(file)
        preprocessing = run_preprocessing(Run(path)) if is_run else None
        if isinstance(net, Cascade):
            preprocessing = net.preprocessing
        size = None if preprocessing or net.input_shape is None else net.input_shape[-1]
        return net, preprocessing, size
    if is_named(source):
        raise InputError(
            f"`--net` {source} has no weights for these classes: `exitwise train-heads --model {source}` makes "
            f"a run with them, which a cascade takes as --net RUN"
        )
    if ":" not in source:
        hint = suggest(source, models.list_presets(), "`exitwise models` lists the presets")
        raise InputError(
            f"`--net` must be package.module:function, a preset, a run or a file of weights with their preset, "
            f"but got {source!r}; {hint}"
        )
    result = call_function(source)
    network, preprocessing = result if isinstance(result, tuple | list) and len(result) == 2 else (result, None)
    if not isinstance(network, nn.Module) or not isinstance(preprocessing, Preprocessing | None):
        raise InputError(
            f"`--net` {source} must return a network, or a network and its exitwise.Preprocessing, "
            f"but returned a {type(result).__name__}"
        )
    return network.eval(), preprocessing, None


def build_members(
    members: Sequence[MemberNetwork],
    given: Preprocessing,
    num_classes: int,
    weights: Sequence[Path] = (),
    needs_weights: bool = True,
) -> list[tuple[nn.Module, Preprocessing | None]]:
    """Build presets, load weights, and return each network with the preprocessing that it needs for given images."""
    files = _pair_files("weights", members, weights)
    networks: dict[str, nn.Module] = {}
    pairs: list[tuple[nn.Module, Preprocessing | None]] = []
    for member, file in zip(members, files, strict=True):
        if member.source not in networks:
            networks[member.source] = _build_network(member, given, num_classes, file, needs_weights)
        own = member.preprocessing
        if member.size is not None and member.size != (given.size if own is None else own.size):
            base = own or given
            own = replace(base, size=member.size)
        pairs.append((networks[member.source], own))
    return pairs


def _pair_files(option: str, members: Sequence[MemberNetwork], files: Sequence[Path]) -> list[Path | None]:
    """Return the file of every member, None for -."""
    if not files:
        return [None] * len(members)
    if len(files) != len(members):
        raise InputError(
            f"`--{option}` must give a file or {NO_FILE} for each of {len(members)} networks, but gives {len(files)}"
        )
    return [None if str(file) == NO_FILE else file for file in files]


def _build_network(
    member: MemberNetwork, given: Preprocessing, num_classes: int, file: Path | None, needs_weights: bool
) -> nn.Module:
    network = member.network
    if network is None:
        if file is None and needs_weights:
            raise InputError(f"`--net` {member.source} is a preset without weights: give them with --weights")
        network = models.build(member.source, num_classes=num_classes, in_channels=len(given.mean)).eval()
    if file is not None:
        load_checkpoint(network, file) if isinstance(network, MultiExitNet) else load_module_weights(network, file)
    if isinstance(network, MultiExitNet) and network.num_classes != num_classes:
        raise InputError(
            f"`--net` {member.source} must have the data's {num_classes} classes, but has {network.num_classes}"
        )
    return network


def read_classes(files: Sequence[Path], members: Sequence[MemberNetwork], names: Sequence[str]) -> list[list[str]]:
    """Return the names of each network's classes in its own order; `names` are those of the data."""
    lists = []
    for file in _pair_files("classes", members, files):
        try:
            text = None if file is None else file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} must be a text with a class per line: {first_line(error)}") from None
        lists.append(list(names) if text is None else [line.strip() for line in text.splitlines() if line.strip()])
    return lists


def rebuild_member_cascade(names: Sequence[str], described: Mapping[str, Any], given: Preprocessing) -> Cascade:
    """Build the cascade of a run again, without its weights.

    Args:
        names: The networks, given again on the command line.
        described: Entry `cascade` of run.json.
        given: Preprocessing of the run's images.
    """
    num_classes, networks = described.get("num_classes"), described.get("networks")
    if not isinstance(num_classes, int) or not isinstance(networks, list):
        raise InputError(f"the run must describe its cascade, but holds {described!r}")
    if len(names) != len(networks):
        raise InputError(f"the run is a cascade of {len(networks)} networks: give --net for each, but got {len(names)}")
    members = find_members(names)
    pairs = build_members(members, given, num_classes, needs_weights=False)
    for i, ((_, preprocessing), entry) in enumerate(zip(pairs, networks, strict=True)):
        if not isinstance(entry, Mapping) or "preprocessing" not in entry:
            continue  # of an earlier version
        if entry["preprocessing"] != to_jsonable(None if preprocessing is None else preprocessing.to_dict()):
            raise InputError(
                f"`--net` {names[i]} takes other images than network {i + 1} of the run, {entry.get('name')}: its size "
                "or normalization differs"
            )
    return cascade(pairs, preprocessing=given)
