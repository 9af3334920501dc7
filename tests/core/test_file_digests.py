"""Digests of files: a changed byte of the header or of the data is noticed when a file is read."""

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import random_probs
from safetensors import safe_open
from safetensors.torch import save_file

import exitwise as ew
from exitwise.core import tensorfiles
from exitwise.core.files import read_json, write_json
from exitwise.data.holdout import HeldOutPart, HoldOut
from exitwise.runs.chosen import ChosenClassifier
from exitwise.runs.run import Run, run_metadata
from exitwise.training.checkpoints import CheckpointDirectory

Loader = Callable[[Path], Any]


@pytest.fixture(scope="module")
def trace() -> ew.Trace:
    full = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    few = torch.arange(40)
    assert full.test is not None
    return ew.Trace(full.val.take(few), full.test.take(few), full.heads, full.curvature, full.costs, full.classes)


def flipped(data: bytes, position: int, bit: int = 0) -> bytes:
    """Return the data with one bit changed."""
    changed = bytearray(data)
    changed[position] ^= 1 << bit
    return bytes(changed)


def header_size(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def make_tensor_file(kind: str, folder: Path, trace: ew.Trace) -> tuple[Path, Loader]:
    """Write a file of one kind, and return the function that reads it."""
    path = folder / f"{kind}.safetensors"
    policy = ew.Policy((0.5, 0.5, 0.5, -inf), budget=2e7, costs=trace.costs.values)
    if kind == "net":
        ew.save_checkpoint(ew.models.msdnet("tiny-8"), path)
        return path, ew.load_net
    if kind == "trace":
        trace.save(path)
        return path, ew.Trace.load
    if kind == "calibration":
        ew.calibrate(trace, "T_opt").save(path)
        return path, ew.Calibration.load
    if kind == "classifier":
        net = ew.load_net(ew.zoo.path("net.safetensors"))
        ew.Classifier(net, ew.calibrate(trace, "T_opt"), policy).save(path)
        return path, ew.Classifier.load
    if kind == "chosen":
        ChosenClassifier(ew.calibrate(trace, "T_opt"), policy).save(path)
        return path, ChosenClassifier.load
    if kind == "split":
        HoldOut(HeldOutPart(torch.tensor([1, 4]), torch.tensor([7, 9]))).save(path)
        return path, HoldOut.load
    checkpoints = CheckpointDirectory(folder / "checkpoints")
    checkpoints.save(2, 0, {"net.w": torch.arange(6.0)}, {"epoch": 2, "batch": 0, "rows": []})
    newest = checkpoints.newest()
    assert newest is not None
    return newest, lambda path: CheckpointDirectory(path.parent).load()


KINDS = ("net", "trace", "calibration", "classifier", "chosen", "split", "checkpoint")


@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_byte_of_a_tensor_file_is_noticed(kind: str, trace: ew.Trace, tmp_path: Path) -> None:
    path, load = make_tensor_file(kind, tmp_path, trace)
    load(path)
    whole = path.read_bytes()
    start = header_size(whole)
    positions = torch.randint(start, len(whole), (5,)).tolist()
    positions += [position for position in range(8, start) if whole[position : position + 1].isdigit()][:: start // 40]
    for position in positions:
        path.write_bytes(flipped(whole, position))
        with pytest.raises(ew.InputError) as caught:
            load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_another_epoch_in_the_header_of_a_checkpoint_is_noticed(tmp_path: Path, trace: ew.Trace) -> None:
    path, load = make_tensor_file("checkpoint", tmp_path, trace)
    whole = path.read_bytes()
    assert whole.count(b'\\"epoch\\": 2') == 1
    path.write_bytes(whole.replace(b'\\"epoch\\": 2', b'\\"epoch\\": 3'))
    with pytest.raises(ew.InputError, match="changed since it was written"):
        load(path)


def test_a_damaged_name_of_the_digest_does_not_make_a_former_file(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    ew.save_checkpoint(ew.models.msdnet("tiny-8"), path)
    path.write_bytes(path.read_bytes().replace(b'"exitwise.sha256"', b'"exitwise.sha257"'))
    with pytest.raises(ew.InputError, match="sha257"):
        ew.load_net(path)


def test_files_without_a_digest_still_open(tmp_path: Path) -> None:
    path, old = tmp_path / "net.safetensors", tmp_path / "old.safetensors"
    net = ew.models.msdnet("tiny-8")
    ew.save_checkpoint(net, path)
    with safe_open(path, framework="pt") as file:
        header = {key: value for key, value in file.metadata().items() if key != tensorfiles.DIGEST_KEY}
    save_file(net.state_dict(), old, metadata=header)
    for key, value in ew.load_net(old).state_dict().items():
        assert torch.equal(value, net.state_dict()[key])


def test_class_names_that_look_like_a_digest(trace: ew.Trace, tmp_path: Path) -> None:
    names = ['"exitwise.sha256":"' + "0" * 64 + '"', "0" * 64, *map(str, range(98))]
    ew.Trace(trace.val, None, trace.heads, trace.curvature, trace.costs, tuple(names)).save(tmp_path / "t.safetensors")
    assert ew.Trace.load(tmp_path / "t.safetensors").classes == tuple(names)


def test_digests_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors", metadata={"sha256": "a" * 64, "hash": "b" * 64})
    assert tensorfiles.read(tmp_path / "other.safetensors")[0]["w"].tolist() == [1, 1]


def test_a_key_that_occurs_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b"{" + entry + b"," + entry + b"}"
    path = tmp_path / "twice.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(ew.InputError, match="twice"):
        tensorfiles.read(path)


# -- JSON


def make_json_file(kind: str, folder: Path) -> tuple[Path, Loader]:
    path = folder / f"{kind}.json"
    policy = ew.fit_policy(random_probs(0, 3, 30, 4), costs=(1.0, 2.0, 4.0), budget=2.5)
    if kind == "policy":
        policy.save(path)
        return path, ew.Policy.load
    if kind == "controller":
        ew.BudgetController(policy).save(path)
        return path, ew.BudgetController.load
    write_json(path, run_metadata({"preset": "tiny-8"}, {"name": "digits", "root": None}))
    return path, lambda path: Run(path.parent).metadata


@pytest.mark.parametrize("kind", ["policy", "controller", "run"])
def test_any_changed_digit_of_a_json_file_is_noticed(kind: str, tmp_path: Path) -> None:
    path, load = make_json_file(kind, tmp_path)
    load(path)
    whole = path.read_bytes()
    positions = [position for position in range(len(whole)) if whole[position : position + 1].isalnum()]
    for position in positions[::7]:
        path.write_bytes(flipped(whole, position))
        with pytest.raises(ew.InputError) as caught:
            load(path)
        assert str(path) in str(caught.value)


def test_an_edited_json_file_says_how_to_keep_the_edit(tmp_path: Path) -> None:
    path, load = make_json_file("run", tmp_path)
    data = json.loads(path.read_text())
    data["data"]["root"] = "/elsewhere"
    path.write_text(json.dumps(data))
    with pytest.raises(ew.InputError, match='remove its entry "sha256"'):
        load(path)
    del data["sha256"]
    path.write_text(json.dumps(data))
    assert load(path)["data"]["root"] == "/elsewhere"


def test_layout_and_order_of_json_do_not_matter(tmp_path: Path) -> None:
    path, load = make_json_file("policy", tmp_path)
    expected = load(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(data.items())), indent=1))
    assert load(path) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "'a' occurs twice"),
        ('{"b": {"a": 1, "a": 2}}', "'a' occurs twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"sha256": 5}', "changed since it was written"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "not valid JSON"),
    ],
)
def test_json_that_exitwise_never_writes(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ew.InputError, match=message) as caught:
        read_json(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


def test_names_of_any_bytes_survive(tmp_path: Path) -> None:
    data = {"format": "exitwise.test", "version": 1, "root": "caf\udce9 \u2028", 3: (1, 2.5)}
    write_json(tmp_path / "a.json", data)  # type: ignore[arg-type]
    assert read_json(tmp_path / "a.json") == {**{k: v for k, v in data.items() if k != 3}, "3": [1, 2.5]}
