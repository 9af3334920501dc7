"""How nets are trained, as data: the paper's numbers by the name of the data set, and shorter ones of our own."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from math import cos, isfinite, pi
from typing import Any

from exitwise.core.errors import InputError
from exitwise.data.images import Augmentation


@dataclass(frozen=True)
class Recipe:
    """SGD on the sum of the exits' cross-entropies, and a schedule of its learning rate.

    With milestones, the rate falls to a tenth at the beginning of each of these epochs; without, it falls along half a
    cosine to `final_lr`. In the first `warmup` epochs it rises evenly from nothing.
    """

    epochs: int
    batch_size: int
    lr: float = 0.1
    milestones: tuple[int, ...] = ()
    final_lr: float = 0.0
    warmup: int = 0
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("warmup", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"`{name}` must be a whole number of at least {least}, but got {value!r}")
        for name in ("lr", "final_lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
                raise InputError(f"`{name}` must be a number of at least 0, but got {value!r}")

    def scaled(self, epochs: int) -> "Recipe":
        """The same in another number of epochs: milestones and warm-up keep their places, up to whole epochs."""
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise InputError(f"`epochs` must be a whole number of at least 1, but got {epochs!r}")
        milestones = tuple(-(-milestone * epochs // self.epochs) for milestone in self.milestones)
        return replace(self, epochs=epochs, milestones=milestones, warmup=self.warmup * epochs // self.epochs)

    def lr_at(self, epoch: int, done: float = 0.0) -> float:
        """The learning rate in an epoch (from 0) of which the share `done` has passed."""
        now = epoch + done
        if now < self.warmup:
            return self.lr * now / self.warmup
        if self.milestones:
            return float(self.lr * 0.1 ** sum(epoch >= milestone for milestone in self.milestones))
        share = (now - self.warmup) / max(self.epochs - self.warmup, 1)
        return self.final_lr + (self.lr - self.final_lr) * (1 + cos(pi * share)) / 2

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Recipe":
        """What `to_dict` gave, checked: it may come from a file."""
        if not isinstance(data, Mapping) or not isinstance(data.get("augmentation"), Mapping):
            raise InputError(f"a recipe must be a mapping with `augmentation`, but is {data!r}")
        known = {each.name for each in fields(cls)}
        try:
            values = {name: value for name, value in data.items() if name in known}
            values["augmentation"] = Augmentation(**data["augmentation"])
            values["milestones"] = tuple(int(milestone) for milestone in data.get("milestones", ()))
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise InputError(f"a recipe is not usable: {error}") from None


@dataclass(frozen=True)
class HeadRecipe:
    """How heads are trained alone: AdamW, whose learning rate falls along half a cosine.

    A head's loss is (1 - distill) * cross-entropy + distill * temperature^2 * KL(last exit || head), both softmaxes at
    that temperature.
    """

    epochs: int = 30
    batch_size: int = 64
    lr: float = 0.005
    weight_decay: float = 0.1
    distill: float = 0.0
    temperature: float = 2.0

    def __post_init__(self) -> None:
        self.to_recipe()  # refuses what a recipe refuses
        for name in ("distill", "temperature"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                raise InputError(f"`{name}` must be a number, but got {value!r}")
        if not 0 <= self.distill <= 1:
            raise InputError(f"`distill` must be from 0 to 1, but got {self.distill!r}")
        if self.temperature <= 0:
            raise InputError(f"`temperature` must be above 0, but got {self.temperature!r}")

    def to_recipe(self, most: int | None = None) -> Recipe:
        """The same as a recipe for whole nets, which does not augment; with batches of at most so many."""
        batch_size = self.batch_size if most is None else min(self.batch_size, most)
        return Recipe(self.epochs, batch_size, self.lr, weight_decay=self.weight_decay)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_CROP_AND_FLIP = Augmentation(padding=4, flip=True)
_PART_AND_FLIP = Augmentation(resized_crop=True, flip=True)

RECIPES: Mapping[str, Recipe] = {
    # The paper's.
    "cifar100": Recipe(epochs=300, batch_size=64, milestones=(150, 225), augmentation=_CROP_AND_FLIP),
    "imagenet": Recipe(epochs=90, batch_size=256, milestones=(30, 60), augmentation=_PART_AND_FLIP),
    "caltech256": Recipe(epochs=180, batch_size=128, milestones=(90, 135), augmentation=_PART_AND_FLIP),
    # Ours, for a CPU: most of the accuracy in a small part of the time.
    "cifar100-short": Recipe(
        epochs=24,
        batch_size=64,
        lr=0.15,
        final_lr=0.001,
        warmup=1,
        nesterov=True,
        augmentation=Augmentation(padding=2, flip=True),
    ),
    "fashion-mnist": Recipe(
        epochs=10, batch_size=64, warmup=1, nesterov=True, augmentation=Augmentation(padding=2, flip=True)
    ),
    "digits": Recipe(epochs=40, batch_size=50, warmup=1, nesterov=True, augmentation=Augmentation(padding=1)),
}


def get_recipe(name: str) -> Recipe:
    """A recipe by its name, or an error with the nearest one."""
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(RECIPES)}"
        raise InputError(f"`recipe` must be the name of a recipe, but got {name!r}; {hint}")
    return RECIPES[name]
