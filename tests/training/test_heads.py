"""Head training changes nothing but the heads, computes features once, and produces an ordinary run."""

import copy
import csv
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import small_net
from command import Command, contents
from PIL import Image
from safetensors.torch import load_file
from small_benchmark import small
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import exitwise as ew
from exitwise import data
from exitwise.core.seeds import derive_generator
from exitwise.training import frozen_features
from exitwise.training.callbacks import TrainingCallback
from exitwise.training.frozen_features import CachedFeatures
from exitwise.training.history import History
from exitwise.training.joint import exit_loss
from exitwise.training.recipes import HeadRecipe
from exitwise.training.trainable_head import TrainableHead, split_head

pytestmark = pytest.mark.numerical

State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Make the weights of new heads the same in every run."""
    torch.manual_seed(0)


def digits() -> data.Splits[data.ImageDataset]:
    train, test = data.load("digits")
    return data.HoldOut.random(train, 297, 0, 500).apply(train, test)


def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def pooled(width: int, *layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *layers)


def cnn() -> ew.MultiExitNet:
    """Return a net for images of 8 x 8 with three kinds of early heads."""
    stages = [nn.Sequential(block(1, 32, 1), block(32, 32, 1)), block(32, 32, 2), block(32, 32, 1), block(32, 64, 2)]
    heads = [
        ew.Head(pooled(32, nn.Linear(32, 64), nn.ReLU()), nn.Linear(64, 10)),
        ew.Head(pooled(32), nn.Linear(32, 10)),
        ew.Head(pooled(32, nn.Dropout(0.2), nn.BatchNorm1d(32)), nn.Linear(32, 10)),
        ew.Head(pooled(64), nn.Linear(64, 10)),
    ]
    return ew.MultiExitNet(stages, heads)


@pytest.fixture(scope="module")
def trunk() -> State:
    """Weights of the net of which only the stages and the last exit are trained, like an original module's."""
    torch.manual_seed(0)
    net = cnn().train()
    train = digits().train
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(8):
        for images, labels, _ in data.Batches(train[torch.randperm(len(train))], 50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images)[-1], labels).backward()
            optimizer.step()
    return net.state_dict()


@pytest.fixture
def net(trunk: State) -> ew.MultiExitNet:
    net = cnn()
    net.load_state_dict(trunk)
    return net.eval()


def snapshot(net: nn.Module) -> State:
    return {name: value.clone() for name, value in net.state_dict().items()}


def changed(before: State, after: State) -> set[str]:
    """Return which of "stages" and "heads.K" differ in any bit."""
    assert before.keys() == after.keys()
    differ = [name for name in before if not torch.equal(before[name], after[name])]
    return {"stages" if name.startswith("stages") else ".".join(name.split(".")[:2]) for name in differ}


def top1(net: ew.MultiExitNet, dataset: Any) -> list[float]:
    images, labels, _ = next(iter(data.Batches(dataset, len(dataset))))
    with torch.no_grad():
        return [(logits.argmax(1) == labels).double().mean().item() for logits in net.eval()(images)]


def nlpd(net: ew.MultiExitNet, dataset: Any) -> list[float]:
    images, labels, _ = next(iter(data.Batches(dataset, len(dataset))))
    with torch.no_grad():
        return [nn.functional.cross_entropy(logits, labels).item() for logits in net.eval()(images)]


