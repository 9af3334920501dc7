"""An early-exit net predicts as simulated, runs later stages on active samples only, and refuses invalid input."""

import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import inf
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from cases import header_without_digest, small_net
from classifier_cases import (
    BYTES,
    LAPLACE,
    OURS,
    SHAPE,
    SIZES,
    VANILLA,
    WRONG,
    assert_as_simulated,
    calibrated,
    changed,
    classifier,
    clear,
    fitted,
    middle_policy,
    nested_net,
    of_shape,
    own_classifier,
    pictures,
    random_policy,
    refused,
    same,
    simulated,
    some_images,
    tiny,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import exitwise as ew
from exitwise.calibration.methods import DROPOUT_METHODS, POE_METHODS
from exitwise.policies.scores import SCORES, exit_scores

pytestmark = pytest.mark.numerical


def norms(net: nn.Module) -> int:
    return sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules())


class TestAsSimulated:
    @pytest.mark.parametrize("method", [*ew.METHODS, *POE_METHODS, *DROPOUT_METHODS])
    @pytest.mark.slow_after_first
    def test_every_method_at_every_size_of_batch(self, method: str) -> None:
        net, calibration = tiny()[0], calibrated(method)
        preds = simulated(net, calibration, some_images(257))
        seen = set()
        for size in SIZES:
            images = some_images(257)[:size]
            policy = random_policy(preds, seed=size)
            pred = ew.Classifier(net, calibration, policy, costs=(1, 2, 3))(images)
            assert_as_simulated(policy, simulated(net, calibration, images), pred.exits, pred.probs)
            assert torch.equal(pred.predicted, pred.probs.argmax(dim=1))
            seen |= set(pred.exits.tolist())
        assert seen == {0, 1, 2}

    @pytest.mark.parametrize("score", SCORES)
    @pytest.mark.parametrize("mode", ["paper", "exact", "naive"])
    @pytest.mark.parametrize("method", [LAPLACE, OURS])
    def test_every_mode_and_score(self, method: str, mode: str, score: str) -> None:
        net, calibration, images = tiny()[0], calibrated(method, mode), some_images(100)
        preds = simulated(net, calibration, images)
        for seed in range(4):
            policy = random_policy(preds, seed, score)
            pred = ew.Classifier(net, calibration, policy, costs=(1, 2, 3))(images)
            assert_as_simulated(policy, preds, pred.exits, pred.probs)

    @pytest.mark.parametrize("method", [VANILLA, OURS, "Pool", "Pool W_opt"])
    def test_the_learned_score(self, method: str) -> None:
        net, trace = tiny()
        calibration, images = calibrated(method), some_images(257)
        val, preds = calibration.predict(trace.val), simulated(net, calibration, images)
        for share in (0.3, 0.6):
            first, *_, last = trace.costs.values
            budget = first + share * (last - first)
            policy = ew.fit_policy(val, trace.val.labels, trace.costs, budget=budget, score="learned")
            assert policy.score_model is not None
            assert not policy.score_model.is_confidence
            clf = ew.Classifier(net, calibration, policy)
            pred = clf(images)
            assert_as_simulated(policy, preds, pred.exits, pred.probs)
            assert len(set(pred.exits.tolist())) > 1
            answers = list(clf.stream(iter(images), batch_size=17))
            exits = torch.tensor([answer.exit for answer in answers])
            assert_as_simulated(policy, preds, exits, torch.stack([torch.as_tensor(a.probs) for a in answers]))
            controller = ew.BudgetController(policy)
            assert len(list(clf.stream(iter(images), batch_size=17, controller=controller))) == 257

    @pytest.mark.parametrize("method", [VANILLA, "MIE T_opt"])
    def test_entropy_without_draws(self, method: str) -> None:
        net, calibration, images = tiny()[0], calibrated(method), some_images(100)
        preds = simulated(net, calibration, images)
        policy = random_policy(preds, 1, "entropy")
        pred = ew.Classifier(net, calibration, policy)(images)
        assert_as_simulated(policy, preds, pred.exits, pred.probs)

    @pytest.mark.parametrize("score", ["confidence", "variance"])
    @pytest.mark.parametrize(("first", "exit"), [((-inf, -inf), 0), ((inf, -inf), 1), ((inf, inf), 2)])
    def test_all_leave_together(self, first: tuple[float, float], exit: int, score: str) -> None:
        net, images = tiny()[0], some_images(33)
        pred = ew.Classifier(net, calibrated(), ew.Policy((*first, -inf), score))(images)
        assert pred.exits.tolist() == [exit] * 33
        expected = simulated(net, calibrated(), images).probs[exit]
        assert torch.allclose(pred.probs, expected, atol=1e-6)

    def test_an_empty_batch(self) -> None:
        pred = classifier()(torch.empty(0, *SHAPE))
        assert len(pred) == 0
        assert [pred.probs.shape, pred.predicted.shape, pred.exits.shape, pred.costs.shape] == [(0, 10)] + [(0,)] * 3
        assert pred.mean_cost == 0

    def test_the_zoos_net(self) -> None:
        net, calibration, images = *zoo(), torch.randn(90, 3, 32, 32, generator=torch.Generator().manual_seed(4))
        preds = simulated(net, calibration, images)
        for seed in range(3):
            policy = random_policy(preds, seed)
            pred = ew.Classifier(net, calibration, policy)(images)
            assert_as_simulated(policy, preds, pred.exits, pred.probs)

    def test_costs_are_those_of_the_exits_taken(self) -> None:
        net, trace = tiny()
        pred = classifier(costs=None)(some_images(50))  # costs are counted
        assert pred.unit == "MACs"
        assert pred.costs.tolist() == [trace.costs.values[k] for k in pred.exits.tolist()]
        policy = ew.Policy(middle_policy(calibrated()).thresholds, unit="ms")
        slow = ew.Classifier(net, calibrated(), policy, costs=ew.Costs((1.0, 2.0, 4.0), "ms"))(some_images(50))
        assert slow.unit == "ms"
        assert slow.costs.tolist() == [(1.0, 2.0, 4.0)[k] for k in slow.exits.tolist()]


