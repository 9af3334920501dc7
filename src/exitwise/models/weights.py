"""Weights from files: our own, those of the two public MSDNet code bases, and torchvision's ResNets and DenseNets."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exitwise import models
from exitwise.core import tensorfiles
from exitwise.core.errors import InputError
from exitwise.models.net import MultiExitNet

FORMAT, VERSION = "exitwise.net", 1

# The public code's key names, piece by piece, and ours. Order matters: `.m.` is a neck in a classifier, and a
# transition elsewhere.
_RENAMES = (
    (r"^classifier\.(\d+)\.m\.(\d+)\.net\.", r"heads.\1.neck.\2."),
    (r"^classifier\.(\d+)\.linear\.", r"heads.\1.last."),
    (r"^blocks\.", "stages."),
    (r"^(stages\.\d+\.\d+)\.(?:layers|m)\.(\d+)\.", r"\1.scales.\2."),
    (r"\.conv_normal\.net\.", ".same."),
    (r"\.conv_down\.net\.", ".down."),
    (r"\.net\.", "."),
    # Torchvision's.
    (r"^(conv1|bn1|layer\d\.\d+\.downsample)\.", r"stages.0.\1."),
    (r"^(layer\d\.\d+)\.(conv|bn)", r"stages.0.\1.residual.\2"),
    (r"^features\.norm5\.", "heads.0.neck.norm5."),
    (r"^features\.", "stages.0."),
    (r"(\.denselayer\d+\.(?:norm|conv))\.(\d)\.", r"\1\2."),  # as in the weights that it offers for download
    (r"^(?:fc|classifier)\.(weight|bias)$", r"heads.0.last.\1"),
)


def save_checkpoint(net: MultiExitNet, path: str | Path) -> None:
    """The net's weights in our own format, with the spec that rebuilds it."""
    tensorfiles.write(Path(path), net.state_dict(), FORMAT, VERSION, {"model": net.spec})


def load_checkpoint(net: MultiExitNet, path: str | Path) -> MultiExitNet:
    """Load weights into `net` and return it: our own files, or state dicts of the public MSDNet code or torchvision.

    Safetensors, or a `.pth` file, read with `weights_only=True`: nothing in a file is ever executed. The state may be
    nested under `state_dict` or `model`, its keys may begin with `module.`. Nothing is changed unless everything fits.
    """
    path = Path(path)
    theirs = {_our_name(key): value for key, value in _read(path).items()}
    ours = net.state_dict()
    for key in [key for key in ours if key.endswith("num_batches_tracked")]:  # absent from old files, never used here
        theirs.setdefault(key, ours[key])
    check_state_dict(net, theirs, path)
    net.load_state_dict(theirs)
    return net


def load_net(path: str | Path) -> MultiExitNet:
    """The net of one of our own files, rebuilt by the preset that the file names, in evaluation mode."""
    path = Path(path)
    tensors, header = tensorfiles.read(path)
    spec = tensorfiles.check_format(path, header, FORMAT, VERSION).get("model")
    if not isinstance(spec, dict):
        raise InputError(f"{path} does not say which preset it belongs to; build the net and use load_checkpoint")
    with torch.device("meta"):  # a header can ask for anything: nothing is allocated before its weights fit
        plan = models.rebuild(spec)
    check_state_dict(plan, tensors, path)
    return load_checkpoint(models.rebuild(spec), path).eval()


def _our_name(key: str) -> str:
    key = key.removeprefix("module.")
    if key.startswith(("stages.", "heads.")):  # ours already, whatever a net of one's own calls its modules
        return key
    for pattern, replacement in _RENAMES:
        key = re.sub(pattern, replacement, key)
    return key


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        state: Any = tensorfiles.read(path)[0]
    else:
        try:
            with warnings.catch_warnings(action="ignore"):
                state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or foreign file makes torch.load raise almost anything
            kind = type(error).__name__
            raise InputError(
                f"{path} is not a whole file of plain tensors, and nothing else is read ({kind})"
            ) from None
    for name in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    if (
        not isinstance(state, Mapping)
        or not state
        or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items())
    ):
        raise InputError(f"{path} must hold a state dict of named tensors, but holds a {type(state).__name__}")
    return dict(state)


def check_state_dict(net: MultiExitNet, theirs: Mapping[str, Tensor], path: Path | str) -> None:
    """Refuse tensors that are not the net's state; `path` is where they come from, in words."""
    ours = net.state_dict()
    problems = []
    missing = next((key for key in ours if key not in theirs), None)
    unexpected = next((key for key in theirs if key not in ours), None)
    reshaped = next((key for key in ours if key in theirs and ours[key].shape != theirs[key].shape), None)
    if missing:
        problems.append(f"first missing key {missing!r}")
    if unexpected:
        problems.append(f"first unexpected key {unexpected!r}")
    if reshaped:
        problems.append(
            f"{reshaped!r} has shape {tuple(theirs[reshaped].shape)} instead of {tuple(ours[reshaped].shape)}"
        )
    if problems:
        fits = _fitting_preset(theirs, net.spec)
        raise InputError(f"{path} does not fit {_words(net.spec)}: {', '.join(problems)}; {fits}")
    broken = next((key for key, value in theirs.items() if not tensorfiles.all_finite(value)), None)
    if broken:
        raise InputError(f"{path} holds values that are not finite in {broken!r}")


def _words(spec: Mapping[str, Any] | None) -> str:
    if not spec or "preset" not in spec:
        return "the net"
    return repr(spec["preset"]) + "".join(f", {key}={value}" for key, value in spec.items() if key != "preset")


def _fitting_preset(theirs: Mapping[str, Tensor], wanted: Mapping[str, Any] | None) -> str:
    """In words: the preset whose keys and shapes a state dict has, with overrides where it needs them.

    Of several, the one that was wanted, then one without overrides.
    """
    shapes = {key: tuple(value.shape) for key, value in theirs.items() if not key.endswith("num_batches_tracked")}
    last = shapes.get("heads.0.last.weight", ())
    exits = sum(key.startswith("heads.") and key.endswith(".last.weight") for key in shapes)
    found: list[Mapping[str, Any]] = []
    for family in models.FAMILIES:
        stem = shapes.get(family.stem, ())
        if len(stem) != 4 or len(last) != 2:
            continue
        for preset in [name for name, config in family.presets.items() if config.exits == exits]:
            with torch.device("meta"):
                net = family.build(preset, max(last[0], 2), max(stem[1], 1))
            state = net.state_dict()
            if shapes == {k: tuple(v.shape) for k, v in state.items() if not k.endswith("num_batches_tracked")}:
                found.append(net.spec or {})
    if not found:
        return "no preset fits it"
    first = (wanted or {}).get("preset")
    return f"it fits {_words(min(found, key=lambda spec: (spec['preset'] != first, len(spec))))}"
