"""Do certificates hold? Samples to hold out are drawn a thousand times from populations whose truth is known.

usage: certificates.py [--draws 1000] [--parts synthetic hold whole]

- "whole": samples to tune and to hold out are drawn from all validation and test predictions of the shipped net, the
  whole procedure runs on them, and what it promised is checked on all 15,000. Beside it, the policy that nothing
  certifies.
- "hold": thresholds are those of the validation split; samples to hold out are drawn from the test split, and what was
  promised is checked on the whole test split and on the part that was not drawn.
- "synthetic": scores and answers are drawn from distributions, so that true costs and losses are known exactly.

Results go to experiments/certificates/results.json, where parts that are not asked for stay. "whole" takes most of an
hour, the others minutes; no data set is needed.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from numpy.typing import NDArray
from results import machine, rounded

import exitwise as ew
from exitwise.core.files import write_json
from exitwise.core.predictions import Predictions
from exitwise.policies.certify import FixedSequenceTest, PolicyOutcomes, nested_cheaper_policies
from exitwise.policies.fit import PolicyFitter
from exitwise.policies.scores import exit_scores

HERE = Path(__file__).parent
METHODS = {"vanilla": "MSDNet (vanilla)", "ours": "MIE Laplace T_opt sigma_opt"}
BUDGETS = (0.3, 0.5, 0.7)  # of the last exit's cost
DELTA = 0.05
TUNE = HOLD = 2500
SEED = 0

Array = NDArray[Any]


def tally(wrong: Array, spent: Array, draws: int, extra: dict[str, Any]) -> dict[str, Any]:
    """How often a promise was broken, with the probability of as many by chance if each may fail with DELTA.

    Who promises nothing breaks nothing: `wrong` and `spent` (part of the budget) are of draws that certified something.
    """
    broken = int(wrong.sum())
    by_chance = float(scipy.stats.binom.sf(broken - 1, draws, DELTA))
    mean = float(spent.mean()) if len(spent) else None
    found = {"draws": draws, "nothing_certified": draws - len(wrong), "broken": broken, "by_chance": by_chance}
    return {**found, "spent": mean, **extra}


@dataclass(frozen=True, eq=False)
class Population:
    """Predictions (K, n, c) and labels of one method, on all samples there are."""

    preds: Array
    labels: Array
    costs: ew.Costs

    @property
    def values(self) -> Array:
        return np.asarray(self.costs.values)

    def truth(self, policy: ew.Policy, table: Array, right: Array) -> tuple[float, float]:
        """Mean cost and accuracy of a policy on everyone."""
        exits = policy.exits_from_scores(table)
        return float(self.values[exits].mean()), float(right[exits, np.arange(len(exits))].mean())


def whole(everyone: Population, part: float, strategy: str, draws: int) -> dict[str, Any]:
    """The whole procedure: tune and hold are drawn, thresholds are fitted on the one and certified on the other."""
    budget = part * everyone.values[-1]
    table = exit_scores(everyone.preds)
    right = everyone.preds.argmax(axis=2) == everyone.labels
    rng = np.random.default_rng(SEED)
    found: dict[str, list[tuple[float, float]]] = {"certified": [], "plain": [], "plain on all": []}
    for _ in range(draws):
        rows = rng.integers(0, len(everyone.labels), TUNE + HOLD)
        tune, hold = rows[:TUNE], rows[TUNE:]
        made = {"costs": everyone.costs, "budget": budget, "strategy": strategy}
        fitter = PolicyFitter(everyone.preds[:, tune], everyone.labels[tune], everyone.costs)
        held = Predictions.of(everyone.preds[:, hold])
        certified = fitter.certify(ew.Certificate(DELTA), budget, strategy, held, everyone.labels[hold])
        found["certified"].append(everyone.truth(certified, table, right))
        found["plain"].append(everyone.truth(fitter.fit(budget, strategy), table, right))
        on_all = ew.fit_policy(everyone.preds[:, rows], everyone.labels[rows], **made)
        found["plain on all"].append(everyone.truth(on_all, table, right))
    results = {}
    for name, pairs in found.items():
        cost, top1 = np.array(pairs).T
        results[name] = tally(cost > budget, cost / budget, draws, {"top1": float(top1.mean())})
    return results


def held_out(
    trace: ew.Trace, calibration: ew.Calibration, part: float, certificate: ew.Certificate, draws: int
) -> dict[str, Any]:
    """Thresholds from the validation split; the test split is drawn into samples to hold out and samples to test on."""
    budget = part * trace.costs.values[-1]
    val, test = calibration.predict(trace.val), calibration.predict(trace.test)
    labels = trace.test.labels.numpy()
    fitter = PolicyFitter(val, trace.val.labels, trace.costs)
    strategy = "geometric" if certificate.risk else "auto"
    policies = nested_cheaper_policies(fitter.fit(budget, strategy), exit_scores(val), trace.costs)
    tune = PolicyOutcomes.from_predictions(policies, val, certificate.risk, val.predicted[-1], trace.val.labels.numpy())
    everyone = PolicyOutcomes.from_predictions(policies, test, certificate.risk, test.predicted[-1], labels)
    right = (test.predicted == labels)[everyone.exits, np.arange(len(labels))]
    costs = np.asarray(trace.costs.values)[everyone.exits]
    row = FixedSequenceTest(policies, tune, HOLD, certificate, trace.costs, reference_is_last_exit=True)
    rng = np.random.default_rng(SEED)
    chosen, on_the_rest = [], []
    for _ in range(draws):
        with suppress(ew.NotCertifiedError):
            chosen.append(row.select(everyone.take(rng.integers(0, len(labels), HOLD)), budget))
        order = rng.permutation(len(labels))
        with suppress(ew.NotCertifiedError):
            number = row.select(everyone.take(order[:HOLD]), budget)
            on_the_rest.append(costs[number, order[HOLD:]].mean())
    numbers = np.array(chosen, dtype=np.int64)
    true_costs, true_top1 = costs.mean(axis=1), right.mean(axis=1)
    wrong = true_costs[numbers] > budget
    extra: dict[str, Any] = {}
    if len(numbers):
        extra["top1"] = float(true_top1[numbers].mean())
        extra["top1_of_plain"] = float(true_top1[-1])
        extra["cost_of_plain"] = float(true_costs[-1] / budget)
        extra["above_budget_on_the_other_test_samples"] = float((np.array(on_the_rest) > budget).mean())
    if certificate.risk is not None and everyone.losses is not None and len(numbers):
        losses = everyone.losses.mean(axis=1)[numbers]
        extra |= {"risk": certificate.risk, "epsilon": certificate.epsilon, "loss": float(losses.mean())}
        wrong = wrong | (losses > float(certificate.epsilon or 0))
    return tally(wrong, true_costs[numbers] / budget, draws, extra)


@dataclass(frozen=True)
class Synthetic:
    """Exits with independent, uniform scores: the shares of samples that leave, and so all means, are products."""

    costs: tuple[float, ...]
    thresholds: tuple[float, ...]  # of the last but one exits
    accuracy: tuple[float, ...]  # of each exit, whatever the score

    def shares(self, thresholds: tuple[float, ...]) -> Array:
        stays = [min(max(each, 0.0), 1.0) for each in thresholds[:-1]]
        return np.array([prod(stays[:k]) * (1 - (stays[k] if k < len(stays) else 0.0)) for k in range(len(stays) + 1)])

    def draw(self, samples: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Scores (K, n) and whether each exit is right (K, n)."""
        right = rng.uniform(size=(len(self.costs), samples)) < np.array(self.accuracy)[:, None]
        return rng.uniform(size=(len(self.costs), samples)), right

    def seen(self, policies: list[ew.Policy], samples: int, rng: np.random.Generator) -> PolicyOutcomes:
        table, right = self.draw(samples, rng)
        exits = np.stack([policy.exits_from_scores(table) for policy in policies])
        said = right[exits, np.arange(samples)]
        return PolicyOutcomes(exits, right[-1].astype(np.int64) - said.astype(np.int64))


