"""Tensors in safetensors files, with a header that holds a format, a version and metadata."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from exitwise.core.errors import InputError
from exitwise.core.files import atomic_write

T = TypeVar("T")


def write(path: Path, tensors: Mapping[str, Tensor], format: str, version: int, metadata: Mapping[str, Any]) -> None:
    """Write tensors of any device as safetensors, atomically; tensors may share memory, as tied weights do.

    Args:
        path: The file to write.
        tensors: Tensors by key.
        format: Format in the header, such as "exitwise.trace".
        version: Version of the format.
        metadata: Further entries of the header, each written as JSON.
    """
    header = {"format": format, "version": str(version)}
    header |= {key: json.dumps(value) for key, value in metadata.items()}
    with atomic_write(path) as temporary:
        try:
            save_file(_unshare_memory(tensors), temporary, metadata=header)
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"{path} could not be written: {error}") from None


def _unshare_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU that share no memory: the file format cannot express sharing."""
    separate, storages = {}, set()
    for key, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        separate[key] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return separate


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors of a safetensors file, and its header.

    Each tensor is read directly into its own contiguous and aligned memory (see `memory`): the data is never held
    twice, and later changes of the file have no effect. The safetensors library validates the file, but its own views
    start at the end of the header and are therefore unaligned.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as checked, path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(size))
            tensors = {}
            for key in checked.keys():  # noqa: SIM118
                tensors[key] = torch.empty_like(checked.get_tensor(key), memory_format=torch.contiguous_format)
                data = tensors[key].reshape(-1).view(torch.uint8).numpy().data
                start, end = entries[key]["data_offsets"]
                file.seek(8 + size + start)
                if end - start != len(data) or file.readinto(data) != len(data):
                    raise InputError(f"{path} changed while it was read")
            return tensors, dict(checked.metadata() or {})
    except SafetensorError as error:
        raise InputError(f"{path} is not a complete safetensors file: {error}") from None


def check_format(path: Path, header: Mapping[str, str], format: str, version: int) -> dict[str, Any]:
    """Return the decoded metadata of a header; raise InputError for another format or version."""
    if header.get("format") != format:
        raise InputError(f"{path} must be of format {format!r}, but its header has {header.get('format')!r}")
    if header.get("version") != str(version):
        raise InputError(
            f"{path} has version {header.get('version')!r} of {format}, but this exitwise reads version {version}"
        )
    try:
        return {key: json.loads(value) for key, value in header.items() if key not in ("format", "version")}
    except (RecursionError, ValueError) as error:
        raise InputError(f"{path} has a header that is not valid JSON: {error}") from None


def load(path: Path, format: str, version: int, build: Callable[[dict[str, Tensor], dict[str, Any]], T]) -> T:
    """Return `build(tensors, metadata)` of a file; errors of `build` become an InputError that names the file."""
    tensors, header = read(path)
    metadata = check_format(path, header, format, version)
    try:
        return build(tensors, metadata)
    except KeyError as error:
        raise InputError(f"{path} lacks {error.args[0]!r}") from None
    except (AttributeError, TypeError, InputError) as error:  # metadata of unexpected types
        raise InputError(f"{path} is not usable: {error}") from None


def all_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite; integers always are. Takes one pass and no temporary tensor."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(bool(bound.isfinite()) for bound in torch.aminmax(tensor.detach()))  # NaN propagates to both bounds
