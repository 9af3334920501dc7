"""The guide to scoring: every command on it runs, in order."""

import json
from pathlib import Path

import pytest
from command import Command, zoo_run
from image_files import picture
from paths import ROOT
from pyarrow import parquet

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "guides" / "scoring.md"


def test_a_newcomer_scores_a_folder_with_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exitwise: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    zoo_run(Path("runs/early"), samples=200)
    for number in range(40):
        picture(Path("photos") / ("cat", "dog")[number % 2] / f"{number}.png", 40, 36, seed=number)
    block = PAGE.read_text(encoding="utf-8").split("<!-- score -->")[1].strip("\n").split("\n\n")[0]
    commands = [line.split("#")[0].replace('"', "").split()[1:] for line in block.splitlines()]
    assert [words[0] for words in commands] == ["export", "score", "score", "score"]
    done = [exitwise(*words) for words in commands]
    assert [outcome.status for outcome in done] == [0] * 4, [outcome.err for outcome in done]
    assert "40 rows in" in done[1].err
    assert "reading and decoding took" in done[1].err
    assert "40 of them from before" in done[2].err
    summary = json.loads(done[3].out)
    assert (summary["images"], summary["errors"], summary["resumed"]) == (20, 0, 0)
    rows = parquet.read_table("scores/parts").to_pylist()
    assert sorted(row["id"] for row in rows) == sorted(
        path.relative_to("photos").as_posix() for path in Path("photos").rglob("*.png")
    )
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"`{column}`" in page for column in rows[0])
