"""Train the heads of a net on its frozen backbone, as a new run."""

from pathlib import Path
from typing import Any

import torch

from exitwise import data
from exitwise.core.errors import InputError
from exitwise.core.files import atomic_directory, write_json
from exitwise.core.seeds import as_generator, temporary_seed
from exitwise.data.images import ImageDataset
from exitwise.models.attach.attach import attach
from exitwise.models.named.build import is_named
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import load_checkpoint, save_checkpoint
from exitwise.runs.data import load_new_data
from exitwise.runs.leaks import last_exit_accuracy, warn_of_accuracies
from exitwise.runs.named import attach_to_named, build_named_for
from exitwise.runs.nets import build_net, net_input_size
from exitwise.runs.options import DataOptions, HeadTrainOptions, MachineOptions, NetOptions
from exitwise.runs.run import run_metadata
from exitwise.training.heads import train_heads
from exitwise.training.history import History
from exitwise.training.loop import TrainingCallback
from exitwise.training.machine import Machine
from exitwise.training.recipes import HeadRecipe


def train_heads_of_new_run(
    directory: Path,
    source: DataOptions,
    net_options: NetOptions,
    options: HeadTrainOptions,
    machine: MachineOptions,
    force: bool,
    callback: TrainingCallback,
) -> History:
    """Create a run whose heads are trained on a frozen backbone; the run appears when the training is complete."""
    if options.attach is not None and net_options.function is not None:
        raise InputError("--attach is for nets by name: let the function of --net return exitwise.attach(...)")
    dataset = data.get_dataset(str(source.data))
    recipe, seed = _make_recipe(options), options.seed or 0
    as_generator(seed)  # an invalid seed is an error before any data are read
    preset = None if net_options.function else net_options.model or dataset.model
    if options.exits is not None and (options.attach or ("auto" if is_named(preset) else None)) != "auto":
        raise InputError("--exits is for --attach auto")
    named = build_named_for(str(preset), source, options, seed) if is_named(preset) else None
    size = named.preprocessing.size if named is not None and named.preprocessing else net_input_size(preset)
    if preset and named is None and options.weights is None:
        raise InputError(f"train-heads needs a trained {preset}: give its weights with --weights")
    fabric = Machine(machine.accelerator, machine.devices, machine.num_nodes).fabric()
    if fabric.world_size > 1:
        raise InputError(f"train-heads runs in one process, but {fabric.world_size} were requested")
    with atomic_directory(directory, force) as new:
        own = None if named is None else named.preprocessing
        held_out, splits, metadata = load_new_data(source, size, preprocessing=own)
        if named is not None:
            net = attach_to_named(named, splits.train, options, seed)
        else:
            net = _build_net(preset, net_options.function, splits.train, options, seed)
        net.to(fabric.device)
        if not options.last:
            parts = {"validation": splits.val, "test": splits.test, "training": splits.train}
            accuracies = [last_exit_accuracy(net, images, name) for name, images in parts.items()]
            warn_of_accuracies(accuracies, net.num_classes)
        settings: dict[str, Any] = {**recipe.to_dict(), "train_last": options.last, "seed": seed}
        history = train_heads(net, splits.train, splits.val, workers=machine.workers, callback=callback, **settings)
        training = {
            "recipe": recipe.to_dict(),
            "freeze_backbone": True,
            "last": options.last,
            "weights": None if options.weights is None else str(options.weights.resolve()),
            "seed": seed,
            "threads": torch.get_num_threads(),
        }
        write_json(new / "run.json", run_metadata(net.spec or {"net": net_options.function}, metadata, training))
        held_out.save(new / "split.safetensors")
        save_checkpoint(net, new / "net.safetensors")
        history.save(new / "history.csv")
        history.plot(new / "history.png")
    return history


def _build_net(
    preset: str | None, function: str | None, images: ImageDataset, options: HeadTrainOptions, seed: int
) -> MultiExitNet:
    """Build a preset or the user's net, load weights, and attach exits if they are requested."""
    with temporary_seed(seed):
        net = build_net(preset, function, images.shape, len(images.classes))
    if options.weights is not None:
        load_checkpoint(net, options.weights)
    if options.attach is not None:
        at = options.attach if options.attach == "auto" else options.attach.split(",")
        with temporary_seed(seed):
            net = attach(net.eval(), at, exits=options.exits, example_inputs=torch.rand(1, *images.shape))
    return net


def _make_recipe(options: HeadTrainOptions) -> HeadRecipe:
    overrides = {name: getattr(options, name) for name in ("epochs", "batch_size", "lr", "distill")}
    return HeadRecipe(**{name: value for name, value in overrides.items() if value is not None})
