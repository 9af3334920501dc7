"""What the command `train` does: makes a run and trains its net, or goes on with one."""

import logging
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exitwise import data, models
from exitwise.core.distributed import rank, run_on_rank_zero
from exitwise.core.errors import AllRanksError, InputError
from exitwise.core.files import atomic_directory, write_json
from exitwise.core.seeds import as_generator, temporary_seed
from exitwise.models.net import MultiExitNet
from exitwise.runs.collect import FILE_SIZE, DataOptions, absolute, build_net, load_splits, rebuild_net
from exitwise.runs.run import Run, run_metadata
from exitwise.training.batch_sources import as_batch_source
from exitwise.training.history import History
from exitwise.training.loop import Trainer, TrainingCallback, worth_compiling
from exitwise.training.machine import Machine
from exitwise.training.recipes import Recipe, get_recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainOptions:
    """What a training is asked to be; what is None is the data set's own, or the run's when it goes on."""

    model: str | None = None
    net: str | None = None
    recipe: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    seed: int | None = None
    compile: bool | None = None
    precision: str | None = None

    def to_recipe(self, known: data.DataSet) -> Recipe:
        recipe = get_recipe(self.recipe or known.recipe)
        if self.epochs is not None:
            recipe = recipe.scaled(self.epochs)
        changes = {"batch_size": self.batch_size, "lr": self.lr}
        return replace(recipe, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]


@dataclass(frozen=True)
class ExecutionOptions:
    """What a training is done with."""

    machine: Machine
    accumulate: int | None = None
    workers: int = 0
    checkpoint_minutes: float = 10.0


@dataclass(frozen=True)
class TrainingSpec:
    """What decides a training's result, as run.json keeps it."""

    recipe: Recipe
    seed: int
    compile: bool
    precision: str
    threads: int
    parts: int  # of a batch: processes times parts that each takes one after the other
    images: str  # a digest of the training pictures and their order

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "recipe": self.recipe.to_dict()}

    @classmethod
    def of(cls, run: Run) -> "TrainingSpec":
        """The plan of a run, checked."""
        kept = run.training()
        kinds = {"seed": int, "compile": bool, "precision": str, "threads": int, "parts": int, "images": str}
        for name, kind in kinds.items():
            if not isinstance(kept.get(name), kind):
                raise InputError(f"{run.directory / 'run.json'} must say the {name} of its training")
        return cls(Recipe.from_dict(kept.get("recipe")), **{name: kept[name] for name in kinds})