@cache
def zoo() -> tuple[ew.MultiExitNet, ew.Calibration]:
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    return ew.load_net(ew.zoo.path("net.safetensors")), ew.calibrate(trace, "MIE Laplace", samples=20)


class TestActiveSamples:
    def test_later_stages_run_on_active_samples_only(self) -> None:
        clf, images = classifier(), some_images(60)
        seen: dict[int, list[Tensor]] = {}

        def record_input(k: int, args: tuple[Any, ...]) -> None:
            assert k not in seen
            state = args[0]
            seen[k] = [tensor.clone() for tensor in (state if isinstance(state, list) else [state])]

        states: list[Any] = [images]
        with torch.no_grad():
            states += [state for _, state in clf.net.states(images)]
        for k, stage in enumerate(clf.net.stages):
            stage.register_forward_pre_hook(lambda _, args, k=k: record_input(k, args))
        exits = clf(images).exits
        assert sorted(set(exits.tolist())) == [0, 1, 2]
        for k in range(3):
            whole = states[k] if isinstance(states[k], list) else [states[k]]
            for found, tensor in zip(seen[k], whole, strict=True):
                expected = tensor[exits >= k]
                assert found.shape == expected.shape
                assert torch.allclose(found, expected, atol=1e-5)
                # the comparison can fail: other samples differ
                if k:
                    assert not torch.allclose(found, tensor[: len(found)], atol=1e-3)

    def test_no_stage_runs_when_nobody_is_left(self) -> None:
        clf = ew.Classifier(tiny()[0], calibrated(), ew.Policy((-inf, -inf, -inf)), costs=(1, 2, 3))
        ran = []
        for k, stage in enumerate(clf.net.stages):
            stage.register_forward_hook(lambda *_, k=k: ran.append(k))
        clf(some_images(5))
        assert ran == [0]
        clf(torch.empty(0, *SHAPE))
        assert ran == [0]


def assert_parity(clf: ew.Classifier, images: Tensor) -> None:
    pred = clf(images)
    assert_as_simulated(clf.policy, simulated(clf.net, clf.calibration, images), pred.exits, pred.probs)