SYNTHETIC = {
    "even": Synthetic((1.0, 2.0, 3.0, 4.0), (0.7, 0.6, 0.5, -np.inf), (0.6, 0.65, 0.7, 0.75)),
    "a rare, expensive exit": Synthetic((1.0, 1.1, 100.0), (0.3, 0.1, -np.inf), (0.6, 0.8, 0.95)),
    "nearly all go to the end": Synthetic((1.0, 5.0, 6.0), (0.99, 0.97, -np.inf), (0.5, 0.7, 0.72)),
}


def synthetic(population: Synthetic, samples: int, risk: str | None, draws: int) -> dict[str, Any]:
    """The budget is what a policy inside the row truly costs: those next to it on the wrong side are tempting."""
    rng = np.random.default_rng(SEED)
    costs = ew.Costs(population.costs)
    table, _ = population.draw(TUNE, rng)
    policies = nested_cheaper_policies(ew.Policy(population.thresholds, costs=population.costs), table, costs)
    shares = np.stack([population.shares(policy.thresholds) for policy in policies])
    true_costs = shares @ np.array(population.costs)
    true_losses = population.accuracy[-1] - shares @ np.array(population.accuracy)
    budget = None if risk else float(true_costs[-8])
    certificate = (
        ew.Certificate(None, risk, float(true_losses[[0, -1]].mean()), DELTA) if risk else ew.Certificate(DELTA)
    )
    row = FixedSequenceTest(
        policies, population.seen(policies, TUNE, rng), samples, certificate, costs, reference_is_last_exit=True
    )
    chosen = []
    for _ in range(draws):
        with suppress(ew.NotCertifiedError):
            chosen.append(row.select(population.seen(policies, samples, rng), budget))
    numbers = np.array(chosen, dtype=np.int64)
    if budget is None:
        epsilon = float(certificate.epsilon or 0)
        wrong, spent = true_losses[numbers] > epsilon + 1e-12, true_losses[numbers] / epsilon
        return tally(wrong, spent, draws, {"epsilon": epsilon})
    return tally(true_costs[numbers] > budget * (1 + 1e-12), true_costs[numbers] / budget, draws, {"budget": budget})


