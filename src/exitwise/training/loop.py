"""Training loop: minimize the sum of the exits' losses, write a checkpoint after every epoch, keep the best weights.

Data order, augmentation and dropout depend only on the seed, the epoch and the batch, and the learning rate only on the
recipe. A checkpoint of weights and momentum is therefore enough to resume bit for bit, from any batch.
"""

import logging
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exitwise.core import distributed
from exitwise.core.checks import check_integer
from exitwise.core.errors import AllRanksError, InputError, shorten
from exitwise.core.seeds import as_generator, derive_seed
from exitwise.core.tensorfiles import all_finite
from exitwise.data.batches import MicroBatches
from exitwise.models.net import MultiExitNet, preserve_training_mode
from exitwise.models.weights import load_checkpoint, save_checkpoint
from exitwise.training.batch_sources import BatchSource, as_batch_source, as_eval_loader
from exitwise.training.callbacks import TrainingCallback, resolve_former_name
from exitwise.training.checkpoints import CheckpointDirectory
from exitwise.training.history import EpochRecord, History
from exitwise.training.interruptions import TrainingInterruptedError, collect_stop_signals, lock_run
from exitwise.training.joint import (
    ORIGINAL_FILE,
    check_kept,
    describe_drop,
    find_kept_epoch,
    load_original,
    needs_original,
)
from exitwise.training.machine import Machine, can_compile
from exitwise.training.recipes import Recipe, get_recipe
from exitwise.training.steps import TrainingSteps

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_log = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """Training progress: completed epochs, batches done in the current epoch, running totals."""

    epoch: int = 0
    batch: int = 0
    loss: float = 0.0  # summed over the batches of this epoch so far
    seconds: float = 0.0  # of this epoch so far
    speed: float = 0.0  # images per second in this epoch
    rows: list[EpochRecord] = field(default_factory=list)
    original_top1: float | None = None  # validation accuracy of the last exit before the training, if it is limited

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TrainingState":
        """Return the state that `to_dict` described; raise InputError if a field is missing or invalid."""
        try:
            rows = [EpochRecord.from_dict(row) for row in data["rows"]]
            numbers: dict[str, Any] = {name: float(data[name]) for name in ("loss", "seconds", "speed")}
            if data.get("original_top1") is not None:
                numbers["original_top1"] = float(data["original_top1"])
            return cls(epoch=int(data["epoch"]), batch=int(data["batch"]), rows=rows, **numbers)
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise InputError(f"a checkpoint's state is not usable: {shorten(error)}") from None


def train(
    net: MultiExitNet,
    train: Any,
    val: Any,
    *,
    recipe: Recipe | str,
    out: str | Path,
    seed: int = 0,
    resume: bool = False,
    machine: Machine | None = None,
    accumulate: int = 1,
    compile: bool = False,
    workers: int = 0,
    checkpoint_minutes: float = 10.0,
    callback: TrainingCallback | None = None,
    watcher: TrainingCallback | None = None,
) -> History:
    """Train a net in place; write its best weights, its history and checkpoints to the folder `out`.

    The loss is the sum of the exits' losses: cross-entropies, unless the recipe adds distillation. Afterwards the net
    has the weights of the epoch with the best validation accuracy at the last exit or, with the recipe's `max_drop`,
    at all exits. Parameters whose `requires_grad` is False stay as they are.

    A net with exits attached to a trained module is trained with the recipe "joint": start with `train_heads`, so that
    the new heads do not disturb the module's layers.

    Args:
        net: The net to train.
        train: Training data: a dataset of `ew.data`, any `Dataset` of (image, label) with a length, or a loader of
            images (m, ...) and labels (m,) with a length, which gives its own batches. Labels are whole numbers in
            0..c-1.
        val: Validation data of the same kinds; a loader needs no length.
        recipe: Epochs, batch size and learning rates, or the name of a recipe in `RECIPES`.
        out: Folder for `net.safetensors`, `history.csv` and `checkpoints/`.
        seed: Seed for data order, augmentation and dropout.
        resume: Continue from the newest intact checkpoint in `out`, bit for bit.
        machine: Devices, processes and precision; by default one process, on a GPU if there is one.
        accumulate: Number of equal parts into which a process splits its share of every batch. They are computed one
            after the other, with one optimizer step for all of them, to save memory.
        compile: Use `torch.compile`, which needs a C++ compiler.
        workers: Processes that decode image files of datasets of `ew.data`; 0 decodes in the training process.
        checkpoint_minutes: Write a checkpoint after this many minutes, besides those of every epoch.
        callback: Object whose hooks are called during training: an `exitwise.training.callbacks.TrainingCallback`.
        watcher: Former name of `callback`.

    Returns:
        Learning rate, losses, accuracies (K,) and speed of every epoch. `history.best` is the epoch that was kept.

    Raises:
        InputError: An argument is invalid, `out` holds a training and `resume` is False, the checkpoint was made with
            other settings, the loss became non-finite, or the last exit lost more than `max_drop` in every epoch.

    Example:
        >>> import exitwise as ew
        >>> import torch
        >>> dataset = torch.utils.data.TensorDataset(torch.rand(40, 1, 8, 8), torch.arange(40) % 10)
        >>> net = ew.models.msdnet("tiny-8")
        >>> recipe = ew.Recipe(epochs=2, batch_size=20, lr=0.05)
        >>> history = ew.train(net, dataset, dataset, recipe=recipe, out="run", machine=ew.Machine(accelerator="cpu"))
        >>> [row.epoch for row in history.epochs], len(history.best.val_top1)
        ([1, 2], 3)
    """
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    callback = resolve_former_name("callback", callback, "watcher", watcher)
    as_generator(seed)  # raises InputError if the seed is invalid
    folder = Path(out)
    if not resume and CheckpointDirectory(folder / "checkpoints").newest() is not None:
        raise InputError(f"{folder} already holds a training: pass `resume=True` to continue it")
    fabric = (machine or Machine()).fabric()
    fabric.launch()
    source = as_batch_source(train, recipe, seed, workers)
    val_loader = as_eval_loader(val, recipe.batch_size, workers)
    trainer = Trainer(net, source, val_loader, recipe, fabric, folder, seed, accumulate, compile)
    trainer.checkpoint_minutes = checkpoint_minutes
    trainer.callback = callback or TrainingCallback()
    if resume:
        trainer.resume()
    with preserve_training_mode(net):
        history = trainer.run()
    load_checkpoint(net, folder / "net.safetensors")
    return history


