"""Tensors in safetensors files, with a header that names our format and version."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from exitwise.errors import InputError
from exitwise.files import replacing

T = TypeVar("T")


def write(path: Path, tensors: Mapping[str, Tensor], format: str, version: int, metadata: Mapping[str, Any]) -> None:
    """Tensors as safetensors; the header names our format and version, and holds `metadata` value by value as JSON."""
    header = {"format": format, "version": str(version)}
    header |= {key: json.dumps(value) for key, value in metadata.items()}
    with replacing(path) as temporary:
        try:
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, temporary, metadata=header)
        except SafetensorError as error:  # a full disk, among others
            raise OSError(f"{path} could not be written: {error}") from None


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file, and its header."""
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} is not a whole safetensors file: {error}") from None


def check_format(path: Path, header: Mapping[str, str], format: str, version: int) -> dict[str, Any]:
    """Refuse another format or a later version; the header's other entries, decoded."""
    if header.get("format") != format:
        raise InputError(f"{path} must be of format {format!r}, but its header says {header.get('format')!r}")
    if header.get("version") != str(version):
        raise InputError(
            f"{path} has version {header.get('version')!r} of {format}, but this exitwise reads version {version}"
        )
    try:
        return {key: json.loads(value) for key, value in header.items() if key not in ("format", "version")}
    except (RecursionError, ValueError) as error:
        raise InputError(f"{path} has a header that is not valid JSON: {error}") from None


def load(path: Path, format: str, version: int, build: Callable[[dict[str, Tensor], dict[str, Any]], T]) -> T:
    """What `build` makes of a file's tensors and header; what it misses or refuses is an error that names the file."""
    tensors, header = read(path)
    metadata = check_format(path, header, format, version)
    try:
        return build(tensors, metadata)
    except KeyError as error:
        raise InputError(f"{path} lacks {error.args[0]!r}") from None
    except (
        AttributeError,
        TypeError,
        InputError,
    ) as error:  # of headers with other kinds of data in them
        raise InputError(f"{path} is not usable: {error}") from None


def finite(tensor: Tensor) -> bool:
    """Whether every value is a number; integer tensors always are."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
