"""Exits trained together with the module they are attached to: steps, teacher, the last exit's limit, resuming."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import Command, once
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import exitwise as ew
from exitwise import data
from exitwise.training.callbacks import TrainingCallback
from exitwise.training.checkpoints import CheckpointDirectory
from exitwise.training.history import EpochRecord, History
from exitwise.training.joint import ScaledGradients, find_kept_epoch

pytestmark = pytest.mark.numerical

JOINT = ew.Recipe(epochs=2, batch_size=16, lr=0.05, distill=0.5, backbone_lr=0.2, scale_gradients=True)


def vector_net() -> ew.MultiExitNet:
    """Three exits on vectors (n, 6) with 4 classes; the stages change their inputs in place, as residual nets do."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x)
            out += x
            return torch.relu_(out)

    torch.manual_seed(1)
    heads = [ew.Head(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 4)) for _ in range(3)]
    return ew.MultiExitNet([Stage() for _ in range(3)], heads)


def vectors(samples: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def gradients(net: ew.MultiExitNet, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*net.named_parameters(), strict=True)
    values = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return {name: torch.zeros(()) if value is None else value for name, value in zip(names, values, strict=True)}


# -- steps


def test_stages_get_the_mean_of_the_gradients_of_later_exits_and_heads_their_own() -> None:
    net, (x, y) = vector_net(), vectors().tensors
    scaled = ScaledGradients(net)(x)
    assert all(torch.equal(*pair) for pair in zip(scaled, net(x), strict=True))
    found = gradients(net, sum(cross_entropy(logits, y) for logits in scaled))  # type: ignore[arg-type]
    by_exit = [gradients(net, cross_entropy(logits, y)) for logits in net(x)]
    for name, value in found.items():
        kind, index, *_ = name.split(".")
        exits = len(net.exits) - int(index) if kind == "stages" else 1
        torch.testing.assert_close(value, sum(each[name] for each in by_exit) / exits)


def test_it_is_sgd_on_distilled_losses_with_small_steps_of_the_backbone(tmp_path: Path) -> None:
    recipe, dataset = (
        replace(JOINT, epochs=1, batch_size=64, momentum=0.0, weight_decay=0.0, temperature=3.0),
        vectors(),
    )
    net = vector_net()
    before, original = dict(copy.deepcopy(net).named_parameters()), copy.deepcopy(net)
    ew.train(net, dataset, dataset, recipe=recipe, out=tmp_path)
    x, y = dataset.tensors
    T, teacher = 3.0, original(x)[-1].detach()
    losses = []
    for logits in ScaledGradients(original)(x):
        divergence = ((teacher / T).softmax(1) * ((teacher / T).log_softmax(1) - (logits / T).log_softmax(1))).sum(1)
        losses.append(0.5 * cross_entropy(logits, y) + 0.5 * T**2 * divergence.mean())
    steps = gradients(original, torch.stack(losses).sum())
    for name, value in net.named_parameters():
        lr = recipe.lr * (1.0 if name.startswith(("heads.0", "heads.1")) else 0.2)
        torch.testing.assert_close(value, before[name] - lr * steps[name], rtol=1e-4, atol=1e-6)


def test_frozen_parameters_stay_and_others_move(tmp_path: Path) -> None:
    net = vector_net()
    net.stages.requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    ew.train(net, vectors(), vectors(), recipe=JOINT, out=tmp_path)
    moved = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.startswith("heads")}


# -- the limit to what the last exit may lose


def row(epoch: int, *top1: float) -> EpochRecord:
    return EpochRecord(epoch, 0.1, 1.0, 1.0, top1, 1.0, 1.0)


def test_the_kept_epoch_is_the_best_on_average_of_those_within_the_limit() -> None:
    rows = [row(1, 0.2, 0.70), row(2, 0.4, 0.69), row(3, 0.6, 0.68), row(4, 0.4, 0.69)]
    assert find_kept_epoch(rows, 0.70, 0.01) == 2
    assert find_kept_epoch(rows, 0.70, 0.02) == 3
    assert find_kept_epoch(rows, 0.70, 0.0) == 1
    assert find_kept_epoch(rows, 0.75, 0.01) == 0


def test_a_history_knows_the_epoch_that_was_kept(tmp_path: Path) -> None:
    history = History((row(1, 0.2, 0.70), row(2, 0.4, 0.69), row(3, 0.6, 0.60)), (2, 2))
    assert (history.best.epoch, history.top1) == (2, (0.4, 0.69))
    history.save(tmp_path / "history.csv")
    assert History.load(tmp_path / "history.csv") == history


class Collector(TrainingCallback):
    def __init__(self) -> None:
        self.kept: list[bool] = []

    def on_epoch_end(self, row: EpochRecord, kept: bool) -> None:
        self.kept.append(kept)


