"""Cuts at the ends of timm's stages, beside cuts of equal cost and those of `ew.best_cuts`.

usage: stage_ends.py RUNS

Two networks of timm are trained on 8,000 images of Fashion-MNIST at 32 x 32 pixels, from random weights (weights stay
in RUNS). Four exits are then attached in three ways: at cuts of equal cost, at those that `ew.best_cuts` chooses, and
at the ends of the three stages before the last one, as timm's `feature_info` names them. Everything else is as in
best_cuts.py: heads, budgets, test samples and bootstrap. Results go to experiments/best_cuts/stage_ends.json.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from best_cuts import PAGE, RESULTS, correct_at
from joint import VAL
from results import fill_tables, machine, rounded
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision_operators import define_operators

import exitwise as ew
from exitwise import data
from exitwise.core.files import write_json
from exitwise.core.seeds import temporary_seed
from exitwise.evaluation.bootstrap import Bootstrap, percentile_interval

EPOCHS = {"regnetx_002": 5, "resnet18": 2}
SIZE, TRAIN, TEST, EXITS, LR = 32, 8_000, 4_000, 4, 0.1
HEADER = """\
| network | cuts | of | mean cost | top-1 % | minus equal cost |
|---|---|---|---|---|---|
"""


def images_for(preprocessing: ew.Preprocessing) -> tuple[Any, Any, Any]:
    """Training, validation and test images of Fashion-MNIST as a network of timm takes them."""
    train, test = data.load("fashion-mnist")
    splits = data.HoldOut.random(train, VAL, 0).apply(train, test)

    def enlarged(part: Any, count: int) -> Any:
        few = part[torch.arange(count)]
        pixels = nn.functional.interpolate(few.pixels.float(), size=(SIZE, SIZE), mode="bilinear")
        rgb = pixels.round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
        return replace(few, pixels=rgb, mean=preprocessing.mean, std=preprocessing.std)

    return enlarged(splits.train, TRAIN), enlarged(splits.val, min(VAL, TEST)), enlarged(splits.test, TEST)


def train_plainly(module: nn.Module, images: Any, epochs: int) -> None:
    """Train with SGD, flips and a learning rate that rises and falls once."""
    optimizer = torch.optim.SGD(module.parameters(), LR, momentum=0.9, nesterov=True, weight_decay=1e-4)
    steps = len(images) // 64
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=epochs * steps, pct_start=0.15)
    look = ew.Preprocessing(SIZE, images.mean, images.std)
    module.train()
    for epoch in range(epochs):
        right = 0
        for part in torch.randperm(len(images)).split(64)[:steps]:
            x, y = look.normalize(images.pixels[part]), images.labels[part]
            logits = module(x.flip(3) if torch.rand(()) < 0.5 else x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, y).backward()
            optimizer.step()
            schedule.step()
            right += int((logits.argmax(1) == y).sum())
        print(f"epoch {epoch + 1}: {right / len(images):.4f}", flush=True)
    module.eval()


def trained_network(name: str, runs: Path) -> tuple[nn.Module, tuple[Any, Any, Any]]:
    """A network of timm with its weights from RUNS, trained if they are not there; and its images."""
    with temporary_seed(0):
        named = ew.models.build_named(f"timm:{name}", 10, None, SIZE)
        assert named.preprocessing is not None
        splits, file = images_for(named.preprocessing), runs / f"timm-{name}.safetensors"
        if not file.exists():
            train_plainly(named.module, splits[0], EPOCHS[name])
            save_file(named.module.state_dict(), file)
    named.module.load_state_dict(load_file(file))
    return named.module.eval(), splits


def stage_ends(module: Any, exits: int) -> list[str]:
    """The modules that timm names as the ends of stages, without the last one: as many as there are early exits."""
    return [info["module"] for info in module.feature_info][-exits:-1]


def compare(module: nn.Module, splits: tuple[Any, Any, Any]) -> dict[str, Any]:
    """The three choices of cuts on the same samples, each with its difference to equal cost."""
    example = next(iter(data.Batches(splits[1], 2)))[0][:1]
    cuts = ew.best_cuts(module, splits[0], splits[1], exits=EXITS, example_inputs=example)
    print(cuts, flush=True)
    choices = {"equal cost": cuts.equal_cost, "feature_info": stage_ends(module, EXITS), "best_cuts": cuts.names}
    correct, found = {}, {}
    for kind, at in choices.items():
        correct[kind], cost = correct_at(module, list(at), splits, cuts.budgets, 0)
        difference = (correct[kind].mean(0) - correct["equal cost"].mean(0))[:, None]
        means = Bootstrap(len(difference)).resampled_means(difference)[:, 0]
        found[kind] = {
            "at": list(at),
            "top1": correct[kind].mean(1).tolist(),
            "mean_top1": float(correct[kind].mean()),
            "mean_cost": cost,
            "gain": float(np.mean(difference)),
            "gain_interval": list(percentile_interval(means)),
        }
    candidates = [each.name for each in cuts.candidates]
    return {"budgets": list(cuts.budgets), "candidates": candidates, "choices": found}


def table(networks: dict[str, Any]) -> str:
    """The table of the README."""
    rows = []
    for name, each in networks.items():
        for kind, choice in each["choices"].items():
            low, high = (100 * end for end in choice["gain_interval"])
            gain = "" if kind == "equal cost" else f"{100 * choice['gain']:+.2f} ({low:+.2f} to {high:+.2f})"
            at, cost = ", ".join(choice["at"]), f"{choice['mean_cost'] / 1e6:.2f} million"
            rows.append(f"| {name} | {at} | {kind} | {cost} | {100 * choice['mean_top1']:.2f} | {gain} |\n")
    return HEADER + "".join(rows)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    define_operators()
    runs, networks = Path(sys.argv[1]), {}
    runs.mkdir(exist_ok=True)
    for name in EPOCHS:
        networks[name] = rounded(compare(*trained_network(name, runs)))
        write_json(RESULTS.with_name("stage_ends.json"), {"machine": machine(), "networks": networks})
        PAGE.write_text(fill_tables(PAGE.read_text(), {"stage-ends": table(networks)}))


if __name__ == "__main__":
    main()
