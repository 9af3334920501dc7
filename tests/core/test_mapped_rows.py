"""Rows in files: the same rows as those of a tensor in memory, and nothing else is read."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import exitwise as ew
from exitwise.core.array_files import ArrayFile, open_array, write_array
from exitwise.core.mapped_rows import MappedRows
from exitwise.core.memory import align, is_aligned
from exitwise.core.tensorfiles import all_finite

N, WIDTH, COUNTS = 23, 3, (7, 1, 10, 5)


@pytest.fixture(scope="module", params=[torch.float32, torch.float16], ids=["float32", "float16"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, MappedRows]:
    """The same rows in memory and in four files."""
    folder = tmp_path_factory.mktemp("rows")
    rows = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(0)).to(request.param)
    files = []
    for i, part in enumerate(rows.split(COUNTS)):
        digest = write_array(folder / f"{i}.npy", part.numpy())
        files.append(open_array(folder / f"{i}.npy", part.numpy().dtype, tuple(part.shape), digest))
    return rows, MappedRows(files)


def test_it_looks_like_the_tensor(pair: tuple[torch.Tensor, MappedRows]) -> None:
    rows, mapped = pair
    assert isinstance(mapped, torch.Tensor)
    assert (mapped.shape, mapped.dtype, len(mapped), mapped.dim()) == (rows.shape, rows.dtype, N, 2)
    assert mapped.tolist() == rows.tolist()
    assert np.array_equal(mapped.numpy(), rows.numpy())
    assert repr(mapped) == f"MappedRows(23 x 3, {rows.dtype}, in 4 files)"
    assert all_finite(mapped)
    assert align(mapped) is mapped
    for other in (copy.deepcopy(mapped), pickle.loads(pickle.dumps(mapped))):
        assert isinstance(other, MappedRows)
        assert torch.equal(other[:], rows)


SLICES = st.builds(slice, *[st.none() | st.integers(-30, 30)] * 2, st.none() | st.integers(1, 5))


@given(SLICES, st.lists(st.integers(-N, N - 1), max_size=40), st.lists(st.booleans(), min_size=N, max_size=N))
@settings(max_examples=60, deadline=None)
def test_rows_are_those_of_the_tensor(
    pair: tuple[torch.Tensor, MappedRows], part: slice, positions: list[int], mask: list[bool]
) -> None:
    rows, mapped = pair
    for samples in (part, torch.tensor(positions, dtype=torch.int64), torch.tensor(mask)):
        read = mapped[samples]
        assert type(read) is torch.Tensor
        assert is_aligned(read)
        assert torch.equal(read, rows[samples])
    taken = mapped.take(torch.tensor(positions, dtype=torch.int64))
    chosen = rows[torch.tensor(positions, dtype=torch.int64)]
    assert isinstance(taken, MappedRows)
    assert torch.equal(taken[:], chosen)
    assert torch.equal(taken[part], chosen[part])
    assert torch.equal(mapped.take(torch.tensor(mask))[part], rows[torch.tensor(mask)][part])


def test_any_other_function_reads_all_rows(pair: tuple[torch.Tensor, MappedRows]) -> None:
    rows, mapped = pair
    weight = torch.ones(2, WIDTH, dtype=rows.dtype)
    assert torch.equal(torch.nn.functional.linear(mapped, weight), torch.nn.functional.linear(rows, weight))
    assert torch.equal(torch.cat([mapped, mapped]), torch.cat([rows, rows]))
    assert torch.equal(mapped.double().sum(dim=0), rows.double().sum(dim=0))
    assert torch.equal(mapped[3], rows[3])
    assert torch.equal(mapped[:, 1:], rows[:, 1:])
    assert torch.equal(mapped[2:5, None], rows[2:5, None])


@pytest.mark.parametrize("positions", [[N], [-N - 1], [0, 99]])
def test_positions_outside_are_refused(pair: tuple[torch.Tensor, MappedRows], positions: list[int]) -> None:
    with pytest.raises(IndexError, match="there are 23 rows"):
        pair[1][torch.tensor(positions)]
    with pytest.raises(IndexError, match="there are 23 rows"):
        pair[1].take(torch.ones(N + 1, dtype=torch.bool))


def test_a_slice_opens_only_its_files(pair: tuple[torch.Tensor, MappedRows], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    map_file = ArrayFile.map
    monkeypatch.setattr(ArrayFile, "map", lambda file: (opened.append(file.path.name), map_file(file))[1])
    _ = pair[1][8:12], pair[1].take(torch.arange(20)), pair[1].take(torch.arange(19, 22))[1:]
    assert opened == ["2.npy", "3.npy"]


def test_a_file_that_shrinks_while_it_is_used_is_an_error(tmp_path: Path) -> None:
    path, rows = tmp_path / "x.npy", np.ones((2000, 3), dtype=np.float32)
    mapped = MappedRows([open_array(path, rows.dtype, rows.shape, write_array(path, rows))])
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ew.InputError, match="was removed or changed while it was used"):
        mapped[:10]
    path.unlink()
    with pytest.raises(ew.InputError, match="was removed or changed while it was used"):
        mapped[:10]
