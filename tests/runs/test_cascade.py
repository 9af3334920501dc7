"""`exitwise cascade`: from networks by name and a folder of images to a run that all commands take."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command
from PIL import Image

import exitwise as ew
from exitwise.core.files import write_json
from exitwise.runs.data import load_splits
from exitwise.runs.run import Run, run_metadata

MINE = """
import exitwise as ew
import torch
from torch import nn


def net(width, seed, classes=3):
    torch.manual_seed(seed)
    layers = nn.Conv2d(3, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)
    return nn.Sequential(*layers)


def small():
    return net(2, 0)


def large():
    return net(8, 1)


def resized():
    return net(2, 0), ew.Preprocessing(8, (0.5,) * 3, (0.25,) * 3)


def branched():
    return ew.attach(net(4, 2).eval(), ["0"], example_inputs=torch.rand(1, 3, 12, 12))


def four():
    return net(2, 0, classes=4)


def text():
    return "a network"
"""
NETS = ("--net", "mine:small", "--net", "mine:large")


def write_images(folder: Path, count: int = 12) -> None:
    """Write `count` images of 12 x 12 pixels for each of three classes that differ in their color."""
    rng = np.random.default_rng(0)
    for i, name in enumerate(("blue", "green", "red")):
        (folder / name).mkdir(parents=True)
        for j in range(count):
            pixels = rng.integers(0, 160, (12, 12, 3), dtype=np.uint8)
            pixels[..., 2 - i] += 90
            Image.fromarray(pixels).save(folder / name / f"{j:03}.png")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the networks in mine.py and images in photos/."""
    (tmp_path / "mine.py").write_text(MINE)
    write_images(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    return tmp_path


@pytest.mark.slow
def test_all_commands_take_the_run_of_a_cascade(place: Path, exitwise: Command) -> None:
    made = exitwise("cascade", *NETS, "--data", "folder:photos", "--out", "run", "--json").json
    assert [network["name"] for network in made["networks"]] == ["mine:small", "mine:large"]
    assert exitwise("collect", "run").err.rstrip().endswith("give --net mine:small --net mine:large again")
    collected = exitwise("collect", "run", *NETS, "--json").json
    assert collected["samples"] == {"val": 18, "test": 18, "train": 0}
    assert collected["costs"] == list(np.cumsum([network["macs"] for network in made["networks"]]))
    calibrated = exitwise("calibrate", "run", "--json").json
    assert "Laplace" not in calibrated["method"]
    assert exitwise("calibrate", "run", "--method", "Laplace").status == 2
    assert exitwise("evaluate", "run", "--budget", "60%").status == 0
    assert exitwise("export", "run", "bundle", *NETS).status == 0
    from_run = exitwise("predict", "run", "photos", *NETS, "--format", "jsonl").out.splitlines()
    from_bundle = exitwise("predict", "bundle", "photos", "--format", "jsonl").out.splitlines()
    for ours, theirs in zip(map(json.loads, from_run), map(json.loads, from_bundle), strict=True):
        assert ours.pop("confidence") == pytest.approx(theirs.pop("confidence"), abs=1e-5)  # torch and ONNX
        assert ours == theirs
    assert exitwise("ablate", "run").status == 0
    assert exitwise("policies", "run").status == 0
    assert exitwise("report", "run").status == 0
    bench = exitwise("bench", "run", *NETS, "--backend", "torch", "--batch-size", "2", "--repeats", "1", "--json",
                    "--costs-of", "torch:2")  # fmt: skip
    assert len(bench.json["costs"]["values"]) == 2


def test_images_are_split_into_halves_without_training_images(place: Path, exitwise: Command) -> None:
    outcome = exitwise("cascade", *NETS, "--data", "folder:photos", "--out", "run")
    assert "18 images for calibration and 18 for testing" in outcome.err
    run = Run("run")
    splits = load_splits(run, None)
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [0, 18, 18]
    assert run.command("collect") == "exitwise collect run --net mine:small --net mine:large"
    sizes = exitwise(
        "cascade", *NETS, "--data", "folder:photos", "--out", "other", "--val-size", "10", "--test-size", "6"
    )
    assert "10 images for calibration and 6 for testing" in sizes.err
    with_train = exitwise("cascade", *NETS, "--data", "folder:photos", "--out", "third", "--train")
    assert "4 images for calibration and 7 for testing, 25 training images" in with_train.err
    assert exitwise("collect", "third", *NETS, "--json").json["samples"]["train"] == 25


def test_a_test_set_gives_both_parts(place: Path, exitwise: Command) -> None:
    (place / "parts").mkdir()
    shutil.copytree(place / "photos", place / "parts" / "train")
    write_images(place / "parts" / "test", 6)
    outcome = exitwise("cascade", *NETS, "--data", "folder:parts", "--out", "run")
    assert "9 images for calibration and 9 for testing, both of the test set" in outcome.err
    assert exitwise("collect", "run", *NETS, "--json").json["samples"] == {"val": 9, "test": 9, "train": 0}


def test_members_may_have_sizes_normalization_and_exits_of_their_own(place: Path, exitwise: Command) -> None:
    nets = [
        word for name in ("mine:resized", "mine:branched", "mine:large@6", "mine:large") for word in ("--net", name)
    ]
    made = exitwise("cascade", *nets, "--data", "folder:photos", "--out", "run", "--json").json
    assert [network["size"] for network in made["networks"]] == [8, 12, 6, 12]
    assert Run(place / "run").metadata["cascade"]["exits"] == [0, 1, 1, 2, 3]
    collected = exitwise("collect", "run", *nets, "--json").json
    assert collected["exits"] == 5
    trace = Run(place / "run").trace()
    assert torch.equal(trace.heads[3].weight, trace.heads[4].weight)  # one network at two resolutions


@pytest.mark.slow
def test_presets_and_files_need_no_function(tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for name in ("first", "second"):
        ew.save_checkpoint(ew.models.msdnet("tiny-8"), tmp_path / f"{name}.safetensors")
    options = ("--net", "tiny-8@6", "--net", "second.safetensors", "--weights", "first.safetensors", "--weights", "-")
    made = exitwise("cascade", *options, "--data", "digits", "--out", "run")
    assert made.status == 0
    assert "Next: exitwise collect run\n" in made.out
    assert exitwise("collect", "run", "--json").json["exits"] == 6
    net = ew.load_net(tmp_path / "run" / "net.safetensors")
    assert isinstance(net, ew.Cascade)
    assert net.num_members == 2
    first = ew.load_net(tmp_path / "first.safetensors")
    assert torch.equal(net.exits[0].last.weight, first.exits[0].last.weight)
    refused = exitwise(
        "cascade", "--net", "tiny-8", "--net", "second.safetensors", "--data", "digits", "--out", "other"
    )
    assert "tiny-8 is a preset without weights: give them with --weights" in refused.err


def test_weights_of_a_module(place: Path, exitwise: Command) -> None:
    torch.manual_seed(5)
    layers = torch.nn.Conv2d(3, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Flatten(), torch.nn.Linear(2, 3)
    state = torch.nn.Sequential(*layers).state_dict()
    torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, place / "small.pth")
    files = ("--weights", "small.pth", "--weights", "-")
    assert exitwise("cascade", *NETS, *files, "--data", "folder:photos", "--out", "run").status == 0
    saved = ew.core.tensorfiles.read(place / "run" / "net.safetensors")[0]  # type: ignore[attr-defined]
    assert torch.equal(saved["heads.0.last.weight"], state["4.weight"])
    swapped = ("--weights", "-", "--weights", "small.pth")
    refused = exitwise("cascade", *NETS, *swapped, "--data", "folder:photos", "--out", "other")
    assert refused.status == 2
    assert "small.pth does not fit the network" in refused.err
    assert not (place / "other").exists()


def test_classes_in_another_order_are_mapped(place: Path, exitwise: Command) -> None:
    (place / "large.txt").write_text("red\ngreen\nblue\n")
    files = ("--classes", "-", "--classes", "large.txt")
    assert exitwise("cascade", *NETS, *files, "--data", "folder:photos", "--out", "run").status == 0
    exitwise("cascade", *NETS, "--data", "folder:photos", "--out", "plain")
    mapped, plain = (
        ew.core.tensorfiles.read(place / name / "net.safetensors")[0]["heads.1.last.weight"]  # type: ignore[attr-defined]
        for name in ("run", "plain")
    )
    assert torch.equal(mapped, plain.flip(0))
    assert exitwise("collect", "run", *NETS).status == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "a cascade needs at least two networks"),
        (("--net", "mine:small"), "a cascade needs at least two networks: give --net for each, but got 1"),
        (("--net", "mine:small", "--net", "mine:four"), "all members must have the same classes, but they have 3, 4"),
        (("--net", "mine:four", "--net", "mine:four@6"), "the networks must have the data's 3 classes, but have 4"),
        (("--net", "mine:small", "--net", "mine:text"), "mine:text must return a network, or a network and its"),
        (("--net", "mine:small", "--net", "mine:nothing"), "mine:nothing could not be imported"),
        (("--net", "mine:small", "--net", "cifar100-smal"), "did you mean 'cifar100-small'?"),
        (("--net", "mine:small", "--net", "timm:resnet18"), "`exitwise train-heads --model timm:resnet18` makes a run"),
        (("--net", "mine:small", "--net", "mine:large@big"), "must end in a size of images, such as @160"),
        ((*NETS, "--weights", "x.pth"), "`--weights` must give a file or - for each of 2 networks"),
        ((*NETS, "--weights", "x.pth", "--weights", "-"), "x.pth does not exist"),
        ((*NETS, "--classes", "x.txt", "--classes", "-"), "x.txt must be a text with a class per line"),
        ((*NETS, "--candidates", "mine:small"), "give either --net for the networks of a cascade, or --candidates"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    place: Path, exitwise: Command, options: tuple[str, ...], message: str
) -> None:
    outcome = exitwise("cascade", *options, "--data", "folder:photos", "--out", "run")
    assert outcome.status == 2
    assert message in outcome.err.splitlines()[-1]
    assert not (place / "run").exists()


def test_another_number_of_networks_is_refused_later(place: Path, exitwise: Command) -> None:
    assert exitwise("cascade", *NETS, "--data", "folder:photos", "--out", "run").status == 0
    outcome = exitwise("collect", "run", "--net", "mine:small")
    assert "the run is a cascade of 2 networks: give --net for each, but got 1" in outcome.err
    assert exitwise("train", "--data", "digits", *NETS, "--out", "x").err.count("several make a cascade") == 1


def test_networks_that_take_other_images_are_refused_later(place: Path, exitwise: Command) -> None:
    nets = ("--net", "mine:large@6", "--net", "mine:large")
    assert exitwise("cascade", *nets, "--data", "folder:photos", "--out", "run").status == 0
    outcome = exitwise("collect", "run", "--net", "mine:large", "--net", "mine:large")
    assert outcome.status == 2
    assert "takes other images than network 1 of the run, mine:large@6" in outcome.err
    assert exitwise("collect", "run", *nets).status == 0


def test_a_run_as_a_network_keeps_its_normalization(place: Path, exitwise: Command) -> None:
    net = ew.models.build("cifar100-resnet8", num_classes=3).eval()
    made = place / "cifar"
    made.mkdir()
    ew.save_checkpoint(net, made / "net.safetensors")
    write_json(made / "run.json", run_metadata(net.spec, {"name": "cifar100", "root": None, "image_size": 32}))
    options = ("--net", "mine:small", "--net", "cifar", "--data", "folder:photos", "--out", "run")
    assert exitwise("cascade", *options).status == 0
    networks = Run(place / "run").metadata["cascade"]["networks"]
    expected = ew.data.get_dataset("cifar100").preprocessing(32)
    assert networks[1]["preprocessing"]["mean"] == list(expected.mean)
    assert networks[0]["preprocessing"] is None


@pytest.mark.slow
def test_candidates_become_the_best_chain(place: Path, exitwise: Command) -> None:
    names = ("mine:small", "mine:large", "mine:large@6")
    candidates = [word for name in names for word in ("--candidates", name)]
    options = (*candidates, "--data", "folder:photos", "--out", "run", "--budget", "90%", "--budget", "200%")
    made = exitwise("cascade", *options, "--json").json
    assert len(made["networks"]) > 1
    assert made["budgets"][0] == pytest.approx(made["budgets"][1] * 0.45)
    assert {tuple(row["networks"]) for row in made["networks_alone"]} == {(name,) for name in names}
    run = Run(place / "run")
    assert [network["name"] for network in run.metadata["cascade"]["networks"]] == made["chosen"]["networks"]
    trace = run.trace()
    nets = [word for name in made["chosen"]["networks"] for word in ("--net", name)]
    again = exitwise("collect", "run", "--force", *nets, "--json").json
    assert list(trace.costs.values) == again["costs"]
    for joined, collected in zip(trace.test.features, run.trace().test.features, strict=True):
        assert torch.allclose(joined, collected, atol=1e-5)  # batches of another net
    assert exitwise("evaluate", "run", "--budget", "80%").status == 0
    assert exitwise("report", "run").status == 0
    assert '"front_milliseconds"' in (place / "run" / "report.html").read_text()
    refused = exitwise("cascade", *candidates, "--data", "folder:photos", "--out", "other", "--budget", "10")
    assert "must be at least the cost of the cheapest network" in refused.err
    assert not (place / "other").exists()
