"""Train the heads of a net on its frozen backbone, as a new run."""

from pathlib import Path
from typing import Any

import torch

from exitwise import data
from exitwise.core.errors import InputError
from exitwise.core.files import atomic_directory, write_json
from exitwise.core.seeds import as_generator
from exitwise.models.named.build import is_named
from exitwise.models.weights import save_checkpoint
from exitwise.runs.attached import build_attached_net, check_attach_options, warn_of_last_exit
from exitwise.runs.data import load_new_data
from exitwise.runs.named import attach_to_named, build_named_for
from exitwise.runs.nets import net_input_size
from exitwise.runs.options import AttachOptions, DataOptions, HeadTrainOptions, MachineOptions, NetOptions
from exitwise.runs.run import run_metadata
from exitwise.training.callbacks import TrainingCallback
from exitwise.training.heads import train_heads
from exitwise.training.history import History
from exitwise.training.machine import Machine
from exitwise.training.recipes import HeadRecipe


def train_heads_of_new_run(
    directory: Path,
    source: DataOptions,
    net_options: NetOptions,
    attached: AttachOptions,
    options: HeadTrainOptions,
    machine: MachineOptions,
    force: bool,
    callback: TrainingCallback,
) -> History:
    """Create a run whose heads are trained on a frozen backbone; the run appears when the training is complete."""
    dataset = data.get_dataset(str(source.data))
    recipe, seed = _make_recipe(options), options.seed or 0
    as_generator(seed)  # an invalid seed is an error before any data are read
    preset = None if net_options.function else net_options.model or dataset.model
    check_attach_options(net_options, attached, is_named(preset))
    named = build_named_for(str(preset), source, attached, options.last, seed) if is_named(preset) else None
    preprocessing = None if named is None else named.preprocessing
    size = net_input_size(preset) if preprocessing is None else preprocessing.size
    if preset and named is None and attached.weights is None:
        raise InputError(f"train-heads needs a trained {preset}: give its weights with --weights")
    fabric = Machine(machine.accelerator, machine.devices, machine.num_nodes).fabric()
    if fabric.world_size > 1:
        raise InputError(f"train-heads runs in one process, but {fabric.world_size} were requested")
    with atomic_directory(directory, force) as new:
        held_out, splits, metadata = load_new_data(source, size, preprocessing=preprocessing)
        if named is None:
            net = build_attached_net(preset, net_options, attached, splits, seed)
        else:
            net = attach_to_named(named, attached, splits, options.last, seed)
        net.to(fabric.device)
        if not options.last:
            warn_of_last_exit(net, splits)
        settings: dict[str, Any] = {**recipe.to_dict(), "train_last": options.last, "seed": seed}
        history = train_heads(net, splits.train, splits.val, workers=machine.workers, callback=callback, **settings)
        training = {
            "recipe": recipe.to_dict(),
            "freeze_backbone": True,
            "last": options.last,
            "weights": None if attached.weights is None else str(attached.weights.resolve()),
            "seed": seed,
            "threads": torch.get_num_threads(),
        }
        write_json(new / "run.json", run_metadata(net.spec or {"net": net_options.function}, metadata, training))
        held_out.save(new / "split.safetensors")
        save_checkpoint(net, new / "net.safetensors")
        history.save(new / "history.csv")
        history.plot(new / "history.png")
    return history


def _make_recipe(options: HeadTrainOptions) -> HeadRecipe:
    overrides = {name: getattr(options, name) for name in ("epochs", "batch_size", "lr", "distill")}
    return HeadRecipe(**{name: value for name, value in overrides.items() if value is not None})
