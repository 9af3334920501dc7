"""Run directories come whole or not at all, and never over something else."""

from pathlib import Path

import pytest

import exitwise as ew
from exitwise.core.files import atomic_directory


def test_a_run_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    place = tmp_path / "run"

    def overtaken() -> None:
        with atomic_directory(place) as late:
            (late / "run.json").write_text("late")
            with atomic_directory(place) as early:
                (early / "run.json").write_text("early")

    with pytest.raises(ew.InputError, match="already holds a run"):
        overtaken()
    assert (place / "run.json").read_text() == "early"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_force_replaces_the_whole_run(tmp_path: Path) -> None:
    place = tmp_path / "run"
    for text in ("old", "new"):
        with atomic_directory(place, force=True) as folder:
            (folder / "run.json").write_text(text)
            (folder / text).write_text("")
    assert sorted(path.name for path in place.iterdir()) == ["new", "run.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_failure_leaves_the_old_run_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with atomic_directory(place) as folder:
        (folder / "run.json").write_text("old")

    def interrupted() -> None:
        with atomic_directory(place, force=True) as folder:
            (folder / "run.json").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (place / "run.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_current_folder_and_foreign_things_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ew.InputError, match="current folder"), atomic_directory("."):
        pass
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ew.InputError, match="is not a run"), atomic_directory("file", force=True):
        pass
    assert (tmp_path / "file").read_text() == "mine"
