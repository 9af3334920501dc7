"""The guide on a billion images shows the committed results."""

from types import ModuleType

import pytest
from paths import ROOT


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import scale

    return scale


def test_the_tables_of_the_guide_are_made_from_the_results(scale: ModuleType) -> None:
    page = scale.PAGE.read_text(encoding="utf-8")
    assert scale.filled(page) == page
    assert page.count("\n| ") > 15
