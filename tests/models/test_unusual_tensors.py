"""Weights that cannot be loaded: sparse, quantized, float8 and other tensors end in one line and change nothing."""

import io
import zipfile
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from weights_cases import fill, refused, same_bits, snapshot

import exitwise as ew
from exitwise import models
from exitwise.core import tensorfiles

KEY = "heads.2.last.weight"  # the last but one: everything before it would be replaced


def sparse(tensor: Tensor) -> Tensor:
    return tensor.to_sparse()


def quantized(tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


UNUSUAL: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (sparse, "sparse_coo"),
    "compressed": (lambda tensor: tensor.to_sparse_csr(), "sparse_csr"),
    "quantized": (quantized, "is quantized"),
    "meta": (lambda tensor: tensor.to("meta"), "meta tensor"),
    "nested": (lambda tensor: torch.nested.nested_tensor([tensor, tensor[:1]]), "nested"),
    "float8": (lambda tensor: tensor.to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "complex": (lambda tensor: tensor.to(torch.complex64), "complex64"),
    "complex NaN": (lambda tensor: torch.complex(tensor, tensor * float("nan")), "complex64"),
    "integers": (lambda tensor: tensor.to(torch.int8), "int8"),
    "too large": (lambda tensor: tensor.double() * 1e200, "not finite in float32"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_tensors_are_refused_in_one_line_and_change_nothing(kind: str, tmp_path: Path) -> None:
    change, message = UNUSUAL[kind]
    net = fill(models.msdnet("tiny-8"))
    state = snapshot(net)
    torch.save({**state, KEY: change(state[KEY])}, tmp_path / "net.pth")
    found = refused(net, tmp_path / "net.pth")
    assert message in found
    assert KEY in found


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.complex64, torch.float64])
def test_unusual_tensors_in_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    net = fill(models.msdnet("tiny-8"))
    value = snapshot(net)[KEY].to(dtype)
    save_file({**snapshot(net), KEY: value * 1e200 if dtype == torch.float64 else value}, tmp_path / "net.safetensors")
    assert KEY in refused(net, tmp_path / "net.safetensors")


@pytest.mark.filterwarnings("ignore")
def test_the_command_says_it_in_one_line(tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("import exitwise as ew\ndef net():\n    return ew.models.msdnet('tiny-8')\n")
    monkeypatch.chdir(tmp_path)
    state = models.msdnet("tiny-8").state_dict()
    for kind in ("sparse", "quantized", "float8", "nested", "meta"):
        torch.save({**state, KEY: UNUSUAL[kind][0](state[KEY])}, tmp_path / "net.pth")
        done = exitwise("collect", "run", "--net", "mine:net", "--checkpoint", "net.pth", "--data", "digits")
        assert (done.status, done.err.count("\n")) == (2, 1), done.err
        assert UNUSUAL[kind][1] in done.err
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floating_types_are_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    net = models.msdnet("tiny-8")
    state = {key: value.to(dtype) if value.is_floating_point() else value for key, value in snapshot(fill(net)).items()}
    torch.save(state, tmp_path / "net.pth")
    ew.load_checkpoint(fill(net, seed=5), tmp_path / "net.pth")
    assert all(torch.equal(value, state[key].to(value.dtype)) for key, value in net.state_dict().items())


class Picky(nn.Linear):
    """Layer whose own loading fails after others were replaced."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not today\nnor tomorrow")


def test_a_net_whose_hooks_fail_keeps_its_weights(tmp_path: Path) -> None:
    net = fill(ew.MultiExitNet([nn.Linear(4, 4), Picky(4, 4)], [ew.Head(nn.Identity(), nn.Linear(4, 2))] * 2))
    torch.save({key: value + 1 for key, value in net.state_dict().items()}, tmp_path / "net.pth")
    assert "not today" in refused(net, tmp_path / "net.pth")


def test_a_compressed_file_is_not_expanded(tmp_path: Path) -> None:
    """A zip file of a megabyte could expand to gigabytes of weights; torch.save never compresses."""
    plain = io.BytesIO()
    torch.save({"w": torch.zeros(1 << 20)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(tmp_path / "n.pth", "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert "is compressed" in refused(models.msdnet("tiny-8"), tmp_path / "n.pth")


# -- Classifier.load


def own_net() -> ew.MultiExitNet:
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    return ew.MultiExitNet(stages, [ew.Head(nn.Identity(), nn.Linear(4, 3)) for _ in stages])


@pytest.mark.parametrize(
    "change",
    [
        {"preprocessing": {"size": 8, "mean": [0.5], "std": [0]}},
        {"classes": ["one"]},
        {"classes": 7},
        {"costs": [2.0, 1.0]},
        {"policy": {"thresholds": [0.5]}},
    ],
)
def test_a_refused_classifier_leaves_the_users_net_alone(change: dict[str, Any], tmp_path: Path) -> None:
    saved, path = fill(own_net(), seed=1), tmp_path / "classifier.safetensors"
    data = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(3)]
    trace = ew.collect(saved, train=data, val=data, costs=(1.0, 2.0))
    policy = ew.Policy((0.5, -inf), costs=(1.0, 2.0))
    ew.Classifier(saved, ew.calibrate(trace, "MSDNet (vanilla)"), policy, classes=["a", "b", "c"]).save(path)
    _, header = tensorfiles.read(path)
    metadata = tensorfiles.check_format(path, header, "exitwise.classifier", 1)
    tensorfiles.write(path, load_file(path), "exitwise.classifier", 1, {**metadata, **change})
    net = fill(own_net(), seed=2)
    before = snapshot(net)
    with pytest.raises(ew.InputError) as caught:
        ew.Classifier.load(path, net=net)
    assert "\n" not in str(caught.value)
    assert same_bits(snapshot(net), before)
