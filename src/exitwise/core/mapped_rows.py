"""Rows of a matrix that lies in files: a tensor of which only the rows that are asked for are read.

`rows[start:stop]` and `rows[positions]` return ordinary tensors. Any other function of PyTorch reads all rows first, so
that `MappedRows` can be used wherever a tensor can; code for many samples takes slices.

Every read maps the files anew and copies the rows into aligned memory. Results are therefore equal to those from a
matrix in memory, and mapped pages do not accumulate.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from exitwise.core.array_files import ArrayFile

_DTYPES = {np.dtype("<f2"): torch.float16, np.dtype("<f4"): torch.float32}


class MappedRows(Tensor):
    """Matrix (n, p) whose rows lie in files, one after the other; perhaps only some of the rows.

    Args:
        files: Checked files with (n_i, p) each, of one type, without values that are not finite.
        positions: Positions (m,) of the rows among those of all files; None for all of them.
    """

    _files: tuple[ArrayFile, ...]
    _starts: Tensor  # (number of files + 1,): the position of each file's first row, and the number of all rows
    _positions: Tensor | None

    @staticmethod
    def __new__(cls, files: Sequence[ArrayFile], positions: Tensor | None = None) -> "MappedRows":
        counts = [file.shape[0] for file in files]
        size = sum(counts) if positions is None else len(positions)
        shape, dtype = (size, files[0].shape[1]), _DTYPES[files[0].dtype]
        rows: MappedRows = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        rows._files, rows._positions = tuple(files), positions
        rows._starts = torch.tensor([0, *counts]).cumsum(0)
        return rows

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rows = args[0]
        if isinstance(rows, MappedRows):
            if func is torch.ops.aten.slice.Tensor and (len(args) < 2 or args[1] == 0):
                return rows.read(slice(*args[2:5]))
            if func is torch.ops.aten.index.Tensor and len(args[1]) == 1:
                return rows.read(args[1][0])
            if func is torch.ops.aten.detach.default:
                return rows
        args, kwargs = tree_map(_read_all, (args, kwargs or {}))
        return func(*args, **kwargs)

    def read(self, samples: slice | Tensor) -> Tensor:
        """Return some of the rows, by a slice, their positions or a mask, as a contiguous tensor."""
        positions = self._locate(samples)
        if isinstance(positions, range):
            return self._copy_range(positions.start, positions.stop)
        flat = self._gather(positions.flatten().contiguous())
        return flat.view(*positions.shape, self.shape[1])

    def take(self, samples: Tensor) -> "MappedRows":
        """Return some of the rows, by their positions (m,) or a mask (n,), without reading them."""
        positions = self._locate(samples)
        return MappedRows(
            self._files, torch.arange(positions.start, positions.stop) if isinstance(positions, range) else positions
        )

    def _locate(self, samples: slice | Tensor) -> range | Tensor:
        """Return the positions of rows of this matrix among those of all files; a range if they are contiguous."""
        n = len(self)
        if isinstance(samples, slice):
            start, stop, step = samples.indices(n)
            stop = max(start, stop)
            if self._positions is not None:
                return self._positions[start:stop:step]
            return range(start, stop) if step == 1 else torch.arange(start, stop, step)
        if samples.dtype in (torch.bool, torch.uint8):
            if samples.shape != (n,):
                raise IndexError(f"the mask has shape {tuple(samples.shape)}, but there are {n} rows")
            samples = samples.nonzero()[:, 0]
        samples = torch.where(samples < 0, samples + n, samples)
        if samples.numel() and not 0 <= int(samples.min()) <= int(samples.max()) < n:
            raise IndexError(
                f"positions reach from {int(samples.min())} to {int(samples.max())}, but there are {n} rows"
            )
        return samples if self._positions is None else self._positions[samples]

    def _copy_range(self, start: int, stop: int) -> Tensor:
        rows = torch.empty(stop - start, self.shape[1], dtype=self.dtype)
        target = rows.numpy()
        for file, first in zip(self._files, self._starts.tolist(), strict=False):
            low, high = max(start, first), min(stop, first + file.shape[0])
            if low < high:
                target[low - start : high - start] = file.map()[low - first : high - first]
        return rows

    def _gather(self, positions: Tensor) -> Tensor:
        rows = torch.empty(len(positions), self.shape[1], dtype=self.dtype)
        target = rows.numpy()
        owners = torch.bucketize(positions, self._starts[1:], right=True)
        for i in sorted(set(owners.tolist())):
            here = (owners == i).nonzero()[:, 0]
            local = positions[here] - self._starts[i]
            target[here.numpy()] = self._files[i].map()[local.numpy()]
        return rows

    def numpy(self, *, force: bool = False) -> Any:
        """Return all rows as an array; PyTorch has no such method for subclasses."""
        return self[:].numpy(force=force)

    def tolist(self) -> Any:
        """Return all rows as nested lists; PyTorch has no such method for subclasses."""
        return self[:].tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"MappedRows({self.shape[0]} x {self.shape[1]}, {self.dtype}, in {len(self._files)} files)"

    def __deepcopy__(self, memo: Any) -> "MappedRows":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return MappedRows, (self._files, self._positions)


def _read_all(value: Any) -> Any:
    return value.read(slice(None)) if isinstance(value, MappedRows) else value
