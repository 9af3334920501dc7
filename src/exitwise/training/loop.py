"""Training loop: minimize the sum of the exits' losses, write a checkpoint after every epoch, keep the best weights.

Data order, augmentation and dropout depend only on the seed, the epoch and the batch, and the learning rate only on the
recipe. A checkpoint of weights and momentum is therefore enough to resume bit for bit, from any batch.
"""

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from exitwise.core import distributed
from exitwise.core.checks import check_integer
from exitwise.core.errors import AllRanksError, InputError, first_line, shorten
from exitwise.core.files import remove_partial_files
from exitwise.core.locks import exclusive_lock
from exitwise.core.seeds import as_generator, derive_seed
from exitwise.core.tensorfiles import all_finite
from exitwise.data.batches import MicroBatches
from exitwise.models.net import MultiExitNet, preserve_training_mode
from exitwise.models.weights import load_checkpoint, save_checkpoint
from exitwise.training.batch_sources import BatchSource, as_batch_source, as_eval_loader
from exitwise.training.checkpoints import CheckpointDirectory
from exitwise.training.history import EpochRecord, History
from exitwise.training.joint import (
    ORIGINAL_FILE,
    ScaledGradients,
    check_kept,
    describe_drop,
    exit_loss,
    find_kept_epoch,
    load_original,
    make_teacher,
    needs_original,
    parameter_groups,
)
from exitwise.training.machine import Machine, has_bf16_instructions
from exitwise.training.recipes import Recipe, get_recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric


T = TypeVar("T")

_log = logging.getLogger(__name__)

_LONG_TRAINING = 5000  # batches; compiling takes one or two minutes, and saves about a quarter of the remaining time


class TrainingInterruptedError(Exception):
    """Training was stopped by a signal, after its checkpoint was written.

    Args:
        signal_number: The signal, such as `signal.SIGTERM`.
        progress: Epochs and batches that are done, as text.
    """

    def __init__(self, signal_number: int, progress: str) -> None:
        super().__init__(progress)
        self.signal_number = signal_number


class TrainingCallback:
    """Hooks that a training calls. These do nothing: override those that you need."""

    def on_features(self, split: str, done: int, samples: int | None) -> None:
        """Handle progress of the backbone: features of `done` samples of a split are computed (`train_heads` only)."""

    def on_train_start(self, epochs: int, batches: int, history: History) -> None:
        """Handle the start: `epochs` of `batches` each; `history` has the epochs that are already done."""

    def on_batch_end(self, epoch: int, batch: int, images_per_second: float, seconds_left: float) -> None:
        """Handle the end of a batch; `epoch` counts from 0, `batch` from 1."""

    def on_epoch_end(self, row: EpochRecord, kept: bool) -> None:
        """Handle the end of an epoch; `kept` if its weights (with `train_heads`, those of any head) are the best."""


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
        callback: Object whose hooks are called as training proceeds, see `exitwise.training.loop.TrainingCallback`.
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


def resolve_former_name(name: str, value: T | None, former_name: str, former_value: T | None) -> T | None:
    """Return the value of an argument given by its name or by its former name, None if it is not given."""
    if value is not None and former_value is not None:
        raise InputError(f"`{former_name}` is the former name of `{name}`: pass only `{name}`")
    return former_value if value is None else value


def can_compile() -> bool:
    """Return whether the C++ compiler that torch.compile needs is installed."""
    return shutil.which(os.environ.get("CXX") or "g++") is not None


def worth_compiling(batches: int) -> bool:
    """Return whether a training of `batches` batches gains from torch.compile and this machine can compile."""
    return batches >= _LONG_TRAINING and can_compile()