def vectors(n: int = 120, seed: int = 0) -> TensorDataset:
    """Return vectors (n, 6) in four overlapping clusters, one per class."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=rng)
    centers = 3 * torch.randn(4, 6, generator=torch.Generator().manual_seed(9))
    return TensorDataset(centers[labels] + torch.randn(n, 6, generator=rng), labels)


class Passes:
    """Counter of the samples that went through a module."""

    def __init__(self, module: nn.Module) -> None:
        self.samples = 0
        module.register_forward_pre_hook(self._count)

    def _count(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.samples += len(inputs[0])


# -- what is trained, and what is not


@pytest.mark.slow
def test_new_heads_on_a_trained_trunk_are_good_and_nothing_else_moves(net: ew.MultiExitNet) -> None:
    splits = digits()
    before, untrained = snapshot(net), top1(net, splits.test)
    history = ew.train_heads(net, splits.train, splits.val)
    assert changed(before, net.state_dict()) == {"heads.0", "heads.1", "heads.2"}
    trained = top1(net, splits.test)
    assert max(untrained[:3]) < 0.3
    assert trained[0] > 0.8
    assert min(trained[1:3]) > 0.88
    assert trained[3] == untrained[3] > 0.95
    # Each head has the weights of the epoch with its lowest validation NLPD.
    assert history.top1 == pytest.approx(top1(net, splits.val))
    assert history.nlpd == pytest.approx(nlpd(net, splits.val), rel=1e-5)
    for k, epoch in enumerate(history.kept[:3]):
        values = [row.val_nlpd[k] for row in history.epochs]
        assert values.index(min(values)) == epoch - 1
    assert history.kept[3] == 0
    assert history.epochs[-1].train_loss < history.epochs[0].train_loss / 2


@pytest.mark.parametrize("cache", [True, False])
def test_modes_gradients_and_random_numbers_are_left_alone(cache: bool) -> None:
    net = ew.models.msdnet("tiny-8").train()
    net.stages[1].eval()
    net.exits[0].neck.eval()
    net.exits[1].last.weight.requires_grad_(False)
    net.stages[0].requires_grad_(False)
    modes = [module.training for module in net.modules()]
    wanted = [parameter.requires_grad for parameter in net.parameters()]
    before, state = snapshot(net), torch.get_rng_state()
    splits = digits()
    ew.train_heads(net, splits.train[torch.arange(100)], splits.val, epochs=1, cache=cache)
    assert changed(before, net.state_dict()) == {
        "heads.0",
        "heads.1",
    }  # parameters that were frozen before are trained, too
    assert not torch.equal(before["heads.1.last.weight"], net.exits[1].last.weight)
    assert net.exits[0].neck[0][1].num_batches_tracked == 1  # BatchNorm of a head that is trained
    assert [module.training for module in net.modules()] == modes
    assert [parameter.requires_grad for parameter in net.parameters()] == wanted
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_last_head_is_trained_on_request() -> None:
    net = small_net()
    before = snapshot(net)
    history = ew.train_heads(net, vectors(), vectors(40, 1), train_last=True, epochs=3)
    assert changed(before, net.state_dict()) == {"heads.0", "heads.1", "heads.2"}
    assert all(epoch > 0 for epoch in history.kept)
    former = small_net()
    former.load_state_dict(before)
    ew.train_heads(former, vectors(), vectors(40, 1), last=True, epochs=3)
    assert changed(net.state_dict(), former.state_dict()) == set()
    one_exit = ew.MultiExitNet(net.stages[:1], net.exits[:1])
    assert len(ew.train_heads(one_exit, vectors(), vectors(40, 1), train_last=True, epochs=1).kept) == 1


def test_a_seed_decides_everything() -> None:
    net = small_net()
    first = snapshot(net)

    def trained(seed: int) -> State:
        net.load_state_dict(first)
        ew.train_heads(net, DataLoader(vectors(), 10, shuffle=True), vectors(40, 1), epochs=2, seed=seed)
        return snapshot(net)

    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(len(results))
        results.append(trained(seed))
    assert changed(results[0], results[1]) == set()
    assert changed(results[0], results[2]) == {"heads.0", "heads.1"}


# -- what it computes


def plain_loop(net: ew.MultiExitNet, train: TensorDataset, recipe: HeadRecipe) -> None:
    """Train the first two heads with AdamW through the whole net, without standardized features."""
    inputs, labels = train.tensors
    parameters = [p for head in net.exits[:2] for p in head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay)
    net.eval()
    for head in net.exits[:2]:
        head.train()
    steps = len(labels) // recipe.batch_size
    for epoch in range(recipe.epochs):
        order = torch.randperm(len(labels), generator=derive_generator(0, epoch))
        for step in range(steps):
            where = order[step * recipe.batch_size : (step + 1) * recipe.batch_size]
            share = (epoch + step / steps) / recipe.epochs
            optimizer.param_groups[0]["lr"] = recipe.lr * (1 + np.cos(np.pi * share)) / 2
            *early, last = net(inputs[where])
            total = torch.zeros(())
            for logits in early[:2]:
                teacher = (last.detach() / recipe.temperature).softmax(1)
                student = (logits / recipe.temperature).softmax(1)
                kl = (teacher * (teacher.log() - student.log())).sum(1).mean()
                own = -logits.log_softmax(1)[torch.arange(len(where)), labels[where]].mean()
                total = total + (1 - recipe.distill) * own + recipe.distill * recipe.temperature**2 * kl
            optimizer.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("distill", [0.0, 0.3])
def test_it_is_adamw_on_each_heads_own_loss(cache: bool, distill: float) -> None:
    """Heads that begin with a BatchNorm are not standardized, so a simple loop gives the same weights."""
    torch.manual_seed(1)
    stages = [nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU()) for width in (6, 8, 8)]
    heads = [ew.Head(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 4)) for _ in stages]
    net = ew.MultiExitNet(stages, heads)
    plain = copy.deepcopy(net)
    recipe = HeadRecipe(epochs=1, batch_size=16, distill=distill, temperature=3.0)
    ew.train_heads(net, vectors(), vectors(40, 1), cache=cache, **recipe.to_dict())
    plain_loop(plain, vectors(), recipe)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_features_of_any_scale_are_learned_alike(bias: bool, scale: float) -> None:
    logits = []
    for factor in (1.0, scale):
        torch.manual_seed(2)
        net = ew.MultiExitNet([nn.Linear(6, 8), nn.ReLU()], [_head(nn.Linear(8, 4, bias=bias)) for _ in range(2)])
        with torch.no_grad():
            net.stages[0].weight.mul_(factor)
            net.stages[0].bias.mul_(factor)
        ew.train_heads(net, vectors(), vectors(40, 1), epochs=5)
        logits.append(net(vectors().tensors[0])[0])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_a_trained_head_starts_from_its_weights(bias: bool) -> None:
    net = ew.MultiExitNet([nn.Linear(6, 8), nn.ReLU()], [_head(nn.Linear(8, 4, bias=bias)) for _ in range(2)])
    ew.train_heads(net, vectors(), vectors(40, 1), lr=0.05, batch_size=20)
    before = net(vectors().tensors[0])[0]
    ew.train_heads(net, vectors(), vectors(40, 1), lr=0.0, epochs=1)
    torch.testing.assert_close(net(vectors().tensors[0])[0], before, rtol=1e-4, atol=1e-4)
    for scale in (200, 1e-3):  # so overconfident that the loss exceeds that of a guess, or hardly confident at all
        scaled = copy.deepcopy(net)
        with torch.no_grad():
            for parameter in scaled.exits[0].parameters():
                parameter.mul_(scale)
        ew.train_heads(scaled, vectors(), vectors(40, 1), lr=0.0, epochs=1)
        torch.testing.assert_close(scaled(vectors().tensors[0])[0], scale * before, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("hidden", [0, 16])
def test_where_there_is_nothing_to_learn_weights_do_not_grow_from_training_to_training(hidden: int) -> None:
    """A training resets a head that is no better than a guess."""
    rng = torch.Generator().manual_seed(0)
    noise = [TensorDataset(torch.randn(n, 6, generator=rng), torch.randint(4, (n,), generator=rng)) for n in (999, 99)]
    neck = nn.Sequential(nn.Linear(8, hidden), nn.ReLU()) if hidden else nn.Identity()
    head = ew.Head(neck, nn.Linear(hidden or 8, 4))
    net = ew.MultiExitNet([nn.Linear(6, 8), nn.ReLU()], [head, _head(nn.Linear(8, 4))])
    with torch.no_grad():
        net.stages[0].weight.mul_(0.01)
        head.last.weight.mul_(200)
    for _ in range(3):
        history = ew.train_heads(net, *noise, epochs=2)
        assert history.epochs[0].train_loss < 2  # a guess has 1.39


def test_a_subclass_of_linear_is_trained_without_standardization() -> None:
    class Cosine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 5 * nn.functional.linear(nn.functional.normalize(x), nn.functional.normalize(self.weight))

    net = ew.MultiExitNet([nn.Linear(6, 8), nn.ReLU()], [_head(Cosine(8, 4, bias=False)), _head(nn.Linear(8, 4))])
    history = ew.train_heads(net, vectors(400), vectors(400), epochs=5, lr=0.05)
    assert history.epochs[-1].val_loss == pytest.approx(history.epochs[-1].train_loss, rel=0.1)


def _head(last: nn.Linear) -> ew.Head:
    return ew.Head(nn.Identity(), last)


def test_a_feature_that_never_varies_does_no_harm() -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, torch.zeros_like(x[:, :2])], dim=1)

    net = ew.MultiExitNet([Silent(), nn.Identity()], [_head(nn.Linear(8, 4)) for _ in range(2)])
    history = ew.train_heads(net, vectors(400), vectors(200, 1), epochs=10, lr=0.05)
    assert history.top1[0] > 0.8
    assert bool(net.exits[0].last.weight.abs().max() < 10)


def test_distillation_is_the_formula() -> None:
    rng = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 9, 5, generator=rng).double().unbind()
    labels = torch.randint(5, (9,), generator=rng)
    z, t, y = logits.numpy(), teacher.numpy(), labels.numpy()

    def softmax(x: np.ndarray) -> np.ndarray:
        return np.exp(x) / np.exp(x).sum(1, keepdims=True)

    own = -np.log(softmax(z)[np.arange(9), y]).mean()
    p, q = softmax(t / 3), softmax(z / 3)
    expected = 0.7 * own + 0.3 * 9 * (p * np.log(p / q)).sum(1).mean()
    assert float(exit_loss(logits, labels, teacher, HeadRecipe(distill=0.3, temperature=3.0))) == pytest.approx(
        expected
    )
    assert float(exit_loss(logits, labels, None, HeadRecipe())) == pytest.approx(own)


@pytest.mark.slow
def test_distilled_heads_agree_more_with_the_last_exit_and_need_no_labels(net: ew.MultiExitNet) -> None:
    splits, first = digits(), snapshot(net)
    images, _, _ = next(iter(data.Batches(splits.test, 500)))
    assert isinstance(splits.train, data.ImageSet)
    mixed = replace(splits.train, labels=splits.train.labels.flip(0))

    def trained(train: Any, distill: float) -> tuple[State, float]:
        net.load_state_dict(first)
        ew.train_heads(net, train, splits.val, epochs=8, distill=distill)
        with torch.no_grad():
            *early, last = (logits.log_softmax(1) for logits in net(images))
        gaps = [nn.functional.kl_div(x, last, log_target=True, reduction="batchmean").item() for x in early]
        return snapshot(net), sum(gaps)

    (plain, far), (_, nearer), (taught, near) = (trained(splits.train, distill) for distill in (0.0, 0.5, 1.0))
    assert max(near, nearer) < far  # half and full distillation may come out in either order
    assert changed(plain, taught) == {"heads.0", "heads.1", "heads.2"}
    assert changed(trained(mixed, 1.0)[0], taught) == set()


# -- cached features


@pytest.mark.parametrize("kind", ["cnn", "msdnet", "vectors"])
def test_cached_features_give_the_same_heads_as_running_the_backbone(kind: str, net: ew.MultiExitNet) -> None:
    train: Any
    if kind == "vectors":
        net, train, val = small_net(), vectors(), vectors(40, 1)
    else:
        splits = digits()
        train, val = splits.train[torch.arange(300)], splits.val
        net = net if kind == "cnn" else ew.models.msdnet("tiny-8")
    first, results = snapshot(net), []
    for cache in (True, False):
        net.load_state_dict(first)
        history = ew.train_heads(net, train, val, epochs=3, cache=cache, distill=0.2)
        results.append((snapshot(net), history))
    for name, value in results[0][0].items():  # on this machine even bitwise equal
        torch.testing.assert_close(results[1][0][name], value, rtol=1e-4, atol=1e-5)
    assert results[0][1].kept == results[1][1].kept


def test_the_backbone_runs_once_over_every_sample(net: ew.MultiExitNet) -> None:
    splits = digits()
    first, last = Passes(net.stages[0]), Passes(net.stages[3])
    ew.train_heads(net, splits.train, splits.val, epochs=5)
    assert first.samples == 1000 + 297
    assert last.samples == 297  # not needed on train
    first.samples = last.samples = 0
    ew.train_heads(net, splits.train, splits.val, epochs=5, distill=0.5)
    assert first.samples == last.samples == 1000 + 297
    first.samples = 0
    ew.train_heads(net, splits.train, splits.val, epochs=5, cache=False)
    assert first.samples > 5 * (960 + 297)


def test_features_that_do_not_fit_are_not_cached(
    net: ew.MultiExitNet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    splits = digits()
    passes = Passes(net.stages[0])
    # 32 + 32 + 32 floats and a label per sample, and ten logits of the last exit per validation sample
    size = (1000 + 297) * (3 * 32 * 4 + 8) + 297 * 10 * 4
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(frozen_features, "CACHE_BYTES", size)
    ew.train_heads(net, splits.train, splits.val, epochs=2)
    assert f"features take {size / 2**20:.1f} MB and are cached: the backbone runs once" in caplog.text
    assert passes.samples == 1297
    monkeypatch.setattr(frozen_features, "CACHE_BYTES", size - 1)
    ew.train_heads(net, splits.train, splits.val, epochs=2)
    assert "the backbone runs in every epoch" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING
    assert passes.samples > 3 * 1297
    passes.samples = 0
    ew.train_heads(net, splits.train, splits.val, epochs=2, cache=True)
    assert passes.samples == 1297


class Noisy(nn.Module):
    """Random noise in training mode, without nn.Dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) if self.training else x