class WithDropout(nn.Module):
    """A stage that computes something else in training mode, and updates its running means there."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.drop(self.norm(self.linear(x)).relu())
        return result


def dropout_net() -> ew.MultiExitNet:
    torch.manual_seed(0)
    return ew.MultiExitNet(
        [WithDropout(6), WithDropout(8)], [ew.Head(nn.Identity(), nn.Linear(8, 4)) for _ in range(2)]
    )


class TestNetsAndImages:
    @pytest.mark.parametrize("method", [VANILLA, "MIE", LAPLACE, OURS])
    @pytest.mark.parametrize("mode", ["paper", "exact", "naive"])
    def test_heads_without_bias(self, method: str, mode: Any) -> None:
        net = small_net()
        assert net.exits[1].last.bias is None
        trace = fitted(net, of_shape((6,), 4))
        calibration = ew.calibrate(trace, method, samples=20, mode=mode)
        images = pictures(80, (6,), 4, 3)[0]
        policy = random_policy(simulated(net, calibration, images), 5)
        assert_parity(ew.Classifier(net, calibration, policy, costs=(1, 2, 3)), images)

    def test_states_may_be_any_nest_of_tensors(self) -> None:
        clf, images = own_classifier(nested_net(), (6,))
        assert len(set(clf(images).exits.tolist())) > 1
        assert_parity(clf, images)

    def test_images_may_be_a_nest_of_tensors_too(self) -> None:
        clf, images = own_classifier(nested_net(), (6,))
        pred = clf({"a": images / 2, "b": images / 2})
        assert same(pred, clf(images))

    @pytest.mark.parametrize("optimized", [False, True])
    def test_float64_and_numpy_images_are_taken_as_they_are(self, optimized: bool) -> None:
        clf, images = classifier(), some_images(40)
        clf = clf.optimize() if optimized else clf
        expected = clf(images)
        for others in (images.double(), images.numpy(), images.double().numpy(), images.clone().requires_grad_()):
            assert same(clf(others), expected)

    def test_strided_images_are_taken(self) -> None:
        clf, images = classifier(), some_images(40)
        flipped = images.flip(3).contiguous()
        assert same(clf(images[::2]), clf(images[::2].contiguous()))
        assert same(clf(images.numpy()[::2]), clf(images[::2].contiguous()))
        assert same(clf(images.numpy()[..., ::-1]), clf(flipped))
        assert same(clf(images.numpy().astype(">f4")), clf(images))

    def test_arrays_that_cannot_be_written_to_are_taken_without_a_warning(self) -> None:
        """Such arrays come from np.asarray of a Pillow image and from memory maps."""
        clf, images = classifier(), some_images(4)
        array = images.numpy().copy()
        array.setflags(write=False)
        assert same(clf(array), clf(images))

    def test_a_net_of_doubles(self) -> None:
        clf, images = classifier(), some_images(40)
        pred = ew.Classifier(clf.net.double(), clf.calibration, clf.policy)(images)
        preds = simulated(tiny()[0], clf.calibration, images)
        assert_as_simulated(clf.policy, preds, pred.exits, pred.probs)

    def test_the_images_are_left_as_they_were(self) -> None:
        clf, images = classifier(), some_images(20)
        before = images.clone()
        clf(images)
        clf.optimize()(images)
        assert torch.equal(images, before)

    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_net_in_training_mode_answers_as_in_evaluation_and_stays_in_it(self, streamed: bool) -> None:
        clf, images = own_classifier(dropout_net().eval(), (6,))
        expected = clf(images)
        modes = [k % 2 == 0 for k, _ in enumerate(clf.net.modules())]
        for pattern in ([True for _ in modes], modes):
            for module, mode in zip(clf.net.modules(), pattern, strict=True):
                module.training = mode
            before = copy.deepcopy(clf.net.state_dict())
            if streamed:
                answers = list(clf.stream(images, batch_size=len(images)))
                assert [answer.exit for answer in answers] == expected.exits.tolist()
            else:
                assert same(clf(images), expected)
            assert [module.training for module in clf.net.modules()] == pattern
            assert all(torch.equal(value, before[key]) for key, value in clf.net.state_dict().items())

    def test_its_mode_comes_back_after_an_error(self) -> None:
        clf = classifier()
        clf.net.train()
        refused(lambda: clf(torch.randn(2, 5, 8, 8)))
        assert all(module.training for module in clf.net.modules())

    def test_nothing_is_kept_for_a_backward_pass(self) -> None:
        pred = classifier()(some_images(3).requires_grad_())
        assert not pred.probs.requires_grad

    def test_a_deep_copy_is_another_classifier_with_the_same_answers(self) -> None:
        clf, images = classifier(), some_images(30)
        expected = clf(images)
        clf_copy = copy.deepcopy(clf)
        with torch.no_grad():
            for parameter in clf.net.parameters():
                parameter.zero_()
        clf.net.train()
        assert same(clf_copy(images), expected)
        clf_copy.net.train()
        assert same(clf_copy(images), expected)  # the copy has its own eval mode
        assert same(copy.deepcopy(clf_copy).optimize()(images), copy.deepcopy(clf_copy.optimize())(images))

    def test_it_can_be_given_another_precision(self) -> None:
        """`.double()` also casts the buffers of the exits."""
        clf, images = classifier(), some_images(40)
        preds = simulated(clf.net, clf.calibration, images)
        pred = clf.double()(images)
        assert_as_simulated(clf.policy, preds, pred.exits, pred.probs)

    def test_it_can_be_pickled(self) -> None:
        clf, images = classifier(), some_images(30)
        assert same(pickle.loads(pickle.dumps(clf))(images), clf(images))


class TestRefused:
    def test_a_calibration_of_another_net(self) -> None:
        net = tiny()[0]
        with torch.no_grad():
            net.exits[1].last.weight[0, 0] += 1e-3
        policy = middle_policy(calibrated())
        refused(lambda: ew.Classifier(net, calibrated(), policy), "`calibration` is of another net", "exit 1")
        refused(lambda: ew.Classifier(small_net(), calibrated(), policy), "`calibration` is of another net", "exit 0")
        two = ew.MultiExitNet(list(net.stages)[:2], net.exits[:2])
        refused(lambda: ew.Classifier(two, calibrated(), policy), "must have 2 exits as the net has, but has 3")

    def test_a_calibration_for_a_bias_that_is_not_there(self) -> None:
        net = tiny()[0]
        net.exits[2].last.bias = None
        refused(lambda: ew.Classifier(net, calibrated(), middle_policy(calibrated())), "another net", "exit 2")

    @pytest.mark.parametrize("thresholds", [(-inf,), (0.5, -inf), (0.5, 0.5, 0.5, -inf)])
    def test_a_policy_with_the_wrong_number_of_thresholds(self, thresholds: tuple[float, ...]) -> None:
        found = f"`policy` must have 3 thresholds, one per exit, but has {len(thresholds)}"
        refused(lambda: ew.Classifier(tiny()[0], calibrated(), ew.Policy(thresholds)), found)

    def test_a_policy_on_the_variance_without_draws(self) -> None:
        policy = ew.Policy((-0.1, -0.1, -inf), "variance")
        refused(lambda: ew.Classifier(tiny()[0], calibrated("MIE T_opt"), policy), "variance", "Laplace")
        ew.Classifier(tiny()[0], calibrated(OURS), policy)

    @pytest.mark.parametrize("name", ["net", "calibration", "policy"])
    def test_arguments_of_another_type(self, name: str) -> None:
        given: dict[str, Any] = {"net": tiny()[0], "calibration": calibrated(), "policy": middle_policy(calibrated())}
        refused(lambda: ew.Classifier(**(given | {name: nn.Linear(2, 2)})), f"`{name}` must be a ", "Linear")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"classes": ["cat", "dog"]}, "`classes` must name the net's 10 classes, but names 2"),
            ({"preprocessing": {"size": 8}}, "`preprocessing` must be a Preprocessing, but got dict"),
            ({"costs": (1.0, 2.0)}, "`costs` must be 3 values in MACs"),
            ({"costs": ew.Costs((1.0, 2.0, 3.0), "ms")}, "but are 3 in ms"),
            ({"costs": (3.0, 2.0, 1.0)}, "must grow"),
        ],
    )
    def test_options_that_do_not_fit(self, options: dict[str, Any], words: str) -> None:
        refused(lambda: classifier(**options), words)

    def test_a_policy_in_milliseconds_without_costs(self) -> None:
        policy = ew.Policy((0.5, 0.5, -inf), unit="ms")
        refused(lambda: ew.Classifier(tiny()[0], calibrated(), policy), "ms", "give `costs`")

    def test_bytes_need_preprocessing(self) -> None:
        pixels = torch.randint(256, (20, *SHAPE), dtype=torch.uint8)
        message = refused(lambda: classifier()(pixels), "bytes", "`preprocessing`")
        assert message == refused(lambda: classifier()(pixels.numpy()))
        clf = classifier(preprocessing=BYTES)
        plain = (pixels / 255 - BYTES.mean[0]) / BYTES.std[0]
        expected, pred = clf(plain), clf(pixels)
        assert torch.allclose(pred.probs, expected.probs, atol=1e-5)
        assert torch.equal(pred.exits, expected.exits)
        assert len(set(pred.exits.tolist())) > 1
        assert same(clf(pixels.numpy()), pred)

    @pytest.mark.parametrize("value", [float("nan"), inf])
    @pytest.mark.parametrize("method", [VANILLA, OURS])
    @pytest.mark.parametrize("score", ["confidence", "entropy"])
    def test_an_image_that_is_not_finite_is_named(self, value: float, method: str, score: str) -> None:
        clf, images = classifier(method, score), some_images(30)
        images[17, 0, 3, 3] = value
        refused(lambda: clf(images), "image 17", "not finite")

    def test_an_image_whose_features_overflow_later_is_named_by_its_place_in_the_batch(self) -> None:
        """The error must not give its position among the active samples."""
        net = small_net()
        net.stages[1] = Explosive()
        clf, images = own_classifier(net, (6,))
        half = float(np.median(exit_scores(simulated(net, clf.calibration, images))[0]))
        clf = ew.Classifier(net, clf.calibration, ew.Policy((half, inf, -inf)), costs=(1, 2, 3))
        active = (clf(images).exits > 0).nonzero()[:, 0]
        heights = net.stages[0](images[active]).detach().amax(dim=1)
        position = int(heights.argmax())
        net.stages[1].limit = float(heights[position]) - 1e-5
        assert int(active[position]) != position
        refused(lambda: clf(images), f"image {active[position]}: exit 1 ", "not finite")

    @pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 64), (1, 8, 8), (8,), (2, 1, 8, 8, 1)])
    @pytest.mark.parametrize("optimized", [False, True])
    @pytest.mark.parametrize("warm", [False, True])
    @pytest.mark.slow_after_first
    def test_images_of_a_wrong_shape(self, shape: tuple[int, ...], optimized: bool, warm: bool) -> None:
        clf = classifier(costs=None).optimize() if optimized else classifier(costs=None)
        if warm:  # the first call counts costs, which already refuses some shapes
            clf(some_images(2))
        refused(lambda: clf(torch.randn(shape)))

    @pytest.mark.parametrize("shape", [(5,), (6,), (2, 3, 6)])
    def test_vectors_of_a_wrong_shape(self, shape: tuple[int, ...]) -> None:
        """A linear stage takes them, the last layer does not."""
        clf, images = own_classifier(small_net(), (6,))
        clf(images)
        refused(lambda: clf(torch.randn(shape)))

    def test_features_of_a_wrong_width(self) -> None:
        """The neck takes them, the last layer does not."""
        net = ew.MultiExitNet([nn.ReLU(), nn.ReLU()], [ew.Head(nn.Flatten(), nn.Linear(12, 3)) for _ in range(2)])
        clf, _ = own_classifier(net, (3, 4))
        refused(lambda: clf(torch.randn(5, 3, 5)), "(3, 5)")

    @pytest.mark.parametrize(
        "images",
        [
            pytest.param(None, id="nothing"),
            pytest.param("cat.png", id="a name"),
            pytest.param([], id="an empty list"),
            pytest.param(torch.tensor(1.0), id="a number"),
            pytest.param((torch.randn(3, *SHAPE), torch.randn(2, *SHAPE)), id="of two lengths"),
            pytest.param({"image": torch.randn(3, *SHAPE)}, id="a dict that the net does not know"),
            pytest.param([torch.randn(3, *SHAPE)], id="a list that the net does not know"),
            pytest.param(torch.zeros(3, *SHAPE, dtype=torch.int64), id="whole numbers"),
            pytest.param(torch.zeros(3, *SHAPE, dtype=torch.complex64), id="complex numbers"),
            pytest.param(np.zeros((3, *SHAPE), dtype=object), id="an array of objects"),
        ],
    )
    def test_what_are_no_images(self, images: Any) -> None:
        clf = classifier()
        clf(some_images(2))
        refused(lambda: clf(images))


class Explosive(nn.Module):
    """A stage whose output overflows for inputs above a limit."""

    limit = inf

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.amax(dim=1, keepdim=True) > self.limit, inf, x)


class TestOptimized:
    @pytest.mark.slow
    def test_the_zoos_net_gives_the_same_answers_but_for_ties(self) -> None:
        net, calibration = zoo()
        images = torch.randn(100, 3, 32, 32, generator=torch.Generator().manual_seed(5))
        preds = simulated(net, calibration, images)
        table = exit_scores(preds)
        policy = ew.Policy((*(float(np.quantile(row, 0.6)) for row in table[:-1]), -inf))
        before = copy.deepcopy(net.state_dict())
        plain = ew.Classifier(net, calibration, policy)
        quick = ew.Classifier(net, calibration, policy).optimize()
        pred, found = plain(images), quick(images)
        sure = torch.from_numpy(clear(policy, preds)[1])
        other = pred.exits != found.exits
        print(f"{int(other.sum())} of {len(images)} take another exit, {int((~sure).sum())} lie on a threshold")
        assert int(other.sum()) <= int((~sure).sum())
        assert not bool((other & sure).any())
        assert (pred.probs - found.probs)[~other].abs().max() < 1e-5
        assert torch.equal(pred.costs[~other], found.costs[~other])
        assert len(set(found.exits.tolist())) == 4
        # The original net is unchanged.
        assert plain.net is net
        assert quick.net is not net
        assert norms(net) > 0
        assert norms(quick.net) == 0
        assert net.state_dict().keys() == before.keys()
        assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())

    @pytest.mark.parametrize(
        ("preset", "remaining"), [("cifar100-resnet8", 0), ("tiny-32", 0), ("cifar100-densenet10", None)]
    )
    def test_every_family_gives_the_same_answers(self, preset: str, remaining: int | None) -> None:
        net = ew.models.build(preset, num_classes=5)
        shape = (3, 32, 32)
        trace = fitted(net, lambda n, seed: pictures(n // 10, shape, 5, seed))
        calibration = ew.calibrate(trace, OURS, samples=10)
        images = pictures(20, shape, 5, 3)[0]
        preds = simulated(net, calibration, images)
        policy = ew.Policy((*(float(np.median(row)) for row in exit_scores(preds)[:-1]), -inf))
        clf = ew.Classifier(net, calibration, policy).optimize()
        assert norms(net) > 0
        assert norms(clf.net) < norms(net)
        assert remaining is None or norms(clf.net) == remaining
        pred = clf(images)
        assert_as_simulated(policy, preds, pred.exits, pred.probs)

    def test_doing_it_twice_is_doing_it_once(self) -> None:
        clf = classifier()
        assert clf.optimize() is clf
        net = clf.net
        assert clf.optimize().net is net

    def test_a_net_in_training_mode_is_folded_in_evaluation(self) -> None:
        clf, images = classifier(), some_images(40)
        expected = clf(images)
        clf.net.train()
        assert torch.allclose(clf.optimize()(images).probs, expected.probs, atol=1e-5)


def conv() -> nn.Conv2d:
    return nn.Conv2d(2, 2, 3, padding=1)


class Fusable(nn.Module):
    """The usual convolution and normalization, which must be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


