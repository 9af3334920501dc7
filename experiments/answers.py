"""Prediction sets and abstention on the shipped trace: size, coverage and errors at budgets, and promises over splits.

usage: answers.py [--fill]

The net is calibrated, and its thresholds are fitted, on half of the validation samples. The other half and the test
samples are 12,500 that nothing has seen. In 1,000 random splits of these, sets and abstention are fitted on 1,000
samples and measured on the rest. Results go to experiments/answers/results.json, and its tables into
docs/guides/unsure.md; `--fill` does only the latter. Three minutes with one thread; no dataset is needed.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from results import fill_tables, machine, rounded, run_or_fill

import exitwise as ew
from exitwise.core.costs import evenly_spaced_budgets
from exitwise.core.files import write_json
from exitwise.policies.prediction_sets import limit_rank

RESULTS = Path(__file__).parent / "answers" / "results.json"
PAGE = Path(__file__).parent.parent / "docs" / "guides" / "unsure.md"
BUDGET, COVERAGE, RISK, DELTA = 2e7, 0.9, 0.25, 0.05
SPLITS, FITTED = 1000, 1000
SCORES, ANSWERED = ("thr", "aps", "raps"), (1.0, 0.95, 0.9, 0.8)
Array = np.ndarray[Any, Any]


def main() -> None:
    torch.set_num_threads(1)
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    tuning, held_out = trace.hold_out(0.5)
    assert trace.test is not None
    cal = ew.calibrate(tuning)
    tune = cal.predict(tuning.val)
    parts = [np.stack([pred.probs for pred in cal.predict(split).exits()]) for split in (held_out, trace.test)]
    probs = np.concatenate(parts, axis=1)
    labels = torch.cat([held_out.labels, trace.test.labels]).numpy()
    count = len(held_out.labels)
    held, test = (probs[:, :count], labels[:count]), (probs[:, count:], labels[count:])
    budgets = [
        measure_budget(ew.fit_policy(tune, tuning.val.labels, trace.costs, budget=budget, score="auto"), held, test)
        for budget in evenly_spaced_budgets(trace.costs, 5)
    ]
    policy = ew.fit_policy(tune, tuning.val.labels, trace.costs, budget=BUDGET, score="auto")
    results = {
        "command": "python experiments/answers.py",
        "machine": machine(),
        "method": cal.method.name,
        "coverage": COVERAGE,
        "budgets": budgets,
        "groups": [measure_groups(policy, per, score, held, test) for per in ("all", "exit") for score in SCORES],
        "splits": measure_splits(policy, probs, labels),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    write_json(RESULTS, rounded(results))


def measure_budget(policy: ew.Policy, held: tuple[Array, Array], test: tuple[Array, Array]) -> dict[str, Any]:
    """Cost, errors for several shares of answered samples, and the size of sets at one budget."""
    errors = []
    for share in ANSWERED:
        abstention = None if share == 1 else ew.fit_abstention(held[0], policy=policy, share=1 - share)
        errors.append(ew.evaluate_abstention(abstention, *test, policy=policy))
    found = ew.evaluate_sets(ew.fit_sets(*held, policy=policy, coverage=COVERAGE), *test, policy=policy)
    return {
        "budget": policy.budget,
        "cost": errors[0].cost,
        "errors": [each.error for each in errors],
        "answered": [each.answered for each in errors],
        "coverage": found.coverage,
        "size": found.mean_size,
        "aurc": errors[0].curve.aurc,
    }


def measure_groups(
    policy: ew.Policy, per: str, score: str, held: tuple[Array, Array], test: tuple[Array, Array]
) -> dict[str, Any]:
    """Coverage and size of sets, overall and by exit."""
    sets = ew.fit_sets(*held, policy=policy, coverage=COVERAGE, per=per, score=score)
    found = ew.evaluate_sets(sets, *test, policy=policy)
    groups = [{"coverage": found.coverage, "size": found.mean_size}]
    groups += [{"coverage": group.coverage, "size": group.mean_size} for group in found.by_exit]
    return {"per": per, "score": score, "groups": groups}


def measure_splits(policy: ew.Policy, probs: Array, labels: Array) -> dict[str, Any]:
    """How often random splits keep the promises: the exact band of the coverage, and the error rate."""
    rng = np.random.default_rng(0)
    exits = policy.exits(probs)
    at_exits = probs[exits, np.arange(len(labels))]
    wrong = at_exits.argmax(axis=1) != labels
    inside: dict[str, list[bool]] = {"all": [], **{f"exit {k + 1}": [] for k in range(len(probs))}}
    covered, broken, answered = [], 0, []
    for _ in range(SPLITS):
        order = rng.permutation(len(labels))
        fitted, rest = order[:FITTED], order[FITTED:]
        for per in ("all", "exit"):
            sets = ew.fit_sets(
                probs[:, fitted], labels[fitted], policy=policy, coverage=COVERAGE, per=per, allow_empty=True
            )
            hits = sets.masks(at_exits[rest], exits[rest])[np.arange(len(rest)), labels[rest]]
            if per == "all":
                covered.append(float(hits.mean()))
                inside["all"].append(is_in_band(hits, FITTED))
                continue
            for k in range(len(probs)):
                inside[f"exit {k + 1}"].append(is_in_band(hits[exits[rest] == k], sets.samples[k]))
        try:
            abstention = ew.fit_abstention(
                probs[:, fitted], labels[fitted], policy=policy, risk=RISK, delta=DELTA, held_out=True
            )
        except ew.NotCertifiedError:
            continue
        kept = ~abstention.mask(at_exits[rest], exits[rest])
        broken += bool(wrong[rest][kept].mean() > RISK)
        answered.append(float(kept.mean()))
    return {
        "splits": SPLITS,
        "fitted": FITTED,
        "mean_coverage": float(np.mean(covered)),
        "in_band": {name: float(np.mean(values)) for name, values in inside.items()},
        "risk": RISK,
        "delta": DELTA,
        "error_if_all_answered": float(wrong.mean()),
        "certified": len(answered),
        "broken": broken,
        "answered": float(np.mean(answered)),
    }


def is_in_band(hits: Array, samples: int) -> bool:
    """Whether the number of covered samples is in the central 95 % of its exact, beta-binomial distribution."""
    rank = limit_rank(samples, COVERAGE)
    low, high = scipy.stats.betabinom.ppf([0.025, 0.975], len(hits), rank, samples + 1 - rank)
    return bool(low <= hits.sum() <= high)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Markdown, by name."""
    rows = [
        "| mean cost, million MACs | "
        + " | ".join(f"{100 * share:g} % answered" for share in ANSWERED)
        + " | AURC | size |",
        "|---|" + "---|" * (len(ANSWERED) + 2),
    ]
    for row in results["budgets"]:
        cells = [f"{100 * error:.1f}" for error in row["errors"]]
        rows.append(f"| {row['cost'] / 1e6:.1f} | {' | '.join(cells)} | {row['aurc']:.3f} | {row['size']:.1f} |")
    exits = len(results["groups"][0]["groups"]) - 1
    heads = ["all", *(f"exit {k + 1}" for k in range(exits))]
    groups = ["| coverage for | score | " + " | ".join(heads) + " |", "|---|---|" + "---|" * len(heads)]
    for row in results["groups"]:
        cells = [
            "" if part["coverage"] is None else f"{100 * part['coverage']:.1f} %, {part['size']:.1f}"
            for part in row["groups"]
        ]
        name = "all images" if row["per"] == "all" else "each exit"
        groups.append(f"| {name} | {row['score']} | {' | '.join(cells)} |")
    return {"trade-off": "\n".join(rows), "sets": "\n".join(groups)}


def filled(page: str) -> str:
    """The page with its tables as the results have them now."""
    return fill_tables(page, tables(json.loads(RESULTS.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    run_or_fill(__doc__, main, PAGE, filled)
