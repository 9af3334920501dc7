"""Weights in files: round trips, keys of the released code, and files that do not fit or are incomplete."""

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from weights_cases import State, fill, refused, same_bits, snapshot

import exitwise as ew
from exitwise import models

pytestmark = pytest.mark.numerical


def released_key(key: str, imagenet: bool = False) -> str:
    """Return the key of the two released MSDNet code bases for a key of exitwise."""
    match key.split("."):
        case ["heads", k, "neck", j, *rest]:
            parts = ["classifier", k, "m", j, "net", *rest]
        case ["heads", k, "last", rest]:
            parts = ["classifier", k, "linear", rest]
        case ["stages", "0", "0", "scales", "0", *rest] if imagenet:
            parts = ["blocks", "0", "0", "layers", "0", *rest]
        case ["stages", "0", "0", "scales", s, *rest]:
            parts = ["blocks", "0", "0", "layers", s, "net", *rest]
        case ["stages", b, i, "scales", s, "same", *rest]:
            parts = ["blocks", b, i, "layers", s, "conv_normal", "net", *rest]
        case ["stages", b, i, "scales", s, "down", *rest]:
            parts = ["blocks", b, i, "layers", s, "conv_down", "net", *rest]
        case ["stages", b, i, "scales", s, *rest]:  # a transition
            parts = ["blocks", b, i, "m", s, "net", *rest]
        case _:
            raise AssertionError(key)
    return ".".join(parts)


# Files of exitwise


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("tiny-8", {}), ("tiny-32", {"num_classes": 3, "in_channels": 2}), ("cifar100-small", {"num_classes": 7})],
)
def test_a_saved_net_comes_back_bit_for_bit(preset: str, changes: dict[str, int], tmp_path: Path) -> None:
    net = fill(models.msdnet(preset, **changes))
    with torch.no_grad():
        net.heads[0].last.bias[:2] = torch.tensor([-0.0, 1e-42])  # signs of zero and denormals count
    ew.save_checkpoint(net, tmp_path / "new" / "net.safetensors")
    again = ew.load_net(tmp_path / "new" / "net.safetensors")
    assert same_bits(snapshot(again), snapshot(net))
    assert again.spec == net.spec == {"preset": preset, **changes}
    assert not any(module.training for module in again.modules())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["net.safetensors"]


