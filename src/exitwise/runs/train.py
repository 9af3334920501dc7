"""Train the net of a new run, or resume the training of an existing one."""

import logging
import shutil
import sys
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exitwise import data
from exitwise.core.checks import check_number
from exitwise.core.distributed import rank, run_on_rank_zero
from exitwise.core.errors import AllRanksError, InputError, UnreadableImageError
from exitwise.core.files import atomic_directory, write_json
from exitwise.core.seeds import as_generator, temporary_seed
from exitwise.models.named.build import is_named
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import load_checkpoint, save_checkpoint
from exitwise.runs.attached import warn_of_last_exit
from exitwise.runs.data import absolute_name, load_new_data, load_splits
from exitwise.runs.nets import rebuild_net
from exitwise.runs.new_net import net_name, prepare_net
from exitwise.runs.options import AttachOptions, DataOptions, ExecutionOptions, MachineOptions, NetOptions, TrainOptions
from exitwise.runs.run import Run, run_metadata
from exitwise.training.batch_sources import as_batch_source
from exitwise.training.callbacks import TrainingCallback
from exitwise.training.heads import train_heads
from exitwise.training.history import History
from exitwise.training.interruptions import TrainingInterruptedError
from exitwise.training.joint import ORIGINAL_FILE, needs_original
from exitwise.training.loop import Trainer
from exitwise.training.machine import Machine, worth_bf16, worth_compiling
from exitwise.training.recipes import JOINT, Recipe, get_recipe

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_log = logging.getLogger(__name__)
_HEAD_EPOCHS = 3  # in which new heads are trained alone, before they are trained together with the network
_NAMED_HEAD_EPOCHS = 10  # the same, of a network of another library, or with a new last layer
_NAMED_LR = 0.003  # its learning rate: .01 and more destroyed the features of a network within a few small epochs
_MIN_BATCHES = 4  # per epoch, for a dataset that is smaller than one batch of the recipe


@dataclass(frozen=True)
class TrainingSpec:
    """Everything that determines the result of a training, as stored in run.json."""

    recipe: Recipe
    seed: int
    compile: bool
    precision: str
    threads: int
    parts: int  # micro-batches per batch: processes times micro-batches that each accumulates
    images: str  # digest of the training images and their order
    weights: str | None = None  # file of the weights that the training started from, or "pretrained"; None: random ones

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "recipe": self.recipe.to_dict()}

    @classmethod
    def of(cls, run: Run) -> "TrainingSpec":
        """Read and check the spec of a run."""
        training = run.training()
        kinds = {"seed": int, "compile": bool, "precision": str, "threads": int, "parts": int, "images": str}
        for name, kind in kinds.items():
            if not isinstance(training.get(name), kind):
                raise InputError(f"{run.directory / 'run.json'} must hold the {name} of its training")
        weights = training.get("weights")
        if weights is not None and not isinstance(weights, str):
            raise InputError(f"{run.directory / 'run.json'} must name the weights of its training, but has {weights!r}")
        values = {name: training[name] for name in kinds}
        return cls(Recipe.from_dict(training.get("recipe")), **values, weights=weights)


