"""Training matches a simple SGD loop, and resumes bit for bit after any interruption."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import Command, contents
from safetensors.torch import load_file
from seeds import SEED
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import exitwise as ew
from exitwise import data
from exitwise.core.files import write_json
from exitwise.training import machine
from exitwise.training.batch_sources import as_batch_source
from exitwise.training.callbacks import TrainingCallback
from exitwise.training.checkpoints import CheckpointDirectory
from exitwise.training.history import EpochRecord, History
from exitwise.training.machine import worth_compiling
from exitwise.training.recipes import RECIPES, Recipe

pytestmark = pytest.mark.numerical

DIGITS = ("train", "--data", "digits", "--epochs", "3")


@pytest.fixture
def whole(digits_run: Path) -> Path:
    """Run of an uninterrupted training in a separate process."""
    return digits_run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """Copy of the uninterrupted run that a test may change."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def start_command(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start the command in a real process."""
    return subprocess.Popen(
        [sys.executable, "-m", "exitwise", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def last_state(run: Path) -> dict[str, Tensor]:
    newest = CheckpointDirectory(run / "checkpoints").newest()
    assert newest is not None
    return load_file(newest)


def assert_same_training(run: Path, expected: Path) -> None:
    """Assert that final weights, momentum and the best weights of two runs are bitwise equal."""
    for tensors, expected_tensors in (
        (last_state(run), last_state(expected)),
        (load_file(run / "net.safetensors"), load_file(expected / "net.safetensors")),
    ):
        assert tensors.keys() == expected_tensors.keys()
        assert all(torch.equal(tensors[key], expected_tensors[key]) for key in tensors)
    rows, expected_rows = (History.load(path / "history.csv").epochs for path in (run, expected))
    assert [row.val_top1 for row in rows] == [row.val_top1 for row in expected_rows]
    assert [row.train_loss for row in rows] == [row.train_loss for row in expected_rows]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)


# -- what the loop computes


def simple_loop(net: ew.MultiExitNet, train: data.ImageSet, recipe: Recipe, seed: int) -> None:
    """Train with torch.optim.SGD on the sum of the losses."""
    optimizer = torch.optim.SGD(
        net.parameters(), lr=0.0, momentum=recipe.momentum, weight_decay=recipe.weight_decay, nesterov=recipe.nesterov
    )
    source = as_batch_source(train, recipe, seed)
    for epoch in range(recipe.epochs):
        for batch, [(images, labels)] in enumerate(source.epoch(epoch)):
            optimizer.param_groups[0]["lr"] = recipe.lr_at(epoch, batch / len(source))
            loss = sum(nn.functional.cross_entropy(logits, labels) for logits in net(images))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()


def digits() -> data.Splits[data.ImageDataset]:
    train, test = data.load("digits")
    return data.HoldOut.random(train, 297, 0, 500).apply(train, test)


def test_it_is_sgd_on_the_sum_of_the_exits_losses(tmp_path: Path) -> None:
    recipe = replace(RECIPES["digits"].scaled(2), lr=0.01, batch_size=200)
    splits = digits()
    torch.manual_seed(3)
    net, simple = ew.models.msdnet("tiny-8"), ew.models.msdnet("tiny-8")
    simple.load_state_dict(net.state_dict())
    ew.train(net, splits.train, data.Batches(splits.val, 50), recipe=recipe, out=tmp_path, seed=5)
    simple_loop(simple, splits.train, recipe, 5)  # type: ignore[arg-type]
    expected = simple.state_dict()
    for key, value in last_state(tmp_path).items():
        if key.startswith("net."):
            torch.testing.assert_close(value, expected[key.removeprefix("net.")], rtol=1e-4, atol=1e-5)


def test_the_net_that_is_kept_is_that_of_the_best_epoch(run: Path) -> None:
    history = History.load(run / "history.csv")
    splits = digits()
    net = ew.load_net(run / "net.safetensors")
    with torch.no_grad():
        images, labels, _ = next(iter(data.Batches(splits.val, 297)))
        top1 = [(logits.argmax(1) == labels).double().mean().item() for logits in net(images)]
    assert history.best.val_top1 == pytest.approx(top1, abs=1e-5)
    assert history.best.val_top1[-1] == max(row.val_top1[-1] for row in history.epochs)


def test_of_equal_epochs_the_first_is_the_best() -> None:
    rows = [
        EpochRecord(n, 0.1, 1.0, 1.0, (0.9, top1), 1.0, 1.0) for n, top1 in enumerate((0.5, 0.7, 0.7, 0.6), start=1)
    ]
    assert History(tuple(rows)).best.epoch == 2


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_any_dataset_or_loader_is_accepted(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    dataset = TensorDataset(x, y)
    train = dataset if kind == "dataset" else DataLoader(dataset, batch_size=16, shuffle=True)
    net = vector_net()
    recipe = Recipe(epochs=20, batch_size=16, lr=0.1)
    history = ew.train(net, train, DataLoader(dataset, batch_size=32), recipe=recipe, out=tmp_path)
    assert history.epochs[-1].val_top1[-1] > 0.9
    with torch.no_grad():
        top1 = (net.eval()(x)[-1].argmax(1) == y).double().mean().item()
    assert top1 == pytest.approx(history.best.val_top1[-1])  # the net ends with the best weights


def vector_net(dropout: float = 0.0) -> ew.MultiExitNet:
    """Return a net with two exits for inputs (n, 6)."""
    first = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout))
    stages = [first, nn.Sequential(nn.Linear(16, 16), nn.ReLU())]
    return ew.MultiExitNet(stages, [ew.Head(nn.Identity(), nn.Linear(16, 4)) for _ in stages])


