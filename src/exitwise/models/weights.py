"""Weights in files: exitwise's format, the two released MSDNet code bases, torchvision's ResNets and DenseNets."""

import re
import struct
import warnings
import zipfile
from argparse import Namespace  # holds the options of timm's training script, beside its weights
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from exitwise import models
from exitwise.core import tensorfiles
from exitwise.core.errors import InputError, first_line
from exitwise.models.net import MultiExitNet
from exitwise.models.weight_shapes import differs_only_in_classes

FORMAT, VERSION = "exitwise.net", 1

_FLOAT = torch.empty(0)
# Types that become any other floating type by a cast; float8 weights need the scales of their program.
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# Patterns of the released code's keys, and their replacements. Order matters: `.m.` is a neck in a classifier, and a
# transition elsewhere.
_RENAMES = (
    (r"^classifier\.(\d+)\.m\.(\d+)\.net\.", r"heads.\1.neck.\2."),
    (r"^classifier\.(\d+)\.linear\.", r"heads.\1.last."),
    (r"^blocks\.", "stages."),
    (r"^(stages\.\d+\.\d+)\.(?:layers|m)\.(\d+)\.", r"\1.scales.\2."),
    (r"\.conv_normal\.net\.", ".same."),
    (r"\.conv_down\.net\.", ".down."),
    (r"\.net\.", "."),
    # Torchvision's keys.
    (r"^(conv1|bn1|layer\d\.\d+\.downsample)\.", r"stages.0.\1."),
    (r"^(layer\d\.\d+)\.(conv|bn)", r"stages.0.\1.residual.\2"),
    (r"^features\.norm5\.", "heads.0.neck.norm5."),
    (r"^features\.", "stages.0."),
    (r"(\.denselayer\d+\.(?:norm|conv))\.(\d)\.", r"\1\2."),  # in the weights that torchvision offers for download
    (r"^(?:fc|classifier)\.(weight|bias)$", r"heads.0.last.\1"),
)


def save_checkpoint(net: MultiExitNet, path: str | Path) -> None:
    """Save the weights of a net, with the spec that rebuilds it.

    The file is written atomically. A net that was not built from a preset has no spec: build it and use
    `load_checkpoint` to load the file.

    Args:
        net: The net.
        path: A safetensors file; its folder is created if needed.

    Example:
        >>> import exitwise as ew
        >>> ew.save_checkpoint(ew.models.msdnet("tiny-8"), "net.safetensors")
        >>> ew.load_net("net.safetensors").spec
        {'preset': 'tiny-8'}
    """
    base = {} if net.base_sha256 is None else {"base": net.base_sha256}
    tensorfiles.write(Path(path), net.state_dict(), FORMAT, VERSION, {"model": net.spec, **base})


def load_checkpoint(net: MultiExitNet, path: str | Path) -> MultiExitNet:
    """Load weights into `net` from exitwise's files or from state dicts of the released MSDNet code or torchvision.

    Files are safetensors, or `.pth` files, read with `weights_only=True`: nothing in a file is ever executed. The state
    may be nested under `state_dict`, `model_state_dict`, `model` or `net`, its keys may begin with `module.`.
    Nothing is changed unless everything fits.

    Args:
        net: The net to load into; its mode stays.
        path: The file.

    Returns:
        `net` itself.

    Raises:
        InputError: The file is missing, damaged, or holds other data than finite weights of this net. If it fits a
            preset, the message names it.

    Example:
        >>> import exitwise as ew
        >>> net = ew.models.msdnet("cifar100-small")
        >>> ew.load_checkpoint(net, ew.zoo.path("net.safetensors")) is net
        True
    """
    path = Path(path)
    state = _read_state_dict(path)
    file_keys = {_rename_key(key): key for key in state}
    loaded = {_rename_key(key): value for key, value in state.items()}
    expected = net.state_dict()
    for key in [key for key in expected if key.endswith("num_batches_tracked")]:  # absent from old files, never used
        loaded.setdefault(key, expected[key])
    loaded = check_state_dict(net, loaded, path, file_keys)
    with restore_on_error(net):
        load_state(net, loaded, path)
    return net


def load_module_weights(module: nn.Module, path: str | Path, keep_for_classes: int | None = None) -> None:
    """Load a state dict into a module of the user's, whose keys it must have; `module.` before all keys is dropped.

    Args:
        module: The module to load into; its mode stays.
        path: The file, safetensors or `.pth`, read as by `load_checkpoint`.
        keep_for_classes: Number of classes of the module, whose layers with so many outputs keep their weights if the
            file has another number.

    Raises:
        InputError: The file is missing or damaged, or its weights do not fit the module.
    """
    path = Path(path)
    loaded, expected = _read_state_dict(path), module.state_dict()
    prefix = "module."
    if all(key.startswith(prefix) for key in loaded) and not all(key.startswith(prefix) for key in expected):
        loaded = {key.removeprefix(prefix): value for key, value in loaded.items()}
    for key in [key for key in expected if key.endswith("num_batches_tracked")]:
        loaded.setdefault(key, expected[key])
    if keep_for_classes is not None:
        kept = {
            key: value
            for key, value in expected.items()
            if key in loaded and differs_only_in_classes(loaded[key], value, keep_for_classes)
        }
        loaded |= kept
    checked = check_state_dict(module, loaded, path)
    with restore_on_error(module):
        load_state(module, checked, path)