class ReadTwice(Fusable):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y).relu() + y


class CalledTwice(Fusable):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu() + self.other(self.conv(x))


class TwoNames(Fusable):
    """One convolution under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(self.conv, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.conv(x)).relu())


class SharedNorm(Fusable):
    """One normalization after two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.other = conv()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu() + self.norm(self.other(x))


class NormOfSomethingElse(Fusable):
    """A normalization that also reads another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu() + self.norm(x)


class StepByStep(nn.Module):
    """Cannot be traced, and uses the output of every step, as feature pyramids do."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(conv(), nn.BatchNorm2d(2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x) if bool(x.sum() > -inf) else x
        for step in self.steps:
            x = step(x)
            total = total + x
        return total


class PartTwice(nn.Module):
    """Cannot be traced, so the use of its children is unknown: nothing is folded."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Fusable()

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x) if bool(x.sum() > -inf) else x
        return x + self.part(x)


class BatchStatistics(Fusable):
    """Normalizes by batch statistics in evaluation mode, too: nothing can be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2, track_running_stats=False)


class TestFolding:
    @pytest.mark.parametrize(
        ("module", "remaining"),
        [
            (Fusable, 0),
            (PartTwice, 1),
            (ReadTwice, 1),
            (CalledTwice, 2),
            (TwoNames, 1),
            (BatchStatistics, 1),
            (SharedNorm, 1),
            (NormOfSomethingElse, 1),
            (StepByStep, 1),
        ],
    )
    def test_a_convolution_is_folded_only_where_a_norm_alone_reads_it(
        self, module: type[nn.Module], remaining: int
    ) -> None:
        torch.manual_seed(0)
        neck = nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten())
        net = ew.MultiExitNet([module()], [ew.Head(neck, nn.Linear(18, 3))])
        trace = fitted(net, of_shape((2, 6, 6), 3), costs=(1.0,))
        clf = ew.Classifier(net, ew.calibrate(trace, VANILLA), ew.Policy((-inf,)), costs=(1.0,))
        images = pictures(20, (2, 6, 6), 3, 3)[0]
        expected = clf(images)
        found = clf.optimize()(images)
        assert (found.probs - expected.probs).abs().max() < 1e-5
        assert norms(clf.net) == remaining