def test_tied_weights_are_saved(tmp_path: Path) -> None:
    net = vector_net()
    net.exits[1].last = net.exits[0].last
    x, y = torch.randn(32, 6), torch.randint(4, (32,))
    ew.train(net, TensorDataset(x, y), TensorDataset(x, y), recipe=Recipe(epochs=1, batch_size=16), out=tmp_path)
    saved = load_file(tmp_path / "net.safetensors")
    assert torch.equal(saved["heads.0.last.weight"], saved["heads.1.last.weight"])


def test_a_net_comes_back_in_the_mode_it_came_in(tmp_path: Path) -> None:
    net = vector_net().train()
    net.stages[0].eval()
    x, y = torch.randn(32, 6), torch.randint(4, (32,))
    ew.train(net, TensorDataset(x, y), [(x, y)], recipe=Recipe(epochs=1, batch_size=16), out=tmp_path)
    assert (net.training, net.stages[0].training, net.stages[1].training) == (True, False, True)


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        ((torch.randn(32, 6), torch.full((32,), 4)), None, "`train` must have labels 0 to 3, but has some from 4 to 4"),
        (None, (torch.randn(32, 6), torch.full((32,), -1)), "`val` must have labels 0 to 3, but has some from -1 to"),
        ((torch.randn(32, 5), torch.zeros(32).long()), None, "the net cannot be trained on images of shape (5,): mat1"),
        ((torch.randn(8, 6), torch.zeros(8).long()), None, "`batch_size` must be at most the 8 samples, but is 16"),
    ],
)
def test_data_that_do_not_fit_the_net_are_refused(
    tmp_path: Path, train: tuple[Tensor, Tensor] | None, val: tuple[Tensor, Tensor] | None, message: str
) -> None:
    good = torch.randn(32, 6), torch.zeros(32).long()
    recipe = Recipe(epochs=1, batch_size=16)
    with pytest.raises(ew.InputError) as error:
        ew.train(
            vector_net(), TensorDataset(*(train or good)), TensorDataset(*(val or good)), recipe=recipe, out=tmp_path
        )
    assert message in str(error.value)


def test_a_checkpoint_cannot_be_resumed_with_other_settings(tmp_path: Path) -> None:
    dataset = TensorDataset(torch.randn(32, 6), torch.zeros(32).long())
    ew.train(vector_net(), dataset, dataset, recipe=Recipe(epochs=1, batch_size=16), out=tmp_path)
    for change, message in (({"recipe": Recipe(epochs=2, batch_size=16)}, "recipe"), ({"seed": 1}, "seed")):
        options: dict[str, object] = {"recipe": Recipe(epochs=1, batch_size=16), **change}
        with pytest.raises(ew.InputError, match=f"the checkpoint was made with another {message}"):
            ew.train(vector_net(), dataset, dataset, out=tmp_path, resume=True, **options)  # type: ignore[arg-type]


