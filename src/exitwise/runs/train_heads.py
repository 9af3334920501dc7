"""What the command `train --freeze-backbone` does: makes a run of a net whose heads alone are trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exitwise import data, models
from exitwise.core.errors import InputError
from exitwise.core.files import atomic_directory, write_json
from exitwise.core.seeds import as_generator, temporary_seed
from exitwise.models.attach.attach import attach
from exitwise.models.weights import load_checkpoint, save_checkpoint
from exitwise.runs.collect import FILE_SIZE, DataOptions, build_net
from exitwise.runs.run import run_metadata
from exitwise.training.heads import train_heads
from exitwise.training.history import History
from exitwise.training.loop import TrainingCallback
from exitwise.training.machine import Machine
from exitwise.training.recipes import HeadRecipe


@dataclass(frozen=True)
class HeadTrainOptions:
    """What a training of heads is asked to be; what is None is the recipe's own."""

    model: str | None = None
    net: str | None = None
    weights: Path | None = None
    last: bool = False
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    distill: float | None = None
    seed: int | None = None
    attach: str | None = None  # names of submodules, parted by commas, or auto
    exits: int | None = None  # for auto

    def to_recipe(self) -> HeadRecipe:
        asked = {name: getattr(self, name) for name in ("epochs", "batch_size", "lr", "distill")}
        return HeadRecipe(**{name: value for name, value in asked.items() if value is not None})


def train_new_heads(
    directory: Path,
    source: DataOptions,
    order: HeadTrainOptions,
    machine: Machine,
    workers: int,
    force: bool,
    watcher: TrainingCallback,
) -> History:
    """Make a run, whole or not at all: this takes too little time to go on with."""
    known = data.data_set(source.name)
    recipe, seed = order.to_recipe(), order.seed or 0
    as_generator(seed)  # refuses what is no seed
    preset = None if order.net else order.model or known.model
    size = models.config(preset).input_shape[1] if preset else FILE_SIZE
    if preset and order.weights is None:
        raise InputError(f"--freeze-backbone needs a trained {preset}: give its weights by --weights")
    fabric = machine.fabric()
    if fabric.world_size > 1:
        raise InputError(f"--freeze-backbone is for one process, but {fabric.world_size} were asked for")
    with atomic_directory(directory, force) as new:
        held, splits, about = source.load(size)
        with temporary_seed(seed):
            net = build_net(preset, order.net, splits.train.shape, len(splits.train.classes))
        if order.weights is not None:
            load_checkpoint(net, order.weights)
        if order.attach is not None:
            at = order.attach if order.attach == "auto" else order.attach.split(",")
            with temporary_seed(seed):
                net = attach(net.eval(), at, exits=order.exits, example_inputs=torch.rand(1, *splits.train.shape))
        net.to(fabric.device)
        options: dict[str, Any] = {**recipe.to_dict(), "last": order.last, "seed": seed, "workers": workers}
        history = train_heads(net, splits.train, splits.val, watcher=watcher, **options)
        training = {
            "recipe": recipe.to_dict(),
            "freeze_backbone": True,
            "last": order.last,
            "weights": None if order.weights is None else str(order.weights.resolve()),
            "seed": seed,
            "threads": torch.get_num_threads(),
        }
        write_json(new / "run.json", run_metadata(net.spec or {"net": order.net}, about, training))
        held.save(new / "split.safetensors")
        save_checkpoint(net, new / "net.safetensors")
        history.save(new / "history.csv")
        history.plot(new / "history.png")
    return history
