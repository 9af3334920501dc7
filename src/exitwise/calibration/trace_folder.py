"""A trace as a folder: features in shards of rows that are mapped into memory, for traces that do not fit in memory.

    trace/
      trace.json                  format, version, names and shapes, metadata, and the digest of every other file
      heads.safetensors           last layers, curvature and costs, by the keys of trace.safetensors
      val-00000.features.0.npy    features of exit 0 of the first 32,768 validation samples; val-00001... of the next
      val-00000.labels.npy        their labels, and val-00000.index.npy their positions in the dataset
      test-00000...

Names of files follow from the numbers of shards and exits, so that no path is read from a file. While a trace is
collected, its shards are in a hidden folder beside it, `.trace.partial`, with their digests in progress.json. A
collection that was interrupted resumes from them. The folder is renamed when it is complete.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exitwise.core import tensorfiles
from exitwise.core.array_files import ArrayFile, open_array, write_array
from exitwise.core.checks import is_integer
from exitwise.core.errors import InputError, shorten
from exitwise.core.files import read_json, remove_partial_files, write_json
from exitwise.core.locks import exclusive_lock
from exitwise.core.mapped_rows import MappedRows

FORMAT, VERSION = "exitwise.trace-folder", 1
MANIFEST, HEADS = "trace.json", "heads.safetensors"
SHARD_ROWS = 32_768  # samples per shard, fewer if their features take more than 256 MiB

_HEADS_FORMAT = "exitwise.trace-heads"
_PROGRESS, _PROGRESS_FORMAT = "progress.json", "exitwise.trace-progress"
_SUMS, _SUMS_FORMAT = "sums.safetensors", "exitwise.trace-sums"
_DTYPES: Mapping[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
_INT64: np.dtype[Any] = np.dtype("<i8")
_SPLITS = ("val", "test")
_SHARD_BYTES = 1 << 28
_MAX_SHARDS, _MAX_ROWS, _MAX_WIDTH, _MAX_EXITS = 100_000, 1 << 24, 1 << 24, 10_000


@dataclass
class _Shard:
    """Rows of one split, and the digests of its files by what they hold: "features.0", "labels", "index"."""

    rows: int
    digests: dict[str, str]


def _file_of(folder: Path, split: str, number: int, content: str) -> Path:
    return folder / f"{split}-{number:05d}.{content}.npy"


def is_trace_folder(path: Path) -> bool:
    """Return whether a path is a folder with a complete trace."""
    return (path / MANIFEST).is_file()


def partial_folder(out: Path) -> Path:
    """Return the hidden folder beside `out` in which a trace is collected."""
    return out.parent / f".{out.name}.partial"


class TraceFolderWriter:
    """Writes a trace as a folder, shard by shard, in memory that does not grow with the number of samples.

    Use it as a context manager: it locks the partial folder. What is complete stays if the block fails, and the next
    writer of the same source continues there.

    Args:
        out: The folder to make.
        widths: Numbers (K,) of features of the exits.
        dtype: Type of the stored features: torch.float32 or torch.float16.
        source: Anything that identifies what is collected; shards of another source are discarded. None always starts
            from the beginning.
        force: Replace an existing trace.
        shard_rows: Samples per shard [default: 32,768, or fewer if their features would take more than 256 MiB].

    Raises:
        InputError: `out` exists, or another process collects into it.
    """

    def __init__(
        self,
        out: Path,
        widths: Sequence[int],
        dtype: torch.dtype = torch.float32,
        source: str | None = None,
        force: bool = False,
        shard_rows: int | None = None,
    ) -> None:
        self._out, self._widths, self._force = out, tuple(widths), force
        self._dtype = check_feature_dtype(dtype)
        most = _SHARD_BYTES // (sum(widths) * _DTYPES[self._dtype].itemsize)
        self._source, self.shard_rows = source, shard_rows or max(1, min(SHARD_ROWS, most))
        self.folder = partial_folder(out)
        self._shards: dict[str, list[_Shard]] = {}
        self._buffers: dict[str, list[list[Tensor]]] = {}  # batches of columns: features of every exit, labels, index
        self._stack = ExitStack()

    def __enter__(self) -> "TraceFolderWriter":
        check_free(self._out, self._force)
        self.folder.mkdir(parents=True, exist_ok=True)
        busy = f"{self._out} is being collected by another process: wait until it is done"
        self._stack.enter_context(exclusive_lock(self.folder / "lock", busy))
        remove_partial_files(self.folder)
        if self._source is None or not self._resume():
            for file in self.folder.iterdir():
                if file.name != "lock":
                    file.unlink()
            self._shards = {}
            self._save_progress()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _resume(self) -> bool:
        """Take over the shards of an interrupted writer of the same source; return whether there are any."""
        if not (self.folder / _PROGRESS).is_file():
            return False
        try:
            progress = read_json(self.folder / _PROGRESS)
            if progress.get("format") != _PROGRESS_FORMAT or progress.get("key") != self._key:
                return False
            self._shards = _read_shards(progress["splits"], len(self._widths))
            for split, shards in self._shards.items():
                _open_split(self.folder, split, shards, self._widths, self._dtype)
            self.load_sums()
        except (InputError, KeyError):  # damaged: everything is collected again
            return False
        return True

    @property
    def _key(self) -> list[Any]:
        return [VERSION, self._source, self._dtype, list(self._widths), self.shard_rows]

    def num_rows(self, split: str) -> int:
        """Return the number of samples of a split in complete shards."""
        return sum(shard.rows for shard in self._shards.get(split, []))

    def read_labels(self, split: str) -> tuple[Tensor, Tensor | None]:
        """Return labels and index of the samples of a split in complete shards."""
        _, labels, index = _open_split(self.folder, split, self._shards.get(split, []), self._widths, self._dtype)
        return labels, index

    def append(self, split: str, features: Sequence[Tensor], labels: Tensor, index: Tensor | None) -> None:
        """Add samples to a split: features K x (m, p_k), labels (m,), and their positions in the dataset, if known."""
        columns = [
            *(self._to_stored(k, x) for k, x in enumerate(features)),
            labels,
            *([] if index is None else [index]),
        ]
        buffer = self._buffers.setdefault(split, [])
        shards = self._shards.get(split)
        num_columns = len(buffer[0]) if buffer else len(shards[0].digests) if shards else len(columns)
        if len(columns) != num_columns:
            raise InputError(f"either all samples of {split} must have an index, or none")
        buffer.append(columns)
        if sum(len(batch[0]) for batch in buffer) >= self.shard_rows:
            self._write_shards(split, self.shard_rows)

    def close_split(self, split: str) -> None:
        """Write the last shard of a split, which may be smaller than the others."""
        if self._buffers.get(split):
            self._write_shards(split, 1)
        self._buffers.pop(split, None)

    def _to_stored(self, k: int, features: Tensor) -> Tensor:
        stored = features.to(torch.float16 if self._dtype == "float16" else torch.float32)
        if not tensorfiles.all_finite(stored):
            raise InputError(f"features of exit {k} hold values beyond {self._dtype}; save the trace as float32")
        return stored

    def _write_shards(self, split: str, min_rows: int) -> None:
        """Write the buffered samples as shards, as long as there are `min_rows` of them; the others stay."""
        columns, shards = [torch.cat(parts) for parts in zip(*self._buffers[split], strict=True)], self._shards
        contents = [*(f"features.{k}" for k in range(len(self._widths))), "labels", "index"][: len(columns)]
        while len(columns[0]) >= min_rows:
            number = len(shards.setdefault(split, []))
            parts = [(content, column[: self.shard_rows]) for content, column in zip(contents, columns, strict=True)]
            digests = {
                content: write_array(_file_of(self.folder, split, number, content), rows.numpy())
                for content, rows in parts
            }
            shards[split].append(_Shard(len(parts[0][1]), digests))
            self._save_progress()
            columns = [column[self.shard_rows :] for column in columns]
        self._buffers[split] = [[column.clone() for column in columns]] if len(columns[0]) else []

    def _save_progress(self) -> None:
        data = {
            "format": _PROGRESS_FORMAT,
            "version": VERSION,
            "key": self._key,
            "splits": _shards_to_dict(self._shards),
        }
        write_json(self.folder / _PROGRESS, data)

    def save_sums(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep sums over training samples, so that an interrupted collection can continue them."""
        tensorfiles.write(self.folder / _SUMS, tensors, _SUMS_FORMAT, VERSION, {})

    def load_sums(self) -> dict[str, Tensor]:
        """Return the sums that were kept last; empty if there are none."""
        file = self.folder / _SUMS
        return tensorfiles.load(file, _SUMS_FORMAT, VERSION, lambda tensors, _: tensors) if file.is_file() else {}

    def finish(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Add last layers, curvature and costs, and rename the folder to its final path.

        Args:
            tensors: Tensors by the keys of trace.safetensors.
            metadata: Further entries of trace.json, JSON-serializable.
        """
        for split in list(self._buffers):
            self.close_split(split)
        heads = self.folder / HEADS
        tensorfiles.write(heads, tensors, _HEADS_FORMAT, VERSION, {})
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self._dtype,
            "widths": list(self._widths),
            "splits": _shards_to_dict(self._shards),
            "digests": {HEADS: _digest_of(heads)},
            "metadata": dict(metadata),
        }
        write_json(self.folder / MANIFEST, manifest)
        check_free(self._out, self._force)  # another command may have made it meanwhile
        if self._out.exists():
            old = partial_folder(self._out).with_suffix(".old")
            shutil.rmtree(old, ignore_errors=True)
            self._out.rename(old)
            self.folder.rename(self._out)
            shutil.rmtree(old)
        else:
            self.folder.rename(self._out)
        for name in (_PROGRESS, _SUMS, "lock"):  # last: whatever ends this process before, nothing is collected again
            (self._out / name).unlink(missing_ok=True)


def check_feature_dtype(dtype: torch.dtype) -> str:
    """Return the name of a type of stored features; raise InputError for other types than float32 and float16."""
    if dtype not in (torch.float32, torch.float16):
        raise InputError(f"`dtype` must be torch.float32 or torch.float16, but got {dtype}")
    return str(dtype).removeprefix("torch.")


def check_free(out: Path, force: bool) -> None:
    """Raise InputError if `out` exists, unless it is a trace or an empty folder that may be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_trace_folder(out):
        raise InputError(f"{out} exists and is not a trace: choose another path")
    if not force:
        raise InputError(f"{out} already holds a trace: choose another path, or remove it first")


def remove_trace_folder(out: Path) -> None:
    """Remove a trace, and what an interrupted collection of it left."""
    if is_trace_folder(out):
        shutil.rmtree(out)
    shutil.rmtree(partial_folder(out), ignore_errors=True)


def read_trace_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Open a trace: tensors by the keys of trace.safetensors, and its metadata; features are not held in memory.

    All files are read once to check their sizes, types, values and digests, in memory that does not grow with them.

    Raises:
        InputError: A file is missing, is damaged, or does not belong to this trace.
    """
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        actual = f"{shorten(manifest.get('format'))} version {shorten(manifest.get('version'))}"
        raise InputError(f"{folder / MANIFEST} must be {FORMAT} version {VERSION}, but is {actual}")
    try:
        dtype, widths, metadata = manifest["dtype"], manifest["widths"], manifest["metadata"]
        if dtype not in _DTYPES:
            raise InputError(f"`dtype` must be float32 or float16, but is {shorten(dtype)}")
        _check_widths(widths)
        if not isinstance(metadata, dict):
            raise InputError(f"`metadata` must be an object, but is {shorten(metadata)}")
        shards = _read_shards(manifest["splits"], len(widths))
        heads_digest = manifest["digests"][HEADS]
    except KeyError as error:
        raise InputError(f"{folder / MANIFEST} lacks {error.args[0]!r}") from None
    except TypeError:
        raise InputError(f"{folder / MANIFEST} is not usable: `digests` must be an object") from None
    except InputError as error:
        raise InputError(f"{folder / MANIFEST} is not usable: {error}") from None
    heads = folder / HEADS
    tensors, header = tensorfiles.read(heads)
    tensorfiles.check_format(heads, header, _HEADS_FORMAT, VERSION)
    if header.get(tensorfiles.DIGEST_KEY) != heads_digest:
        raise InputError(f"{heads} is of another trace: its digest is not the one in {MANIFEST}")
    for split, parts in shards.items():
        features, labels, index = _open_split(folder, split, parts, widths, dtype)
        tensors |= {f"{split}.features.{k}": rows for k, rows in enumerate(features)}
        tensors[f"{split}.labels"] = labels
        if index is not None:
            tensors[f"{split}.index"] = index
    return tensors, metadata


def _open_split(
    folder: Path, split: str, shards: Sequence[_Shard], widths: Sequence[int], dtype: str
) -> tuple[list[MappedRows], Tensor, Tensor | None]:
    """Check all files of a split; return its features (K,), labels (n,) and index (n,), if it has one."""

    def open_files(content: str, type: np.dtype[Any], *width: int) -> list[ArrayFile]:
        return [
            open_array(_file_of(folder, split, i, content), type, (shard.rows, *width), shard.digests[content])
            for i, shard in enumerate(shards)
        ]

    def read_integers(content: str) -> Tensor | None:
        if not shards or content not in shards[0].digests:
            return None
        return torch.from_numpy(np.concatenate([np.array(file.map()) for file in open_files(content, _INT64)]))

    features = [MappedRows(open_files(f"features.{k}", _DTYPES[dtype], p)) for k, p in enumerate(widths) if shards]
    labels = read_integers("labels")
    return features, torch.empty(0, dtype=torch.int64) if labels is None else labels, read_integers("index")


def _check_widths(widths: Any) -> None:
    is_list = isinstance(widths, list) and 0 < len(widths) <= _MAX_EXITS
    if not is_list or not all(is_integer(p) and 0 < p <= _MAX_WIDTH for p in widths):
        raise InputError(f"`widths` must be positive whole numbers, but are {shorten(widths)}")


def _shards_to_dict(shards: Mapping[str, Sequence[_Shard]]) -> dict[str, Any]:
    return {
        split: [{"rows": shard.rows, "digests": shard.digests} for shard in parts] for split, parts in shards.items()
    }


def _read_shards(splits: Any, num_exits: int) -> dict[str, list[_Shard]]:
    """Return the shards of every split after checking them; all shards of a split have the same files."""
    if not isinstance(splits, dict) or not set(splits) <= set(_SPLITS):
        raise InputError(f"`splits` must be an object with the entries val and test, but is {shorten(splits)}")
    required = {*(f"features.{k}" for k in range(num_exits)), "labels"}
    result = {}
    for split, parts in splits.items():
        if not isinstance(parts, list) or not 0 < len(parts) <= _MAX_SHARDS:
            raise InputError(f"`splits` must list the shards of {split}, but has {shorten(parts)}")
        for part in parts:
            rows, digests = (part.get(key) if isinstance(part, dict) else None for key in ("rows", "digests"))
            if not is_integer(rows) or not 0 < rows <= _MAX_ROWS:  # type: ignore[operator]
                raise InputError(f"`rows` of a shard of {split} must be a positive number, but are {shorten(rows)}")
            is_digests = isinstance(digests, dict) and all(isinstance(value, str) for value in digests.values())
            if not is_digests or set(digests) not in (required, required | {"index"}):  # type: ignore[arg-type]
                raise InputError(
                    f"`digests` of a shard of {split} must be those of its files, but are {shorten(digests)}"
                )
        if len({len(part["digests"]) for part in parts}) > 1:
            raise InputError(f"either all shards of {split} must have an index, or none")
        result[split] = [_Shard(part["rows"], part["digests"]) for part in parts]
    return result


def _digest_of(file: Path) -> str:
    return tensorfiles.read(file)[1][tensorfiles.DIGEST_KEY]


def digest_tensors(tensors: Mapping[str, Any], *settings: Any) -> str:
    """Return the SHA-256 of named tensors and JSON-serializable settings, to recognize what is collected."""
    digest = hashlib.sha256(json.dumps(settings, default=str).encode())
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