class Pick(nn.Module):
    def forward(self, state: dict[str, Tensor]) -> Tensor:
        return state["tokens"][:, 0]


MAPS = torch.rand(3, 4, 5, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("neck", "state", "ahead"),
    [
        (nn.Identity(), torch.rand(3, 4), (3, 4)),
        (nn.Sequential(), torch.rand(3, 4), (3, 4)),
        (pooled(4), MAPS, (3, 4)),
        (nn.Sequential(nn.Sequential(nn.ReLU(inplace=True)), pooled(4, nn.Linear(4, 4))), MAPS, (3, 4)),
        (nn.Sequential(Pick(), nn.Linear(4, 4)), {"tokens": torch.rand(3, 9, 4), "mask": torch.ones(3)}, (3, 4)),
        (nn.Sequential(nn.Dropout(0.5), *pooled(4)), MAPS, (3, 4, 5, 5)),
        (nn.Sequential(Noisy(), *pooled(4)), MAPS, (3, 4, 5, 5)),
        (nn.Sequential(nn.BatchNorm2d(4, affine=False), *pooled(4)), MAPS, (3, 4, 5, 5)),
        (nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.Flatten()), MAPS, (3, 4, 2, 2)),
    ],
)
def test_a_head_is_cut_before_the_first_part_that_learns_or_is_random(
    neck: nn.Module, state: Any, ahead: tuple[int, ...]
) -> None:
    head = ew.Head(neck, nn.Linear(4, 2)).eval()
    given = copy.deepcopy(state)
    before, after = split_head(head, state)
    with torch.no_grad():
        kept = before(state)
        assert tuple(kept.shape) == ahead
        assert torch.equal(after(kept), head(given))


