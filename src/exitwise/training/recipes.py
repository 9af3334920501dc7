"""Training recipes: the paper's hyperparameters by dataset, and shorter recipes for a CPU."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import cos, pi
from typing import Any

from exitwise.core.checks import check_bool, check_integer, check_number, get_named
from exitwise.core.errors import InputError
from exitwise.data.images import Augmentation


@dataclass(frozen=True)
class Recipe:
    """SGD on the sum of the exits' losses, with a learning rate schedule.

    An exit's loss is its cross-entropy. For a net with exits attached to a trained module there is more: distillation
    from the module itself, smaller steps for its layers, and a limit to what its own exit may lose. With `distill` d
    and `temperature` T, the loss of every exit is (1 - d) * cross-entropy + d * T^2 * KL(last exit || exit), where the
    last exit is that of the net before the training.

    With milestones, the learning rate falls to a tenth at the beginning of each of these epochs. Without, it falls
    along half a cosine to `final_lr`. In the first `warmup` epochs it rises linearly from 0.

    Args:
        epochs: Number of epochs.
        batch_size: Images per optimizer step, over all processes.
        lr: Learning rate after the warm-up.
        milestones: Epochs, counted from 0, at whose beginning the learning rate is divided by 10.
        final_lr: Learning rate at the end of the cosine schedule; not used with milestones.
        warmup: Number of warm-up epochs.
        momentum: Momentum of SGD.
        nesterov: Use Nesterov momentum.
        weight_decay: Weight decay of SGD.
        augmentation: Random crops and flips of training images; none by default.
        distill: Weight d of distillation from the last exit as it was before the training, from 0 to 1.
        temperature: Temperature T of distillation.
        backbone_lr: Learning rate of the stages and of the last head, relative to that of the other heads.
        scale_gradients: Give every stage the mean of the gradients of the exits after it, instead of their sum.
        max_drop: Validation accuracy, as a fraction, that the last exit may lose against the net before the training.
            Epochs in which it loses more are not kept. Of the others, the one with the best mean accuracy over the
            exits is kept. If None, the epoch with the best accuracy at the last exit is kept.

    Raises:
        InputError: An argument is invalid.

    Example:
        >>> import exitwise as ew
        >>> recipe = ew.Recipe(epochs=300, batch_size=64, milestones=(150, 225))
        >>> [round(recipe.lr_at(epoch), 4) for epoch in (0, 150, 225)]
        [0.1, 0.01, 0.001]
        >>> recipe.scaled(30).milestones
        (15, 23)
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
    distill: float = 0.0
    temperature: float = 2.0
    backbone_lr: float = 1.0
    scale_gradients: bool = False
    max_drop: float | None = None

    def __post_init__(self) -> None:
        # Converted, because NumPy's numbers cannot be written to JSON.
        for name, minimum in (("epochs", 1), ("batch_size", 1), ("warmup", 0)):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum))
        for name in ("lr", "final_lr", "momentum", "weight_decay", "backbone_lr"):
            object.__setattr__(self, name, check_number(name, getattr(self, name), 0))
        _check_distillation(self)
        check_bool("scale_gradients", self.scale_gradients)
        if self.max_drop is not None:
            object.__setattr__(self, "max_drop", check_number("max_drop", self.max_drop, 0, 1))

    def scaled(self, epochs: int) -> "Recipe":
        """Return a copy for another number of epochs; milestones and warm-up scale along, rounded to whole epochs."""
        epochs = check_integer("epochs", epochs, 1)
        milestones = tuple(-(-milestone * epochs // self.epochs) for milestone in self.milestones)
        return replace(self, epochs=epochs, milestones=milestones, warmup=self.warmup * epochs // self.epochs)

    def lr_at(self, epoch: int, done: float = 0.0) -> float:
        """Return the learning rate in an epoch.

        Args:
            epoch: The epoch, from 0.
            done: Fraction of the epoch that has passed.
        """
        time = epoch + done
        if time < self.warmup:
            return self.lr * time / self.warmup
        if self.milestones:
            return float(self.lr * 0.1 ** sum(epoch >= milestone for milestone in self.milestones))
        fraction = (time - self.warmup) / max(self.epochs - self.warmup, 1)
        return self.final_lr + (self.lr - self.final_lr) * (1 + cos(pi * fraction)) / 2

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Recipe":
        """Return the recipe that `to_dict` described; raise InputError if `data`, perhaps from a file, is invalid."""
        if not isinstance(data, Mapping) or not isinstance(data.get("augmentation"), Mapping):
            raise InputError(f"a recipe must be a mapping with `augmentation`, but is {data!r}")
        names = {field.name for field in fields(cls)}
        try:
            values = {name: value for name, value in data.items() if name in names}
            values["augmentation"] = Augmentation(**data["augmentation"])
            values["milestones"] = tuple(int(milestone) for milestone in data.get("milestones", ()))
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise InputError(f"a recipe is not usable: {error}") from None


@dataclass(frozen=True)
class HeadRecipe:
    """AdamW on each head's own loss, on a frozen backbone; the learning rate falls to 0 along half a cosine.

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
        checked = self.to_recipe()
        for name in ("epochs", "batch_size", "lr", "weight_decay"):
            object.__setattr__(self, name, getattr(checked, name))
        _check_distillation(self)

    def to_recipe(self, max_batch_size: int | None = None) -> Recipe:
        """Return a `Recipe` with the same schedule and no augmentation; `max_batch_size` caps its batch size."""
        batch_size = self.batch_size if max_batch_size is None else min(self.batch_size, max_batch_size)
        return Recipe(self.epochs, batch_size, self.lr, weight_decay=self.weight_decay)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return asdict(self)


def _check_distillation(recipe: Recipe | HeadRecipe) -> None:
    """Convert weight and temperature of distillation to floats; raise InputError if they are invalid."""
    object.__setattr__(recipe, "distill", check_number("distill", recipe.distill, 0, 1))
    object.__setattr__(recipe, "temperature", check_number("temperature", recipe.temperature))
    if recipe.temperature <= 0:
        raise InputError(f"`temperature` must be above 0, but got {recipe.temperature:g}")


_CROP_AND_FLIP = Augmentation(padding=4, flip=True)
_RESIZED_CROP_AND_FLIP = Augmentation(resized_crop=True, flip=True)

JOINT = "joint"  # name of the recipe for exits that are trained together with the module they are attached to

RECIPES: Mapping[str, Recipe] = {
    # The paper's recipes.
    "cifar100": Recipe(epochs=300, batch_size=64, milestones=(150, 225), augmentation=_CROP_AND_FLIP),
    "imagenet": Recipe(epochs=90, batch_size=256, milestones=(30, 60), augmentation=_RESIZED_CROP_AND_FLIP),
    "caltech256": Recipe(epochs=180, batch_size=128, milestones=(90, 135), augmentation=_RESIZED_CROP_AND_FLIP),
    # Shorter recipes for a CPU: most of the accuracy in a fraction of the time.
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
    # Exits attached to a trained module, together with its layers. The command adds the dataset's augmentation.
    JOINT: Recipe(
        epochs=8,
        batch_size=64,
        lr=0.05,
        nesterov=True,
        distill=0.5,
        backbone_lr=0.5,
        scale_gradients=True,
        max_drop=0.005,
    ),
}


def get_recipe(name: str) -> Recipe:
    """Return the recipe of a name in `RECIPES`; for an unknown name the error suggests the nearest one."""
    return get_named("recipe", name, RECIPES, "a recipe")