@contextmanager
def restore_on_error(net: nn.Module) -> Iterator[None]:
    """Give the net its former weights back if the block fails."""
    before = {key: value.clone() for key, value in net.state_dict().items() if isinstance(value, Tensor)}
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for key, value in net.state_dict().items():
                if key in before:
                    value.copy_(before[key])
        raise


def load_state(net: nn.Module, state: Mapping[str, Tensor], source: Path | str) -> None:
    """Load a state dict that `check_state_dict` returned; errors of a net's own hooks become an InputError."""
    try:
        net.load_state_dict(dict(state))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{source} could not be loaded into the net: {first_line(error)}") from None


def load_net(path: str | Path) -> MultiExitNet:
    """Rebuild the net of a file that `save_checkpoint` wrote, from the preset that the file names.

    Args:
        path: A safetensors file.

    Returns:
        The net with its weights, in evaluation mode.

    Raises:
        InputError: The file is missing, damaged or of another format, names no preset, or its weights do not fit it.

    Example:
        >>> import exitwise as ew
        >>> net = ew.load_net(ew.zoo.path("net.safetensors"))
        >>> net.spec, len(net.exits), net.num_classes
        ({'preset': 'cifar100-small'}, 4, 100)
    """
    path = Path(path)
    tensors, header = tensorfiles.read(path)
    metadata = tensorfiles.check_format(path, header, FORMAT, VERSION)
    spec = metadata.get("model")
    if not isinstance(spec, dict):
        raise InputError(f"{path} does not name the preset of its net; build the net and use load_checkpoint")
    check_rebuilt(spec, tensors, path)
    net = load_checkpoint(models.rebuild(spec), path).eval()
    net.base_sha256 = metadata.get("base")
    return net


def read_base_hash(path: Path) -> str | None:
    """Return the hash of the weights that a base network had when it was loaded, from a file that has been read."""
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata() or {})
    return tensorfiles.check_format(path, header, FORMAT, VERSION).get("base") if "base" in header else None


def check_rebuilt(
    spec: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    source: Path | str,
    prepare: Callable[[MultiExitNet], MultiExitNet] | None = None,
) -> None:
    """Raise `InputError` unless weights of a file fit the net of its spec, before anything of its size is allocated.

    Args:
        spec: How to rebuild the net.
        weights: Weights by the keys of the net.
        source: Beginning of the message.
        prepare: Changes the rebuilt net before its keys are compared.
    """
    if "module" in spec:  # a network by name: its exits cannot always be attached without values
        models.check_named_size(spec, sum(tensor.numel() for tensor in weights.values()))
        return
    with torch.device("meta"):
        meta_net = models.rebuild(spec)
    check_state_dict(meta_net if prepare is None else prepare(meta_net), weights, source)


def _rename_key(key: str) -> str:
    """Return the key of exitwise for a key of the released code or torchvision."""
    key = key.removeprefix("module.")
    if key.startswith(("stages.", "heads.")):  # a MultiExitNet's own, even if submodules match the patterns
        return key
    for pattern, replacement in _RENAMES:
        key = re.sub(pattern, replacement, key)
    return key


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        state: Any = tensorfiles.read(path)[0]
    else:
        _check_uncompressed(path)
        try:
            with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals([Namespace]):
                state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or foreign file makes torch.load raise almost anything
            kind = type(error).__name__
            raise InputError(
                f"{path} must be a complete file that holds only tensors, but reading raised {kind}"
            ) from None
    for name in ("state_dict", "model_state_dict", "model", "net"):
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    if (
        not isinstance(state, Mapping)
        or not state
        or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items())
    ):
        raise InputError(f"{path} must hold a state dict of named tensors, but holds a {type(state).__name__}")
    return dict(state)