def test_msdnet_heads_precompute_one_feature_map_and_other_heads_the_stage_state() -> None:
    net = ew.models.msdnet("tiny-8").eval()
    states = [state for _, state in net.states(torch.rand(3, 1, 8, 8))]
    learners = [TrainableHead(head) for head in net.exits]
    for learner, state in zip(learners, states, strict=True):
        assert torch.equal(learner.precompute(state), state[-1])

    class Own(ew.Head):
        def features(self, state: Any) -> Tensor:
            return super().features(state[0])

    kept = TrainableHead(Own(pooled(4), nn.Linear(4, 2))).precompute([MAPS, MAPS])
    assert torch.equal(kept[0], MAPS)


def test_a_small_view_does_not_hold_the_whole_state_in_memory() -> None:
    class Tokens(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"tokens": x[:, None].expand(-1, 50, -1).contiguous()}

    heads = [ew.Head(Pick(), nn.Linear(6, 4)) for _ in range(2)]
    net = ew.MultiExitNet([Tokens(), nn.Identity()], heads).eval()
    learners = [TrainableHead(net.exits[0])]
    head_data = frozen_features.make_head_data(net, learners, vectors(), vectors(40, 1), HeadRecipe(), 0, True)
    assert isinstance(head_data, CachedFeatures)
    inputs, last_logits, labels = head_data._train
    assert inputs[0].untyped_storage().nbytes() == 120 * 6 * 4
    assert last_logits is None
    assert torch.equal(labels, vectors().tensors[1])