def test_the_former_name_of_the_callback_is_accepted_but_not_both_names(tmp_path: Path) -> None:
    dataset = TensorDataset(torch.randn(32, 6), torch.zeros(32).long())
    recipe = Recipe(epochs=1, batch_size=16)
    with pytest.raises(KeyboardInterrupt):
        ew.train(vector_net(), dataset, dataset, recipe=recipe, out=tmp_path / "former", watcher=StopAfter(1))
    both = {"callback": TrainingCallback(), "watcher": TrainingCallback()}
    with pytest.raises(ew.InputError, match="`watcher` is the former name of `callback`: pass only `callback`"):
        ew.train(vector_net(), dataset, dataset, recipe=recipe, out=tmp_path / "both", **both)  # type: ignore[arg-type]
    assert not (tmp_path / "both").exists()


def test_parts_of_a_batch_make_the_step_of_the_whole(tmp_path: Path) -> None:
    x, y = torch.randn(48, 6), torch.randint(4, (48,))
    states = []
    for parts in (1, 4):
        torch.manual_seed(1)
        net = vector_net()
        recipe = Recipe(epochs=3, batch_size=16)
        out = tmp_path / str(parts)
        ew.train(net, TensorDataset(x, y), [(x, y)], recipe=recipe, out=out, accumulate=parts)
        states.append(last_state(out))
    for key in states[0]:
        torch.testing.assert_close(states[0][key], states[1][key], rtol=1e-5, atol=1e-6)


