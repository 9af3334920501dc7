"""Head training on a frozen backbone, whose weights and BatchNorm statistics stay the same bit for bit."""

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from exitwise.core import distributed
from exitwise.core.checks import check_bool
from exitwise.core.errors import InputError
from exitwise.core.nested import map_tensors
from exitwise.core.seeds import as_generator, derive_seed
from exitwise.models.net import MultiExitNet, preserve_training_mode
from exitwise.training.callbacks import TrainingCallback, resolve_former_name
from exitwise.training.frozen_features import Cache, CachedFeatures, RecomputedFeatures, make_head_data
from exitwise.training.history import EpochRecord, History
from exitwise.training.joint import exit_loss
from exitwise.training.recipes import HeadRecipe
from exitwise.training.trainable_head import TrainableHead

_STATISTICS_SAMPLES = 1024  # about this many training samples give the mean and deviation of features


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
    train_last: bool | None = None,
    cache: Cache = "auto",
    seed: int = 0,
    workers: int = 0,
    callback: TrainingCallback | None = None,
    last: bool | None = None,
    watcher: TrainingCallback | None = None,
) -> History:
    """Train the heads of a net in place with AdamW; stages, and by default the last head, stay as they are.

    The backbone runs once, in evaluation mode, and its features are cached in memory. If they take more than 2 GB (or
    with `cache=False`), it runs in every epoch instead, on a loader's own batches. Each head ends with the weights of
    the epoch in which its own validation NLPD was lowest: later epochs may be slightly more accurate, but they are
    overconfident.

    A head's loss is its cross-entropy; with `distill` d and temperature T it is (1 - d) of that plus
    d T^2 KL(last exit || head), both softmaxes at T.

    Args:
        net: The net whose heads are trained, in any mode and on any device.
        train: Training data without augmentation: a dataset of `ew.data`, any `Dataset` of (input, label), or a loader
            of inputs (m, ...) and labels (m,) that has a length. Labels are whole numbers in 0..c-1.
        val: Validation data of the same kinds; a loader needs no length.
        epochs: Number of epochs.
        batch_size: Samples per batch, unless a loader gives its own batches and features are not cached.
        lr: First learning rate; it falls to 0 along half a cosine.
        weight_decay: Weight decay of AdamW.
        distill: Weight of distillation from the last exit, from 0 to 1.
        temperature: Temperature T of distillation.
        train_last: Also train the last head; False if not given.
        cache: True caches the features, False recomputes them in every epoch, "auto" caches up to 2 GB.
        seed: Seed for data order, new weights and dropout.
        workers: Processes that decode image files of datasets of `ew.data`; 0 decodes in the training process.
        callback: Object whose hooks are called during training: an `exitwise.training.callbacks.TrainingCallback`.
        last: Former name of `train_last`.
        watcher: Former name of `callback`.

    Returns:
        Learning rate, losses, accuracies (K,), NLPDs (K,) and speed of every epoch. `history.kept` (K,) has the epoch
        of each head's weights, 0 for a head that was not trained.

    Raises:
        InputError: An argument is invalid, a head shares weights with another part of the net, there are several
            processes, or a loss became non-finite.

    Example:
        >>> import exitwise as ew
        >>> import torch
        >>> dataset = torch.utils.data.TensorDataset(torch.rand(40, 1, 8, 8), torch.arange(40) % 10)
        >>> net = ew.models.msdnet("tiny-8")
        >>> history = ew.train_heads(net, dataset, dataset, epochs=2)
        >>> len(history.epochs), len(history.kept), history.kept[-1]
        (2, 3, 0)
    """
    recipe = HeadRecipe(epochs, batch_size, lr, weight_decay, distill, temperature)
    callback = resolve_former_name("callback", callback, "watcher", watcher) or TrainingCallback()
    given = resolve_former_name("train_last", train_last, "last", last)
    train_last = given is not None and check_bool("train_last" if last is None else "last", given)
    _check_arguments(net, recipe, train_last, cache)
    as_generator(seed)  # raises InputError if the seed is invalid
    heads = [TrainableHead(head) for head in (net.exits if train_last else net.exits[:-1])]
    device = next(net.parameters()).device
    cuda = [device.index] if device.type == "cuda" else []
    with preserve_training_mode(net), torch.random.fork_rng(devices=cuda):
        net.eval()
        torch.manual_seed(derive_seed(seed))
        data = make_head_data(net, heads, train, val, recipe, seed, cache, workers, callback.on_features)
        try:
            rows = list(_HeadTraining(heads, data, recipe, seed, device, callback).epochs())
        finally:
            for head in heads:
                head.restore_best()
    kept = tuple(head.best_epoch for head in heads)
    return History(tuple(rows), kept if train_last else (*kept, 0))


def _check_arguments(net: Any, recipe: HeadRecipe, train_last: bool, cache: Any) -> None:
    """Raise InputError for arguments that are invalid whatever the data are."""
    if not isinstance(net, MultiExitNet):
        raise InputError(f"`net` must be a MultiExitNet, but got {type(net).__name__}")
    if not isinstance(cache, bool) and cache != "auto":
        raise InputError(f"`cache` must be 'auto', True or False, but got {cache!r}")
    if distributed.world_size() > 1:
        raise InputError(f"heads must be trained in one process, but there are {distributed.world_size()}")
    if len(net.exits) == 1 and not train_last:
        raise InputError("`net` has only the last exit: pass `train_last=True` to train it, or attach earlier exits")
    if train_last and recipe.distill:
        raise InputError("`distill` needs a fixed last exit as the teacher, so its head cannot be trained as well")
    _check_shared_weights(net, len(net.exits) if train_last else len(net.exits) - 1)


