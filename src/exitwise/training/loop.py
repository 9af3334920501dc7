"""The training loop: the sum of the exits' losses, a checkpoint at every epoch, the best net kept.

Data order, augmentation and dropout follow from the seed, the epoch and the batch alone, and the learning rate from the
recipe. So a checkpoint of weights and momentum is all it takes to go on bit for bit, from any batch.
"""

import logging
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from exitwise.core import distributed
from exitwise.core.errors import AllRanksError, InputError, first_line
from exitwise.core.files import remove_partial_files
from exitwise.core.seeds import as_generator, derive_seed
from exitwise.core.tensorfiles import all_finite
from exitwise.data.batches import MicroBatches
from exitwise.models.net import MultiExitNet, preserve_training_mode
from exitwise.models.weights import load_checkpoint, save_checkpoint
from exitwise.training.batch_sources import BatchSource, as_batch_source, as_eval_loader
from exitwise.training.checkpoints import CheckpointDirectory
from exitwise.training.history import EpochRecord, History
from exitwise.training.machine import Machine
from exitwise.training.recipes import Recipe, get_recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric

try:
    import fcntl
except ImportError:  # Windows: nothing holds a run there
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

_WORTH_COMPILING = 5000  # batches: compiling takes one or two minutes, and saves about a quarter of the rest


class TrainingInterruptedError(Exception):
    """A training that was asked to stop, and has written its checkpoint."""

    def __init__(self, signal_number: int, where: str) -> None:
        super().__init__(where)
        self.signal_number = signal_number


class TrainingCallback:
    """Told what happens; this one does nothing with it."""

    def on_features(self, split: str, done: int, samples: int | None) -> None: ...
    def on_train_start(self, epochs: int, batches: int, history: History) -> None: ...
    def on_batch_end(self, epoch: int, batch: int, images_per_second: float, seconds_left: float) -> None: ...
    def on_epoch_end(self, row: EpochRecord, kept: bool) -> None: ...


@dataclass
class TrainingState:
    """Where a training is: so many whole epochs and batches of the next, and what they left."""

    epoch: int = 0
    batch: int = 0
    loss: float = 0.0  # summed over the batches of this epoch so far
    seconds: float = 0.0  # of this epoch so far
    speed: float = 0.0  # images per second in this epoch
    rows: list[EpochRecord] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TrainingState":
        try:
            rows = [EpochRecord.from_dict(row) for row in data["rows"]]
            numbers = {name: float(data[name]) for name in ("loss", "seconds", "speed")}
            return cls(epoch=int(data["epoch"]), batch=int(data["batch"]), rows=rows, **numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"a checkpoint's state is not usable: {error!r}") from None


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
    watcher: TrainingCallback | None = None,
) -> History:
    """Train a net in place, and leave in the folder `out` its best weights, its history and checkpoints.

    `train` and `val` are data sets of ours, any `Dataset` of (image, label), labels being whole numbers in 0..c-1, or
    loaders of images (m, ...) and labels (m,), which give their own batches and of which `train` must have a length.
    The net ends with the weights of the epoch whose validation accuracy at the last exit was best. With `resume` it
    goes on from the newest whole checkpoint in `out`. `accumulate` cuts every batch into that many parts, one after the
    other, and steps once for all of them.
    """
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    as_generator(seed)  # refuses what is no seed
    folder = Path(out)
    snapshots = CheckpointDirectory(folder / "checkpoints")
    if not resume and snapshots.newest() is not None:
        raise InputError(f"{folder} already holds a training: `resume` goes on with it")
    fabric = (machine or Machine()).fabric()
    fabric.launch()
    source = as_batch_source(train, recipe, seed, workers)
    batches = as_eval_loader(val, recipe.batch_size, workers)
    trainer = Trainer(net, source, batches, recipe, fabric, folder, seed, accumulate, compile)
    trainer.checkpoint_minutes = checkpoint_minutes
    trainer.watcher = watcher or TrainingCallback()
    if resume:
        trainer.resume()
    with preserve_training_mode(net):
        history = trainer.run()
    load_checkpoint(net, folder / "net.safetensors")
    return history


def can_compile() -> bool:
    """Whether torch.compile finds the C++ compiler that it needs."""
    return shutil.which(os.environ.get("CXX") or "g++") is not None