def train_new_run(
    directory: Path,
    source: DataOptions,
    net_options: NetOptions,
    attached: AttachOptions,
    options: TrainOptions,
    machine: MachineOptions,
    execution: ExecutionOptions,
    force: bool,
    callback: TrainingCallback,
) -> History:
    """Create a run and train its net."""
    dataset, name = data.get_dataset(str(source.data)), net_name(source, net_options)
    recipe = make_recipe(options, dataset.recipe, JOINT if attached.attach or is_named(name) else None)
    if is_named(name) and options.recipe is None and options.lr is None:
        recipe = replace(recipe, lr=_NAMED_LR)
    seed = options.seed or 0
    as_generator(seed)  # an invalid seed is an error before any data are read
    fabric = _machine(machine, execution, options.precision or "32-true").fabric()  # fails early, before data are read
    new_net = prepare_net(source, net_options, attached, seed)
    size = new_net.image_size
    if new_net.name and new_net.weights is None and (new_net.has_exits_attached or needs_original(recipe)):
        raise InputError(f"this training starts from a trained {new_net.name}: give its weights with --weights")
    if attached.last and not new_net.has_exits_attached:
        raise InputError("--last is for exits that are attached: without --attach, all heads are trained anyway")
    held_out, splits, metadata = load_new_data(source, size, preprocessing=new_net.preprocessing)
    if options.batch_size is None:
        recipe = _fit_batch_size(recipe, len(splits.train), fabric.world_size * (execution.accumulate or 1))
    net = new_net.build(splits)
    batches = recipe.epochs * (len(splits.train) // recipe.batch_size)
    compiled = worth_compiling(batches) if options.compile is None else options.compile
    as_batch_source(splits.train, recipe, seed)  # fails for a batch size larger than the training set
    precision = options.precision or "32-true"
    if options.precision is None and worth_bf16(batches, fabric.device):
        precision = "bf16-mixed"
        fabric = _machine(machine, execution, precision).fabric()
        if rank() == 0:
            reason = "this CPU has instructions for it (--precision 32-true turns it off)"
            print(f"exitwise: trains with --precision bf16-mixed, because {reason}", file=sys.stderr)
    if new_net.has_exits_attached:  # every process does this, with the same result
        net.to(fabric.device)
        epochs = _NAMED_HEAD_EPOCHS if attached.last or new_net.named is not None else _HEAD_EPOCHS
        _train_new_heads(net, splits, recipe, epochs, attached.last, seed, machine.workers, callback)
    fabric.launch()
    spec = TrainingSpec(
        recipe=recipe,
        seed=seed,
        compile=compiled,
        precision=precision,
        threads=torch.get_num_threads(),
        parts=fabric.world_size * (execution.accumulate or 1),
        images=_digest(splits.train),
        weights=new_net.weights,
    )
    trainer = _make_trainer(net, splits, spec, machine.workers, execution.accumulate, fabric, directory)
    described = run_metadata(net.spec or {"net": net_options.function}, metadata, spec.to_dict())
    run_on_rank_zero(lambda: _create_run(directory, force, described, held_out, net if spec.weights else None))
    try:
        return _run_training(trainer, execution, callback)
    except TrainingInterruptedError:
        raise
    except Exception as error:
        # A run without a checkpoint would only block the next attempt. So would one whose first epoch met an image that
        # cannot be read: it cannot be resumed with --skip-unreadable, which changes the images.
        is_start = isinstance(error, UnreadableImageError) and not (directory / "history.csv").exists()
        if rank() == 0 and (is_start or _has_no_checkpoint(trainer, directory)):
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _train_new_heads(
    net: MultiExitNet,
    splits: data.Splits[Any],
    recipe: Recipe,
    epochs: int,
    train_last: bool,
    seed: int,
    workers: int,
    callback: TrainingCallback,
) -> None:
    """Train the heads of attached exits alone; a last layer that is trained with them has no teacher yet."""
    if not train_last:
        warn_of_last_exit(net, splits)
    train_heads(
        net,
        splits.train,
        splits.val,
        train_last=train_last,
        epochs=epochs,
        distill=0.0 if train_last else recipe.distill,
        temperature=recipe.temperature,
        seed=seed,
        workers=workers,
        callback=callback,
    )


def make_recipe(options: TrainOptions, of_data: str, default: str | None = None) -> Recipe:
    """Return the recipe of the options, or the default one by name, with the values that the options override.

    Args:
        options: Names a recipe, or values of it.
        of_data: Name of the dataset's recipe; its augmentation is also that of a joint training.
        default: Name of the default recipe, if it is not the dataset's.
    """
    name = options.recipe or default or of_data
    recipe = get_recipe(name)
    if name == JOINT:
        recipe = replace(recipe, augmentation=get_recipe(of_data).augmentation)
    if options.epochs is not None:
        recipe = recipe.scaled(options.epochs)
    if options.batch_size is not None:
        recipe = replace(recipe, batch_size=options.batch_size)
    if options.lr is not None:
        recipe = replace(recipe, lr=options.lr)
    if options.distill is not None:
        recipe = replace(recipe, distill=options.distill)
    if options.max_drop is not None:
        recipe = replace(recipe, max_drop=check_number("max_drop", options.max_drop, 0, 100) / 100)
    return recipe


def _fit_batch_size(recipe: Recipe, samples: int, parts: int) -> Recipe:
    """Return the recipe with smaller batches if there are fewer images than in one of its batches."""
    if samples >= recipe.batch_size:
        return recipe
    size = max(samples // _MIN_BATCHES // parts, 1) * parts
    if rank() == 0:
        reason = f"because there are only {samples} training images"
        print(f"exitwise: batches have {size} images instead of {recipe.batch_size}, {reason}", file=sys.stderr)
    return replace(recipe, batch_size=size)


def resume_run(
    directory: Path,
    root: Path | None,
    net_options: NetOptions,
    options: TrainOptions,
    machine: MachineOptions,
    execution: ExecutionOptions,
    callback: TrainingCallback,
) -> History:
    """Resume the training of an existing run from its newest checkpoint."""
    run = Run(directory)
    if run.training().get("freeze_backbone"):
        raise InputError(f"{directory} is a training of heads, which cannot be resumed: repeat it with --force")
    spec = TrainingSpec.of(run)
    _check_same_options(run, net_options, options, spec)
    fabric = _machine(machine, execution, spec.precision).fabric()
    with temporary_seed(spec.seed):
        net = rebuild_net(run, net_options.function)
    splits = load_splits(run, root)
    classes = len(splits.train.classes)
    if classes != net.num_classes:
        raise InputError(f"{directory} has a net of {net.num_classes} classes, but its data now have {classes}")
    if _digest(splits.train) != spec.images:
        raise InputError(f"{directory} cannot be resumed: its training images, or their order, have changed")
    fabric.launch()
    threads = torch.get_num_threads()
    if spec.threads != threads:
        _log.warning("trained with %d threads before and %d now: the last bits may differ", spec.threads, threads)
    trainer = _make_trainer(net, splits, spec, machine.workers, execution.accumulate, fabric, directory)
    if not run_on_rank_zero(lambda: _has_no_checkpoint(trainer, directory)):
        trainer.resume()
    elif spec.weights is not None:
        load_checkpoint(net, directory / ORIGINAL_FILE)
    return _run_training(trainer, execution, callback)


def _machine(machine: MachineOptions, execution: ExecutionOptions, precision: str) -> Machine:
    return Machine(machine.accelerator, machine.devices, machine.num_nodes, precision, execution.strategy)


def _has_no_checkpoint(trainer: Trainer, directory: Path) -> bool:
    """Return whether a run was interrupted before its first checkpoint, so that it can start again."""
    return trainer.checkpoints.newest() is None and not (directory / "history.csv").exists()


def _digest(images: Any) -> str:
    """Return a digest of images, labels, classes and their order."""
    digest = blake2b(digest_size=16)
    for part in (images.fingerprints(), images.labels):
        digest.update(part.numpy().data)
    digest.update("\n".join(images.classes).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _make_trainer(
    net: MultiExitNet,
    splits: data.Splits[Any],
    spec: TrainingSpec,
    workers: int,
    accumulate: int | None,
    fabric: "Fabric",
    directory: Path,
) -> Trainer:
    """Make a trainer on every rank; micro-batches beyond the number of ranks are accumulated."""
    source = as_batch_source(splits.train, spec.recipe, spec.seed, workers)
    val = data.Batches(splits.val, spec.recipe.batch_size, workers)
    per_rank, remainder = divmod(spec.parts, fabric.world_size)
    if remainder or accumulate not in (None, per_rank):
        raise AllRanksError(
            f"{directory} is trained in {spec.parts} parts per batch, which {fabric.world_size} processes"
            f"{f' x {accumulate} parts' if accumulate else ''} do not make"
        )
    return Trainer(net, source, val, spec.recipe, fabric, directory, spec.seed, per_rank, spec.compile)


def _run_training(trainer: Trainer, execution: ExecutionOptions, callback: TrainingCallback) -> History:
    trainer.checkpoint_minutes = execution.checkpoint_minutes
    trainer.callback = callback if rank() == 0 else TrainingCallback()
    history = trainer.run()
    if rank() == 0:
        history.plot(trainer.folder / "history.png")
    return history


def _create_run(
    directory: Path, force: bool, metadata: dict[str, Any], held_out: data.HoldOut, net: MultiExitNet | None
) -> None:
    """Create the directory of a run, with the weights that its training starts from unless `net` is None."""
    with atomic_directory(directory, force) as new:
        if net is not None:
            save_checkpoint(net, new / ORIGINAL_FILE)
        write_json(new / "run.json", metadata)
        held_out.save(new / "split.safetensors")


def check_same_data(run: Run, name: str) -> None:
    """Raise InputError unless `name` is the dataset that the run is trained on."""
    data.get_dataset(name)
    trained_on = run.metadata["data"]["name"]
    if absolute_name(name) != trained_on:
        raise InputError(f"{run.directory} is trained on {trained_on}, and cannot be resumed with {name}")


def _check_same_options(run: Run, net_options: NetOptions, options: TrainOptions, spec: TrainingSpec) -> None:
    """Raise InputError if a given option differs from the run's: a resumed training cannot change."""
    recipe, model = spec.recipe, run.metadata["model"]
    pairs = {
        "model": (net_options.model, model.get("preset") or model.get("module")),
        "epochs": (options.epochs, recipe.epochs),
        "batch-size": (options.batch_size, recipe.batch_size),
        "lr": (options.lr, recipe.lr),
        "seed": (options.seed, spec.seed),
        "compile": (options.compile, spec.compile),
        "precision": (options.precision, spec.precision),
        "distill": (options.distill, recipe.distill),
        "max-drop": (options.max_drop, None if recipe.max_drop is None else round(100 * recipe.max_drop, 9)),
    }
    for name, (requested, value) in pairs.items():
        if requested is not None and requested != value:
            raise InputError(
                f"{run.directory} is trained with --{name} {value}, and cannot be resumed with {requested}"
            )
    if options.recipe is not None:
        overridden = {name: getattr(recipe, name) for name in ("lr", "batch_size", "distill", "max_drop")}
        if options.recipe == JOINT:
            overridden["augmentation"] = recipe.augmentation
        if replace(get_recipe(options.recipe).scaled(recipe.epochs), **overridden) != recipe:
            raise InputError(f"{run.directory} is trained with another recipe than {options.recipe!r}")