def _check_uncompressed(path: Path) -> None:
    """Raise InputError if a zip file would take more memory than its size: torch.save does not compress."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (OSError, RecursionError, RuntimeError, ValueError, LookupError, zipfile.BadZipFile, struct.error):
        return  # another format, or damaged: torch.load decides
    if size > path.stat().st_size:
        raise InputError(
            f"{path} is compressed, from {size:,} bytes: write it with torch.save, which does not compress"
        )


def _describe_unusual_kind(tensor: Tensor, expected: Tensor) -> str | None:
    """Return how a tensor differs from one that can be weights in the place of `expected`, or None."""
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.layout != torch.strided:
        return f"has the layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_quantized:
        return "is quantized"
    if tensor.is_meta:
        return "is a meta tensor, without values"
    dtype = str(tensor.dtype).removeprefix("torch.")
    if expected.is_floating_point():
        return None if tensor.dtype in _FLOATS else f"is {dtype}"
    if expected.is_complex() or tensor.is_complex():
        return None if expected.is_complex() and tensor.is_complex() else f"is {dtype}"
    return (
        f"is {dtype}"
        if tensor.is_floating_point() or (tensor.dtype == torch.bool) != (expected.dtype == torch.bool)
        else None
    )


def check_state_dict(
    net: nn.Module, loaded: Mapping[str, Tensor], source: Path | str, file_keys: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Return `loaded` in the net's types; raise `InputError` unless it has its keys and shapes and is finite in them.

    Nothing is allocated before the shapes fit.

    Args:
        net: The net that the weights are for.
        loaded: Weights by the net's keys.
        source: Beginning of the message.
        file_keys: Keys in the file by the net's keys, where they differ: messages name these.
    """

    def in_file(key: str) -> str:
        return (file_keys or {}).get(key, key)

    expected = {key: value for key, value in net.state_dict().items() if isinstance(value, Tensor)}
    for key, value in loaded.items():
        if kind := _describe_unusual_kind(value, expected.get(key, value)):
            wanted = str(expected.get(key, _FLOAT).dtype).removeprefix("torch.")
            raise InputError(f"{source} cannot be loaded: {in_file(key)!r} {kind}, but must be a dense {wanted} tensor")
    problems = []
    missing = next((key for key in expected if key not in loaded), None)
    unexpected = next((key for key in loaded if key not in expected), None)
    reshaped = next((key for key in expected if key in loaded and expected[key].shape != loaded[key].shape), None)
    if missing:
        problems.append(f"first missing key {missing!r}")
    if unexpected:
        problems.append(f"first unexpected key {in_file(unexpected)!r}")
    if reshaped:
        shapes = [tuple(state[reshaped].shape) for state in (loaded, expected)]
        problems.append(f"{in_file(reshaped)!r} has shape {shapes[0]} instead of {shapes[1]}")
    if problems:
        if not isinstance(net, MultiExitNet):
            raise InputError(f"{source} does not fit the network: {', '.join(problems)}")
        hint = _describe_original_module(loaded, expected) or _describe_fitting_preset(loaded, net.spec)
        raise InputError(f"{source} does not fit {_describe_spec(net.spec)}: {', '.join(problems)}; {hint}")
    cast = {key: loaded[key].detach().to(expected[key].dtype) for key in expected}
    for key, value in cast.items():
        if not tensorfiles.all_finite(value):
            too_large = tensorfiles.all_finite(loaded[key])
            dtype = str(value.dtype).removeprefix("torch.")
            reason = f"that are not finite in {dtype}" if too_large else "that are not finite"
            raise InputError(f"{source} holds values {reason} in {in_file(key)!r}")
        if not value.is_floating_point() and not torch.equal(value.to(loaded[key].dtype), loaded[key]):
            raise InputError(f"{source} holds values in {in_file(key)!r} that {value.dtype} cannot hold")
    return cast


def _describe_spec(spec: Mapping[str, Any] | None) -> str:
    if not spec or "preset" not in spec:
        return "the net"
    return repr(spec["preset"]) + "".join(f", {key}={value}" for key, value in spec.items() if key != "preset")


def _describe_original_module(loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Return what to do with weights that fit by their shapes, but not by their names: those before `attach`."""

    def count_shapes(state: Mapping[str, Tensor]) -> Counter[tuple[int, ...]]:
        return Counter(tuple(value.shape) for key, value in state.items() if not key.endswith("num_batches_tracked"))

    if any(key in expected for key in loaded if not key.endswith("num_batches_tracked")):
        return None
    if count_shapes(loaded) - count_shapes(expected):
        return None
    return "its shapes are those of the original module: load it there, before the exits are attached"


def _describe_fitting_preset(loaded: Mapping[str, Tensor], requested: Mapping[str, Any] | None) -> str:
    """Return "it fits ..." with the preset, and its overrides, that has the keys and shapes of a state dict.

    If several presets fit, the requested one is preferred, then one without overrides.
    """
    shapes = {key: tuple(value.shape) for key, value in loaded.items() if not key.endswith("num_batches_tracked")}
    last = shapes.get("heads.0.last.weight", ())
    exits = sum(key.startswith("heads.") and key.endswith(".last.weight") for key in shapes)
    specs: list[Mapping[str, Any]] = []
    for family in models.FAMILIES:
        stem = shapes.get(family.stem, ())
        if len(stem) != 4 or len(last) != 2:
            continue
        for preset in [name for name, config in family.presets.items() if config.exits == exits]:
            with torch.device("meta"):
                net = family.build(preset, max(last[0], 2), max(stem[1], 1))
            state = net.state_dict()
            if shapes == {k: tuple(v.shape) for k, v in state.items() if not k.endswith("num_batches_tracked")}:
                specs.append(net.spec or {})
    if not specs:
        return "no preset fits it"
    preferred = (requested or {}).get("preset")
    return f"it fits {_describe_spec(min(specs, key=lambda spec: (spec['preset'] != preferred, len(spec))))}"