def _check_shared_weights(net: MultiExitNet, num_heads: int) -> None:
    """Raise InputError if one of the first `num_heads` heads shares a parameter with another part of the net."""
    trained = {f"heads.{k}" for k in range(num_heads)}
    owners: dict[int, tuple[str, str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        owner = "stages" if name.startswith("stages.") else ".".join(name.split(".")[:2])
        first_owner, first_name = owners.setdefault(id(parameter), (owner, name))
        if first_owner != owner and {owner, first_owner} & trained:
            raise InputError(
                f"{name} is the same parameter as {first_name}: a head that shares weights cannot be trained separately"
            )


class _HeadTraining:
    """AdamW on the heads' losses, with per-head selection of the best epoch."""

    def __init__(
        self,
        heads: Sequence[TrainableHead],
        data: CachedFeatures | RecomputedFeatures,
        recipe: HeadRecipe,
        seed: int,
        device: torch.device,
        callback: TrainingCallback,
    ) -> None:
        self._heads, self._data, self._recipe, self._seed = heads, data, recipe, seed
        self._device, self._callback = device, callback
        self._schedule = recipe.to_recipe()
        inputs, labels = self._first_samples()
        torch.manual_seed(derive_seed(seed))  # new weights must not depend on what the loader has drawn
        parameters = [p for head, x in zip(heads, inputs, strict=True) for p in head.start(x, labels)]
        fused = device.type in ("cpu", "cuda")
        self._optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=fused)

    def epochs(self) -> Iterator[EpochRecord]:
        """Train; yield the record of each epoch when it is done."""
        self._callback.on_train_start(self._recipe.epochs, len(self._data), History(()))
        for epoch in range(self._recipe.epochs):
            start = time.monotonic()
            loss, speed = self._train_epoch(epoch)
            top1, nlpd = self._validate(epoch)
            improved = [head.keep_if_best(value, epoch + 1) for head, value in zip(self._heads, nlpd, strict=False)]
            val_loss = sum(nlpd[: len(self._heads)])
            lr = self._schedule.lr_at(epoch, 1 - 1 / len(self._data))
            row = EpochRecord(epoch + 1, lr, loss, val_loss, top1, speed, time.monotonic() - start, nlpd)
            self._callback.on_epoch_end(row, any(improved))
            yield row

    def _first_samples(self) -> tuple[list[Any], Tensor]:
        """Return inputs of each head and labels of about `_STATISTICS_SAMPLES` samples."""
        batches = islice(self._data.epoch(0), max(1, _STATISTICS_SAMPLES // self._recipe.batch_size))
        samples = [self._to_device((inputs, labels)) for inputs, _, labels in batches]
        joined: tuple[list[Any], Tensor] = map_tensors(lambda *tensors: torch.cat(tensors), *samples)
        return joined

    def _to_device(self, batch: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self._device), batch)

    def _train_epoch(self, epoch: int) -> tuple[float, float]:
        """Train for one epoch; return the mean of the summed losses and the samples per second."""
        total, samples, batches, start = 0.0, 0, len(self._data), time.monotonic()
        for index, batch in enumerate(self._data.epoch(epoch)):
            inputs, teacher_logits, labels = self._to_device(batch)
            for group in self._optimizer.param_groups:
                group["lr"] = self._schedule.lr_at(epoch, index / batches)
            torch.manual_seed(derive_seed(self._seed, epoch, index))
            logits = [head.logits(x) for head, x in zip(self._heads, inputs, strict=True)]
            losses = torch.stack([exit_loss(z, labels, teacher_logits, self._recipe) for z in logits])
            total += self._sum_finite(losses.detach(), f"epoch {epoch + 1}, batch {index + 1}")
            self._optimizer.zero_grad()
            losses.sum().backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            samples += len(labels)
            speed = samples / (time.monotonic() - start)
            remaining = (self._recipe.epochs - epoch) * batches - index - 1
            self._callback.on_batch_end(epoch, index + 1, speed, remaining * samples / (index + 1) / speed)
        return total / batches, speed

    def _validate(self, epoch: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the top-1 accuracy (K,) and the NLPD (K,) of every exit."""
        for head in self._heads:
            head.sync()
        correct, total, samples = torch.zeros(()), torch.zeros((), dtype=torch.float64), 0
        for batch in self._data.val():
            inputs, last_logits, labels = self._to_device(batch)
            logits = [head.head_logits(x) for head, x in zip(self._heads, inputs, strict=True)]
            all_logits = logits if last_logits is None else [*logits, last_logits]
            losses = torch.stack([cross_entropy(z, labels) for z in all_logits]).double()
            self._sum_finite(losses[: len(logits)], f"the validation of epoch {epoch + 1}")
            total = total + losses.cpu() * len(labels)
            correct = correct + torch.stack([(z.argmax(1) == labels).sum() for z in all_logits]).cpu()
            samples += len(labels)
        return tuple((correct.double() / samples).tolist()), tuple((total / samples).tolist())

    def _sum_finite(self, losses: Tensor, where: str) -> float:
        """Return the sum of the heads' losses; raise InputError if one is non-finite."""
        for k, value in enumerate(losses.tolist()):
            if not isfinite(value):
                raise InputError(
                    f"the loss of exit {k + 1} became {value} in {where}: "
                    f"lower `lr`, or check the inputs for values that are not finite"
                )
        return float(losses.sum())