def test_loading_returns_the_same_net_in_the_same_mode(tmp_path: Path) -> None:
    source, target = fill(models.msdnet("tiny-8"), 1), fill(models.msdnet("tiny-8"), 2)
    ew.save_checkpoint(source, tmp_path / "net.safetensors")
    target.train()
    target.stages[1].eval()
    modes = [module.training for module in target.modules()]
    assert ew.load_checkpoint(target, str(tmp_path / "net.safetensors")) is target
    assert [module.training for module in target.modules()] == modes
    assert same_bits(snapshot(target), snapshot(source))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.safetensors"
    ew.save_checkpoint(models.msdnet("tiny-8"), path)
    before = path.read_bytes()

    def full_disk(tensors: State, file: Path, metadata: dict[str, str]) -> None:
        file.write_bytes(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr("exitwise.core.tensorfiles.save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        ew.save_checkpoint(models.msdnet("tiny-8"), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


class Wrapped(nn.Module):
    """Stage with a submodule name of the released code."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(nn.Linear(4, 4), id="plain"),
        pytest.param(
            Wrapped(),
            id="a submodule called net",
        ),
    ],
)
def test_a_net_of_ones_own_is_saved_and_loaded(stage: nn.Module, tmp_path: Path) -> None:
    net = fill(ew.MultiExitNet([stage], [ew.Head(nn.Identity(), nn.Linear(4, 2))]))
    saved = snapshot(net)
    ew.save_checkpoint(net, tmp_path / "net.safetensors")
    ew.load_checkpoint(fill(net, seed=9), tmp_path / "net.safetensors")
    assert same_bits(snapshot(net), saved)
    with pytest.raises(ew.InputError, match=r"does not name the preset .* use load_checkpoint"):
        ew.load_net(tmp_path / "net.safetensors")


NO_MODEL = {"format": "exitwise.net", "version": "1"}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({}, "must be of format 'exitwise.net'"),
        ({"format": "exitwise.trace", "version": "1"}, "'exitwise.trace'"),
        ({"format": "exitwise.net", "version": "2"}, "version '2'"),
        (NO_MODEL, "does not name the preset"),
        (NO_MODEL | {"model": "[]"}, "does not name the preset"),
        (NO_MODEL | {"model": '{"preset": '}, "not valid JSON"),
        (NO_MODEL | {"model": '{"preset": "tiny-9"}'}, "did you mean"),
        (NO_MODEL | {"model": '{"preset": "tiny-8", "path": "x.py"}'}, "at most `num_classes`"),
        (NO_MODEL | {"model": '{"preset": "tiny-8", "num_classes": 3}'}, "it fits 'tiny-8'"),
        pytest.param(
            NO_MODEL | {"model": '{"preset": ["tiny-8"]}'},
            "`preset`",
        ),
    ],
)
def test_load_net_reads_only_what_it_can_rebuild(header: dict[str, str], expected: str, tmp_path: Path) -> None:
    save_file(models.msdnet("tiny-8").state_dict(), tmp_path / "net.safetensors", metadata=header)
    with pytest.raises(ew.InputError, match=re.escape(expected)) as caught:
        ew.load_net(tmp_path / "net.safetensors")
    assert "\n" not in str(caught.value)


# Files of the released code


def write_state(state: State, path: Path, prefix: str, nested: str | None) -> None:
    named = {prefix + key: value for key, value in state.items()}
    if path.suffix == ".safetensors":
        save_file(named, path)
    else:
        extras = {"epoch": 299, "best_prec1": 71.5, "optimizer": {"param_groups": [{"lr": 0.001}]}}
        torch.save({**extras, nested: named} if nested else named, path)


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize(
    ("file", "nested"),
    [("net.safetensors", None), ("net.pth", None), ("net.pth.tar", "state_dict"), ("net.pth", "model")],
)
@pytest.mark.slow_after_first
def test_public_cifar_weights_load(file: str, nested: str | None, prefix: str, tmp_path: Path) -> None:
    source = fill(models.msdnet("cifar100-small"))
    released = {released_key(key): value for key, value in source.state_dict().items()}
    assert len(released) == len(source.state_dict())
    assert {
        "blocks.0.0.layers.0.net.0.weight",
        "blocks.2.2.m.1.net.1.running_var",
        "classifier.3.m.0.net.1.running_mean",
        "classifier.3.linear.weight",
    } <= released.keys()
    write_state(released, tmp_path / file, prefix, nested)
    net = ew.load_checkpoint(models.msdnet("cifar100-small"), tmp_path / file)
    assert same_bits(snapshot(net), snapshot(source))


@pytest.mark.slow
def test_public_imagenet_weights_load(tmp_path: Path) -> None:
    source = fill(models.msdnet("imagenet-small"))
    released = {released_key(key, imagenet=True): value for key, value in source.state_dict().items()}
    assert {
        "blocks.0.0.layers.0.0.weight",
        "blocks.0.0.layers.0.0.bias",
        "blocks.0.0.layers.0.1.running_mean",
        "blocks.0.0.layers.1.net.0.weight",
        "blocks.1.2.m.0.net.0.weight",
    } <= released.keys()
    write_state(released, tmp_path / "net.pth", "module.", "state_dict")
    net = ew.load_checkpoint(models.msdnet("imagenet-small"), tmp_path / "net.pth")
    assert same_bits(snapshot(net), snapshot(source))


@pytest.mark.parametrize("public", [False, True])
def test_old_files_without_batch_counters_load(public: bool, tmp_path: Path) -> None:
    source, net = fill(models.msdnet("tiny-8"), 1), fill(models.msdnet("tiny-8"), 2)
    counters = {key: value for key, value in snapshot(net).items() if key.endswith("num_batches_tracked")}
    state = {key: value for key, value in source.state_dict().items() if key not in counters}
    torch.save({released_key(key) if public else key: value for key, value in state.items()}, tmp_path / "old.pth")
    ew.load_checkpoint(net, tmp_path / "old.pth")
    assert counters
    assert same_bits(snapshot(net), {key: {**state, **counters}[key] for key in net.state_dict()})


# Files that do not fit


@pytest.mark.parametrize(
    ("source", "changes", "target", "public", "expected"),
    [
        ("cifar100-medium", {}, "cifar100-small", False, "it fits 'cifar100-medium'"),
        ("cifar100-small", {}, "cifar100-medium", True, "it fits 'cifar100-small'"),
        ("cifar100-small", {"num_classes": 10}, "cifar100-small", False, "it fits 'cifar100-small', num_classes=10"),
        ("cifar100-small", {"in_channels": 1}, "tiny-32", True, "it fits 'cifar100-small', in_channels=1"),
        ("tiny-16", {}, "tiny-8", False, "it fits 'tiny-16'"),
        ("caltech256-small", {}, "tiny-8", False, "it fits 'caltech256-small'"),
    ],
)
@pytest.mark.slow_after_first
def test_a_misfit_names_keys_and_the_preset_that_fits(
    source: str, changes: dict[str, int], target: str, public: bool, expected: str, tmp_path: Path
) -> None:
    state, net = models.msdnet(source, **changes).state_dict(), models.msdnet(target)

    def in_file(key: str) -> str:
        return released_key(key) if public else key

    torch.save({in_file(key): value for key, value in state.items()}, tmp_path / "other.pth")
    message = refused(net, tmp_path / "other.pth")
    assert message.endswith(expected)
    assert f"does not fit {target!r}" in message
    for label, keys in (
        ("first missing key", [key for key in net.state_dict() if key not in state]),
        ("first unexpected key", [in_file(key) for key in state if key not in net.state_dict()]),
    ):
        named = re.findall(f"{label} '([^']+)'", message)
        assert named == keys[:1]


def test_weights_that_no_preset_fits(tmp_path: Path) -> None:
    net = models.msdnet("tiny-8")
    torch.save({**net.state_dict(), "extra": torch.zeros(1)}, tmp_path / "more.pth")
    assert "first unexpected key 'extra'; no preset fits it" in refused(net, tmp_path / "more.pth")
    torch.save({key: value for key, value in net.state_dict().items() if ".last." not in key}, tmp_path / "less.pth")
    assert "first missing key 'heads.0.last.weight'; no preset fits it" in refused(net, tmp_path / "less.pth")


def test_a_misfit_of_a_net_of_ones_own(tmp_path: Path) -> None:
    net = ew.MultiExitNet([nn.Linear(4, 4)], [ew.Head(nn.Identity(), nn.Linear(4, 2))])
    ew.save_checkpoint(models.msdnet("tiny-8"), tmp_path / "net.safetensors")
    assert "it fits 'tiny-8'" in refused(net, tmp_path / "net.safetensors")


# Files that are incomplete, of other content, or missing


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", ["heads.1.last.bias", "stages.0.0.scales.0.1.running_var"])
@pytest.mark.parametrize("file", ["net.safetensors", "net.pth"])
def test_weights_must_be_finite(file: str, key: str, value: float, tmp_path: Path) -> None:
    state = snapshot(fill(models.msdnet("tiny-8"), 1))
    state[key][-1] = value
    write_state(state, tmp_path / file, "", None)
    assert f"not finite in '{key}'" in refused(models.msdnet("tiny-8"), tmp_path / file)


@pytest.mark.parametrize("file", ["net.safetensors", "net.pth"])
def test_a_missing_file_is_reported(file: str, tmp_path: Path) -> None:
    assert "does not exist" in refused(models.msdnet("tiny-8"), tmp_path / file)
    with pytest.raises(ew.InputError, match="does not exist"):
        ew.load_net(tmp_path / file)


def write_legacy(state: State, path: Path) -> None:
    """Write a file as PyTorch before 1.6 did, when the released checkpoints were saved."""
    torch.save(state, path, _use_new_zipfile_serialization=False)


def every_length(size: int) -> list[int]:
    return [*range(0, 400, 9), *range(0, size, size // 40), size - 1]


@pytest.mark.parametrize(
    ("file", "write", "lengths"),
    [
        pytest.param("net.safetensors", save_file, every_length, id="safetensors"),
        pytest.param("net.pth", torch.save, lambda size: [0, 100, size // 2, size - 1], id="pth"),
        pytest.param("net.pth", write_legacy, lambda size: [0, 200, size // 2, size - 1], id="pth before 1.6"),
        pytest.param("net.pth", torch.save, every_length, id="pth, anywhere"),
        pytest.param(
            "net.pth",
            write_legacy,
            every_length,
            id="pth before 1.6, anywhere",
        ),
    ],
)
@pytest.mark.slow_after_first
def test_a_truncated_file_is_refused(
    file: str, write: Callable[[State, Path], None], lengths: Callable[[int], list[int]], tmp_path: Path
) -> None:
    net = models.msdnet("tiny-8")
    write(fill(models.msdnet("tiny-8")).state_dict(), tmp_path / "complete")
    content = (tmp_path / "complete").read_bytes()
    for length in lengths(len(content)):
        (tmp_path / file).write_bytes(content[:length])
        refused(net, tmp_path / file)


def test_complete_files_from_before_1_6_load(tmp_path: Path) -> None:
    source = fill(models.msdnet("tiny-8"))
    write_legacy(source.state_dict(), tmp_path / "net.pth")
    assert same_bits(snapshot(ew.load_checkpoint(models.msdnet("tiny-8"), tmp_path / "net.pth")), snapshot(source))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param([torch.zeros(2)], id="list"),
        pytest.param(torch.zeros(2), id="tensor"),
        pytest.param({}, id="empty dict"),
        pytest.param({"state_dict": {}}, id="empty state dict"),
        pytest.param({"epoch": 3, "weights": {"a": torch.zeros(1)}}, id="state under another name"),
        pytest.param({"heads.0.last.weight": 1.0}, id="numbers for tensors"),
        pytest.param(
            {0: torch.zeros(1)},
            id="numbers for names",
        ),
    ],
)
def test_other_contents_are_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "net.pth")
    assert "must hold a state dict of named tensors" in refused(models.msdnet("tiny-8"), tmp_path / "net.pth")


class Trap:
    """Object whose unpickling creates a file."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.sprung,))


def old_pickle(content: Any, path: Path, protocol: int = 2) -> None:
    path.write_bytes(pickle.dumps(content, protocol))


def recent_pickle(content: Any, path: Path) -> None:
    old_pickle(content, path, protocol=4)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("file", "write"),
    [
        ("net.pth", torch.save),
        ("net.pth", write_legacy),
        ("net.pth", old_pickle),
        pytest.param("net.pth", recent_pickle),
        ("net.safetensors", torch.save),
        ("net.safetensors", recent_pickle),
        ("net", torch.save),
    ],
)
def test_code_in_a_file_is_refused_and_not_run(
    file: str, write: Callable[[Any, Path], None], nested: bool, tmp_path: Path
) -> None:
    path, sprung = tmp_path / file, tmp_path / "sprung"
    write({"state_dict": models.msdnet("tiny-8").state_dict(), "args": Trap(sprung)} if nested else Trap(sprung), path)
    refused(models.msdnet("tiny-8"), path)
    with pytest.raises(ew.InputError):
        ew.load_net(path)
    assert not sprung.exists()

    content = io.BytesIO(path.read_bytes())
    if write in (old_pickle, recent_pickle):
        pickle.load(content)
    else:
        torch.load(content, weights_only=False)
    assert sprung.exists()  # the trap was armed


# A trained net


@pytest.fixture(scope="session")
def golden(shared: Path) -> Path:
    return shared / "golden"


def test_the_trained_checkpoint_has_the_public_names_and_loads(golden: Path) -> None:
    file = golden / "cifar100_msdnet_small.safetensors"
    state = load_file(file)
    net = ew.load_checkpoint(models.msdnet("cifar100-small"), file)
    loaded = {released_key(key): value for key, value in net.state_dict().items()}
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    with pytest.raises(ew.InputError, match=r"must be of format 'exitwise\.net'"):
        ew.load_net(file)


@pytest.mark.parametrize(("split", "file"), [("val", "train.bin"), ("test", "test.bin")])
@pytest.mark.slow
def test_features_of_real_images_are_those_of_the_released_code(
    split: str, file: str, golden: Path, cifar100: Path
) -> None:
    """The trace is float16, which rounds to 2^-11 of the value; `atol` allows another order of summation."""
    trace = load_file(golden / "trace.safetensors")
    records = np.memmap(cifar100 / "cifar-100-binary" / file, np.uint8, "r").reshape(-1, 2 + 3 * 32 * 32)
    chosen = torch.from_numpy(records[trace[f"{split}.index"][:64].numpy()])
    assert torch.equal(chosen[:, 1].long(), trace[f"{split}.labels"][:64])
    mean, std = torch.tensor([[0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761]]).view(2, 3, 1, 1)
    images = (chosen[:, 2:].reshape(-1, 3, 32, 32) / 255 - mean) / std

    net = ew.load_checkpoint(models.msdnet("cifar100-small"), golden / "cifar100_msdnet_small.safetensors").eval()
    with torch.no_grad():
        features = net.features(images)
    for k, computed in enumerate(features):
        expected = trace[f"{split}.features.{k}"][:64].float()
        torch.testing.assert_close(computed, expected, rtol=2**-11, atol=5e-6)


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model", "net"])
def test_a_state_dict_is_unwrapped(tmp_path: Path, wrapper: str) -> None:
    net = ew.models.msdnet("tiny-8")
    state = {f"module.{key}": value for key, value in net.state_dict().items()}
    torch.save({wrapper: state, "epoch": 3}, tmp_path / "net.pth")
    other = ew.models.msdnet("tiny-8")
    ew.load_checkpoint(other, tmp_path / "net.pth")
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in other.state_dict().items())


def test_messages_name_keys_as_they_are_in_the_file(tmp_path: Path) -> None:
    torch.save({"state_dict": {"module.layer1.0.conv1.weight": torch.zeros(2, 2)}}, tmp_path / "net.pth")
    with pytest.raises(ValueError, match="does not fit") as error:
        ew.load_checkpoint(ew.models.msdnet("tiny-8"), tmp_path / "net.pth")
    assert "first unexpected key 'module.layer1.0.conv1.weight'" in str(error.value)
    assert "stages.0.layer1" not in str(error.value)
    assert len(str(error.value)) - len(str(tmp_path)) < 300


def test_weights_of_the_original_module_are_recognized(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    torch.save({f"net.{key}": value for key, value in module.state_dict().items()}, tmp_path / "w.pth")
    net = ew.attach(module, at=["1"], example_inputs=torch.rand(2, 4))
    with pytest.raises(ew.InputError, match="those of the original module: load it there, before the exits are attach"):
        ew.load_checkpoint(net, tmp_path / "w.pth")
