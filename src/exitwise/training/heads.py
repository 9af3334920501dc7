"""Training heads alone: the backbone and its statistics stay as they are, bit for bit."""

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from exitwise.core import distributed
from exitwise.core.errors import InputError
from exitwise.core.nested import map_tensors
from exitwise.core.seeds import as_generator, derive_seed
from exitwise.models.net import MultiExitNet, preserve_training_mode
from exitwise.training.frozen_features import Cache, CachedFeatures, RecomputedFeatures, make_head_data
from exitwise.training.history import EpochRecord, History
from exitwise.training.loop import TrainingCallback
from exitwise.training.recipes import HeadRecipe
from exitwise.training.trainable_head import TrainableHead

_SOME = 1024  # samples, about, that tell how features are spread


def train_heads(
    net: MultiExitNet,
    train: Any,
    val: Any,
    *,
    epochs: int = HeadRecipe.epochs,
    batch_size: int = HeadRecipe.batch_size,
    lr: float = HeadRecipe.lr,
    weight_decay: float = HeadRecipe.weight_decay,
    distill: float = HeadRecipe.distill,
    temperature: float = HeadRecipe.temperature,
    last: bool = False,
    cache: Cache = "auto",
    seed: int = 0,
    workers: int = 0,
    watcher: TrainingCallback | None = None,
) -> History:
    """Train the heads of a net in place, all but the last one, which is the trained net's own; or it too with `last`.

    `train` and `val` are data sets of ours, any `Dataset` of (input, label), or loaders of inputs (m, ...) and labels
    (m,), whole numbers in 0..c-1; of `train` no augmentation is wanted. The backbone runs once, in evaluation, and what
    the heads read is kept in memory; where that takes more than 2 GB (or with `cache=False`) it runs in every epoch, on
    a loader's own batches. Each head ends with the weights of the epoch in which its own validation accuracy was best,
    which `History.kept` (K,) names.

    A head's loss is its cross-entropy; with `distill` d and temperature T it is (1 - d) of that plus
    d T^2 KL(last exit || head), both softmaxes at T.
    """
    recipe = HeadRecipe(epochs, batch_size, lr, weight_decay, distill, temperature)
    _check(net, recipe, last, cache)
    as_generator(seed)  # refuses what is no seed
    heads = net.exits if last else net.exits[:-1]
    learners = [TrainableHead(head) for head in heads]
    device = next(net.parameters()).device
    watcher = watcher or TrainingCallback()
    cuda = [device.index] if device.type == "cuda" else []
    with preserve_training_mode(net), torch.random.fork_rng(devices=cuda):
        net.eval()
        torch.manual_seed(derive_seed(seed))
        data = make_head_data(net, learners, train, val, recipe, seed, cache, workers, watcher.on_features)
        try:
            rows = list(_HeadTraining(learners, data, recipe, seed, device, watcher).epochs())
        finally:
            for learner in learners:
                learner.restore_best()
    kept = tuple(learner.epoch for learner in learners)
    return History(tuple(rows), kept if last else (*kept, 0))