def worth_compiling(batches: int) -> bool:
    """Whether a training of so many batches gains from torch.compile, and this machine can compile."""
    return batches >= _WORTH_COMPILING and can_compile()


class Trainer:
    """One process's part in a training."""

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
        self.folder, self.seed, self.accumulate = folder, seed, accumulate
        self.snapshots = CheckpointDirectory(folder / "checkpoints")
        self.state = TrainingState()
        self.watcher = TrainingCallback()
        self.checkpoint_minutes = 10.0
        self._tried = False  # whether the net has taken a batch
        if accumulate < 1:
            raise InputError(f"`accumulate` must be at least 1, but got {accumulate}")
        if compile and not can_compile():
            raise AllRanksError(
                "torch.compile needs a C++ compiler, and there is none: install g++, or name one by CXX"
            )
        self._parts = fabric.world_size * accumulate
        if recipe.batch_size % self._parts:
            raise AllRanksError(
                f"`batch_size` {recipe.batch_size} must be a multiple of {fabric.world_size} processes x "
                f"{accumulate} parts, or they could not share a batch evenly"
            )
        fast = compile or fabric.device.type == "cuda"  # on a CPU, channels-last alone loses with two threads
        self._layout = torch.channels_last if fast else torch.contiguous_format
        if fast:
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._optimizer = torch.optim.SGD(
            net.parameters(),
            lr=recipe.lr,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov and recipe.momentum > 0,
            weight_decay=recipe.weight_decay,
            fused=fabric.device.type in ("cpu", "cuda"),
        )
        module: nn.Module = torch.compile(net) if compile else net  # type: ignore[assignment]
        self._module, self._stepper = fabric.setup(module, self._optimizer)

    # -- checkpoints

    def save(self) -> None:
        """Weights, momentum and the place in the training. The first process writes, the others wait."""
        broken = next((name for name, value in self.net.state_dict().items() if not all_finite(value)), None)
        if broken:  # the next loss would be no number, and this checkpoint no good one
            where = f"epoch {self.state.epoch + 1}, batch {self.state.batch}"
            raise AllRanksError(f"{broken} is not finite any more after {where}; {self.snapshots.last_good_hint()}")
        distributed.run_on_rank_zero(self._write)

    def _write(self) -> None:
        tensors = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        for name, parameter in self.net.named_parameters():
            momentum = self._optimizer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum.{name}"] = momentum
        made_by = {"recipe": self.recipe.to_dict(), "seed": self.seed, "parts": self._parts}
        precision = self.fabric.strategy.precision.state_dict()
        state = {**self.state.to_dict(), **made_by, "precision": precision}
        self.snapshots.save(self.state.epoch, self.state.batch, tensors, state)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint."""
        self.restore(*distributed.run_on_rank_zero(self.snapshots.load))
        kept = self.folder / "net.safetensors"
        if self.state.rows and not kept.is_file():
            raise AllRanksError(f"{kept} is gone, and with it the best net so far: it has to be trained anew")

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """What `save` wrote, into this trainer, whole or not at all."""
        found = TrainingState.from_dict(state)
        asked = {"recipe": self.recipe, "seed": self.seed, "parts": self._parts}
        made_by = {**state, "recipe": Recipe.from_dict(state.get("recipe"))}
        for name, value in asked.items():
            if made_by.get(name) != value:
                words = {"parts": "number of processes times parts per batch"}.get(name, name)
                raise AllRanksError(
                    f"the checkpoint is of a training with another {words}, and cannot go on with this one"
                )
        weights = {name.removeprefix("net."): value for name, value in tensors.items() if name.startswith("net.")}
        ours = self.net.state_dict()
        if {name: value.shape for name, value in ours.items()} != {n: v.shape for n, v in weights.items()}:
            raise AllRanksError("the checkpoint is of another net")
        self.net.load_state_dict(weights)
        for name, parameter in self.net.named_parameters():
            if f"momentum.{name}" in tensors:
                momentum = torch.empty_like(parameter, requires_grad=False).copy_(tensors[f"momentum.{name}"])
                self._optimizer.state[parameter]["momentum_buffer"] = momentum
        self.fabric.strategy.precision.load_state_dict(dict(state.get("precision") or {}))
        self.state = found

    # -- the loop

    def run(self) -> History:
        """Train to the end, or until told to stop."""
        try:
            return self._run()
        except OSError as error:  # a full disk, a data set that went away
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            raise InputError(f"{what}; {self.snapshots.last_good_hint()}") from None

    def _run(self) -> History:
        cuda = [self.fabric.device.index] if self.fabric.device.type == "cuda" else []
        with _exclusive_lock(self.folder), _stop_signals() as asked, torch.random.fork_rng(devices=cuda):
            self.watcher.on_train_start(self.recipe.epochs, len(self.source), History(tuple(self.state.rows)))
            if distributed.broadcast_object(self.snapshots.newest() is None):
                self.save()
            while self.state.epoch < self.recipe.epochs:
                self._train_epoch(asked)
                self._finish_epoch(asked)
        history = History(tuple(self.state.rows))
        if distributed.rank() == 0:
            history.save(self.folder / "history.csv")
        return history

    def _train_epoch(self, asked: list[int]) -> None:
        state, batches, rank = self.state, len(self.source), distributed.rank()
        if state.batch >= batches:
            return
        self._module.train()
        mine = range(rank * self.accumulate, (rank + 1) * self.accumulate)
        begun, saved, first = time.monotonic() - state.seconds, time.monotonic(), state.batch
        clock = time.monotonic()
        for parts in self.source.epoch(state.epoch, state.batch, self._parts, mine):
            self._set_lr(state.epoch, state.batch / batches)
            due = time.monotonic() - saved > 60 * self.checkpoint_minutes
            loss, stop, save = self._step(parts, bool(asked), due)
            state.batch += 1
            state.loss += loss
            state.seconds = time.monotonic() - begun
            if stop or (save and state.batch < batches):
                self.save()
                saved = time.monotonic()
            if stop:
                raise TrainingInterruptedError(asked[0] if asked else signal.SIGTERM, self._where())
            speed = (state.batch - first) * self.recipe.batch_size / (time.monotonic() - clock)
            left = (self.recipe.epochs - state.epoch) * batches - state.batch
            self.watcher.on_batch_end(state.epoch, state.batch, speed, left * self.recipe.batch_size / speed)
        state.speed = (state.batch - first) * self.recipe.batch_size / (time.monotonic() - clock)
        distributed.broadcast_tensors(
            self.net.buffers()
        )  # statistics of BatchNorm are per process: all validate the first's
        self.save()  # validation may be interrupted, too

    def _finish_epoch(self, asked: list[int]) -> None:
        state = self.state
        start = time.monotonic()
        top1, loss = self._validate(asked)
        row = EpochRecord(
            epoch=state.epoch + 1,
            lr=self.recipe.lr_at(state.epoch, 1.0 - 1.0 / len(self.source)),
            train_loss=state.loss / len(self.source),
            val_loss=loss,
            val_top1=top1,
            images_per_second=state.speed,
            seconds=state.seconds + time.monotonic() - start,
        )
        best = History((*state.rows, row)).best is row
        state.rows.append(row)
        state.epoch, state.batch, state.loss, state.seconds = state.epoch + 1, 0, 0.0, 0.0
        distributed.run_on_rank_zero(lambda: self._keep(best))
        self.save()
        self.watcher.on_epoch_end(row, best)
        if asked and distributed.world_size() == 1:
            raise TrainingInterruptedError(asked[0], self._where())

    def _keep(self, best: bool) -> None:
        """Before the checkpoint: an epoch that is done again writes the same net again."""
        if best:
            save_checkpoint(self.net, self.folder / "net.safetensors")
        History(tuple(self.state.rows)).save(self.folder / "history.csv")

    def _step(self, parts: MicroBatches, asked: bool, due: bool) -> tuple[float, bool, bool]:
        """One step of the optimiser; the loss over all processes, and whether any wants to stop or to save."""
        state = self.state
        torch.manual_seed(derive_seed(self.seed, state.epoch, state.batch, distributed.rank()))
        self._stepper.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64)
        for number, (images, labels) in enumerate(parts, start=1):
            images = self.fabric.to_device(images)
            if images.dim() == 4:
                images = images.contiguous(memory_format=self._layout)
            with self.fabric.no_backward_sync(self._module, enabled=number < len(parts)):
                part = self._loss(self._logits(images), self._labels(labels, "train")) / len(parts)
                self.fabric.backward(part)
            loss += part.detach().double().cpu()
        shared = torch.stack([loss / distributed.world_size(), torch.tensor(float(asked)), torch.tensor(float(due))])
        loss_, stop, save = distributed.all_reduce_sum(shared).tolist()
        if not isfinite(loss_):
            where = f"epoch {state.epoch + 1}, batch {state.batch + 1}"
            raise AllRanksError(f"the loss became {loss_} in {where}; {self.snapshots.last_good_hint()}")
        self._stepper.step()
        return loss_, stop > 0, save > 0

    def _logits(self, images: Tensor) -> list[Tensor]:
        """The net on a batch. That it cannot take such images shows at the first one."""
        try:
            logits: list[Tensor] = self._module(images)
        except (RuntimeError, ValueError) as error:
            if self._tried:
                raise
            reason = first_line(error)
            shape = tuple(images.shape[1:])
            raise AllRanksError(f"the net cannot be trained on images of shape {shape}: {reason}") from None
        self._tried = True
        return logits

    def _labels(self, labels: Tensor, name: str) -> Tensor:
        """Labels on the net's device, refused where the net has no such class."""
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.net.num_classes:
            found = f"{int(labels.min())} to {int(labels.max())}"
            raise InputError(f"`{name}` must have labels 0 to {self.net.num_classes - 1}, but has some from {found}")
        moved: Tensor = self.fabric.to_device(labels)
        return moved

    def _loss(self, logits: list[Tensor], labels: Tensor) -> Tensor:
        """The sum of the exits' cross-entropies."""
        return torch.stack([cross_entropy(exit.float(), labels) for exit in logits]).sum()

    def _validate(self, asked: list[int]) -> tuple[tuple[float, ...], float]:
        """Top-1 of every exit, and the mean of the summed losses, over the whole validation split."""
        exits = len(self.net.exits)
        sums = torch.zeros(exits + 2, dtype=torch.float64)  # right answers per exit, loss, samples
        self.net.eval()
        torch.manual_seed(
            derive_seed(self.seed, self.state.epoch)
        )  # a loader that shuffles gives all processes the same
        with torch.inference_mode(), self.fabric.autocast():
            for images, labels, *_ in distributed.shard_batches(self.val):
                images, labels = self.fabric.to_device(images), self._labels(labels, "val")
                logits = self.net(images)
                right = torch.stack([(exit.argmax(1) == labels).sum() for exit in logits])
                loss = self._loss(logits, labels) * len(labels)
                sums += torch.cat([right.double(), loss[None].double(), right.new_tensor([len(labels)])]).cpu()
                if (
                    asked and distributed.world_size() == 1
                ):  # several processes finish: one alone would leave them waiting
                    raise TrainingInterruptedError(asked[0], self._where())
        sums = distributed.all_reduce_sum(sums)
        samples = float(sums[-1])
        if not samples:
            raise InputError("`val` gave no samples")
        return tuple((sums[:exits] / samples).tolist()), float(sums[exits]) / samples

    def _set_lr(self, epoch: int, done: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.lr_at(epoch, done)

    def _where(self) -> str:
        return f"after {self.state.epoch} epochs and {self.state.batch} batches"


@contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    """Hold a run against a second training of it; a process that dies lets go. What a killed one left is removed."""
    with ExitStack() as held:
        distributed.run_on_rank_zero(lambda: _lock(folder, held))
        yield


def _lock(folder: Path, held: ExitStack) -> None:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    file = held.enter_context((folder / "checkpoints" / "lock").open("w"))
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder} is being trained by another process") from None
        except OSError:
            _log.warning("%s: this file system has no locks, so nothing keeps a second training away", folder)
    for place in (folder, folder / "checkpoints"):
        remove_partial_files(place)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that SIGTERM and Ctrl-C add to, so that a batch ends before the training does; twice ends it at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        asked.append(number)

    before: dict[int, Any] = {}
    try:
        for number in (int(signal.SIGTERM), int(signal.SIGINT)):
            before[number] = signal.signal(number, note)
    except ValueError:  # not in the main thread: no signals come here
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
