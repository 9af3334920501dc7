"""Train the heads of a net on its frozen backbone, as a new run."""

from pathlib import Path
from typing import Any

import torch

from exitwise.core.errors import InputError
from exitwise.core.files import atomic_directory, write_json
from exitwise.core.seeds import as_generator
from exitwise.models.weights import save_checkpoint
from exitwise.runs.attached import warn_of_last_exit
from exitwise.runs.data import load_new_data
from exitwise.runs.new_net import prepare_net
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
    recipe, seed = _make_recipe(options), options.seed or 0
    as_generator(seed)  # an invalid seed is an error before any data are read
    new_net = prepare_net(source, net_options, attached, seed)
    size = new_net.image_size
    if new_net.name and new_net.weights is None:
        raise InputError(f"train-heads needs a trained {new_net.name}: give its weights with --weights")
    fabric = Machine(machine.accelerator, machine.devices, machine.num_nodes).fabric()
    if fabric.world_size > 1:
        raise InputError(f"train-heads runs in one process, but {fabric.world_size} were requested")
    with atomic_directory(directory, force) as new:
        held_out, splits, metadata = load_new_data(source, size, preprocessing=new_net.preprocessing)
        net = new_net.build(splits)
        net.to(fabric.device)
        if not attached.last:
            warn_of_last_exit(net, splits)
        settings: dict[str, Any] = {**recipe.to_dict(), "train_last": attached.last, "seed": seed}
        history = train_heads(net, splits.train, splits.val, workers=machine.workers, callback=callback, **settings)
        training = {
            "recipe": recipe.to_dict(),
            "freeze_backbone": True,
            "last": attached.last,
            "weights": new_net.weights,
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