def train_new_run(
    directory: Path,
    source: DataOptions,
    order: TrainOptions,
    means: ExecutionOptions,
    force: bool,
    watcher: TrainingCallback,
) -> History:
    """Make a run and train its net."""
    known = data.data_set(source.name)
    recipe = order.to_recipe(known)
    seed = order.seed or 0
    as_generator(seed)  # refuses what is no seed
    preset = None if order.net else order.model or known.model
    size = models.config(preset).input_shape[1] if preset else FILE_SIZE
    fabric = means.machine.fabric()  # says what the machine cannot do before any picture is read
    held, splits, about = source.load(size)
    with temporary_seed(seed):
        net = build_net(preset, order.net, splits.train.shape, len(splits.train.classes))
    batches = recipe.epochs * (len(splits.train) // recipe.batch_size)
    compiled = worth_compiling(batches) if order.compile is None else order.compile
    as_batch_source(splits.train, recipe, seed)  # refuses a batch size that the pictures do not have
    fabric.launch()
    parts = fabric.world_size * (means.accumulate or 1)
    precision, threads = means.machine.precision, torch.get_num_threads()
    plan = TrainingSpec(recipe, seed, compiled, precision, threads, parts, _digest(splits.train))
    trainer = _trainer(net, splits, plan, means, fabric, directory)
    described = run_metadata(net.spec or {"net": order.net}, about, plan.to_dict())
    run_on_rank_zero(lambda: _make_run(directory, force, described, held))
    return _run(trainer, means, watcher)


def resume_run(
    directory: Path, root: Path | None, order: TrainOptions, means: ExecutionOptions, watcher: TrainingCallback
) -> History:
    """Go on with the training of an existing run."""
    run = Run(directory)
    if run.training().get("freeze_backbone"):
        raise InputError(f"{directory} had its heads trained alone, which cannot go on: train it again with --force")
    plan = TrainingSpec.of(run)
    _check_same(run, order, plan)
    fabric = replace(means.machine, precision=plan.precision).fabric()
    with temporary_seed(plan.seed):
        net = rebuild_net(run, order.net)
    splits = load_splits(run, root)
    if len(splits.train.classes) != net.num_classes:
        found = len(splits.train.classes)
        raise InputError(f"{directory} has a net of {net.num_classes} classes, but its data now have {found}")
    if _digest(splits.train) != plan.images:
        raise InputError(
            f"{directory} cannot go on: its training pictures, or their order, have changed since it began"
        )
    fabric.launch()
    if plan.threads != torch.get_num_threads():
        now = torch.get_num_threads()
        _log.warning("threads were %d and are %d now: the last bits may come out differently", plan.threads, now)
    trainer = _trainer(net, splits, plan, means, fabric, directory)
    if not run_on_rank_zero(lambda: _not_begun(trainer, directory)):
        trainer.resume()
    return _run(trainer, means, watcher)


def _not_begun(trainer: Trainer, directory: Path) -> bool:
    """Whether a run was interrupted before its first checkpoint, so that nothing was lost."""
    return trainer.snapshots.newest() is None and not (directory / "history.csv").exists()


def _digest(images: data.Pictures) -> str:
    """Of pictures, labels, classes and their order."""
    digest = blake2b(digest_size=16)
    for part in (images.fingerprints(), images.labels):
        digest.update(part.numpy().data)
    digest.update("\n".join(images.classes).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _trainer(
    net: MultiExitNet,
    splits: data.Splits[data.Pictures],
    plan: TrainingSpec,
    means: ExecutionOptions,
    fabric: "Fabric",
    directory: Path,
) -> Trainer:
    """A trainer in every process. Parts that processes do not take, each takes one after the other."""
    source = as_batch_source(splits.train, plan.recipe, plan.seed, means.workers)
    val = data.Batches(splits.val, plan.recipe.batch_size, means.workers)
    accumulate, left = divmod(plan.parts, fabric.world_size)
    if left or means.accumulate not in (None, accumulate):
        raise AllRanksError(
            f"{directory} is trained in {plan.parts} parts per batch, which {fabric.world_size} processes"
            f"{f' x {means.accumulate} parts' if means.accumulate else ''} do not make"
        )
    return Trainer(net, source, val, plan.recipe, fabric, directory, plan.seed, accumulate, plan.compile)


def _run(trainer: Trainer, means: ExecutionOptions, watcher: TrainingCallback) -> History:
    trainer.checkpoint_minutes = means.checkpoint_minutes
    trainer.watcher = watcher if rank() == 0 else TrainingCallback()
    history = trainer.run()
    if rank() == 0:
        history.plot(trainer.folder / "history.png")
    return history


def _make_run(directory: Path, force: bool, about: dict[str, Any], held: data.HoldOut) -> None:
    with atomic_directory(directory, force) as new:
        write_json(new / "run.json", about)
        held.save(new / "split.safetensors")


def check_same_data(run: Run, name: str) -> None:
    """Refuse to go on with another data set than the run's."""
    data.data_set(name)
    if absolute(name) != run.metadata["data"]["name"]:
        raise InputError(f"{run.directory} is trained on {run.metadata['data']['name']}, and cannot go on with {name}")


def _check_same(run: Run, order: TrainOptions, plan: TrainingSpec) -> None:
    """Refuse to go on as something else than the run is."""
    recipe = plan.recipe
    has = {
        "model": (run.metadata.get("model") or {}).get("preset"),
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "lr": recipe.lr,
        "seed": plan.seed,
        "compile": plan.compile,
        "precision": plan.precision,
    }
    for name, value in has.items():
        asked = getattr(order, name)
        if asked is not None and asked != value:
            option = name.replace("_", "-")
            raise InputError(f"{run.directory} is trained with --{option} {value}, and cannot go on with {asked}")
    if (
        order.recipe is not None
        and replace(get_recipe(order.recipe).scaled(recipe.epochs), lr=recipe.lr, batch_size=recipe.batch_size)
        != recipe
    ):
        raise InputError(f"{run.directory} is trained by another recipe than {order.recipe!r}, and cannot change it")