# -- arguments


class Words(Dataset[tuple[dict[str, Tensor], int]]):
    """Dataset whose inputs are mappings."""

    def __init__(self, vectors: TensorDataset) -> None:
        self._vectors = vectors

    def __len__(self) -> int:
        return len(self._vectors)

    def __getitem__(self, position: int) -> tuple[dict[str, Tensor], int]:
        values, label = self._vectors[position]
        return {"left": values[:3], "right": values[3:]}, int(label)


class Joined(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return torch.cat([x["left"], x["right"]], dim=1)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", ["dataset", "loader", "shuffled", "list", "named inputs"])
@pytest.mark.slow_after_first
def test_datasets_and_loaders_of_any_kind_are_accepted(kind: str, cache: bool) -> None:
    net = small_net()
    train: Any
    train, val = vectors(400), vectors(200, 1)
    given: dict[str, Callable[[], tuple[Any, Any]]] = {
        "dataset": lambda: (train, val),
        "loader": lambda: (DataLoader(train, 32), DataLoader(val, 32)),
        "shuffled": lambda: (DataLoader(train, 32, shuffle=True, drop_last=True), DataLoader(val, 7, shuffle=True)),
        "list": lambda: (list(DataLoader(train, 32)), list(DataLoader(val, 32))),
        "named inputs": lambda: (Words(train), DataLoader(Words(val), 20)),
    }
    if kind == "named inputs":
        net.stages[0] = nn.Sequential(Joined(), *net.stages[0])
    history = ew.train_heads(net, *given[kind](), epochs=10, lr=0.05, cache=cache)
    assert min(history.top1[:2]) > 0.7
    net.eval()
    inputs, labels = val.tensors
    named = {"left": inputs[:, :3], "right": inputs[:, 3:]}
    exit_logits = net(named if kind == "named inputs" else inputs)
    right = [(logits.argmax(1) == labels).double().mean().item() for logits in exit_logits]
    assert history.top1 == pytest.approx(right)


def test_fewer_samples_than_a_batch_are_one_batch_and_a_generator_can_be_kept() -> None:
    history = ew.train_heads(small_net(), vectors(20), (batch for batch in DataLoader(vectors(9, 1), 5)), epochs=2)
    assert len(history.epochs) == 2


class Recorder(TrainingCallback):
    """Callback that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_features(self, split: str, done: int, samples: int | None) -> None:
        self.calls.append((split, done, samples))

    def on_train_start(self, epochs: int, batches: int, history: History) -> None:
        self.calls.append(("started", epochs, batches))

    def on_batch_end(self, epoch: int, batch: int, images_per_second: float, seconds_left: float) -> None:
        assert images_per_second > 0
        assert seconds_left >= 0
        self.calls.append((epoch, batch))

    def on_epoch_end(self, row: Any, kept: bool) -> None:
        self.calls.append((row.epoch, kept))


@pytest.mark.parametrize("keyword", ["callback", "watcher"])
def test_hooks_of_the_callback_are_called(keyword: str) -> None:
    """The former keyword `watcher` works like `callback`."""
    recorder = Recorder()
    options: dict[str, Any] = {keyword: recorder}
    ew.train_heads(small_net(), vectors(), vectors(40, 1), epochs=1, **options)
    passes = {("train", 64, 120), ("train", 120, 120), ("val", 40, 40)}
    assert set(recorder.calls[:3]) == passes
    assert recorder.calls[3:] == [("started", 1, 1), (0, 1), (1, True)]


def bad_labels(value: int) -> TensorDataset:
    inputs, labels = (tensor.clone() for tensor in vectors().tensors)
    labels[5] = value
    return TensorDataset(inputs, labels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"net": nn.Linear(6, 4)}, "`net` must be a MultiExitNet, but got Linear"),
        ({"net": ew.MultiExitNet([nn.Identity()], [_head(nn.Linear(6, 4))])}, "`net` has only the last exit"),
        ({"train": bad_labels(4)}, "`train` has a label 0 to 4 outside the net's 4 classes"),
        ({"val": bad_labels(-1)}, "`val` has a label -1 to 3 outside the net's 4 classes"),
        ({"train": []}, "`train` gave no batches"),
        ({"val": []}, "`val` gave no samples"),
        ({"train": TensorDataset(torch.empty(0, 6), torch.empty(0).long())}, "`train` gave no samples"),
        ({"val": TensorDataset(torch.empty(0, 6), torch.empty(0).long())}, "`val` gave no samples"),
        ({"train": 3}, "`train` must be a dataset or a loader of (images, labels) that has a length, but got int"),
        ({"train": iter([])}, "that has a length, but got list_iterator"),
        ({"val": None}, "`val` must be a dataset or a loader of (images, labels), but got NoneType"),
        ({"train": TensorDataset(torch.rand(9, 6), torch.rand(9))}, "`train` must give whole numbers as labels"),
        (
            {"train": TensorDataset(torch.rand(9, 5), torch.zeros(9).long())},
            "cannot take inputs of float32 (9, 5): mat1",
        ),
        ({"val": iter([]), "cache": False}, "`val` gave no samples"),
        ({"val": iter(DataLoader(vectors(), 9)), "cache": False}, "`val` can be read only once"),
        ({"epochs": 0}, "`epochs` must be a whole number of at least 1, but got 0"),
        ({"batch_size": 2.0}, "`batch_size` must be a whole number of at least 1, but got 2.0"),
        ({"lr": -1}, "`lr` must be a number of at least 0, but got -1"),
        ({"weight_decay": float("inf")}, "`weight_decay` must be a number of at least 0, but got inf"),
        ({"distill": 1.5}, "`distill` must be a number from 0 to 1, but got 1.5"),
        ({"distill": "half"}, "`distill` must be a number from 0 to 1, but got 'half'"),
        ({"distill": 0.5, "train_last": True}, "`distill` needs a fixed last exit as the teacher"),
        ({"temperature": 0}, "`temperature` must be above 0, but got 0"),
        ({"train_last": 1}, "`train_last` must be True or False, but got 1"),
        ({"last": 1}, "`last` must be True or False, but got 1"),
        ({"train_last": False, "last": True}, "`last` is the former name of `train_last`: pass only `train_last`"),
        ({"callback": TrainingCallback(), "watcher": TrainingCallback()}, "`watcher` is the former name of `callback`"),
        ({"cache": "yes"}, "`cache` must be 'auto', True or False, but got 'yes'"),
        ({"seed": -1}, "`seed` must be"),
        ({"lr": 1e38}, "the loss of exit 1 became"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(changes: dict[str, Any], message: str) -> None:
    net = changes.pop("net", small_net())
    before = snapshot(net)
    given = {"train": vectors(), "val": vectors(40, 1), "epochs": 1, "batch_size": 16, **changes}
    with pytest.raises(ew.InputError) as error:
        ew.train_heads(net, given.pop("train"), given.pop("val"), **given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert changed(before, net.state_dict()) == set()


@pytest.mark.parametrize("split", ["train", "val"])
def test_non_finite_inputs_are_reported(split: str) -> None:
    splits = {"train": vectors(), "val": vectors(40, 1)}
    splits[split].tensors[0][7, 3] = float("nan")
    with pytest.raises(ew.InputError, match=r"the loss of exit 1 became nan in .*epoch 1.* not finite"):
        ew.train_heads(small_net(), splits["train"], splits["val"], epochs=1, batch_size=60)


def test_shared_weights_are_refused() -> None:
    net = small_net()
    net.exits[2].last = net.exits[0].last
    with pytest.raises(ew.InputError, match=r"heads.2.last.weight is the same parameter as heads.0.last.weight"):
        ew.train_heads(net, vectors(), vectors(40, 1))
    net = small_net()
    net.exits[1].neck = net.stages[1]
    with pytest.raises(ew.InputError, match=r"heads.1.neck.0.weight is the same parameter as stages.1.0.weight"):
        ew.train_heads(net, vectors(), vectors(40, 1))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exitwise.core.distributed.world_size", lambda: 2)
    with pytest.raises(ew.InputError, match="must be trained in one process, but there are 2"):
        ew.train_heads(small_net(), vectors(), vectors(40, 1))


def test_a_parametrized_layer_is_trained_without_standardization() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    neck = nn.Sequential(normed, nn.ReLU())
    net = ew.MultiExitNet([nn.Linear(6, 8), nn.ReLU()], [ew.Head(neck, nn.Linear(8, 4)), _head(nn.Linear(8, 4))])
    history = ew.train_heads(net, vectors(400), vectors(200, 1), epochs=10, lr=0.05)
    inputs, labels = vectors(200, 1).tensors
    right = (net(inputs)[0].argmax(1) == labels).double().mean().item()
    assert history.top1[0] == pytest.approx(right)
    assert right > 0.8


@pytest.mark.slow
def test_a_head_that_overfits_is_kept_from_before_its_loss_rises() -> None:
    train, val = vectors(24), vectors(400, 1)
    torch.manual_seed(1)
    neck = nn.Sequential(nn.Linear(6, 64), nn.ReLU())
    net = ew.MultiExitNet([nn.Identity(), nn.Linear(6, 8)], [ew.Head(neck, nn.Linear(64, 4)), _head(nn.Linear(8, 4))])
    history = ew.train_heads(net, train, val, epochs=60, batch_size=8, lr=0.05)
    losses = [row.val_nlpd[0] for row in history.epochs]
    assert losses[-1] > 1.2 * min(losses)  # it overfits
    assert history.kept[0] == 1 + losses.index(min(losses))
    inputs, labels = val.tensors
    with torch.no_grad():
        assert nn.functional.cross_entropy(net(inputs)[0], labels).item() == pytest.approx(min(losses), rel=1e-5)
    assert history.best.epoch == history.kept[0]


def test_a_history_without_losses_of_exits_still_opens(tmp_path: Path) -> None:
    history = ew.train_heads(small_net(), vectors(), vectors(40, 1), epochs=4)
    history.save(tmp_path / "history.csv")
    with (tmp_path / "history.csv").open(newline="") as file:
        rows = [{k: v for k, v in row.items() if "nlpd" not in k} for row in csv.DictReader(file)]
    assert len(rows[0]) == 10
    with (tmp_path / "former.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    former = History.load(tmp_path / "former.csv")
    assert former.kept == history.kept
    assert former.top1 == pytest.approx(history.top1, abs=1e-5)
    assert former.nlpd == ()
    sums = [sum(row.val_top1) for row in former.epochs]
    assert former.best.epoch == 1 + sums.index(max(sums))


def test_an_interrupted_training_leaves_the_best_heads_so_far() -> None:
    class Stop(TrainingCallback):
        def on_epoch_end(self, row: Any, kept: bool) -> None:
            if row.epoch == 2:
                raise KeyboardInterrupt

    net, before = small_net(), small_net()
    before.load_state_dict(net.state_dict())
    with pytest.raises(KeyboardInterrupt):
        ew.train_heads(net, vectors(), vectors(40, 1), epochs=9, callback=Stop())
    assert changed(before.state_dict(), net.state_dict()) == {"heads.0", "heads.1"}


def test_a_history_of_heads_is_saved_and_drawn(tmp_path: Path) -> None:
    history = ew.train_heads(small_net(), vectors(), vectors(40, 1), epochs=6)
    history.save(tmp_path / "history.csv")
    loaded = History.load(tmp_path / "history.csv")
    assert loaded.kept == history.kept
    assert loaded.top1 == pytest.approx(history.top1, abs=1e-5)
    assert History.from_dict(json.loads(json.dumps(history.to_dict()))) == history
    assert loaded.nlpd == pytest.approx(history.nlpd, rel=1e-5)
    sums = [sum(row.val_nlpd) for row in history.epochs]
    assert history.best.epoch == 1 + sums.index(min(sums))
    stars = next(line for line in history.figure().axes[1].lines if line.get_label() == "kept")
    assert list(stars.get_xdata()) == list(history.kept[:2])
    history.plot(tmp_path / "history.png")
    with Image.open(tmp_path / "history.png") as drawn:
        assert drawn.size > (500, 200)


# -- the command

OWN = """
import exitwise as ew
import torch
from torch import nn

def block(inputs, outputs, stride):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

def head(width):
    return ew.Head(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(width, 10))

def net():
    return ew.MultiExitNet([block(1, 16, 1), block(16, 32, 2), block(32, 32, 2)], [head(16), head(32), head(32)])
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a tiny MSDNet after three epochs."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    splits = digits()
    net = ew.models.msdnet("tiny-8")
    ew.train(net, splits.train, splits.val, recipe=ew.Recipe(epochs=3, batch_size=50), out=folder)
    return folder / "net.safetensors"


@pytest.mark.slow
def test_the_whole_way_from_a_checkpoint_to_predictions(checkpoint: Path, tmp_path: Path, exitwise: Command) -> None:
    run = tmp_path / "run"
    options = ("--data", "digits", "--distill", 0.5, "--epochs", 4, "--lr", 0.02, "--seed", 3)
    done = exitwise("train-heads", *options, "--weights", checkpoint, "--out", run)
    assert done.status == 0, done.err
    assert "Trained for 4 epochs; the run keeps each head from the epoch of its lowest validation NLPD" in done.out
    assert done.err.count("top-1 % by exit") == 4
    names = ["history.csv", "history.png", "net.safetensors", "run.json", "split.safetensors"]
    assert sorted(path.name for path in run.iterdir()) == names
    before, after = load_file(checkpoint), load_file(run / "net.safetensors")
    assert changed(before, after) == {"heads.0", "heads.1"}
    metadata = json.loads((run / "run.json").read_text())
    assert metadata["model"]["preset"] == "tiny-8"
    assert metadata["training"].pop("threads") >= 1
    assert metadata["training"] == {
        "recipe": HeadRecipe(epochs=4, lr=0.02, distill=0.5).to_dict(),
        "freeze_backbone": True,
        "last": False,
        "weights": str(checkpoint),
        "seed": 3,
    }
    history = History.load(run / "history.csv")
    net = ew.load_net(run / "net.safetensors")
    assert history.top1 == pytest.approx(top1(net, digits().val), abs=1e-5)

    assert exitwise("collect", run).status == 0
    assert exitwise("calibrate", run).status == 0
    done = exitwise("evaluate", run, "--budget", "60%", "--json")
    assert all(result["evaluation"]["top1"] > 0.8 for result in done.json["methods"].values())
    images = tmp_path / "images"
    images.mkdir()
    test = digits().test
    assert test is not None
    for k, pixels in enumerate(test.pixels_of(torch.arange(30), None, None)):
        Image.fromarray(pixels[0].numpy()).save(images / f"{k:02}.png")
    done = exitwise("predict", run, images, "--budget", "60%", "--out", tmp_path / "rows.csv")
    assert done.status == 0, done.err
    with (tmp_path / "rows.csv").open(newline="") as file:
        predicted = [int(row["predicted"]) for row in csv.DictReader(file)]
    assert np.mean(np.array(predicted) == test.labels[:30].numpy()) > 0.8
    assert exitwise("report", run, "--out", tmp_path / "page.html").status == 0
    assert exitwise("report", run, "--live", "--out", tmp_path / "live.html").status == 0
    assert "batch size 64" in (tmp_path / "page.html").read_text()

    kept = contents(run)
    for again in (("train", run, "--resume"), ("train", run, "--resume", "--freeze-backbone")):
        refused = exitwise(*again)
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert "repeat it with --force" in refused.err
    refused = exitwise("train-heads", *options, "--weights", checkpoint, "--out", run)
    assert "already holds a run" in refused.err
    assert contents(run) == kept
    done = exitwise("train-heads", *options, "--weights", checkpoint, "--out", run, "--force", "--json")
    assert done.json["kept"] == list(history.kept)
    again = load_file(run / "net.safetensors")
    assert changed(after, again) == set()


@pytest.mark.slow
def test_a_net_of_ones_own(tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heads_net.py").write_text(OWN)
    options = ("train-heads", "--data", "digits", "--net", "heads_net:net", "--epochs", 2)
    assert exitwise(*options, "--out", "one").status == 0
    assert exitwise(*options, "--out", "two", "--last", "--weights", "one/net.safetensors").status == 0
    one, two = (load_file(f"{name}/net.safetensors") for name in ("one", "two"))
    assert changed(one, two) == {"heads.0", "heads.1", "heads.2"}
    former = exitwise("train", "--freeze-backbone", *options[1:], "--out", "three")
    assert former.err.endswith("exitwise: `train --freeze-backbone` is now `exitwise train-heads`\n")
    assert changed(one, load_file("three/net.safetensors")) == set()
    assert exitwise("collect", "two", "--net", "heads_net:net").status == 0
    assert exitwise("evaluate", "two", "--budget", "80%").status == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train-heads"], "needs a trained tiny-8: give its weights with --weights"),
        (["train-heads", "--weights", "nowhere.pth"], "nowhere.pth does not exist"),
        (["train-heads", "--model", "tiny8"], "did you mean 'tiny-8'"),
        (["train-heads", "--net", "heads_net:net", "--distill", "2"], "`--distill` must be a number from 0 to 1"),
        (["train-heads", "--net", "heads_net:net", "--epochs", "0"], "`--epochs` must be a whole number"),
        (["train-heads", "--net", "heads_net:net", "--seed", "-1"], "`--seed` must be"),
        (
            ["train-heads", "--net", "heads_net:net", "--last", "--distill", "1"],
            "its head cannot be trained as well",
        ),
        (["train-heads", "--net", "heads_net:net", "--lr", "1e38"], "the loss of exit 1 became"),
        (["train", "--freeze-backbone", "--recipe", "digits"], "--recipe is not an option of train-heads"),
        (["train-heads", "--precision", "bf16-mixed"], "No such option: --precision"),
        (["train", "--freeze-backbone", "--compile"], "--compile is not an option of train-heads"),
        (["train-heads", "--net", "heads_net:net", "--attach", "auto"], "--attach is for nets by name"),
        (["train-heads", "--weights", "x.pth", "--attach", "auto"], "needs the number of exits: give --exits"),
        (["train-heads", "--weights", "x.pth", "--exits", "3"], "--exits is for --attach auto"),
        (["train-heads", "--weights", "x.pth", "--attach", "stages"], "--attach stages is for networks of timm"),
        (["train-heads", "--weights", "x.pth", "--head", "conv"], "give --attach as well"),
        (["train", "--last"], "--last is for exits that are attached"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heads_net.py").write_text(OWN)
    done = exitwise(*options, "--data", "digits", "--out", "run")
    assert (done.status, done.err.count("\n")) == (2, 1), done.err
    assert message in done.err
    assert {path.name for path in tmp_path.iterdir()} <= {"heads_net.py", "__pycache__"}


@pytest.mark.slow
def test_the_benchmark_measures_everything(tmp_path: Path) -> None:
    rows = small("heads.py", tmp_path)["measured"]
    assert [row["net"] for row in rows] == ["ResNet20", "MSDNet-small", "MSDNet-small, pooled heads"]
    assert all(set(row["median seconds"]) == set(rows[0]["median seconds"]) for row in rows)
    # About 40 was measured; above 1 is safe on any machine.
    assert rows[0]["median ratio"] > 1
