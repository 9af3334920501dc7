"""Environment of processes that a command starts with its own Python."""

import os
from pathlib import Path

import exitwise


def child_environment() -> dict[str, str]:
    """Return the environment of this process, in which a child imports the same exitwise."""
    root = str(Path(exitwise.__file__).parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