class Trainer:
    """One rank's part of a training.

    Args:
        net: The net to train, in place.
        source: Training batches.
        val: Validation batches (images, labels).
        recipe: Epochs, batch size and learning rates.
        fabric: Launched Fabric: devices, ranks, precision.
        folder: Run directory.
        seed: Seed for data order, augmentation and dropout.
        accumulate: Micro-batches per batch and rank.
        compile: Use torch.compile.
    """

    def __init__(
        self,
        net: MultiExitNet,
        source: BatchSource,
        val: Iterable[Any],
        recipe: Recipe,
        fabric: "Fabric",
        folder: Path,
        seed: int = 0,
        accumulate: int = 1,
        compile: bool = False,
    ) -> None:
        self.net, self.source, self.val, self.recipe, self.fabric = net, source, val, recipe, fabric
        self.folder, self.seed, self.accumulate = folder, seed, check_integer("accumulate", accumulate, 1)
        self.checkpoints = CheckpointDirectory(folder / "checkpoints")
        self.state = TrainingState()
        self.callback = TrainingCallback()
        self.checkpoint_minutes = 10.0
        if compile and not can_compile():
            raise AllRanksError("torch.compile needs a C++ compiler, but none was found: install g++, or set CXX")
        self._parts = fabric.world_size * self.accumulate
        if recipe.batch_size % self._parts:
            raise AllRanksError(
                f"`batch_size` must be a multiple of {fabric.world_size} processes x {accumulate} parts, "
                f"but got {recipe.batch_size}"
            )
        self._steps = TrainingSteps(net, recipe, fabric, compile)

    # -- checkpoints

    def save(self) -> None:
        """Write weights, momentum and progress to a checkpoint. Rank 0 writes, the others wait."""
        broken = next((name for name, value in self.net.state_dict().items() if not all_finite(value)), None)
        if broken:  # the next loss would be non-finite, and a checkpoint of these weights useless
            where = f"epoch {self.state.epoch + 1}, batch {self.state.batch}"
            raise AllRanksError(f"{broken} is not finite any more after {where}; {self.checkpoints.last_good_hint()}")
        distributed.run_on_rank_zero(self._write_checkpoint)

    def _write_checkpoint(self) -> None:
        tensors = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        tensors |= {f"momentum.{name}": value for name, value in self._steps.momentum().items()}
        settings = {"recipe": self.recipe.to_dict(), "seed": self.seed, "parts": self._parts}
        precision = self.fabric.strategy.precision.state_dict()
        state = {**self.state.to_dict(), **settings, "precision": precision}
        self.checkpoints.save(self.state.epoch, self.state.batch, tensors, state)

    def resume(self) -> None:
        """Restore the newest intact checkpoint."""
        self.restore(*distributed.run_on_rank_zero(self.checkpoints.load))
        best_weights = self.folder / "net.safetensors"
        history = self._history()
        if self.state.rows and (any(history.kept) or not history.kept) and not best_weights.is_file():
            raise AllRanksError(f"{best_weights} is missing, so the best weights are lost: start a new training run")

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore the tensors and the state that `save` wrote. Nothing changes if they do not match this trainer."""
        training_state = TrainingState.from_dict(state)
        expected = {"recipe": self.recipe, "seed": self.seed, "parts": self._parts}
        saved = {**state, "recipe": Recipe.from_dict(state.get("recipe"))}
        for name, value in expected.items():
            if saved.get(name) != value:
                quantity = {"parts": "number of processes times parts per batch"}.get(name, name)
                raise AllRanksError(f"the checkpoint was made with another {quantity}, so it cannot be resumed here")
        weights = {name.removeprefix("net."): value for name, value in tensors.items() if name.startswith("net.")}
        shapes = {name: value.shape for name, value in self.net.state_dict().items()}
        if shapes != {name: value.shape for name, value in weights.items()}:
            raise AllRanksError("the checkpoint is of another net: names or shapes of its weights differ")
        self.net.load_state_dict(weights)
        prefix = "momentum."
        momentum = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        self._steps.load_momentum(momentum)
        self.fabric.strategy.precision.load_state_dict(dict(state.get("precision") or {}))
        self.state = training_state

    # -- the loop

    def run(self) -> History:
        """Train until the last epoch is done; raise TrainingInterruptedError after a signal."""
        try:
            return self._run()
        except OSError as error:  # such as a full disk, or a dataset that became unreadable
            problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise InputError(f"{problem}; {self.checkpoints.last_good_hint()}") from None

    def _run(self) -> History:
        cuda = [self.fabric.device.index] if self.fabric.device.type == "cuda" else []
        with lock_run(self.folder), collect_stop_signals() as stop_signals, torch.random.fork_rng(devices=cuda):
            self.callback.on_train_start(self.recipe.epochs, len(self.source), self._history())
            if distributed.broadcast_object(self.checkpoints.newest() is None):
                self._record_original(stop_signals)
                self.save()
            if self.recipe.distill and self.state.epoch < self.recipe.epochs:
                self._steps.set_teacher(load_original(self.net, self.folder))
            while self.state.epoch < self.recipe.epochs:
                self._train_epoch(stop_signals)
                self._finish_epoch(stop_signals)
        history = self._history()
        if distributed.rank() == 0:
            history.save(self.folder / "history.csv")
        if self.recipe.max_drop is not None and self.state.original_top1 is not None:
            check_kept(history, self.state.original_top1, self.recipe.max_drop)
        return history

    def _record_original(self, stop_signals: list[int]) -> None:
        """Before the first epoch, write the weights that the training compares with, and validate them."""
        if not needs_original(self.recipe):
            return
        distributed.run_on_rank_zero(lambda: save_checkpoint(self.net, self.folder / ORIGINAL_FILE))
        if self.recipe.max_drop is not None:
            self.state.original_top1 = self._validate(stop_signals)[0][-1]

    def _history(self) -> History:
        """Return the history so far; with `max_drop`, it names the epoch that is kept."""
        rows = tuple(self.state.rows)
        if self.recipe.max_drop is None or self.state.original_top1 is None:
            return History(rows)
        epoch = find_kept_epoch(rows, self.state.original_top1, self.recipe.max_drop)
        return History(rows, (epoch,) * len(self.net.exits))

    def _train_epoch(self, stop_signals: list[int]) -> None:
        """Train on the batches of the current epoch that are not done yet."""
        state, batches, rank = self.state, len(self.source), distributed.rank()
        if state.batch >= batches:
            return
        self._steps.module.train()
        own_parts = range(rank * self.accumulate, (rank + 1) * self.accumulate)
        first_batch, loop_start = state.batch, time.monotonic()
        epoch_start, last_save = loop_start - state.seconds, loop_start
        for micro_batches in self.source.epoch(state.epoch, state.batch, self._parts, own_parts):
            self._steps.set_lr(self.recipe.lr_at(state.epoch, state.batch / batches))
            save_due = time.monotonic() - last_save > 60 * self.checkpoint_minutes
            loss, stop, save = self._step(micro_batches, bool(stop_signals), save_due)
            state.batch += 1
            state.loss += loss
            state.seconds = time.monotonic() - epoch_start
            if stop or (save and state.batch < batches):
                self.save()
                last_save = time.monotonic()
            if stop:
                signal_number = stop_signals[0] if stop_signals else signal.SIGTERM
                raise TrainingInterruptedError(signal_number, self._describe_progress())
            speed = (state.batch - first_batch) * self.recipe.batch_size / (time.monotonic() - loop_start)
            remaining = (self.recipe.epochs - state.epoch) * batches - state.batch
            self.callback.on_batch_end(state.epoch, state.batch, speed, remaining * self.recipe.batch_size / speed)
        state.speed = (state.batch - first_batch) * self.recipe.batch_size / (time.monotonic() - loop_start)
        # BatchNorm statistics differ between ranks: all validate with those of rank 0.
        distributed.broadcast_tensors(self.net.buffers())
        self.save()  # validation may be interrupted, too

    def _finish_epoch(self, stop_signals: list[int]) -> None:
        """Validate, record the epoch, and write the history, a checkpoint and perhaps the best weights."""
        state = self.state
        start = time.monotonic()
        top1, loss = self._validate(stop_signals)
        row = EpochRecord(
            epoch=state.epoch + 1,
            lr=self.recipe.lr_at(state.epoch, 1.0 - 1.0 / len(self.source)),
            train_loss=state.loss / len(self.source),
            val_loss=loss,
            val_top1=top1,
            images_per_second=state.speed,
            seconds=state.seconds + time.monotonic() - start,
        )
        state.rows.append(row)
        best = self._is_kept(row)
        state.epoch, state.batch, state.loss, state.seconds = state.epoch + 1, 0, 0.0, 0.0
        # Before the checkpoint: an epoch that is repeated after an interruption writes the same files again.
        distributed.run_on_rank_zero(lambda: self._write_results(best))
        self.save()
        self.callback.on_epoch_end(row, best)
        if stop_signals and distributed.world_size() == 1:
            raise TrainingInterruptedError(stop_signals[0], self._describe_progress())

    def _is_kept(self, row: EpochRecord) -> bool:
        """Return whether the newest epoch is the one to keep; warn if its last exit lost too much."""
        history, original_top1, max_drop = self._history(), self.state.original_top1, self.recipe.max_drop
        if original_top1 is None or max_drop is None:
            return history.best is row
        if not find_kept_epoch([row], original_top1, max_drop) and distributed.rank() == 0:
            _log.warning("epoch %d is not kept: %s", row.epoch, describe_drop(row, original_top1, max_drop))
        return history.kept[-1] == row.epoch

    def _write_results(self, best: bool) -> None:
        """Write the history and, after the best epoch so far, the weights."""
        if best:
            save_checkpoint(self.net, self.folder / "net.safetensors")
        self._history().save(self.folder / "history.csv")

    def _step(self, micro_batches: MicroBatches, stop_requested: bool, save_due: bool) -> tuple[float, bool, bool]:
        """Make one optimizer step; return the loss over all ranks and whether any of them requests a stop or a save."""
        state = self.state
        torch.manual_seed(derive_seed(self.seed, state.epoch, state.batch, distributed.rank()))
        own_loss = self._steps.compute_gradients(micro_batches)
        flags = torch.tensor([stop_requested, save_due], dtype=torch.float64)
        shared = torch.cat([own_loss[None] / distributed.world_size(), flags])
        loss, stop, save = distributed.all_reduce_sum(shared).tolist()
        if not isfinite(loss):
            where = f"epoch {state.epoch + 1}, batch {state.batch + 1}"
            raise AllRanksError(f"the loss became {loss} in {where}; {self.checkpoints.last_good_hint()}")
        self._steps.update()
        return loss, stop > 0, save > 0

    def _validate(self, stop_signals: list[int]) -> tuple[tuple[float, ...], float]:
        """Return the top-1 accuracy of every exit and the mean of the summed losses over the validation split."""

        def stop_if_requested() -> None:
            # Several ranks finish the validation: if one stopped, the others would wait for it.
            if stop_signals and distributed.world_size() == 1:
                raise TrainingInterruptedError(stop_signals[0], self._describe_progress())

        # A loader that shuffles must give all ranks the same order.
        torch.manual_seed(derive_seed(self.seed, self.state.epoch))
        return self._steps.validate(self.val, stop_if_requested)

    def _describe_progress(self) -> str:
        return f"after {self.state.epoch} epochs and {self.state.batch} batches"
