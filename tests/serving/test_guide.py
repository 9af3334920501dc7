"""The commands and the client in the guide to serving, with a server process."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from paths import ROOT
from serving_cases import family_bundle, infer_body, png, some_images, started

from exitwise.cli.app import app
from exitwise.serving.recent import WINDOW

GUIDE = (ROOT / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with started(family_bundle(tmp_path_factory.mktemp("serving") / "bundle"), "--slo", "30s") as server:
        yield server.urls[0]


@pytest.mark.slow
def test_curl_lines(url: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    (tmp_path / "photo.jpg").write_bytes(png(0, (60, 80), "JPEG"))
    (tmp_path / "photo.png").write_bytes(png(1, (30, 40)))
    (tmp_path / "request.json").write_text(json.dumps(infer_body(some_images(2))))
    blocks = [part.split("\n\n")[0] for part in GUIDE.split("<!-- serve -->\n")[1:]]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    assert [line.split()[0] for line in lines] == ["curl"] * 7
    answers = []
    for line in lines:
        command = line.replace("localhost:8000", url.removeprefix("http://"))
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
        answers.append(json.loads(done.stdout))
    assert len(answers[0]["results"]) == 1
    assert [each["file"] for each in answers[1]["results"]] == ["photo.jpg", "photo.png"]
    assert [len(each["top"]) for each in answers[1]["results"]] == [3, 3]
    assert answers[1]["budget"] < answers[0]["budget"]
    assert answers[2] == {"ready": True}
    assert answers[3]["name"] == "model"
    assert [each["name"] for each in answers[4]["outputs"]] == ["probs", "predicted", "exits", "costs"]
    assert [len(each["top"]) for each in answers[5]["exits"]] == [3, 3, 3]
    assert len(answers[6]["requests"]) == WINDOW


@pytest.mark.slow
def test_the_python_client(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(import json\n.*?)```", GUIDE, flags=re.DOTALL)
    code = code.replace("http://localhost:8000", url).replace("(2, 3, 32, 32)", "(2, 1, 8, 8)")
    names: dict[str, Any] = {}
    exec(compile(code, "serving.md", "exec"), names)
    shape, budget, unit = re.match(r"(\(.*\)) (\S+) (\S+)", capsys.readouterr().out).groups()  # type: ignore[union-attr]
    assert (shape, unit) == ("(2, 10)", "MACs")
    assert float(budget) > 0
    assert np.allclose(names["probs"].sum(axis=1), 1, atol=1e-4)


def test_every_option_in_the_guide_exists() -> None:
    root: Any = typer.main.get_command(app)
    options = {
        name
        for word in ("serve", "export")
        for each in root.commands[word].params
        for name in (*each.opts, *each.secondary_opts)
    }
    mentioned = set(re.findall(r"(?<!\S)`?(--[a-z][a-z-]+)", GUIDE))
    assert mentioned - {"--data-binary"} <= options | {"--help"}
    assert len(mentioned) > 10


def test_figures_of_the_experiments_are_those_of_the_committed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    from serving_runs import describe

    rows = describe(ROOT / "experiments" / "serving")
    assert len(rows) == 6
    for row in rows:
        assert row in GUIDE


def test_figures_of_memory_are_those_of_the_committed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from serving_memory import SETTINGS, describe

    results = json.loads((ROOT / "benchmarks" / "results" / "serving_memory.json").read_text())["settings"]
    assert set(results) == set(SETTINGS)
    for name, result in results.items():
        assert describe(name, result) in GUIDE


def test_the_tables_under_load_are_those_of_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    results = json.loads((ROOT / "benchmarks" / "results" / "serving.json").read_text())["measured"]
    part = GUIDE.split("## Under load")[1].split("\n## ")[0]
    printed = {line for line in part.splitlines() if line.startswith("| ")}
    rows = import_module("serving").table(results)
    assert len(rows) >= 25
    assert set(rows) <= printed
    step = results["step"]["results"]
    for name in ("adaptive", "fixed"):
        assert f"{step[name]['violations']:,}" in part