def rewrite(path: Path, to: Path, **header: str) -> Path:
    """Copy a file with some entries of its header replaced."""
    save_file(load_file(path), to, metadata=header_without_digest(path) | header)
    return to


class TestFiles:
    @pytest.mark.parametrize("optimized", [False, True])
    @pytest.mark.parametrize("method", [VANILLA, OURS])
    @pytest.mark.slow_after_first
    def test_a_round_trip_changes_no_bit(self, tmp_path: Path, method: str, optimized: bool) -> None:
        clf = classifier(method, classes=[f"class {i}" for i in range(10)], preprocessing=BYTES, costs=None)
        clf, images = clf.optimize() if optimized else clf, some_images(65)
        clf.save(tmp_path / "a.safetensors")
        expected = clf(images)
        clf.save(tmp_path / "b.safetensors")  # now with counted costs
        for name in ("a", "b"):
            found = ew.Classifier.load(tmp_path / f"{name}.safetensors")
            assert same(found(images), expected)
            assert found.optimized is optimized
            assert (found.policy, found.classes, found.preprocessing) == (clf.policy, clf.classes, clf.preprocessing)
            state = found.net.state_dict()
            assert all(torch.equal(value, state[key]) for key, value in clf.net.state_dict().items())
            assert not any(module.training for module in found.net.modules())

    @pytest.mark.parametrize("optimized", [False, True])
    def test_a_net_of_ones_own_is_given(self, tmp_path: Path, optimized: bool) -> None:
        path = tmp_path / "clf.safetensors"
        net = own_convolutions()
        clf, images = own_classifier(net, (2, 6, 6))
        clf = clf.optimize() if optimized else clf
        clf.save(path)
        refused(lambda: ew.Classifier.load(path), str(path), "give it as `net`")
        other = own_convolutions()
        before = copy.deepcopy(other.state_dict())
        found = ew.Classifier.load(path, net=other)
        assert same(found(images), clf(images))
        untouched = all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
        assert untouched is optimized
        refused(lambda: ew.Classifier.load(path, net=small_net()), str(path), "its net")

    def test_weights_that_two_stages_share(self, tmp_path: Path) -> None:
        net = small_net()
        net.stages[1] = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        net.stages[2] = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        net.stages[2][0].weight = net.stages[1][0].weight
        clf, images = own_classifier(net, (6,))
        clf.save(tmp_path / "clf.safetensors")
        found = ew.Classifier.load(tmp_path / "clf.safetensors", net=copy.deepcopy(net))
        assert same(found(images), clf(images))

    def test_a_file_cut_short_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "clf.safetensors"
        classifier().save(path)
        data = path.read_bytes()
        for length in (0, 4, 8, 100, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:length])
            refused(lambda: ew.Classifier.load(path), str(path))

    def test_files_of_something_else_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "clf.safetensors"
        refused(lambda: ew.Classifier.load(path), str(path), "does not exist")
        calibrated().save(path)
        refused(lambda: ew.Classifier.load(path), str(path), "exitwise.calibration")
        net = ew.zoo.path("net.safetensors")
        refused(lambda: ew.Classifier.load(net), str(net), "exitwise.net")
        save_file({"a": torch.zeros(1)}, path)
        refused(lambda: ew.Classifier.load(path), str(path), "format")

    def test_a_later_version_is_refused(self, tmp_path: Path) -> None:
        path, later = tmp_path / "clf.safetensors", tmp_path / "later.safetensors"
        classifier().save(path)
        for version in ("2", "1.0", "text"):
            rewrite(path, later, version=version)
            refused(lambda: ew.Classifier.load(later), str(later), f"version {version!r}")

    @pytest.mark.parametrize("entry", ["model", "calibration", "policy", "costs", "classes", "preprocessing"])
    @pytest.mark.slow_after_first
    def test_a_header_with_broken_values_is_refused_or_harmless(self, tmp_path: Path, entry: str) -> None:
        """Any replaced value gives an `InputError` or a classifier that works."""
        path, broken = tmp_path / "clf.safetensors", tmp_path / "broken.safetensors"
        if entry == "model":
            clf, images, own = classifier(), some_images(5), None
        else:  # loading is faster with a given net
            own = small_net()
            clf, images = own_classifier(own, (6,))
        names = [f"class {i}" for i in range(clf.net.num_classes)]
        policy = ew.Policy(clf.policy.thresholds, cost=1.0, budget=2.0, q=0.5, costs=(1.0, 2.0, 3.0))
        ew.Classifier(clf.net, clf.calibration, policy, classes=names, preprocessing=BYTES).save(path)
        tensors, header = load_file(path), header_without_digest(path)
        count, wrong = 0, []
        others = changed(json.loads(header[entry]), WRONG)
        for text in ["{", "", "nonsense", *map(json.dumps, others)]:
            save_file(tensors, broken, metadata=header | {entry: text})
            try:
                found = ew.Classifier.load(broken, own)
            except ew.InputError as error:
                count += 1
                if str(broken) not in str(error) or "\n" in str(error):
                    wrong.append((text[:80], str(error)))
            except Exception as error:  # the test collects these
                wrong.append((text[:80], repr(error)[:200]))
            else:
                found.check_range = False  # another mean or deviation means another range of normalized images
                assert torch.isfinite(found(images).probs).all(), text
        assert count > len(WRONG) // 2
        assert not wrong

    @pytest.mark.parametrize("size", [10**7, 10**18, 10**30])
    @pytest.mark.parametrize("name", ["num_classes", "in_channels"])
    def test_a_header_that_asks_for_a_huge_net_is_refused(self, tmp_path: Path, name: str, size: int) -> None:
        """Sizes beyond 64 bits raise other errors in torch."""
        path, huge = tmp_path / "clf.safetensors", tmp_path / "huge.safetensors"
        classifier().save(path)
        rewrite(path, huge, model=json.dumps({"preset": "tiny-8", name: size}))
        refused(lambda: ew.Classifier.load(huge), str(huge))

    def test_missing_tensors_and_entries_are_named(self, tmp_path: Path) -> None:
        path, broken = tmp_path / "clf.safetensors", tmp_path / "broken.safetensors"
        classifier().save(path)
        tensors, header = load_file(path), header_without_digest(path)
        for name in ("net.heads.0.last.weight", "calibration.draws", "calibration.exit.1.basis"):
            save_file({key: value for key, value in tensors.items() if key != name}, broken, metadata=header)
            refused(lambda: ew.Classifier.load(broken), str(broken), name.partition(".")[2])
        for entry in ("model", "policy", "optimized", "costs"):
            save_file(tensors, broken, metadata={key: value for key, value in header.items() if key != entry})
            refused(lambda entry=entry: ew.Classifier.load(broken), str(broken), entry)

    def test_weights_that_are_not_the_calibrations_are_refused(self, tmp_path: Path) -> None:
        path, broken = tmp_path / "clf.safetensors", tmp_path / "broken.safetensors"
        classifier().save(path)
        tensors = load_file(path)
        tensors["net.heads.2.last.weight"] += 1
        save_file(tensors, broken, metadata=header_without_digest(path))
        refused(lambda: ew.Classifier.load(broken), str(broken), "another net", "exit 2")


