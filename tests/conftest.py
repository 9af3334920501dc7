"""What every test shares."""

from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small operations on two threads become many times slower when anything else runs."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Material beside the checkout that the repository does not hold: real pictures."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the shared material beside the checkout, and {SHARED.name}/ is not there")
    return SHARED