def trained_vector_net(folder: Path) -> ew.MultiExitNet:
    net = vector_net()
    ew.train(net, vectors(), vectors(), recipe=ew.Recipe(epochs=40, batch_size=16, lr=0.1), out=folder)
    return net


def test_epochs_that_lose_too_much_are_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = trained_vector_net(tmp_path / "plain")
    x, y = vectors().tensors
    original = float((net(x)[-1].argmax(1) == y).double().mean())
    assert original > 0.9
    wrong = TensorDataset(x, (y + 1) % 4)  # what it learns is wrong for the validation samples
    callback = Collector()
    recipe = replace(JOINT, epochs=6, distill=0.0, max_drop=0.1, lr=0.05, warmup=4)
    history = ew.train(net, wrong, vectors(), recipe=recipe, out=tmp_path / "joint", callback=callback)
    kept = history.kept[0]
    assert history.kept == (kept,) * 3
    assert history.best.val_top1[-1] >= original - 0.1
    top1 = [float((logits.argmax(1) == y).double().mean()) for logits in net(x)]
    assert history.top1 == pytest.approx(top1, abs=1e-6)
    lost = [row.epoch for row in history.epochs if row.val_top1[-1] < original - 0.1]
    assert lost
    assert not any(callback.kept[epoch - 1] for epoch in lost)
    messages = [record.getMessage() for record in caplog.records if "is not kept" in record.getMessage()]
    assert [int(message.split()[1]) for message in messages] == lost
    assert messages[-1].endswith(f"than the {100 * original:.2f} % of the original network, and may lose 10")


def test_without_any_epoch_to_keep_it_is_an_error(tmp_path: Path) -> None:
    net = trained_vector_net(tmp_path / "plain")
    x, y = vectors().tensors
    recipe = replace(JOINT, epochs=2, distill=0.0, max_drop=0.0, lr=2.0)
    with pytest.raises(ew.InputError, match=r"^no epoch is kept: even in epoch \d its last exit has .* lower `lr`"):
        ew.train(net, TensorDataset(x, (y + 1) % 4), vectors(), recipe=recipe, out=tmp_path / "joint")
    assert not (tmp_path / "joint" / "net.safetensors").exists()
    with pytest.raises(ew.InputError, match="no epoch is kept"):
        ew.train(net, vectors(), vectors(), recipe=recipe, out=tmp_path / "joint", resume=True)


# -- resuming


class StopAfter(TrainingCallback):
    def __init__(self, batches: int) -> None:
        self.remaining = batches

    def on_batch_end(self, epoch: int, batch: int, images_per_second: float, seconds_left: float) -> None:
        self.remaining -= 1
        if not self.remaining:
            raise KeyboardInterrupt


@pytest.mark.parametrize("batches", [1, 6])
def test_a_joint_training_is_resumed_with_its_teacher_and_its_limit(tmp_path: Path, batches: int) -> None:
    recipe = replace(JOINT, epochs=3, max_drop=0.5)

    def fit(out: Path, net: ew.MultiExitNet, callback: TrainingCallback | None = None, resume: bool = False) -> History:
        return ew.train(
            net, vectors(), vectors(), recipe=recipe, out=out, callback=callback, resume=resume, checkpoint_minutes=0.0
        )

    whole = fit(tmp_path / "whole", vector_net())
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "cut", vector_net(), StopAfter(batches))
    other = vector_net()  # as after a restart: the weights before the training are not in memory any more
    nn.init.zeros_(other.exits[-1].last.weight)
    cut = fit(tmp_path / "cut", other, resume=True)
    assert cut.kept == whole.kept
    assert [row.train_loss for row in cut.epochs] == [row.train_loss for row in whole.epochs]
    states = [
        load_file(CheckpointDirectory(tmp_path / name / "checkpoints").newest() or "") for name in ("whole", "cut")
    ]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    (tmp_path / "cut" / "original.safetensors").unlink()
    done = fit(tmp_path / "cut", other, resume=True)  # a training that is done needs no teacher
    assert done.kept == whole.kept


def test_a_lost_teacher_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ew.train(vector_net(), vectors(), vectors(), recipe=JOINT, out=tmp_path, callback=StopAfter(2))
    (tmp_path / "original.safetensors").unlink()
    with pytest.raises(ew.InputError, match=r"original\.safetensors is missing, so the original network is lost"):
        ew.train(vector_net(), vectors(), vectors(), recipe=JOINT, out=tmp_path, resume=True)


