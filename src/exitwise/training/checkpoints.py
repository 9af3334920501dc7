"""Checkpoints of a training: written whole or not at all, the newest two kept, a damaged one passed over."""

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
_KEPT = 2

_log = logging.getLogger(__name__)


class CheckpointDirectory:
    """The folder `checkpoints` of a run; a file's name says where in the training it was made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[Path]:
        """Newest first."""
        return sorted(self.folder.glob("[0-9]*-[0-9]*.safetensors"), reverse=True)

    def newest(self) -> Path | None:
        return next(iter(self.files()), None)

    def last_good_hint(self) -> str:
        """Where to go on from after an error."""
        last = self.newest()
        return f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"

    def save(self, epoch: int, batch: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write one, then remove all but the newest two."""
        file = self.folder / f"{epoch:05d}-{batch:07d}.safetensors"
        header = {"state": dict(state), "digest": _digest(tensors)}
        tensorfiles.write(file, tensors, FORMAT, VERSION, header)
        for old in self.files()[_KEPT:]:
            old.unlink(missing_ok=True)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and state of the newest whole checkpoint; a damaged one is passed over with a warning."""
        files = self.files()
        if not files:
            raise InputError(f"{self.folder} holds no checkpoint to go on from")
        problems: dict[Path, str] = {}
        for file in files:
            try:
                found = tensorfiles.load(file, FORMAT, VERSION, _checked)
            except InputError as error:
                problems[file] = str(error)
                continue
            for damaged, problem in problems.items():
                _log.warning("%s; going on from the checkpoint before it, %s", problem, file.name)
                damaged.unlink(missing_ok=True)  # or it would count as one of the newest two
            return found
        raise InputError(f"no checkpoint in {self.folder} is whole: {problems[files[0]]}")


def _checked(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if metadata["digest"] != _digest(tensors):
        raise InputError("its contents have changed since it was written")
    state = metadata["state"]
    if not isinstance(state, dict):
        raise InputError("its state is no mapping")
    return tensors, state


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
