"""Tensors in safetensors files, with a header that holds a format, a version, metadata and a digest of the file."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from exitwise.core.errors import InputError, first_line
from exitwise.core.files import atomic_write, check_digest_name, parse_json
from exitwise.core.mapped_rows import MappedRows

T = TypeVar("T")

DIGEST_KEY = "exitwise.sha256"  # files of other programs may hold a "sha256" of something else
_NO_DIGEST = b"0" * 64  # stands for the digest while it is computed
# Quotes inside of a string are escaped, so no name or value of a header can look like this entry.
_DIGEST_ENTRY = re.compile(rb'"' + re.escape(DIGEST_KEY.encode()) + rb'":"([0-9a-f]{64})"')


def write(path: Path, tensors: Mapping[str, Tensor], format: str, version: int, metadata: Mapping[str, Any]) -> None:
    """Write tensors of any device as safetensors, atomically; tensors may share memory, as tied weights do.

    The header also holds the SHA-256 of the whole file, header and data, which `read` checks.

    Args:
        path: The file to write.
        tensors: Tensors by key.
        format: Format in the header, such as "exitwise.trace".
        version: Version of the format.
        metadata: Further entries of the header, each written as JSON.
    """
    header = {"format": format, "version": str(version)}
    header |= {key: json.dumps(value) for key, value in metadata.items()}
    header[DIGEST_KEY] = _NO_DIGEST.decode()
    with atomic_write(path) as temporary:
        try:
            save_file(_unshare_memory(tensors), temporary, metadata=header)
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"{path} could not be written: {error}") from None
        _insert_digest(temporary)


def _insert_digest(path: Path) -> None:
    """Replace the zeros in the header of a file by the digest of the file with the zeros."""
    with path.open("r+b") as file:
        prefix = file.read(8)
        header = file.read(int.from_bytes(prefix, "little"))
        digest = hashlib.sha256(prefix + header)
        while block := file.read(1 << 20):
            digest.update(block)
        entry = _DIGEST_ENTRY.search(header)
        assert entry is not None
        file.seek(len(prefix) + entry.start(1))
        file.write(digest.hexdigest().encode())


def _unshare_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors on the CPU that share no memory: the file format cannot express sharing."""
    separate, storages = {}, set()
    for key, tensor in tensors.items():
        tensor = (tensor[:] if isinstance(tensor, MappedRows) else tensor).detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        separate[key] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return separate


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors of a safetensors file, and its header.

    Each tensor is read directly into its own contiguous and aligned memory (see `memory`): the data is never held
    twice, and later changes of the file have no effect. The safetensors library validates the file, but its own views
    start at the end of the header and are therefore unaligned.

    Raises:
        InputError: If the file is missing, incomplete, of unknown types, or does not match the digest in its header.
            Files of other programs and of earlier versions have no digest.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as checked, path.open("rb") as file:
            prefix = file.read(8)
            raw_header = file.read(int.from_bytes(prefix, "little"))
            entries, header = parse_json(raw_header), dict(checked.metadata() or {})
            if header.get("format", "").startswith("exitwise."):
                check_digest_name(path, header, DIGEST_KEY)
            entry = _DIGEST_ENTRY.search(raw_header)
            digest = hashlib.sha256(prefix + _without_digest(raw_header, entry))
            tensors = {key: torch.empty(0) for key in checked.keys()}  # noqa: SIM118
            for key in sorted(tensors, key=lambda key: entries[key]["data_offsets"]):  # the order of the file
                tensors[key] = torch.empty_like(checked.get_tensor(key), memory_format=torch.contiguous_format)
                data = tensors[key].reshape(-1).view(torch.uint8).numpy().data
                start, end = entries[key]["data_offsets"]
                file.seek(len(prefix) + len(raw_header) + start)
                if end - start != len(data) or file.readinto(data) != len(data):
                    raise InputError(f"{path} changed while it was read")
                digest.update(data)
    except SafetensorError as error:
        raise InputError(f"{path} is not a complete safetensors file: {first_line(error)}") from None
    except InputError:
        raise
    except (LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a usable safetensors file: {first_line(error)}") from None
    if DIGEST_KEY in header and (entry is None or digest.hexdigest().encode() != entry[1]):
        raise InputError(f"{path} has changed since it was written: its contents do not match its digest")
    return tensors, header


def _without_digest(header: bytes, entry: re.Match[bytes] | None) -> bytes:
    return header if entry is None else header[: entry.start(1)] + _NO_DIGEST + header[entry.end(1) :]


def check_format(path: Path, header: Mapping[str, str], format: str, version: int) -> dict[str, Any]:
    """Return the decoded metadata of a header; raise InputError for another format or version."""
    if header.get("format") != format:
        raise InputError(f"{path} must be of format {format!r}, but its header has {header.get('format')!r}")
    if header.get("version") != str(version):
        raise InputError(
            f"{path} has version {header.get('version')!r} of {format}, but this exitwise reads version {version}"
        )
    try:
        reserved = ("format", "version", DIGEST_KEY)
        return {key: parse_json(value) for key, value in header.items() if key not in reserved}
    except (RecursionError, ValueError) as error:
        raise InputError(f"{path} has a header that is not valid JSON: {error}") from None


def load(path: Path, format: str, version: int, build: Callable[[dict[str, Tensor], dict[str, Any]], T]) -> T:
    """Return `build(tensors, metadata)` of a file; errors of `build` become an InputError that names the file."""
    tensors, header = read(path)
    return build_from_file(path, build, tensors, check_format(path, header, format, version))


def build_from_file(
    path: Path,
    build: Callable[[dict[str, Tensor], dict[str, Any]], T],
    tensors: dict[str, Tensor],
    metadata: dict[str, Any],
) -> T:
    """Return `build(tensors, metadata)`; its errors become an InputError that names the file they were read from."""
    try:
        return build(tensors, metadata)
    except KeyError as error:
        raise InputError(f"{path} lacks {error.args[0]!r}") from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not usable: {first_line(error)}") from None  # values of unexpected types


def all_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite; integers always are. Takes one pass and no temporary tensor.

    Rows in files were checked when the files were opened.
    """
    if isinstance(tensor, MappedRows):
        return True
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach())
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:
        tensor = tensor.detach().float()  # float8 types have no arithmetic
    return all(bool(bound.isfinite()) for bound in torch.aminmax(tensor.detach()))  # NaN propagates to both bounds
