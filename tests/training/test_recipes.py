"""Recipes have the paper's hyperparameters, and their schedules match PyTorch's schedulers."""

import pytest
import torch

import exitwise as ew
from exitwise.training.recipes import RECIPES, Recipe, get_recipe


@pytest.mark.parametrize(
    ("name", "epochs", "batch_size", "milestones"),
    [("cifar100", 300, 64, (150, 225)), ("imagenet", 90, 256, (30, 60)), ("caltech256", 180, 128, (90, 135))],
)
def test_the_papers_numbers(name: str, epochs: int, batch_size: int, milestones: tuple[int, ...]) -> None:
    recipe = RECIPES[name]
    assert (recipe.epochs, recipe.batch_size, recipe.milestones) == (epochs, batch_size, milestones)
    assert (recipe.lr, recipe.momentum, recipe.weight_decay, recipe.nesterov) == (0.1, 0.9, 1e-4, False)
    assert recipe.augmentation.flip
    assert recipe.augmentation.padding == (4 if name == "cifar100" else 0)
    assert recipe.augmentation.resized_crop == (name != "cifar100")


@pytest.mark.parametrize("epochs", [1, 2, 7, 30, 42, 84, 300])
def test_milestones_move_with_the_epochs(epochs: int) -> None:
    scaled = RECIPES["cifar100"].scaled(epochs)
    assert scaled.epochs == epochs
    assert all(0 <= epoch - share * epochs < 1 for epoch, share in zip(scaled.milestones, (0.5, 0.75), strict=True))
    assert RECIPES["cifar100"].scaled(30).milestones == (15, 23)
    assert RECIPES["cifar100"].scaled(42).milestones == (21, 32)


def scheduled_rates(recipe: Recipe, scheduler: type, **settings: object) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=recipe.lr)
    schedule = scheduler(optimizer, **settings)
    rates = []
    for _ in range(recipe.epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_steps_are_those_of_multistep() -> None:
    recipe = RECIPES["cifar100"]
    expected = scheduled_rates(recipe, torch.optim.lr_scheduler.MultiStepLR, milestones=[150, 225])
    assert [recipe.lr_at(epoch) for epoch in range(300)] == pytest.approx(expected)
    assert recipe.lr_at(149, 0.999) == pytest.approx(0.1)  # constant within an epoch


def test_cosine_is_that_of_cosine_annealing() -> None:
    recipe = Recipe(epochs=40, batch_size=8, lr=0.2, final_lr=0.01)
    expected = scheduled_rates(recipe, torch.optim.lr_scheduler.CosineAnnealingLR, T_max=40, eta_min=0.01)
    assert [recipe.lr_at(epoch) for epoch in range(40)] == pytest.approx(expected)
    assert recipe.lr_at(39, 1.0) == pytest.approx(0.01)


def test_warm_up_rises_evenly_to_the_first_rate() -> None:
    recipe = Recipe(epochs=10, batch_size=8, lr=0.3, warmup=3)
    assert [recipe.lr_at(epoch, 0.5) for epoch in range(3)] == pytest.approx([0.05, 0.15, 0.25])
    assert recipe.lr_at(3) == pytest.approx(0.3)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_json(name: str) -> None:
    import json

    assert Recipe.from_dict(json.loads(json.dumps(RECIPES[name].to_dict()))) == RECIPES[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "`epochs` must be a whole number of at least 1, but got 0"),
        ({"batch_size": 1.5}, "`batch_size` must be a whole number"),
        ({"lr": float("nan")}, "`lr` must be a number of at least 0"),
        ({"augmentation": None}, "must be a mapping with `augmentation`"),
        ({"augmentation": {"rotate": 3}}, "not usable"),
        ({"milestones": "x"}, "not usable"),
    ],
)
def test_a_recipe_from_a_damaged_file_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ew.InputError, match=message.replace("(", r"\(")):
        Recipe.from_dict({**RECIPES["digits"].to_dict(), **change})


def test_a_mistyped_recipe_gets_a_hint() -> None:
    with pytest.raises(ew.InputError, match="did you mean 'caltech256'"):
        get_recipe("caltech-256")
