"""What the results of experiments have in common."""

import os
import platform
from typing import Any

import numpy as np
import torch


def rounded(value: Any) -> Any:
    """Five digits of every number, in nested plain data."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def machine() -> dict[str, Any]:
    return {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }
