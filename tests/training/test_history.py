"""The training history as a CSV file: round trips, and files that were edited or damaged."""

from pathlib import Path

import pytest

import exitwise as ew
from exitwise.training.history import EpochRecord, History

HEADER = "epoch,lr,train_loss,val_loss,val_top1_exit1,val_top1_exit2,images_per_second,seconds"
ROW = "1,0.1,2,2.5,0.5,0.75,100,3"


@pytest.mark.parametrize("kept", [(), (2, 1), (1, 0)])
def test_a_file_and_back(kept: tuple[int, ...], tmp_path: Path) -> None:
    history = History(tuple(EpochRecord(k, 0.1, 2.0, 2.5, (0.5, 0.75), 100.0, 3.0) for k in (1, 2)), kept)
    history.save(tmp_path / "history.csv")
    assert History.load(tmp_path / "history.csv") == history


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEADER}\n{ROW},7\n", "every row must have the cells of the first"),
        (f"{HEADER}\n{ROW}\n1,0.1\n", "every row must have the cells of the first"),
        (f"{HEADER},lr\n{ROW},7\n", "different names"),
        (f"{HEADER}\n{ROW.replace('2.5', 'good')}\n", "good"),
        (f"{HEADER.replace('lr', 'rate')}\n{ROW}\n", "lr"),
        (f"{HEADER},kept\n{ROW},3\n", "`kept` must hold exits from 1 to 2"),
        (f"{HEADER},kept\n9{ROW[1:]},1\n", "`kept` must hold exits from 1 to 2"),
        ("", "is not a training history"),
        (b"\xff\xfe\0", "is not a training history"),
        (f"{HEADER}\n{ROW}\0\n", "is not a training history"),
        ('"' + "x" * 200_000, "is not a training history"),
    ],
)
def test_a_broken_file_is_named_in_one_line(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ew.InputError, match=message) as caught:
        History.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
