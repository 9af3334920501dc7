"""Train the paper's MSDNet for CIFAR-100 with its own recipe over many sessions, on one thread at low priority.

usage: long_training.py run CIFAR100_ROOT RUN    start, or resume from RUN or else from the checkpoint kept here
       long_training.py keep RUN                 keep the newest checkpoint of RUN here, to resume on another machine

SIGTERM stops a run; it loses nothing. 150 epochs instead of the paper's 300, with its milestones moved: a core trained
218 images per second next to another job, so 300 epochs take 17 hours of a core that does nothing else, and twice that
next to other work.
"""

import os
import shutil
import sys
from pathlib import Path

from exitwise.core.files import read_json, write_json

KEPT = Path(__file__).parent / "msdnet-small-150"
OPTIONS = ["--model", "cifar100-small", "--epochs", "150", "--precision", "bf16-mixed", "--compile"]


def run(root: Path, directory: Path) -> None:
    """Become `exitwise train`, which ends with the training or with a signal."""
    if not directory.exists() and KEPT.is_dir():
        shutil.copytree(KEPT, directory)
    command = [sys.executable, "-m", "exitwise", "train"]
    if directory.exists():
        command += [directory, "--resume", "--root", root]
    else:
        command += ["--data", "cifar100", "--root", root, *OPTIONS, "--out", directory]
    os.nice(19)
    os.execve(sys.executable, list(map(str, command)), {**os.environ, "OMP_NUM_THREADS": "1"})


def keep(directory: Path, kept: Path = KEPT) -> None:
    """Copy what resuming needs, without the place of the data."""
    newest = max((directory / "checkpoints").glob("*.safetensors"))
    (kept / "checkpoints").mkdir(parents=True, exist_ok=True)
    for old in (kept / "checkpoints").glob("*.safetensors"):
        old.unlink()
    shutil.copyfile(newest, kept / "checkpoints" / newest.name)
    for name in ("split.safetensors", "history.csv", "net.safetensors"):
        shutil.copyfile(directory / name, kept / name)
    metadata = read_json(directory / "run.json")
    metadata["data"]["root"] = None
    write_json(kept / "run.json", metadata)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", root, directory]:
            run(Path(root), Path(directory))
        case ["keep", directory]:
            keep(Path(directory))
        case _:
            sys.exit(__doc__)