def test_history_is_saved_and_drawn(run: Path, tmp_path: Path) -> None:
    lines = (run / "history.csv").read_text().splitlines()
    assert lines[0].split(",")[:4] == ["epoch", "lr", "train_loss", "val_loss"]
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2", "3"]
    assert (run / "history.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    history = History.load(run / "history.csv")
    history.save(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text().splitlines() == lines


# -- interruptions


# A training that kills itself just before it touches a file of the run for the n-th time: opens, creates, renames or
# removes it, or changes its mode. Every state that a kill can leave on disk lies between two of these events.
KILLED = """
import os, signal, sys
from exitwise.cli.app import main
remaining, folder = int(sys.argv.pop(1)), sys.argv.pop(1)

def count(event, arguments):
    global remaining
    if event in ("open", "os.chmod", "os.rename", "os.remove", "os.mkdir") and folder in str(arguments[0]):
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
main()
"""


@pytest.mark.soak
def test_killed_at_random_moments_it_ends_with_the_same_weights(whole: Path, tmp_path: Path, seed: int) -> None:
    """Kill a real process with SIGKILL; with a checkpoint after every batch, most kills hit an epoch or a write."""
    directory, moments = tmp_path / "run", random.Random(seed)
    arguments: list[object] = [*DIGITS, "--out", directory, "--checkpoint-minutes", 0]
    for _ in range(3 if SEED else 1):
        touches = moments.randrange(20, 120)  # of about 450; the run exists after 16
        command = [sys.executable, "-c", KILLED, str(touches), str(tmp_path), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, f"killed at touch {touches}: {done.stderr}"
        arguments = ["train", directory, "--resume", "--checkpoint-minutes", 0]
    with start_command("train", directory, "--resume", "--checkpoint-minutes", 0) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert_same_training(directory, whole)
    assert not list(directory.rglob(".*")), "a killed write left a partial file"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_a_signal_saves_a_checkpoint_and_prints_how_to_resume(
    whole: Path, tmp_path: Path, exitwise: Command, number: signal.Signals, status: int
) -> None:
    directory = tmp_path / "run"
    with start_command(*DIGITS, "--out", directory) as process:
        wait_for(lambda: bool(CheckpointDirectory(directory / "checkpoints").files()), process)
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
    assert process.returncode == status, err
    assert err.splitlines()[-1].startswith("exitwise: stopped after 0 epochs and ")
    assert err.splitlines()[-1].endswith(f"`exitwise train {directory} --resume` resumes it")
    assert exitwise("train", directory, "--resume").status == 0
    assert_same_training(directory, whole)


class StopAfter(TrainingCallback):
    """Callback that interrupts the training after a number of batches."""

    def __init__(self, batches: int) -> None:
        self.remaining = batches

    def on_batch_end(self, epoch: int, batch: int, images_per_second: float, seconds_left: float) -> None:
        self.remaining -= 1
        if not self.remaining:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["dataset", "loader", "generator"])
@pytest.mark.parametrize("batches", [1, 4, 7, 11])
@pytest.mark.slow_after_first
def test_dropout_and_a_loaders_order_are_resumed_too(tmp_path: Path, kind: str, batches: int) -> None:
    x, y = torch.randn(64, 6), torch.randint(4, (64,))

    def fit(out: Path, callback: TrainingCallback | None = None, resume: bool = False) -> None:
        torch.manual_seed(2)
        net = vector_net(dropout=0.5)
        dataset = TensorDataset(x, y)
        generator = torch.Generator() if kind == "generator" else None
        loader = DataLoader(dataset, batch_size=16, shuffle=True, generator=generator)
        train = dataset if kind == "dataset" else loader
        recipe = Recipe(epochs=3, batch_size=16, warmup=1)
        torch.manual_seed(random.randrange(10**6))  # other draws of the process must not matter
        ew.train(net, train, [(x, y)], recipe=recipe, out=out, callback=callback, resume=resume, checkpoint_minutes=0.0)

    fit(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "cut", StopAfter(batches))
    fit(tmp_path / "cut", resume=True)
    assert_same_training(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.skipif(not worth_compiling(10**6), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
@pytest.mark.slow
def test_a_compiled_training_resumes_and_is_close_to_the_eager_one(tmp_path: Path) -> None:
    x, y = torch.randn(64, 6), torch.randint(4, (64,))

    def fit(out: Path, callback: TrainingCallback | None = None, resume: bool = False, compile: bool = True) -> None:
        torch.manual_seed(2)
        recipe = Recipe(epochs=2, batch_size=16)
        dataset = TensorDataset(x, y)
        options = {"callback": callback, "resume": resume, "compile": compile, "checkpoint_minutes": 0.0}
        ew.train(vector_net(), dataset, [(x, y)], recipe=recipe, out=out, **options)  # type: ignore[arg-type]

    fit(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "cut", StopAfter(3))
    fit(tmp_path / "cut", resume=True)
    assert_same_training(tmp_path / "cut", tmp_path / "whole")
    fit(tmp_path / "eager", compile=False)
    compiled, eager = last_state(tmp_path / "whole"), last_state(tmp_path / "eager")
    for key, value in eager.items():
        torch.testing.assert_close(compiled[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_newest_checkpoint_is_skipped(
    whole: Path, run: Path, exitwise: Command, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    newest, before = CheckpointDirectory(run / "checkpoints").files()
    bytes_ = bytearray(newest.read_bytes())
    if damage == "flipped":
        bytes_[-1000] ^= 1
    newest.write_bytes(bytes_[: len(bytes_) // 2] if damage == "cut" else b"" if damage == "empty" else bytes_)
    done = exitwise("train", run, "--resume")
    assert done.status == 0, done.err
    assert str(newest) in caplog.text
    assert f"resuming from the checkpoint before it, {before.name}" in caplog.text
    assert_same_training(run, whole)


@pytest.mark.slow
def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path, exitwise: Command) -> None:
    directory = tmp_path / "run"
    with start_command("train", "--data", "digits", "--epochs", 200, "--out", directory) as process:
        wait_for(lambda: bool(CheckpointDirectory(directory / "checkpoints").files()), process)
        done = exitwise("train", directory, "--resume")
        process.kill()
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "is being trained by another process" in done.err


def test_resuming_without_an_intact_checkpoint_is_refused(run: Path, exitwise: Command) -> None:
    for file in CheckpointDirectory(run / "checkpoints").files():
        file.write_bytes(b"x")
    done = exitwise("train", run, "--resume")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "no checkpoint in" in done.err
    assert "is intact" in done.err


def test_a_non_finite_loss_stops_with_the_last_good_checkpoint(tmp_path: Path, exitwise: Command) -> None:
    directory = tmp_path / "run"
    done = exitwise(*DIGITS, "--out", directory, "--lr", "1e30", "--checkpoint-minutes", 0)
    assert done.status == 2
    line = done.err.splitlines()[-1]
    newest = CheckpointDirectory(directory / "checkpoints").newest()
    assert f"in epoch 1, batch {int(newest.stem.split('-')[1]) + 1}; the last good checkpoint is {newest}" in line  # type: ignore[union-attr]
    assert "the loss became nan" in line or "the loss became inf" in line


class Breaking(nn.Module):
    """Module with an infinite gradient at the third batch, though the loss is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.remaining = 3

    def forward(self, x: Tensor) -> Tensor:
        self.remaining -= self.training
        return x * (self.weight if self.remaining else (self.weight - 1).abs().sqrt() + 1)


def test_non_finite_weights_are_never_saved(tmp_path: Path) -> None:
    net = ew.MultiExitNet([Breaking()], [ew.Head(nn.Identity(), nn.Linear(6, 4))])
    with torch.no_grad():
        net.exits[0].last.weight.zero_()  # no gradient reaches the weight before the third batch
    recipe = Recipe(epochs=2, batch_size=16, lr=1e-30, momentum=0.0, weight_decay=0.0)
    dataset = TensorDataset(torch.randn(64, 6), torch.randint(4, (64,)))
    with pytest.raises(ew.InputError, match=r"stages.0.weight is not finite any more after epoch 1, batch 3") as error:
        ew.train(net, dataset, [dataset[:16]], recipe=recipe, out=tmp_path, checkpoint_minutes=0.0)
    newest = CheckpointDirectory(tmp_path / "checkpoints").newest()
    assert str(error.value).endswith(f"the last good checkpoint is {newest}")
    assert newest is not None
    assert newest.name == "00000-0000002.safetensors"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounted file system of 1.2 MB; the test is skipped where mounting is not permitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", disk], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a small disk: {mount.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint(small_disk: Path, whole: Path, exitwise: Command) -> None:
    directory = small_disk / "run"
    done = exitwise(*DIGITS, "--out", directory)
    assert done.status == 2
    assert "No space left on device" in done.err
    newest = CheckpointDirectory(directory / "checkpoints").newest()
    last_words = done.err.splitlines()[-1].partition("the last good checkpoint is ")[2]
    assert last_words in (str(newest), f".../checkpoints/{newest.name}")  # long messages show only the end of paths
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    assert exitwise("train", directory, "--resume").status == 0
    assert_same_training(directory, whole)


# -- resuming with other options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "tiny-16"], "is trained with --model tiny-8, and cannot be resumed with tiny-16"),
        (["--data", "cifar10"], "is trained on digits, and cannot be resumed with cifar10"),
        (["--epochs", "9"], "is trained with --epochs 3, and cannot be resumed with 9"),
        (["--seed", "1"], "is trained with --seed 0, and cannot be resumed with 1"),
        (["--precision", "bf16-mixed"], "is trained with --precision 32-true, and cannot be resumed with bf16-mixed"),
        (["--recipe", "cifar100"], "is trained with another recipe than 'cifar100'"),
        (["--net", "some:thing"], "has the net 'tiny-8': --net is for other nets"),
    ],
)
def test_resuming_with_other_options_is_refused(run: Path, exitwise: Command, options: list[str], message: str) -> None:
    before = contents(run)
    done = exitwise("train", run, "--resume", *options)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert message in done.err
    assert contents(run) == before


@pytest.mark.parametrize(
    "option", [["--split-seed", "5"], ["--val-size", "17"], ["--image-size", "9"], ["--force"], ["--out", "elsewhere"]]
)
def test_options_of_a_new_run_are_refused_with_resume(run: Path, exitwise: Command, option: list[str]) -> None:
    before = contents(run)
    done = exitwise("train", run, "--resume", *option)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert f"{option[0]} is for a new run" in done.err
    assert contents(run) == before


@pytest.mark.slow
def test_the_options_that_a_run_was_made_with_may_be_repeated(tmp_path: Path, exitwise: Command) -> None:
    options = ["--data", "digits", "--recipe", "digits", "--lr", "0.05", "--epochs", "1"]
    assert exitwise("train", *options, "--out", tmp_path / "run").status == 0
    assert exitwise("train", tmp_path / "run", "--resume", *options).status == 0


@pytest.mark.slow
def test_a_resumed_run_keeps_its_number_of_micro_batches(tmp_path: Path, exitwise: Command) -> None:
    """BatchNorm statistics depend on the micro-batches, so they must be kept with or without `--accumulate`."""
    finished, cut = tmp_path / "whole", tmp_path / "cut"
    for directory in (finished, cut):
        assert exitwise(*DIGITS, "--accumulate", "2", "--checkpoint-minutes", 0, "--out", directory).status == 0
    newest, before = CheckpointDirectory(cut / "checkpoints").files()
    newest.unlink()
    assert before.stem == "00002-0000020"
    refused = exitwise("train", cut, "--resume", "--accumulate", "5")
    assert "is trained in 2 parts per batch, which 1 processes x 5 parts do not make" in refused.err
    assert exitwise("train", cut, "--resume").status == 0
    assert_same_training(cut, finished)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_again(whole: Path, run: Path, exitwise: Command) -> None:
    for file in (*CheckpointDirectory(run / "checkpoints").files(), run / "history.csv", run / "net.safetensors"):
        file.unlink()
    assert exitwise("train", run, "--resume").status == 0
    assert_same_training(run, whole)


def test_resuming_without_the_best_weights_is_refused(run: Path, exitwise: Command) -> None:
    (run / "net.safetensors").unlink()
    done = exitwise("train", run, "--resume")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "net.safetensors is missing, so the best weights are lost" in done.err


@pytest.mark.parametrize("change", ["class", "image"])
@pytest.mark.slow_after_first
@pytest.mark.slow
def test_images_that_changed_since_the_start_are_noticed(
    tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder = class_folder(tmp_path / "mine", {"a": 30, "b": 30})
    options = ["--model", "tiny-16", "--epochs", 1, "--batch-size", 20, "--out", tmp_path / "run"]
    assert exitwise("train", "--data", f"folder:{folder}", *options).status == 0
    monkeypatch.chdir(tmp_path)  # a run finds its images from any working directory
    assert exitwise("train", "run", "--resume").status == 0
    class_folder(tmp_path / "more", {"c": 2})
    (tmp_path / "more" / "c" / "0.png").rename(folder / "b" / "zero.png")
    if change == "class":
        (tmp_path / "more" / "c").rename(folder / "c")
    done = exitwise("train", "run", "--resume")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert ("but its data now have 3" if change == "class" else "or their order, have changed") in done.err


def test_resuming_what_is_done_changes_nothing(run: Path, exitwise: Command) -> None:
    before = {name: size for name, (size, _) in contents(run).items() if "png" not in name}
    done = exitwise("train", run, "--resume", "--json")
    assert (done.status, len(done.json["epochs"])) == (0, 3)
    assert {name: size for name, (size, _) in contents(run).items() if "png" not in name} == before


@pytest.mark.slow
def test_half_precision_is_resumed_as_such(tmp_path: Path, exitwise: Command) -> None:
    finished, cut = tmp_path / "whole", tmp_path / "cut"
    options = [*DIGITS, "--precision", "bf16-mixed", "--checkpoint-minutes", 0, "--out"]
    done = exitwise(*options, finished)
    if "announces instructions that it lacks" in done.err:
        assert (done.status, done.err.count("\n")) == (2, 1)  # instead of a process that dies silently
        assert not finished.exists()
        pytest.skip("this CPU cannot compute in bfloat16, as the error message says")
    assert done.status == 0, done.err
    assert exitwise(*options, cut).status == 0
    newest = CheckpointDirectory(cut / "checkpoints").files()[0]
    newest.unlink()  # the last epoch is validated again
    assert exitwise("train", cut, "--resume").status == 0
    assert_same_training(cut, finished)


def test_a_precision_that_the_cpu_dies_of_is_refused(
    tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    monkeypatch.setattr(machine, "_PROBES", {"bf16-mixed": deadly})
    done = exitwise(*DIGITS, "--precision", "bf16-mixed", "--out", tmp_path / "run")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "`--precision` bf16-mixed does not run here" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("instructions", [True, False])
def test_long_trainings_use_bfloat16_where_the_cpu_has_it(
    instructions: bool, tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_LONG_TRAINING", 1)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": instructions, "amx_bf16": False})
    if not machine.survives(machine._PROBES["bf16-mixed"]):
        pytest.skip("this CPU cannot compute in bfloat16")
    options = [*DIGITS, "--no-compile", "--epochs", 1, "--out"]
    done = exitwise(*options, tmp_path / "chosen")
    assert done.status == 0, done.err
    chosen = json.loads((tmp_path / "chosen" / "run.json").read_text())["training"]["precision"]
    assert chosen == ("bf16-mixed" if instructions else "32-true")
    assert ("because this CPU has instructions for it (--precision 32-true turns it off)" in done.err) == instructions
    done = exitwise(*options, tmp_path / "given", "--precision", "32-true")
    assert json.loads((tmp_path / "given" / "run.json").read_text())["training"]["precision"] == "32-true"


def test_a_checkpoint_of_another_net_is_refused(run: Path, tmp_path: Path, exitwise: Command) -> None:
    metadata = json.loads((run / "run.json").read_text())
    metadata["model"] = {"preset": "tiny-8", "num_classes": 10, "in_channels": 3}
    write_json(run / "run.json", metadata)
    done = exitwise("train", run, "--resume")
    assert done.status == 2
    assert "the checkpoint is of another net" in done.err


# -- bad input


def class_folder(root: Path, classes: dict[str, int], size: int = 12) -> Path:
    from PIL import Image

    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for k in range(count):
            Image.effect_noise((size, size), 60).save(root / name / f"{k}.png")
    return root


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name the dataset to train on with --data"),
        (["--data", "digit"], "did you mean 'digits'"),
        (["--data", "cifar100"], "cifar100 must be read from a folder: pass --root DIR"),
        (["--data", "cifar100", "--root", "nowhere"], "nowhere does not exist; put cifar-100-binary.tar.gz there"),
        (["--data", "imagenet", "--root", "."], "must hold ImageNet's train/ and val/"),
        (["--data", "digits", "--model", "tiny8"], "did you mean 'tiny-8'"),
        (["--data", "digits", "--model", "cifar100-small"], "cannot take inputs of shape (1, 8, 8)"),
        (["--data", "digits", "--recipe", "digit"], "did you mean 'digits'"),
        (["--data", "digits", "--epochs", "0"], "`--epochs` must be a whole number of at least 1"),
        (["--data", "digits", "--batch-size", "1001"], "must be from 1 to the 1000 training images, but is 1001"),
        (["--data", "digits", "--lr", "-1"], "`--lr` must be a number of at least 0"),
        (["--data", "digits", "--seed", "-1"], "`--seed` must be"),
        (["--data", "digits", "--val-size", "1797"], "must take some of 1797 train images"),
        (["--data", "digits", "--devices", "1000"], "of this machine, but is 1000"),
        (
            ["--data", "digits", "--devices", "0"],
            "'--devices': Input should be greater than or equal to 1, but got '0'",
        ),
        (["--data", "digits", "--num-nodes", "2"], "set MASTER_ADDR, MASTER_PORT and NODE_RANK on each"),
        (["--data", "caltech256", "--root", "nothing"], "put 256_ObjectCategories.tar there, from https://data.calt"),
        (["--data", "digits", "--out", "one/a/0.png/x"], "one/a/0.png/x cannot be created"),
        (["--data", "digits", "--accelerator", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda', 'mps'"),
        (["--data", "digits", "--precision", "8"], "'8' is not one of '32-true'"),
        (["--data", "digits", "--strategy", "fsdp"], "'fsdp' is not one of 'auto', 'ddp'"),
        (["--data", "digits", "--accumulate", "3"], "must be a multiple of 1 processes x 3 parts"),
        (["--data", "imagenet", "--root", ".", "--download"], "imagenet cannot be downloaded"),
        (["--data", "digits", "--recipe", "imagenet", "--batch-size", "64"], "resized crops needs image files"),
        (["--data", "digits", "--net", "nowhere:net"], "could not be imported"),
        (["--data", "digits", "--net", "torch.nn:Identity"], "must return a MultiExitNet, but returned a Identity"),
        (["--data", "digits", "--net", "torch.nn:Linear"], "torch.nn:Linear failed with TypeError: Linear.__init__"),
        (["--data", "digits", "--net", "torch"], "must be like package.module:function"),
        (["--data", "folder:one"], "must hold at least two class folders, but holds 1"),
        (["--data", "folder:empty"], "empty/b is a class folder without images"),
        (["--resume"], "--resume needs the run to resume"),
        (["somewhere", "--data", "digits"], "somewhere: --resume resumes a run; a new one is named with --out"),
        (["somewhere", "--resume"], "somewhere is not a run"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    class_folder(tmp_path / "one", {"a": 3})
    class_folder(tmp_path / "empty", {"a": 3, "b": 0})
    before = contents(tmp_path)
    done = exitwise("train", *options)
    assert (done.status, done.err.count("\n")) == (2, 1), done.err
    assert message in done.err
    assert contents(tmp_path) == before
    assert not (tmp_path / "exitwise-digits").exists()


def test_an_existing_run_is_kept(run: Path, exitwise: Command) -> None:
    before = contents(run)
    done = exitwise(*DIGITS, "--out", run)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "already holds a run" in done.err
    assert contents(run) == before


@pytest.mark.slow
def test_an_unreadable_image_stops_a_training_with_its_path_or_is_skipped(
    tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = class_folder(tmp_path / "mine", {"a": 30, "b": 30})
    (folder / "b" / "broken.png").write_bytes(b"\x89PNG nothing")
    options = ["train", "--data", "folder:mine", "--model", "tiny-16", "--epochs", "1", "--batch-size", "41"]
    done = exitwise(*options, "--val-size", "10", "--test-size", "10")
    assert done.status == 2
    assert str(Path("mine") / "b" / "broken.png") in done.err
    done = exitwise(*options, "--val-size", "10", "--test-size", "9", "--skip-unreadable", "--force")
    assert done.status == 0, done.err
    assert "broken.png" in caplog.text
    done = exitwise("collect", "exitwise-mine", "--json")
    assert done.json["samples"] == {"val": 10, "test": 9, "train": 41}


# -- from training to evaluation


def test_digits_from_nothing_to_an_evaluated_run(run: Path, exitwise: Command) -> None:
    assert exitwise("collect", run).status == 0
    assert exitwise("calibrate", run).status == 0
    done = exitwise("evaluate", run, "--budget", "50%", "--json")
    assert done.status == 0
    results = done.json["methods"]
    assert all(result["evaluation"]["top1"] > 0.9 for result in results.values())
    trace = ew.Trace.load(run / "trace.safetensors")
    assert (len(trace.val), len(trace.test or ()), trace.curvature[0].n) == (297, 500, 1000)


@pytest.mark.slow
def test_a_trace_of_an_earlier_state_of_the_net_is_refused(run: Path, exitwise: Command) -> None:
    assert exitwise("collect", run).status == 0
    net = ew.load_net(run / "net.safetensors")
    with torch.no_grad():
        net.exits[-1].last.weight.mul_(2)
    ew.save_checkpoint(net, run / "net.safetensors")  # as a resumed training does
    done = exitwise("calibrate", run)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert f"run `exitwise collect {run} --force`" in done.err
    assert exitwise("collect", run, "--force").status == 0
    assert exitwise("calibrate", run).status == 0


NET = """
import exitwise as ew
from torch import nn

def small():
    stages = [nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()), nn.Sequential(nn.Linear(32, 32), nn.ReLU())]
    return ew.MultiExitNet(stages, [ew.Head(nn.Identity(), nn.Linear(32, 10)) for _ in stages])
"""


@pytest.mark.slow
def test_a_net_of_ones_own_is_trained_resumed_and_collected_by_name(
    tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_nets.py").write_text(NET)
    assert exitwise(*DIGITS, "--net", "my_nets:small", "--out", "run").status == 0
    for command in (["train", "run", "--resume"], ["collect", "run"]):
        refused = exitwise(*command)  # a name in a file is not enough to import code
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert "give --net my_nets:small again" in refused.err
        assert exitwise(*command, "--net", "my_nets:small").status == 0
    assert exitwise("evaluate", "run", "--budget", "90%").status == 0


@pytest.mark.slow
def test_baselines_are_trained_by_one_flag_and_shown_beside(run: Path, tmp_path: Path, exitwise: Command) -> None:
    folder = class_folder(tmp_path / "mine", {"a": 30, "b": 30}, size=16)
    done = exitwise(
        *("train", "--data", f"folder:{folder}", "--model", "cifar100-resnet8", "--image-size", 16, "--epochs", 1),
        *("--batch-size", 16, "--out", tmp_path / "resnet", "--json"),
    )
    assert done.status == 0, done.err
    assert len(done.json["epochs"][0]["val_top1"]) == 1
    for directory in (run, tmp_path / "resnet"):
        assert exitwise("collect", directory).status == 0
    assert exitwise("calibrate", tmp_path / "resnet").status == 0
    done = exitwise("evaluate", run, "--budget", "50%", "--against", tmp_path / "resnet", "--json")
    assert done.status == 0, done.err
    cost = ew.Trace.load(tmp_path / "resnet" / "trace.safetensors").costs.values[0]
    assert done.json["methods"]["cifar100-resnet8"]["evaluation"]["cost"] == cost
    assert "cifar100-resnet8" in exitwise("evaluate", run, "--budget", "50%", "--against", tmp_path / "resnet").out
    rows = exitwise("ablate", tmp_path / "resnet", "--json").json["ablation"]["rows"]
    assert rows[0]["top1"] == done.json["methods"]["cifar100-resnet8"]["evaluation"]["top1"]
    assert "one exit, at" in exitwise("ablate", tmp_path / "resnet").out
