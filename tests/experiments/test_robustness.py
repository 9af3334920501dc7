"""The recorded results on corrupted and other images: complete, as the page shows them, and computed as stated."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch
from paths import ROOT

PAGE = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def robustness() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "experiments"))
    yield import_module("robustness")
    sys.path.remove(str(ROOT / "experiments"))


def test_the_page_has_the_recorded_tables(robustness: ModuleType) -> None:
    assert robustness.fill(PAGE) == PAGE, "run `python experiments/robustness.py --fill`"


def test_every_corruption_severity_and_method_was_run(robustness: ModuleType) -> None:
    results = json.loads(robustness.RESULTS.read_text(encoding="utf-8"))
    settings = {"clean", *(f"{name} {s}" for name in robustness.ROTATED for s in robustness.SEVERITIES)}
    assert set(results["corrupted"]) == settings
    assert all(set(rows) == set(robustness.METHODS) for rows in results["corrupted"].values())


def test_rotation_turns_by_the_stated_angle_to_both_sides(robustness: ModuleType) -> None:
    from corruptions import STRENGTHS, rotation

    row = torch.zeros(64, 1, 65, 65, dtype=torch.uint8)
    row[:, :, 32, 32:] = 255  # a horizontal ray from the center
    for severity, degrees in enumerate(STRENGTHS["rotation"], start=1):
        rotated = rotation(row, severity, torch.Generator().manual_seed(0)).double()[:, 0]
        y, x = torch.meshgrid(torch.arange(65.0) - 32, torch.arange(65.0) - 32, indexing="ij")
        far = (x.square() + y.square() > 20**2) & (x.square() + y.square() < 30**2)
        weight = rotated * far
        angles = torch.atan2((weight * y).sum(dim=(1, 2)), (weight * x).sum(dim=(1, 2))).rad2deg()
        assert torch.allclose(angles.abs(), torch.full_like(angles, degrees), atol=0.5)  # half a degree: pixels
        assert 16 < (angles > 0).sum() < 48