def own_convolutions() -> ew.MultiExitNet:
    """Return a net without a preset."""
    stages = [nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), nn.Sequential(nn.Conv2d(4, 4, 3))]
    heads = [ew.Head(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()), nn.Linear(16, 3)) for _ in range(2)]
    return ew.MultiExitNet(stages, heads).eval()


class TestThreads:
    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize("optimized", [False, True])
    @pytest.mark.slow_after_first
    def test_eight_share_a_classifier(self, training: bool, optimized: bool) -> None:
        clf, images = own_classifier(dropout_net().eval(), (6,))
        clf = clf.optimize() if optimized else clf
        parts = [images[k::8] for k in range(8)]
        expected = [clf(part) for part in parts]
        clf.net.train(training)
        start = Barrier(8)

        def run(k: int) -> list[ew.Prediction]:
            start.wait()
            return [clf(parts[k]) for _ in range(40)]

        with ThreadPoolExecutor(8) as pool:
            for its, pred in zip(expected, pool.map(run, range(8)), strict=True):
                assert all(torch.equal(each.exits, its.exits) for each in pred)
                assert all(torch.allclose(each.probs, its.probs, atol=1e-6) for each in pred)
        assert all(module.training is training for module in clf.net.modules())

    def test_the_first_calls_may_come_together(self) -> None:
        """Costs are counted on the first call."""
        clf, images = classifier(costs=None), some_images(16)
        expected = copy.deepcopy(clf)(images)
        start = Barrier(8)

        def run(_: int) -> ew.Prediction:
            start.wait()
            return clf(images)

        with ThreadPoolExecutor(8) as pool:
            for pred in pool.map(run, range(8)):
                assert torch.equal(pred.exits, expected.exits)
                assert torch.equal(pred.costs, expected.costs)
                assert torch.allclose(pred.probs, expected.probs, atol=1e-6)


