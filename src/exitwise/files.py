"""Reading and writing files: whole or not at all, and never code."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from exitwise.errors import InputError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; renamed over `path` when the block ends well, removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    text = json.dumps(data, indent=2, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} must hold a JSON object, but holds a {type(data).__name__}")
    return data


def write_tensors(path: Path, tensors: Mapping[str, Tensor], format: str, version: int, metadata: Mapping[str, Any]) -> None:
    """Tensors as safetensors; the header names our format and version, and holds `metadata` value by value as JSON."""
    header = {"format": format, "version": str(version)}
    header |= {key: json.dumps(value) for key, value in metadata.items()}
    with replacing(path) as temporary:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, temporary, metadata=header)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
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
    except json.JSONDecodeError as error:
        raise InputError(f"{path} has a header that is not valid JSON: {error}") from None


def finite(tensor: Tensor) -> bool:
    """Whether every value is a number; integer tensors always are."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