def worth_bf16(batches: int, device: torch.device) -> bool:
    """Return whether a training of `batches` batches gains from bfloat16: a long one on a CPU that has it."""
    return batches >= _LONG_TRAINING and device.type == "cpu" and has_bf16_instructions()


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
        self._has_run = False  # whether a forward pass of the net has succeeded
        self._teacher: Callable[[Any], Tensor] | None = None
        if compile and not can_compile():
            raise AllRanksError("torch.compile needs a C++ compiler, but none was found: install g++, or set CXX")
        self._parts = fabric.world_size * self.accumulate
        if recipe.batch_size % self._parts:
            raise AllRanksError(
                f"`batch_size` must be a multiple of {fabric.world_size} processes x {accumulate} parts, "
                f"but got {recipe.batch_size}"
            )
        fast = compile or fabric.device.type == "cuda"  # on a CPU, channels-last without compiling is slower
        self._memory_format = torch.channels_last if fast else torch.contiguous_format
        if fast:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._optimizer = torch.optim.SGD(
            parameter_groups(net, recipe),
            lr=recipe.lr,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov and recipe.momentum > 0,
            weight_decay=recipe.weight_decay,
            fused=fabric.device.type in ("cpu", "cuda"),
        )
        self._compile = compile
        module: nn.Module = ScaledGradients(net) if recipe.scale_gradients else net
        module = torch.compile(module) if compile else module  # type: ignore[assignment]
        self._module, self._fabric_optimizer = fabric.setup(module, self._optimizer)

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
        for name, parameter in self.net.named_parameters():
            momentum = self._optimizer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum.{name}"] = momentum
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
        for name, parameter in self.net.named_parameters():
            if f"momentum.{name}" in tensors:
                momentum = torch.empty_like(parameter, requires_grad=False).copy_(tensors[f"momentum.{name}"])
                self._optimizer.state[parameter]["momentum_buffer"] = momentum
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
        with _lock_run(self.folder), _stop_signals() as stop_signals, torch.random.fork_rng(devices=cuda):
            self.callback.on_train_start(self.recipe.epochs, len(self.source), self._history())
            if distributed.broadcast_object(self.checkpoints.newest() is None):
                self._record_original(stop_signals)
                self.save()
            if self.recipe.distill and self.state.epoch < self.recipe.epochs:
                self._teacher = make_teacher(load_original(self.net, self.folder), self._compile)
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
        self._module.train()
        own_parts = range(rank * self.accumulate, (rank + 1) * self.accumulate)
        first_batch, loop_start = state.batch, time.monotonic()
        epoch_start, last_save = loop_start - state.seconds, loop_start
        for micro_batches in self.source.epoch(state.epoch, state.batch, self._parts, own_parts):
            self._set_lr(state.epoch, state.batch / batches)
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
        self._fabric_optimizer.zero_grad(set_to_none=True)
        own_loss = torch.zeros((), dtype=torch.float64)
        for count, (images, labels) in enumerate(micro_batches, start=1):
            images = self.fabric.to_device(images)
            if images.dim() == 4:
                images = images.contiguous(memory_format=self._memory_format)
            with self.fabric.no_backward_sync(self._module, enabled=count < len(micro_batches)):
                logits, labels = self._compute_logits(images), self._check_labels(labels, "train")
                teacher_logits = self._compute_teacher_logits(images)
                part = self._sum_losses(logits, labels, teacher_logits) / len(micro_batches)
                self.fabric.backward(part)
            own_loss += part.detach().double().cpu()
        flags = torch.tensor([stop_requested, save_due], dtype=torch.float64)
        shared = torch.cat([own_loss[None] / distributed.world_size(), flags])
        loss, stop, save = distributed.all_reduce_sum(shared).tolist()
        if not isfinite(loss):
            where = f"epoch {state.epoch + 1}, batch {state.batch + 1}"
            raise AllRanksError(f"the loss became {loss} in {where}; {self.checkpoints.last_good_hint()}")
        self._fabric_optimizer.step()
        return loss, stop > 0, save > 0

    def _compute_logits(self, images: Tensor) -> list[Tensor]:
        """Return the exits' logits; raise InputError if the first batch shows that the net cannot take such images."""
        try:
            logits: list[Tensor] = self._module(images)
        except (RuntimeError, ValueError) as error:
            if self._has_run:
                raise
            reason = first_line(error)
            shape = tuple(images.shape[1:])
            raise AllRanksError(f"the net cannot be trained on images of shape {shape}: {reason}") from None
        self._has_run = True
        return logits

    def _check_labels(self, labels: Tensor, name: str) -> Tensor:
        """Return labels on the net's device; raise InputError if the net has no such class."""
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.net.num_classes:
            found = f"{int(labels.min())} to {int(labels.max())}"
            raise InputError(f"`{name}` must have labels 0 to {self.net.num_classes - 1}, but has some from {found}")
        moved: Tensor = self.fabric.to_device(labels)
        return moved

    def _compute_teacher_logits(self, images: Tensor) -> Tensor | None:
        """Return the logits of the net before the training, None without distillation."""
        if self._teacher is None:
            return None
        with self.fabric.autocast():
            return self._teacher(images)

    def _sum_losses(self, logits: list[Tensor], labels: Tensor, teacher_logits: Tensor | None = None) -> Tensor:
        """Return the sum of the exits' losses; without a teacher's logits, of their cross-entropies."""
        losses = [exit_loss(exit_logits.float(), labels, teacher_logits, self.recipe) for exit_logits in logits]
        return torch.stack(losses).sum()

    def _validate(self, stop_signals: list[int]) -> tuple[tuple[float, ...], float]:
        """Return the top-1 accuracy of every exit and the mean of the summed losses over the validation split."""
        exits = len(self.net.exits)
        sums = torch.zeros(exits + 2, dtype=torch.float64)  # correct predictions per exit, loss, samples
        self.net.eval()
        # A loader that shuffles must give all ranks the same order.
        torch.manual_seed(derive_seed(self.seed, self.state.epoch))
        with torch.inference_mode(), self.fabric.autocast():
            for images, labels, *_ in distributed.shard_batches(self.val):
                images, labels = self.fabric.to_device(images), self._check_labels(labels, "val")
                logits = self.net(images)
                correct = torch.stack([(exit_logits.argmax(1) == labels).sum() for exit_logits in logits])
                loss = self._sum_losses(logits, labels) * len(labels)
                sums += torch.cat([correct.double(), loss[None].double(), correct.new_tensor([len(labels)])]).cpu()
                # Several ranks finish the validation: if one stopped, the others would wait for it.
                if stop_signals and distributed.world_size() == 1:
                    raise TrainingInterruptedError(stop_signals[0], self._describe_progress())
        sums = distributed.all_reduce_sum(sums)
        samples = float(sums[-1])
        if not samples:
            raise InputError("`val` gave no samples")
        return tuple((sums[:exits] / samples).tolist()), float(sums[exits]) / samples

    def _set_lr(self, epoch: int, done: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = group["relative_lr"] * self.recipe.lr_at(epoch, done)

    def _describe_progress(self) -> str:
        return f"after {self.state.epoch} epochs and {self.state.batch} batches"


@contextmanager
def _lock_run(folder: Path) -> Iterator[None]:
    """Lock the run directory against concurrent training (released on process exit) and delete partial files."""
    with ExitStack() as locks:
        distributed.run_on_rank_zero(lambda: _acquire_lock(folder, locks))
        yield


def _acquire_lock(folder: Path, locks: ExitStack) -> None:
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    locks.enter_context(exclusive_lock(checkpoints / "lock", f"{folder} is being trained by another process"))
    for path in (folder, checkpoints):
        remove_partial_files(path)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT so that training stops after the current batch; a second signal stops it at once."""
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if received:
            signal.signal(number, previous_handlers[number])
            signal.raise_signal(number)
        received.append(number)

    previous_handlers: dict[int, Any] = {}
    try:
        for number in (int(signal.SIGTERM), int(signal.SIGINT)):
            previous_handlers[number] = signal.signal(number, receive)
    except ValueError:  # only the main thread receives signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
