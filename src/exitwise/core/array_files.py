"""Matrices in `.npy` files: written with a digest, checked before use, and mapped into memory row by row.

Only version 1.0 of the format, C order and the expected type are read, so nothing is ever unpickled. Data begin on a
64-byte boundary.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from exitwise.core.errors import InputError, first_line
from exitwise.core.files import atomic_write

_CHUNK = 1 << 22  # bytes that are read at once to check a file
_FORMAT_VERSION = (1, 0)


@dataclass(frozen=True)
class ArrayFile:
    """A checked `.npy` file with an array of known shape and type, which begins `offset` bytes after its start."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    def map(self) -> NDArray[Any]:
        """Return the array as a read-only view of the file; it holds the file open as long as it is referenced."""
        try:
            return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path} was removed or changed while it was used: {first_line(error)}") from None


class _DigestingFile:
    """File to write to that also computes the SHA-256 of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)


def write_array(path: Path, array: NDArray[Any]) -> str:
    """Write an array as `.npy`, atomically, and return the SHA-256 of the file."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        digesting = _DigestingFile(file)
        np.lib.format.write_array(digesting, np.ascontiguousarray(array), _FORMAT_VERSION, allow_pickle=False)
    return digesting.digest.hexdigest()


def open_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], digest: str) -> ArrayFile:
    """Check a `.npy` file completely, in one pass that needs little memory.

    Args:
        path: The file.
        dtype: Type that the array must have, of numbers.
        shape: Shape that the array must have.
        digest: SHA-256 that the file must have.

    Returns:
        The file, ready to be mapped.

    Raises:
        InputError: The file is missing, has another size, type, shape or digest, or holds values that are not finite.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    with path.open("rb") as file:
        actual = _read_header(path, file)
        if actual != (shape, False, dtype):
            order = "Fortran" if actual[1] else "C"
            raise InputError(
                f"{path} must hold {dtype} of shape {shape}, but holds {actual[2]} {actual[0]} in {order} order"
            )
        offset = file.tell()
        expected = offset + dtype.itemsize * int(np.prod(shape, dtype=object))
        if (size := path.stat().st_size) != expected:
            raise InputError(f"{path} must have {expected} bytes, but has {size}: it is incomplete or was changed")
        file.seek(0)
        hashed, is_finite = hashlib.sha256(file.read(offset)), True
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
            is_finite = is_finite and _all_finite(np.frombuffer(chunk, dtype))
    if hashed.hexdigest() != digest:
        raise InputError(f"{path} has changed since it was written: its contents do not match its digest")
    if not is_finite:
        raise InputError(f"{path} holds values that are not finite")
    return ArrayFile(path, shape, dtype, offset)


def _read_header(path: Path, file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether the order is Fortran's, and type; the file is then at the start of the data."""
    try:
        version = np.lib.format.read_magic(file)
        if version != _FORMAT_VERSION:
            raise InputError(f"{path} must have version 1.0 of the .npy format, but has {version[0]}.{version[1]}")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except InputError:
        raise
    except Exception as error:  # NumPy evaluates the header as a Python literal, which fails in many ways
        raise InputError(f"{path} is not a usable .npy file: {first_line(error)}") from None
    return shape, is_fortran, dtype


def _all_finite(values: NDArray[Any]) -> bool:
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
