"""The page of the commands is what its generator writes, and shows every command and visible option."""

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import typer
from paths import ROOT

from exitwise.cli.app import COMMANDS, app

SCRIPT = ROOT / "docs" / "command_reference.py"
PAGE = ROOT / "docs" / "reference" / "commands.md"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    module = ModuleType("command_reference")
    module.__file__ = str(SCRIPT)
    exec(compile(SCRIPT.read_text(encoding="utf-8"), str(SCRIPT), "exec"), vars(module))
    return module


def test_the_committed_page_is_up_to_date(generator: ModuleType) -> None:
    assert PAGE.read_text(encoding="utf-8") == generator.render(), "run `python docs/command_reference.py`"


def test_the_script_writes_the_page(generator: ModuleType, tmp_path: Any) -> None:
    copy = tmp_path / "docs" / "command_reference.py"
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    copy.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run([sys.executable, str(copy)], check=True)
    assert (tmp_path / "docs" / "reference" / "commands.md").read_text(encoding="utf-8") == generator.render()


def test_groups_commands_and_visible_options_are_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    root: Any = typer.main.get_command(app)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [f"## {group}" for group in COMMANDS]
    sections = dict(part.split("\n", 1) for part in text.split("\n### exitwise ")[1:])
    assert sections.keys() == root.commands.keys()
    for name, command in root.commands.items():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                shown = any(f"| `{parameter.opts[0]}{end}" in sections[name] for end in (" ", "`"))
                assert shown != parameter.hidden, f"{name} {parameter.opts[0]}"


def test_cells_keep_tables_intact(generator: ModuleType) -> None:
    assert generator._cell("a|b\n c") == r"a\|b c"
    assert generator._prose("Resume, with --resume; see `exitwise train --resume`.") == (
        "Resume, with `--resume`; see `exitwise train --resume`."
    )
