"""Advice to users with few labels."""

from pathlib import Path

from cases import random_trace
from command import Command, new_run

from exitwise.rival_methods.advice import FEWEST, note_few_labels


def test_there_is_no_note_from_the_fewest_labels_that_were_tried() -> None:
    assert note_few_labels(FEWEST) == []
    assert f"only {FEWEST - 1} labeled" in note_few_labels(FEWEST - 1)[0]


def test_evaluate_notes_few_labels(tmp_path: Path, exitwise: Command) -> None:
    few = exitwise("evaluate", new_run(tmp_path / "few", random_trace(n=60)), "--budget", "60%", "--json")
    assert any("only 60 labeled validation samples" in note for note in few.json["notes"])
    enough = exitwise("evaluate", new_run(tmp_path / "enough", random_trace(n=FEWEST)), "--budget", "60%", "--json")
    assert not any("labeled validation samples" in note for note in enough.json["notes"])