# -- the command


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a ResNet8 with one exit, after four epochs on digits."""

    def make(folder: Path) -> None:
        torch.manual_seed(0)
        train, _ = data.load("digits")
        splits = data.HoldOut.random(train, 297, 0, 500).apply(train, None)
        net = ew.models.resnet("cifar100-resnet8", num_classes=10, in_channels=1)
        ew.train(net, splits.train, splits.val, recipe=ew.RECIPES["digits"].scaled(4), out=folder)

    return once(tmp_path_factory, "plain-digits", make) / "net.safetensors"


OPTIONS = ("--data", "digits", "--model", "cifar100-resnet8", "--attach", "auto", "--exits", 3)


@pytest.mark.slow
def test_from_a_trained_network_to_its_exits_trained_together(plain: Path, tmp_path: Path, exitwise: Command) -> None:
    run = tmp_path / "run"
    done = exitwise(
        "train", *OPTIONS, "--weights", plain, "--head", "conv", "--epochs", 3, "--max-drop", 2, "--out", run
    )
    assert done.status == 0, done.err
    assert done.err.count("top-1 % by exit") == 6  # three epochs of the heads alone, three of all layers
    assert "the run keeps the weights of epoch" in done.out
    metadata = json.loads((run / "run.json").read_text())
    assert metadata["model"]["attach"] == {
        "at": metadata["model"]["attach"]["at"],
        "head": "conv",
        "input_shape": [1, 8, 8],
    }
    recipe = ew.RECIPES["joint"].scaled(3)
    assert metadata["training"]["recipe"] == replace(
        recipe, augmentation=ew.RECIPES["digits"].augmentation, max_drop=0.02
    ).to_dict() | {"milestones": []}
    history = History.load(run / "history.csv")
    assert history.top1[-1] >= 0.9
    original = load_file(run / "original.safetensors")
    plain_weights = [value for name, value in load_file(plain).items() if name.startswith("stages")]
    assert sum(len(value.shape) == 4 for value in plain_weights) > 0
    assert all(any(torch.equal(value, other) for other in original.values()) for value in plain_weights)
    for words in (["collect", run], ["evaluate", run, "--budget", "50%", "--method", "T_opt"]):
        assert exitwise(*words).status == 0
    bundle = tmp_path / "bundle"
    done = exitwise("export", run, bundle)
    assert done.status == 0, done.err
    again = exitwise("train", run, "--resume", "--max-drop", 2, "--recipe", "joint")
    assert again.status == 0, again.err
    assert "cannot be resumed with 1" in exitwise("train", run, "--resume", "--max-drop", 1).err
    assert "--weights is for a new run" in exitwise("train", run, "--resume", "--weights", plain).err


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_its_weights(
    plain: Path, tmp_path: Path, exitwise: Command
) -> None:
    run = tmp_path / "run"
    assert exitwise("train", *OPTIONS, "--weights", plain, "--epochs", 1, "--max-drop", 5, "--out", run).status == 0
    expected = load_file(run / "net.safetensors")
    for file in (*CheckpointDirectory(run / "checkpoints").files(), run / "history.csv", run / "net.safetensors"):
        file.unlink()
    assert exitwise("train", run, "--resume").status == 0
    found = load_file(run / "net.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (run / "original.safetensors").unlink()
    for file in CheckpointDirectory(run / "checkpoints").files():
        file.unlink()
    (run / "history.csv").unlink()
    done = exitwise("train", run, "--resume")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "original.safetensors does not exist" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (OPTIONS, "starts from a trained cifar100-resnet8: give its weights with --weights"),
        (("--data", "digits", "--distill", 0.5), "starts from a trained tiny-8: give its weights with --weights"),
        (("--data", "digits", "--recipe", "joint"), "starts from a trained tiny-8: give its weights with --weights"),
        ((*OPTIONS, "--weights", "nowhere.pth"), "nowhere.pth does not exist"),
        ((*OPTIONS, "--weights", "x.pth", "--max-drop", -1), "`--max-drop` must be a number from 0 to 100"),
        ((*OPTIONS, "--weights", "x.pth", "--distill", 2), "`--distill` must be a number from 0 to 1"),
        ((*OPTIONS, "--weights", "x.pth", "--head", "big"), "'big' is not one of 'mlp', 'grid', 'linear', 'conv'"),
        (("--data", "digits", "--exits", 3), "--exits is for --attach auto"),
        (("--data", "digits", "--head", "conv"), "--head is for exits that are attached"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = exitwise("train", *options, "--out", "run")
    assert (done.status, done.err.count("\n")) == (2, 1), done.err
    assert message in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_drop": 2}, "`max_drop` must be a number from 0 to 1"),
        ({"backbone_lr": -1}, "`backbone_lr` must be a number of at least 0"),
        ({"scale_gradients": 1}, "`scale_gradients` must be"),
        ({"distill": 2}, "`distill` must be a number from 0 to 1"),
        ({"temperature": 0}, "`temperature` must be above 0"),
    ],
)
def test_bad_recipes_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ew.InputError, match=message):
        ew.Recipe(epochs=1, batch_size=1, **values)  # type: ignore[arg-type]


def test_recipes_of_former_files_still_open() -> None:
    former = ew.Recipe(epochs=3, batch_size=4).to_dict()
    for name in ("distill", "temperature", "backbone_lr", "scale_gradients", "max_drop"):
        del former[name]
    assert ew.Recipe.from_dict(former) == ew.Recipe(epochs=3, batch_size=4)
