"""Classifiers in folders and on the Hugging Face Hub, which a stub on this machine stands for."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import once
from hub_stub import COMMIT, running_hub
from other_libraries import define_operators
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset

import exitwise as ew
from exitwise.models.named.weight_hash import hash_weights

define_operators()
pytest.importorskip("timm")

TESTS = Path(__file__).parent.parent
CLASSES = ["ash", "birch", "cedar"]
NAME = "timm:test_resnet"


def loader(samples: int = 60) -> DataLoader[Any]:
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 3
    images = torch.randn(samples, 3, 32, 32, generator=rng) + labels[:, None, None, None] - 1
    return DataLoader(TensorDataset(images, labels), batch_size=20)


def make_shared(folder: Path) -> None:
    """A classifier on a small network of timm with weights of its own, saved as a file, an adapter, and as a whole."""
    torch.manual_seed(0)
    random = ew.models.build_named(NAME, 3, weights=None, image_size=32).module.state_dict()
    save_file(random, folder / "base.safetensors")
    first = next(iter(random))
    save_file({**random, first: random[first] + 1}, folder / "other.safetensors")
    net = ew.attach(ew.models.build_named(NAME, 3, folder / "base.safetensors", 32), exits=3, head="linear")
    ew.train_heads(net, loader(), loader(), epochs=2)
    trace = ew.collect(net, train=None, val=loader(), test=loader())
    calibration = ew.calibrate(trace, "T_opt")
    assert trace.test is not None
    preds, labels = calibration.predict(trace.test), trace.test.labels
    budget = 0.7 * trace.costs.values[-1]
    policy = ew.fit_policy(calibration.predict(trace.val), trace.val.labels, trace.costs, budget=budget)
    result = ew.evaluate(preds, labels=labels, policy=policy, costs=trace.costs)
    policies = ew.sweep(calibration.predict(trace.val), costs=trace.costs)
    curve = ew.budget_curve(preds, labels=labels, policies=policies, costs=trace.costs)
    classifier = ew.Classifier(net, calibration, policy, classes=CLASSES)
    classifier.save(folder / "classifier.safetensors")
    (folder / "results.json").write_text(json.dumps({"top1": result.top1, "ece": result.ece, "cost": result.cost}))
    classifier.save_pretrained(folder / "adapter", data="sixty noisy squares", evaluation=result, curve=curve)
    classifier.save_pretrained(folder / "whole", whole=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "shared-classifier", make_shared)


def check_equal(given: ew.Classifier, shared: Path) -> None:
    expected = ew.Classifier.load(shared / "classifier.safetensors")
    images = next(iter(loader()))[0]
    assert torch.equal(given(images).probs, expected(images).probs)
    assert torch.equal(given(images).exits, expected(images).exits)
    assert given.preprocessing == expected.preprocessing
    assert given.classes == tuple(CLASSES)


def test_an_adapter_leaves_out_the_stages_and_comes_back_with_its_base(shared: Path) -> None:
    tensors = load_file(shared / "adapter" / "adapter.safetensors")
    assert not any(key.startswith("net.stages.") for key in tensors)
    assert sorted(path.name for path in (shared / "adapter").iterdir()) == [
        "README.md",
        "adapter.safetensors",
        "config.json",
    ]
    check_equal(ew.Classifier.from_pretrained(shared / "adapter", base=shared / "base.safetensors"), shared)


def test_a_whole_classifier_needs_no_base(shared: Path) -> None:
    check_equal(ew.Classifier.from_pretrained(shared / "whole"), shared)
    with pytest.raises(ew.InputError, match="`base` is for adapters"):
        ew.Classifier.from_pretrained(shared / "whole", base=shared / "base.safetensors")


def test_a_base_that_differs_is_refused_in_one_line(shared: Path) -> None:
    with pytest.raises(ew.InputError, match=r"its base network timm:test_resnet has other weights .*sha256") as error:
        ew.Classifier.from_pretrained(shared / "adapter", base=shared / "other.safetensors")
    assert "\n" not in str(error.value)
    with pytest.raises(ew.InputError, match=r"does not fit the network|could not be built|timm has no"):
        ew.Classifier.from_pretrained(shared / "adapter", base="timm:resnet1000")


def test_the_hash_of_a_base_sees_names_shapes_and_values() -> None:
    def net(*layers: torch.nn.Module) -> ew.MultiExitNet:
        return ew.MultiExitNet([torch.nn.Sequential(*layers)], [ew.Head(torch.nn.Flatten(), torch.nn.Linear(4, 2))])

    layer = torch.nn.Linear(2, 2)
    same, changed = net(layer), net(torch.nn.Linear(2, 2))
    assert hash_weights(same.stages) == hash_weights(net(layer).stages)  # whatever the heads are
    assert len({hash_weights(x.stages) for x in (same, changed, net(torch.nn.Identity(), layer))}) == 3


def test_the_card_shows_what_was_measured(shared: Path) -> None:
    card = (shared / "adapter" / "README.md").read_text()
    results = json.loads((shared / "results.json").read_text())
    config = json.loads((shared / "adapter" / "config.json").read_text())
    for text in (
        f"| top-1 accuracy | {results['top1']:.2%} |",
        f"| ECE | {results['ece']:.4f} |",
        "Budget curve",
        "sixty noisy squares",
        "not certified",
        config["base"]["sha256"],
        "ash, birch, cedar",
        "library_name: exitwise",
    ):
        assert text in card
    assert "Not measured." in (shared / "whole" / "README.md").read_text()
    header = card.split("---")[1]
    assert "base_model: timm/test_resnet" in header


def test_damaged_and_foreign_files_are_refused(shared: Path, tmp_path: Path) -> None:
    config = json.loads((shared / "adapter" / "config.json").read_text())
    folder = tmp_path / "adapter"
    folder.mkdir()
    with pytest.raises(ew.InputError, match=r"is not a shared classifier: it has no config\.json"):
        ew.Classifier.from_pretrained(folder)
    for wrong in ({**config, "file": "../adapter.safetensors"}, {**config, "format": "other"}, {**config, "base": 3}):
        wrong.pop("sha256")
        (folder / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(ew.InputError, match=r"config\.json must"):
            ew.Classifier.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "adapter.safetensors").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ew.InputError, match="not a complete safetensors file"):
        ew.Classifier.from_pretrained(folder)


def test_nets_without_a_name_are_saved_as_a_whole(tmp_path: Path, shared: Path) -> None:
    classifier = ew.Classifier.load(shared / "classifier.safetensors")
    classifier.net.spec = None
    with pytest.raises(ew.InputError, match="`whole=True` writes all weights"):
        classifier.save_pretrained(tmp_path / "none", whole=False)
    classifier.save_pretrained(tmp_path / "own")
    with pytest.raises(ew.InputError, match="give it as `net`"):
        ew.Classifier.from_pretrained(tmp_path / "own")
    net = ew.Classifier.load(shared / "classifier.safetensors").net
    check_equal(ew.Classifier.from_pretrained(tmp_path / "own", net=net), shared)


def test_a_base_that_was_trained_since_is_saved_as_a_whole(shared: Path, tmp_path: Path) -> None:
    classifier = ew.Classifier.load(shared / "classifier.safetensors")
    classifier.save_pretrained(tmp_path / "same")
    assert (tmp_path / "same" / "adapter.safetensors").exists()
    with torch.no_grad():
        next(classifier.net.stages.parameters()).add_(0.1)
    with pytest.raises(ew.InputError, match="its stages are random or were trained since"):
        classifier.save_pretrained(tmp_path / "trained", whole=False)
    assert not (tmp_path / "trained").exists()
    classifier.save_pretrained(tmp_path / "trained")
    again = ew.Classifier.from_pretrained(tmp_path / "trained")
    images = next(iter(loader()))[0]
    assert torch.equal(classifier(images).probs, again(images).probs)


def test_the_hash_of_the_base_is_that_of_loaded_weights(shared: Path, tmp_path: Path) -> None:
    named = ew.models.build_named(NAME, 3, shared / "base.safetensors", 32)
    net = ew.attach(named, exits=3, head="linear")
    assert net.base_sha256 == hash_weights(net.stages)
    ew.save_checkpoint(net, tmp_path / "net.safetensors")
    assert ew.load_net(tmp_path / "net.safetensors").base_sha256 == net.base_sha256
    random = ew.models.build_named(NAME, 3, None, 32)
    assert ew.attach(random, exits=3, head="linear").base_sha256 is None
    with torch.no_grad():
        next(named.module.parameters()).add_(0.1)
    assert ew.attach(named, exits=3, head="linear").base_sha256 is None


def test_a_failing_save_leaves_the_folder_as_it_was(shared: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def contents() -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    classifier, folder = ew.Classifier.load(shared / "classifier.safetensors"), tmp_path / "saved"
    classifier.save_pretrained(folder)
    (folder / "README.md").write_text("mine")
    (folder / "bundle").mkdir()
    (folder / "bundle" / "old.onnx").write_text("old")
    before = contents()
    with monkeypatch.context() as patch:
        patch.setattr("exitwise.runtime.hub.write_card", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            classifier.save_pretrained(folder, whole=True)
    assert contents() == before
    assert list(tmp_path.iterdir()) == [folder]
    classifier.save_pretrained(folder, whole=True)
    assert set(contents()) == {"README.md", "classifier.safetensors", "config.json"}
    assert (folder / "README.md").read_text() == "mine"


def test_the_base_may_have_another_number_of_classes(shared: Path, tmp_path: Path) -> None:
    state = load_file(shared / "base.safetensors")
    last = {"fc.weight": torch.zeros(7, state["fc.weight"].shape[1]), "fc.bias": torch.zeros(7)}
    save_file({**state, **last}, tmp_path / "seven.safetensors")
    check_equal(ew.Classifier.from_pretrained(shared / "adapter", base=tmp_path / "seven.safetensors"), shared)


@pytest.mark.slow
def test_a_bundle_can_be_added(tmp_path: Path, shared: Path) -> None:
    from exitwise.runtime.onnx import Session

    classifier = ew.Classifier.load(shared / "classifier.safetensors")
    classifier.save_pretrained(tmp_path, bundle=True)
    images = next(iter(loader()))[0]
    given = Session(tmp_path / "bundle", threads=1)(images.numpy()).probs
    torch.testing.assert_close(torch.as_tensor(given), classifier(images).probs, rtol=0, atol=1e-5)  # other kernels


IN_A_PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from other_libraries import define_operators
define_operators()
import torch, exitwise as ew
shared, cache = sys.argv[2:]
classifier = ew.Classifier.load(f"{shared}/classifier.safetensors")
print(classifier.push_to_hub("me/trees", private=True, token="hf_none", data="squares"))
again = ew.Classifier.from_pretrained("me/trees", base=f"{shared}/base.safetensors", cache_dir=cache)
images = torch.randn(5, 3, 32, 32)
assert torch.equal(classifier(images).probs, again(images).probs)
try:
    ew.Classifier.from_pretrained("me/nothing", cache_dir=cache)
except ew.InputError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_classifier_goes_to_the_hub_and_comes_back(shared: Path, tmp_path: Path) -> None:
    with running_hub() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, str(TESTS), str(shared), str(tmp_path / "cache")],
            capture_output=True,
            text=True,
            env=environment,
        )
    assert done.returncode == 0, (done.stderr, hub.requests)
    address, missing = done.stdout.strip().splitlines()
    assert COMMIT in address
    assert set(hub.files["me/trees"]) == {"README.md", "adapter.safetensors", "config.json"}
    assert hub.private["me/trees"]
    assert missing.startswith("me/nothing could not be loaded from the Hub: ")