PARTS = ("synthetic", "hold", "whole")


def main(draws: int, parts: Sequence[str] = PARTS, place: Path = HERE / "certificates") -> None:
    torch.set_num_threads(1)
    path = place / "results.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    results: dict[str, Any] = {
        "command": "python experiments/certificates.py",
        "machine": machine(),
        "settings": {"draws": draws, "delta": DELTA, "tune": TUNE, "hold": HOLD, "seed": SEED, "methods": METHODS},
        **{part: known.get(part, {}) for part in PARTS},
    }

    def keep(part: str, name: str, make: Callable[[], dict[str, Any]]) -> None:
        if part in parts:
            results[part][name] = rounded(make())
            print(part, name, results[part][name], flush=True)
            write_json(path, results)

    for name, population in SYNTHETIC.items():
        for samples in (200, 2500):
            for what, risk in (("budget", None), ("loss", "accuracy")):
                make = partial(synthetic, population, samples, risk, draws)
                keep("synthetic", f"{name}, {samples} held out, {what}", make)
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    certificates = {
        "budget": ew.Certificate(DELTA),
        "budget and 2 % of accuracy": ew.Certificate(DELTA, "accuracy", 0.02),
        "budget and 15 % of disagreement": ew.Certificate(DELTA, "disagreement", 0.15),
    }
    for kind, method in METHODS.items():
        calibration = ew.calibrate(trace, method, seed=SEED)
        for budget in BUDGETS:
            for name, certificate in certificates.items():
                make = partial(held_out, trace, calibration, budget, certificate, draws)
                keep("hold", f"{kind}, {budget:.0%}, {name}", make)
        preds = torch.cat([calibration.predict(trace.val).probs, calibration.predict(trace.test).probs], dim=1)
        labels = torch.cat([trace.val.labels, trace.test.labels])
        everyone = Population(preds.numpy(), labels.numpy(), trace.costs)
        for strategy in ("geometric", "auto"):
            keep("whole", f"{kind}, 50%, {strategy}", partial(whole, everyone, 0.5, strategy, draws))


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Markdown, by name; for docs/policies.md."""
    whole = [
        "| | plain: above the budget | certified: above it | spent | top-1, plain | certified |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results["whole"].items():
        plain, sure = found["plain on all"], found["certified"]
        whole.append(
            f"| {name} | {100 * plain['broken'] / plain['draws']:.1f} % | {100 * sure['broken'] / sure['draws']:.1f} % "
            f"| {100 * sure['spent']:.1f} % | {100 * plain['top1']:.2f} | {100 * sure['top1']:.2f} |"
        )
    parts = ["| | nothing certified | broken | spent | top-1, plain | certified |", "|---|---|---|---|---|---|"]
    for name, row in {**results["hold"], **results["synthetic"]}.items():
        spent = "" if row["spent"] is None else f"{100 * row['spent']:.1f} %"
        accuracy = [f"{100 * row[key]:.2f}" if key in row else "" for key in ("top1_of_plain", "top1")]
        share = 100 * row["nothing_certified"] / row["draws"]
        broken = f"{100 * row['broken'] / row['draws']:.1f} %"
        parts.append(f"| {name} | {share:.0f} % | {broken} | {spent} | {' | '.join(accuracy)} |")
    return {"whole": "\n".join(whole), "parts": "\n".join(parts)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tables", action="store_true", help="print the tables of results that are there")
    arguments = parser.parse_args()
    if not arguments.tables:
        main(arguments.draws, arguments.parts)
    for table in tables(json.loads((HERE / "certificates" / "results.json").read_text())).values():
        print(table, end="\n\n")
