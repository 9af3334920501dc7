"""Checkpoints of a training: written atomically; the newest two are kept, damaged ones are skipped."""

import logging
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exitwise.core import tensorfiles
from exitwise.core.errors import InputError

FORMAT, VERSION = "exitwise.checkpoint", 1
_MAX_FILES = 2

_log = logging.getLogger(__name__)


class CheckpointDirectory:
    """Folder `checkpoints` of a run. A file is named after the epochs and batches that are done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[Path]:
        """Return the checkpoint files, newest first."""
        return sorted(self.folder.glob("[0-9]*-[0-9]*.safetensors"), reverse=True)

    def newest(self) -> Path | None:
        """Return the newest checkpoint file, None if there is none."""
        return next(iter(self.files()), None)

    def last_good_hint(self) -> str:
        """Return the end of an error message: the checkpoint from which training can be resumed."""
        newest = self.newest()
        return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"

    def save(self, epoch: int, batch: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint, then remove all but the newest two.

        Args:
            epoch: Completed epochs.
            batch: Batches done in the current epoch.
            tensors: Weights and momentum by name.
            state: JSON-serializable settings and progress.
        """
        file = self.folder / f"{epoch:05d}-{batch:07d}.safetensors"
        tensorfiles.write(file, tensors, FORMAT, VERSION, {"state": dict(state)})
        for old_file in self.files()[_MAX_FILES:]:
            old_file.unlink(missing_ok=True)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and state of the newest intact checkpoint; damaged ones are skipped with a warning."""
        files = self.files()
        if not files:
            raise InputError(f"{self.folder} holds no checkpoint to resume from")
        problems: dict[Path, str] = {}
        for file in files:
            try:
                checkpoint = _load(file)
            except InputError as error:
                problems[file] = str(error)
                continue
            for damaged, problem in problems.items():
                _log.warning("%s; resuming from the checkpoint before it, %s", problem, file.name)
                damaged.unlink(missing_ok=True)  # otherwise it would count as one of the newest two
            return checkpoint
        raise InputError(f"no checkpoint in {self.folder} is intact: {problems[files[0]]}")


def _load(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and state of a checkpoint; raise InputError if it is damaged."""
    tensors, header = tensorfiles.read(file)
    metadata = tensorfiles.check_format(file, header, FORMAT, VERSION)
    # Former checkpoints have a digest of their tensors instead of one of the whole file.
    if tensorfiles.DIGEST_KEY not in header and metadata.get("digest") != _digest(tensors):
        raise InputError(f"{file} has changed since it was written: its contents do not match its digest")
    state = metadata.get("state")
    if not isinstance(state, dict):
        raise InputError(f"{file} must hold a mapping as `state`, but holds a {type(state).__name__}")
    return tensors, state


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names and bytes of all tensors, as former checkpoints hold it."""
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