def _check(net: Any, recipe: HeadRecipe, last: Any, cache: Any) -> None:
    """Refuse what can be seen to be wrong at once."""
    if not isinstance(net, MultiExitNet):
        raise InputError(f"`net` must be a MultiExitNet, but got {type(net).__name__}")
    if not isinstance(last, bool):
        raise InputError(f"`last` must be true or false, but got {last!r}")
    if not isinstance(cache, bool) and cache != "auto":
        raise InputError(f"`cache` must be 'auto', true or false, but got {cache!r}")
    if distributed.world_size() > 1:
        raise InputError("heads are trained by one process, but there are several")
    if len(net.exits) == 1 and not last:
        raise InputError("`net` has one exit, which is the last: `last=True` trains it, or attach exits before it")
    if last and recipe.distill:
        raise InputError("`distill` has the last exit as its teacher, which cannot learn at the same time as `last`")
    learning = {f"heads.{k}" for k in range(len(net.exits) if last else len(net.exits) - 1)}
    owners: dict[int, tuple[str, str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        owner = "stages" if name.startswith("stages.") else ".".join(name.split(".")[:2])
        other, first = owners.setdefault(id(parameter), (owner, name))
        if other != owner and {owner, other} & learning:
            raise InputError(f"{name} is the same as {first}: a head that shares weights cannot learn alone")


class _HeadTraining:
    """Heads, what they learn from, and how."""

    def __init__(
        self,
        learners: Sequence[TrainableHead],
        data: CachedFeatures | RecomputedFeatures,
        recipe: HeadRecipe,
        seed: int,
        device: torch.device,
        watcher: TrainingCallback,
    ) -> None:
        self._learners, self._data, self._recipe, self._seed = learners, data, recipe, seed
        self._device, self._watcher = device, watcher
        self._schedule = recipe.to_recipe()
        inputs, labels = self._some()
        torch.manual_seed(derive_seed(seed))  # whatever was drawn on the way
        parameters = [p for learner, each in zip(learners, inputs, strict=True) for p in learner.start(each, labels)]
        fused = device.type in ("cpu", "cuda")
        self._optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=fused)

    def epochs(self) -> Iterator[EpochRecord]:
        """Each epoch's figures, when it is done."""
        self._watcher.on_train_start(self._recipe.epochs, len(self._data), History(()))
        for epoch in range(self._recipe.epochs):
            start = time.monotonic()
            loss, speed = self._train(epoch)
            top1, val_loss = self._validate(epoch)
            better = [
                learner.keep_if_best(value, epoch + 1) for learner, value in zip(self._learners, top1, strict=False)
            ]
            lr = self._schedule.lr_at(epoch, 1 - 1 / len(self._data))
            row = EpochRecord(epoch + 1, lr, loss, val_loss, top1, speed, time.monotonic() - start)
            self._watcher.on_epoch_end(row, any(better))
            yield row

    def _some(self) -> tuple[list[Any], Tensor]:
        """What each head reads of some samples, and their labels."""
        several = max(1, _SOME // self._recipe.batch_size)
        read = [self._here((inputs, labels)) for inputs, _, labels in islice(self._data.epoch(0), several)]
        joined: tuple[list[Any], Tensor] = map_tensors(lambda *parts: torch.cat(parts), *read)
        return joined

    def _here(self, seen: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self._device), seen)

    def _train(self, epoch: int) -> tuple[float, float]:
        """The mean of the summed losses, and samples per second."""
        total, samples, batches, start = 0.0, 0, len(self._data), time.monotonic()
        for number, seen in enumerate(self._data.epoch(epoch)):
            inputs, said, labels = self._here(seen)
            for group in self._optimizer.param_groups:
                group["lr"] = self._schedule.lr_at(epoch, number / batches)
            torch.manual_seed(derive_seed(self._seed, epoch, number))
            logits = [learner.logits(each) for learner, each in zip(self._learners, inputs, strict=True)]
            losses = torch.stack([head_loss(each, labels, said, self._recipe) for each in logits])
            total += self._finite(losses.detach(), f"epoch {epoch + 1}, batch {number + 1}")
            self._optimizer.zero_grad()
            losses.sum().backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            samples += len(labels)
            speed = samples / (time.monotonic() - start)
            left = (self._recipe.epochs - epoch) * batches - number - 1
            self._watcher.on_batch_end(epoch, number + 1, speed, left * samples / (number + 1) / speed)
        return total / batches, speed

    def _validate(self, epoch: int) -> tuple[tuple[float, ...], float]:
        """Top-1 of every exit, and the mean of the summed cross-entropies of those that learn."""
        for learner in self._learners:
            learner.sync()
        right, total, samples = torch.zeros(()), 0.0, 0
        for seen in self._data.val():
            inputs, said, labels = self._here(seen)
            logits = [learner.head_logits(each) for learner, each in zip(self._learners, inputs, strict=True)]
            losses = torch.stack([cross_entropy(each, labels) for each in logits])
            total += self._finite(losses, f"the validation of epoch {epoch + 1}") * len(labels)
            answers = logits if said is None else [*logits, said]
            right = right + torch.stack([(each.argmax(1) == labels).sum() for each in answers]).cpu()
            samples += len(labels)
        return tuple((right.double() / samples).tolist()), total / samples

    def _finite(self, losses: Tensor, where: str) -> float:
        """The sum of the heads' losses, refused if one is no number."""
        for k, value in enumerate(losses.tolist()):
            if not isfinite(value):
                raise InputError(
                    f"the loss of exit {k + 1} became {value} in {where}: "
                    f"lower `lr`, or look for inputs that are not finite"
                )
        return float(losses.sum())


def head_loss(logits: Tensor, labels: Tensor, teacher: Tensor | None, recipe: HeadRecipe) -> Tensor:
    """Of one head's logits (n, c), given the last exit's."""
    own = cross_entropy(logits, labels)
    if teacher is None or not recipe.distill:
        return own
    T = recipe.temperature
    learned = kl_div((logits / T).log_softmax(1), (teacher / T).log_softmax(1), log_target=True, reduction="batchmean")
    return (1 - recipe.distill) * own + recipe.distill * T**2 * learned
