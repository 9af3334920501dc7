"""Files of rows: whole rows only, whatever they hold and wherever they were cut."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import exitwise as ew
from exitwise.runs.row_file import FORMATS, Csv, RowFile

pytestmark = pytest.mark.numerical

FIELDS = ("image", "value", "error")
names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)
rows = st.lists(
    st.fixed_dictionaries({"image": names, "value": st.integers() | st.none(), "error": names | st.none()}), max_size=8
)


def write(path: Path, kind: str, some: list[dict[str, Any]], resume: bool = False) -> None:
    with RowFile(path, FORMATS[kind], FIELDS, resume) as file:
        file.add(some)


def images(path: Path, kind: str) -> list[str]:
    with RowFile(path, FORMATS[kind], FIELDS, resume=True) as file:
        return [row["image"] for row in file.existing_rows()]


@pytest.mark.parametrize("kind", FORMATS)
@given(some=rows)
def test_what_is_written_comes_back(kind: str, some: list[dict[str, Any]], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("rows") / "file"
    write(path, kind, some)
    assert images(path, kind) == [row["image"] for row in some]
    if kind == "jsonl":
        assert [json.loads(line) for line in path.read_bytes().splitlines()] == some
    else:
        with path.open(newline="", encoding="utf-8") as file:
            assert [row["image"] for row in csv.DictReader(file)] == [row["image"] for row in some]


@pytest.mark.parametrize("kind", FORMATS)
@given(some=rows.filter(bool), data=st.data())
def test_a_file_cut_anywhere_is_gone_on_with(kind: str, some: Any, data: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("rows")
    write(folder / "whole", kind, some)
    whole = (folder / "whole").read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    (folder / "cut").write_bytes(whole[:cut])
    done = images(folder / "cut", kind)
    assert done == [row["image"] for row in some][: len(done)]
    write(folder / "cut", kind, some[len(done) :], resume=True)
    assert (folder / "cut").read_bytes() == whole


def test_file_names_may_be_any_bytes(tmp_path: Path) -> None:
    name = os.fsdecode(b'caf\xe9,"x"\n.png')
    for kind in FORMATS:
        write(tmp_path / kind, kind, [{"image": name, "value": 1, "error": None}])
        assert images(tmp_path / kind, kind) == [name]
    assert b"caf\xe9" in (tmp_path / "csv").read_bytes()


@pytest.mark.parametrize(
    ("kind", "content", "problem"),
    [
        ("csv", b"a,b\n1,2\n", "does not begin with the columns image, value, error"),
        ("csv", b"image,value,error\nx,1\n", "row 1 was not written by exitwise predict"),
        ("jsonl", b'{"image": "x"}\n', "row 1 was not written by exitwise predict"),
        ("jsonl", b'{"image": "x", "value": 1, "error": null}\n[1]\n', "row 2 was not written by exitwise predict"),
        ("jsonl", b"nonsense\n", "row 1 was not written by exitwise predict"),
    ],
)
def test_a_file_of_something_else_is_refused(kind: str, content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ew.InputError, match=problem):
        images(path, kind)
    assert path.read_bytes() == content


def test_a_row_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills in the middle of a row: the file ends with the row before."""
    with RowFile(tmp_path / "file", FORMATS["csv"], FIELDS) as file:
        file.add([{"image": "a", "value": 1, "error": None}])
        before = (tmp_path / "file").read_bytes()
        real = file._file

        class Full:
            """Takes three bytes and then no more."""

            taken = 0

            def write(self, data: bytes) -> int:
                if self.taken:
                    raise OSError(28, "No space left on device")
                self.taken = real.write(data[:3])
                return self.taken

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        monkeypatch.setattr(file, "_file", Full())
        with pytest.raises(OSError, match=r"No space left on device.*file"):
            file.add([{"image": "b", "value": 2, "error": None}])
    assert (tmp_path / "file").read_bytes() == before


# -- one writer


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_writer_is_refused_and_changes_nothing(tmp_path: Path, resume: bool) -> None:
    path = tmp_path / "file"
    with RowFile(path, FORMATS["csv"], FIELDS) as file:
        file.add([{"image": "a", "value": 1, "error": None}])
        before = path.read_bytes()
        with pytest.raises(ew.InputError, match="file is being written by another process"):
            RowFile(path, FORMATS["csv"], FIELDS, resume)
        assert path.read_bytes() == before
        file.add([{"image": "b", "value": 2, "error": None}])
    assert images(path, "csv") == ["a", "b"]


def test_a_file_that_another_process_has_just_written_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, "csv", [{"image": "a", "value": 1, "error": None}])
    before = path.read_bytes()
    with pytest.raises(ew.InputError, match="file exists: --resume to continue it, --force to replace it"):
        RowFile(path, FORMATS["csv"], FIELDS, replace=False)
    assert path.read_bytes() == before


# -- spreadsheets


@pytest.mark.parametrize("name", ["=1+1.png", "+x", "-x", "@SUM(A1)", "\t=1", "\r=1", "a=1", "'quoted", ""])
def test_safe_cells_are_no_formulas(tmp_path: Path, name: str) -> None:
    """A spreadsheet computes cells that begin so; an apostrophe makes them text."""
    some = [{"image": name, "value": -1, "error": "=2"}]
    write(tmp_path / "plain", "csv", some)
    with RowFile(tmp_path / "safe", Csv(safe=True), FIELDS) as file:
        file.add(some)
    rows = []
    for kind in ("plain", "safe"):
        with (tmp_path / kind).open(newline="") as read:
            rows.append(list(csv.reader(read))[1])
    assert rows[0] == [name, "-1", "=2"]
    assert rows[1] == [("'" if name[:1] in "=+-@\t\r" and name else "") + name, "-1", "'=2"]
