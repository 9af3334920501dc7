"""Calibrators of others, against scipy on the same objective, scikit-learn, and brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize as scipy_minimize
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from exitwise.calibration.pool import OWN_WEIGHT_BOUNDS
from exitwise.rival_methods import calibrators
from exitwise.rival_methods.calibrators import CALIBRATORS, fit_beta, isotonic_regression
from exitwise.rival_methods.geometric import combine, fit_geometric_ensemble
from exitwise.rival_methods.solver import minimize
from exitwise.rival_methods.stopping_heads import fit_logistic, fit_stopping_head

pytestmark = pytest.mark.numerical


def case(n: int = 400, c: int = 4, seed: int = 0, size: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Overconfident logits (n, c) that say something about the labels (n,), more about some classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(c, size=n)
    logits = size * (rng.normal(size=(n, c)) + np.eye(c)[labels] * (1 + np.arange(c)[labels, None] / c))
    return torch.from_numpy(logits), torch.from_numpy(labels)


def nlpd(log_probs: np.ndarray, labels: torch.Tensor) -> float:
    return -float(log_probs[np.arange(len(labels)), labels.numpy()].mean())


def check_probabilities(log_probs: torch.Tensor) -> None:
    assert bool(torch.isfinite(log_probs).all())
    assert log_probs.exp().sum(dim=1).numpy() == pytest.approx(1, abs=1e-6)


class TestSolver:
    def test_it_finds_the_minimum_of_an_ill_conditioned_quadratic(self) -> None:
        rng = np.random.default_rng(0)
        basis = np.linalg.qr(rng.normal(size=(8, 8)))[0]
        matrix = torch.from_numpy(basis @ np.diag(np.geomspace(1e-3, 1e2, 8)) @ basis.T)
        goal = torch.from_numpy(rng.normal(size=8))

        def objective(point: torch.Tensor) -> tuple[float, torch.Tensor]:
            slope = matrix @ (point - goal)
            return float((point - goal) @ slope) / 2, slope

        found = minimize(objective, torch.zeros(8, dtype=torch.float64), precision=1e-10)
        assert found.numpy() == pytest.approx(goal.numpy(), abs=1e-5)

    def test_what_cannot_be_improved_stays(self) -> None:
        start = torch.ones(3, dtype=torch.float64)
        assert minimize(lambda x: (0.0, torch.zeros(3).double()), start) is start
        assert minimize(lambda x: (float("nan"), torch.ones(3).double()), start) is start


class TestScalings:
    @pytest.mark.parametrize("size", [0.01, 0.7, 3.0, 200.0])
    def test_temperature_minimizes_the_nlpd(self, size: float) -> None:
        logits, labels = case(size=size)
        loss = lambda beta: nlpd(log_softmax(beta * logits.numpy(), axis=1), labels)  # noqa: E731
        low, high = OWN_WEIGHT_BOUNDS
        best = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
        assert loss(fit_beta(logits, labels)) == pytest.approx(best.fun, abs=1e-6)

    def test_vector_is_the_minimum_that_scipy_finds(self) -> None:
        logits, labels = case()
        n, c = logits.shape
        scaled = fit_beta(logits, labels) * logits.numpy()

        def loss(point: np.ndarray) -> float:
            return nlpd(log_softmax(scaled * (1 + point[:c]) + point[c:], axis=1), labels) + c / n * (point @ point)

        best = scipy_minimize(loss, np.zeros(2 * c), method="BFGS", options={"gtol": 1e-8}).x
        expected = log_softmax(scaled * (1 + best[:c]) + best[c:], axis=1)
        assert CALIBRATORS["vector"](logits, labels).log_probs(logits).numpy() == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize("name", ["matrix", "Dirichlet"])
    def test_a_matrix_is_the_minimum_that_scipy_finds(self, name: str) -> None:
        logits, labels = case()
        n, c = logits.shape
        inputs = logits if name == "matrix" else logits.log_softmax(dim=1)
        scaled = fit_beta(inputs, labels) * inputs.numpy()
        penalty = np.full((c + 1, c), c * (c - 1) / n)
        np.fill_diagonal(penalty[:c], c / n * (1 if name == "matrix" else 0.01))
        penalty[c] = c / n

        def loss(flat: np.ndarray) -> float:
            point = flat.reshape(c + 1, c)
            fit = nlpd(log_softmax(scaled + scaled @ point[:c].T + point[c], axis=1), labels)
            return fit + float((penalty * point**2).sum())

        best = scipy_minimize(loss, np.zeros(c * (c + 1)), method="BFGS", options={"gtol": 1e-7}).x.reshape(c + 1, c)
        expected = log_softmax(scaled + scaled @ best[:c].T + best[c], axis=1)
        # The gradient is below 1e-5 in both, and the penalty's curvature is at least 2e-4.
        assert CALIBRATORS[name](logits, labels).log_probs(logits).numpy() == pytest.approx(expected, abs=3e-2)
        found = nlpd(CALIBRATORS[name](logits, labels).log_probs(logits).numpy(), labels)
        assert found == pytest.approx(nlpd(expected, labels), abs=1e-4)

    def test_ensemble_temperature_scaling_is_the_best_mixture(self) -> None:
        logits, labels = case(seed=3)
        beta, rows = fit_beta(logits, labels), np.arange(len(labels))
        parts = [softmax(factor * logits.numpy(), axis=1)[rows, labels] for factor in (beta, 1.0, 0.0)]
        best = scipy_minimize(
            lambda w: -np.log(w @ np.stack(parts)).mean(),
            np.full(3, 1 / 3),
            bounds=[(1e-9, 1)] * 3,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-12},
        )
        found = nlpd(CALIBRATORS["ETS"](logits, labels).log_probs(logits).numpy(), labels)
        assert found == pytest.approx(best.fun, abs=1e-6)

    @pytest.mark.parametrize("name", ["temperature", "vector", "matrix", "Dirichlet", "ETS"])
    def test_no_scaling_is_worse_than_temperature_where_it_was_fitted(self, name: str) -> None:
        logits, labels = case(seed=5)
        found = nlpd(CALIBRATORS[name](logits, labels).log_probs(logits).numpy(), labels)
        assert found <= nlpd(CALIBRATORS["temperature"](logits, labels).log_probs(logits).numpy(), labels) + 1e-7


class TestTopLabel:
    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=40))
    def test_isotonic_regression_is_that_of_scikit_learn(self, samples: list[tuple[int, bool]]) -> None:
        x, y = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
        points, values = isotonic_regression(x, y)
        expected = IsotonicRegression().fit(x, y).predict(points)
        assert values == pytest.approx(expected, abs=1e-9)

    @pytest.mark.parametrize("name", ["isotonic", "histogram"])
    @pytest.mark.parametrize("classes", [2, 3, 20])
    def test_the_predicted_class_and_the_share_of_correct_ones_are_kept(self, name: str, classes: int) -> None:
        logits, labels = case(2000, classes, seed=1)
        log_probs = CALIBRATORS[name](logits, labels).log_probs(logits)
        check_probabilities(log_probs)
        assert (log_probs.argmax(dim=1) == logits.argmax(dim=1)).all()
        correct = (log_probs.argmax(dim=1) == labels).double().mean()
        # Shares are smoothed by one sample per bin, and not below one half of two classes.
        assert float(log_probs.exp().max(dim=1).values.mean()) == pytest.approx(float(correct), abs=0.02)

    def test_a_histogram_has_the_share_of_correct_ones_of_each_bin(self) -> None:
        logits, labels = case(1500, 10, seed=2)
        top = logits.softmax(dim=1).max(dim=1).values.numpy()
        correct = (logits.argmax(dim=1) == labels).numpy()
        edges = np.quantile(top, np.linspace(0, 1, calibrators.BINS + 1)[1:-1])
        bins = np.digitize(top, edges)
        found = CALIBRATORS["histogram"](logits, labels).log_probs(logits).exp().max(dim=1).values.numpy()
        for number in range(calibrators.BINS):
            inside = bins == number
            assert found[inside] == pytest.approx((correct[inside].sum() + 1) / (inside.sum() + 2), abs=1e-9)


class TestBadInput:
    @pytest.mark.parametrize("name", CALIBRATORS)
    @pytest.mark.parametrize(
        "kind", ["one sample", "few", "absent class", "noise", "saturated", "constant", "all correct", "all wrong"]
    )
    def test_probabilities_are_always_finite(self, name: str, kind: str) -> None:
        logits, labels = case(60, 5, seed=4)
        if kind == "one sample":
            logits, labels = logits[:1], labels[:1]
        elif kind == "few":
            logits, labels = logits[:4], labels[:4]
        elif kind == "absent class":
            labels = labels.clamp(max=2)
        elif kind == "noise":
            labels = labels[torch.randperm(60, generator=torch.Generator().manual_seed(0))]
        elif kind == "saturated":
            logits = logits * 1e4
        elif kind == "constant":
            logits = torch.zeros_like(logits)
        elif kind == "all correct":
            labels = logits.argmax(dim=1)
        elif kind == "all wrong":
            labels = logits.argmin(dim=1)
        calibrator = CALIBRATORS[name](logits, labels)
        check_probabilities(calibrator.log_probs(logits))
        check_probabilities(calibrator.log_probs(case(30, 5, seed=9, size=50)[0]))
        assert calibrator.macs > 0


class TestGeometricEnsemble:
    def test_it_is_the_minimum_that_scipy_finds(self) -> None:
        parts = [case(300, 4, seed)[0].log_softmax(dim=1) for seed in (0, 0)]
        labels = case(300, 4, 0)[1]
        parts[1] = (parts[1] * 0.5 + torch.from_numpy(np.random.default_rng(1).normal(size=(300, 4)))).log_softmax(1)
        n, stacked = 300, np.stack([part.numpy() for part in parts])

        def loss(point: np.ndarray) -> float:
            logits = np.tensordot(point[:2], stacked, axes=1) + point[2:]
            return nlpd(log_softmax(logits, axis=1), labels) + float(point[2:] @ point[2:]) / n

        best = scipy_minimize(
            loss,
            np.full(6, 0.5),
            bounds=[(0, None)] * 2 + [(None, None)] * 4,
            method="L-BFGS-B",
            options={"ftol": 1e-14},
        )
        weights, bias = fit_geometric_ensemble(parts, labels)
        assert weights.numpy() == pytest.approx(best.x[:2], abs=1e-3)
        assert bias.numpy() == pytest.approx(best.x[2:], abs=1e-3)
        check_probabilities(combine(parts, weights, bias))

    def test_equal_exits_and_an_absent_class_do_no_harm(self) -> None:
        logits, labels = case(100, 4, seed=2)
        part = logits.log_softmax(dim=1)
        weights, bias = fit_geometric_ensemble([part, part, part], labels.clamp(max=2))
        assert bool(torch.isfinite(weights).all())
        check_probabilities(combine([part, part, part], weights, bias))


class TestStoppingHeads:
    def test_the_regression_is_that_of_scikit_learn(self) -> None:
        rng = np.random.default_rng(0)
        inputs = np.concatenate([rng.normal(size=(500, 3)), np.ones((500, 1))], axis=1)
        target = rng.random(500) < 1 / (1 + np.exp(-inputs @ [2.0, -1.0, 0.5, 0.3]))
        found = fit_logistic(torch.from_numpy(inputs), torch.from_numpy(target).double(), strength=0.01)
        reference = LogisticRegression(C=100, tol=1e-10, max_iter=10_000).fit(inputs[:, :3], target)
        # The intercept has no penalty there and one of .01 here.
        assert found[:3].numpy() == pytest.approx(reference.coef_[0], abs=1e-3)
        assert float(found[3]) == pytest.approx(float(reference.intercept_[0]), abs=1e-3)

    def test_it_learns_from_features_that_confidence_does_not_show(self) -> None:
        rng = np.random.default_rng(0)
        features = rng.normal(size=(2000, 5))
        right = torch.from_numpy(features[:, 1] + rng.normal(size=2000) > 0)
        confidence = torch.from_numpy(rng.uniform(0.2, 1, size=2000))
        head = fit_stopping_head(torch.from_numpy(features), confidence, right)
        assert head is not None
        for scores in (head.scores, head.out_of_fold_scores):
            found = scores(torch.from_numpy(features), confidence).numpy()
            assert np.corrcoef(found, features[:, 1])[0, 1] > 0.95

    def test_a_sample_is_scored_by_a_model_that_did_not_see_it(self) -> None:
        rng = np.random.default_rng(0)
        features, confidence = torch.from_numpy(rng.normal(size=(100, 3))), torch.from_numpy(rng.uniform(size=100))
        right = torch.from_numpy(rng.random(100) < 0.5)
        head = fit_stopping_head(features, confidence, right)
        assert head is not None
        changed = right.clone()
        changed[7] = ~changed[7]
        other = fit_stopping_head(features, confidence, changed)
        assert other is not None
        fold = int(head.fold_of_sample[7])
        if fold:  # the first fold also chooses the penalty
            assert torch.equal(head.weights[fold], other.weights[fold])
        assert not torch.equal(head.weights, other.weights)

    def test_without_both_cases_there_is_no_head(self) -> None:
        features, confidence = torch.zeros(20, 2), torch.full((20,), 0.5)
        assert fit_stopping_head(features, confidence, torch.ones(20, dtype=torch.bool)) is None
