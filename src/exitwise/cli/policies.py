"""The commands about budgets: evaluate and policies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exitwise.calibration.methods import OURS, VANILLA, get_method
from exitwise.cli.train import JsonOption, RunArgument, print_json
from exitwise.core.errors import InputError

if TYPE_CHECKING:
    from exitwise.runs.policies import PolicyOptions

MethodOption = Annotated[
    str, typer.Option(help="One of the paper's methods by its name, with PoE for MIE, or MC dropout for Laplace.")
]
Strategy = Annotated[
    str, typer.Option(help="How thresholds are made: auto, geometric (the paper's), optimized or label_free.")
]
ScoreOption = Annotated[str, typer.Option(help="What decides: confidence, margin, entropy, variance or patience.")]
Objective = Annotated[str, typer.Option(help="What thresholds are best for: accuracy or nlpd.")]
Certify = Annotated[
    float | None,
    typer.Option(help="Guarantee the budget: 0.05 for a probability of 95%. Holds out half of the validation split."),
]
MaxLoss = Annotated[
    float | None, typer.Option(help="Also guarantee that no more is lost against the last exit: 0.01 for a point.")
]
Risk = Annotated[str | None, typer.Option(help="What --max-loss is about: accuracy (if not given) or disagreement.")]


def request(
    strategy: str, score: str, objective: str, certify: float | None, max_loss: float | None, risk: str | None
) -> "PolicyOptions":
    """The options as one."""
    from exitwise.policies.certificate import Certificate
    from exitwise.runs.policies import PolicyOptions

    certificate = None
    if risk is not None and max_loss is None:
        raise InputError("--risk is what --max-loss is about: say how much may be lost")
    if certify is not None:
        certificate = Certificate(certify, None if max_loss is None else risk or "accuracy", max_loss)
    elif max_loss is not None:
        raise InputError("--max-loss is part of a guarantee: say how sure it must be by --certify 0.05")
    return PolicyOptions(strategy, score, objective, certificate)


def evaluate(
    run: RunArgument,
    budget: Annotated[
        str,
        typer.Option(help="Mean cost per sample: 2e7 (MACs), 50% of the last exit's, or 12ms where costs are in ms."),
    ],
    method: MethodOption = OURS,
    score: ScoreOption = "confidence",
    strategy: Strategy = "auto",
    objective: Objective = "accuracy",
    certify: Certify = None,
    max_loss: MaxLoss = None,
    risk: Risk = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Another run, such as a baseline's, to show beside; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit thresholds for a budget on the validation split, and measure on the test split what they buy."""
    from exitwise.calibration.tuning import Tuner
    from exitwise.cli import tables
    from exitwise.evaluation.evaluate import evaluate as evaluate_policy
    from exitwise.runs import collect, policies
    from exitwise.runs.run import Run

    chosen, asked = get_method(method), request(strategy, score, objective, certify, max_loss, risk)
    opened = Run(run)
    trace = opened.trace()
    if trace.test is None:
        raise InputError(f"the trace of {run} has no test split to evaluate on")
    costs = collect.costs_in_budget_unit(budget, opened, trace)
    amount = collect.parse_budget(budget, costs)
    asked.check(chosen, costs, amount)
    tuner, found, samples = Tuner(trace), {}, {}
    for each in dict.fromkeys((get_method(VANILLA), chosen)):
        its = asked if each == chosen else asked.for_baseline(each)
        made = policies.calibrate_run(opened, tuner, each, its.certificate)
        policy = made.policy(costs, amount, its)
        result = evaluate_policy(
            made.calibration.predict(trace.test), labels=trace.test.labels, policy=policy, costs=costs
        )
        found[each.name], samples = (policy, result), made.samples
    policy, result = found[chosen.name]
    for other in against or []:
        name, pair = collect.evaluate_vanilla_at(Run(other), amount, costs.unit)
        found[name] = pair
    opened.save_policy(policy)
    report = {name: {"policy": made.to_dict(), "evaluation": got.to_dict()} for name, (made, got) in found.items()}
    about = {"budget": amount, "unit": costs.unit, "method": chosen.name, "methods": report}
    about["samples"] = {**samples, **policies.tested_on(trace)}
    opened.add_results(evaluation=about)
    if as_json:
        return print_json(**about)
    out = tables.console()
    out.print(tables.evaluation(found, amount, costs.unit))
    out.print(tables.exits(policy, result, found[VANILLA][1], costs.values, costs.unit))
    out.print(tables.describe_fit(policy))
    return None


def policies(
    run: RunArgument,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="2e7 (MACs), 50% or 12ms; may be repeated. Six over the range if not given."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated, or all for the twelve. The plain net and the whole method."),
    ] = None,
    score: Annotated[
        list[str] | None, typer.Option(help="What decides: may be repeated, or all for every one. confidence.")
    ] = None,
    objective: Objective = "accuracy",
    certify: Annotated[float, typer.Option(help="The certified rows' probability to fail; 0 leaves them out.")] = 0.05,
    repeats: Annotated[int, typer.Option(help="Bootstrap samples behind the intervals.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """Compare every strategy, for each method and budget, with the paper's public rule: on test data, with intervals.

    Calibration and thresholds see the validation split alone, those of certified rows one half of it.
    """
    from exitwise.calibration.methods import METHODS
    from exitwise.cli import tables
    from exitwise.cli.progress import progress_bars
    from exitwise.policies.scores import SCORES
    from exitwise.runs import collect, compare
    from exitwise.runs.run import Run

    opened = Run(run)
    trace = opened.trace()
    names = list(METHODS) if method == ["all"] else method or [VANILLA, OURS]
    methods = [get_method(name) for name in names]
    chosen = list(SCORES) if score == ["all"] else score or ["confidence"]
    in_ms = any(text.strip().lower().endswith("ms") for text in budget or [])
    costs = collect.costs_in_budget_unit("ms" if in_ms else "", opened, trace)
    amounts = [collect.parse_budget(text, costs) for text in budget or []] or compare.evenly_spaced_budgets(costs, 6)
    asked = compare.Comparison(tuple(amounts), tuple(methods), tuple(chosen), objective, certify or None, repeats)
    with progress_bars("methods") as progress:
        table = asked.run(opened, trace, costs, lambda done, total: progress("compare", done, total))
    opened.add_results(policies=table.to_dict())
    if as_json:
        return print_json(**table.to_dict())
    out = tables.console()
    for part in tables.policies(table, out.width):
        out.print(part)
    return None