class TestPrediction:
    def test_what_it_says_of_itself(self) -> None:
        pred = classifier()(some_images(50))
        counts = torch.bincount(pred.exits, minlength=3).tolist()
        assert min(counts) > 0
        assert len(pred) == 50
        assert pred.mean_cost == pytest.approx(sum(pred.costs.tolist()) / 50)
        exited = ", ".join(f"{count} at exit {k}" for k, count in enumerate(counts))
        assert repr(pred) == f"Prediction(50 images, mean cost {pred.mean_cost:.4g} MACs, exited: {exited})"

    @pytest.mark.parametrize(("old", "new"), [("labels", "predicted"), ("cost", "costs")])
    def test_deprecated_names_still_work_and_warn(self, old: str, new: str) -> None:
        pred = classifier()(some_images(3))
        with pytest.warns(DeprecationWarning, match=f"Prediction.{old} is deprecated: use Prediction.{new}") as caught:
            assert getattr(pred, old) is getattr(pred, new)
        assert caught[0].filename == __file__  # the warning points to the caller

    def test_an_exit_that_nobody_took_is_not_named(self) -> None:
        clf = ew.Classifier(tiny()[0], calibrated(), ew.Policy((inf, -inf, -inf)))
        assert repr(clf(some_images(4))).endswith("exited: 4 at exit 1)")
        assert repr(clf(some_images(0))) == "Prediction(0 images, mean cost 0 MACs, exited: none)"

    def test_as_plain_data(self) -> None:
        pred = classifier()(some_images(5))
        data = json.loads(json.dumps(pred.to_dict()))
        assert set(data) == {"probs", "predicted", "exits", "costs", "unit"}
        assert data["unit"] == "MACs"
        assert torch.equal(torch.tensor(data["probs"]), pred.probs)
        assert (data["predicted"], data["exits"]) == (pred.predicted.tolist(), pred.exits.tolist())
        assert data["costs"] == pred.costs.tolist()

    @pytest.mark.parametrize("n", [5, 0])
    def test_as_a_table(self, n: int) -> None:
        pred = classifier()(some_images(n))
        table = pred.to_pandas()
        assert list(table.columns) == ["predicted", "confidence", "exit", "cost"]
        assert table["predicted"].tolist() == pred.predicted.tolist()
        assert table["confidence"].tolist() == pred.probs.amax(dim=1).tolist()
        assert table["exit"].tolist() == pred.exits.tolist()
        assert table["cost"].tolist() == pred.costs.tolist()

    def test_everything_is_a_tensor_on_the_cpu_in_the_order_of_the_images(self) -> None:
        clf, images = classifier(), some_images(40)
        pred = clf(images)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
        other = clf(images[order])
        assert torch.equal(other.exits, pred.exits[order])
        assert torch.allclose(other.probs, pred.probs[order], atol=1e-5)
        assert pred.probs.dtype == torch.float32
        assert pred.predicted.dtype == pred.exits.dtype == torch.int64
