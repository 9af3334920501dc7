"""Commands about budgets: evaluate and policies."""

from pathlib import Path
from typing import Annotated

import typer

from exitwise.calibration.methods import OURS, VANILLA, get_method
from exitwise.cli.options import JsonOption, MethodOption, RunArgument, print_json
from exitwise.core.errors import InputError

ObjectiveOption = Annotated[str, typer.Option(help="Metric that thresholds optimize: accuracy or nlpd.")]


def evaluate(
    run: RunArgument,
    budget: Annotated[
        str,
        typer.Option(
            help="Mean cost per sample: 2e7 (MACs), 50% (of the last exit's cost), or 12ms (after `exitwise bench`)."
        ),
    ],
    method: MethodOption = OURS,
    score: Annotated[
        str, typer.Option(help="Exit score: confidence, margin, entropy, variance or patience.")
    ] = "confidence",
    strategy: Annotated[
        str, typer.Option(help="Threshold strategy: auto, geometric (the paper's), optimized or label_free.")
    ] = "auto",
    objective: ObjectiveOption = "accuracy",
    certify: Annotated[
        float | None,
        typer.Option(
            help="Certify the budget with this failure probability, such as 0.05; "
            "holds out half of the validation split."
        ),
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(
            help="With --certify: also certify a maximum loss relative to the last exit; 0.01 is one percentage point."
        ),
    ] = None,
    risk: Annotated[
        str | None,
        typer.Option(help="Kind of loss that --max-loss limits: accuracy or disagreement.", show_default="accuracy"),
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Another run to compare with, such as a baseline; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit thresholds for a budget on the validation split, and measure accuracy and calibration on the test split.

    The run remembers the calibrated net and its thresholds: `predict`, `export`, `bench` and `report` use them.
    """
    from exitwise.cli import tables
    from exitwise.policies.certificate import Certificate
    from exitwise.runs.budgets import costs_in_budget_unit, parse_budget
    from exitwise.runs.policies import PolicyOptions, evaluate_run
    from exitwise.runs.run import Run

    calibration_method, certificate = get_method(method), None
    if risk is not None and max_loss is None:
        raise InputError("--risk is the kind of loss of --max-loss: give the maximum loss, too")
    if certify is not None:
        certificate = Certificate(certify, None if max_loss is None else risk or "accuracy", max_loss)
    elif max_loss is not None:
        raise InputError("--max-loss is part of a certificate: give its failure probability with --certify 0.05")
    opened = Run(run)
    trace = opened.trace()
    costs = costs_in_budget_unit(budget, opened, trace)
    amount = parse_budget(budget, costs)
    options = PolicyOptions(strategy, score, objective, certificate)
    evaluation = evaluate_run(opened, trace, calibration_method, costs, amount, options, against or ())
    if as_json:
        return print_json(**evaluation.to_dict())
    policy, result = evaluation.models[evaluation.method]
    out = tables.console()
    out.print(tables.evaluation(evaluation.models, amount, costs.unit))
    out.print(tables.exits(policy, result, evaluation.models[VANILLA][1], costs.values, costs.unit))
    out.print(tables.describe_fit(policy))
    return None


def policies(
    run: RunArgument,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="2e7 (MACs), 50% or 12ms; may be repeated.",
            show_default="six, evenly spaced over the range",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method by name, or all for the twelve; may be repeated.",
            show_default="vanilla and the full method",
        ),
    ] = None,
    score: Annotated[
        list[str] | None,
        typer.Option(help="Exit score, or all; may be repeated.", show_default="confidence"),
    ] = None,
    objective: ObjectiveOption = "accuracy",
    certify: Annotated[
        float, typer.Option(help="Failure probability of the certified rows; 0 leaves them out.")
    ] = 0.05,
    repeats: Annotated[int, typer.Option(help="Bootstrap resamples for the intervals.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """Compare every strategy with the paper's sweep, for each method and budget: on test data, with intervals.

    Calibration and thresholds use only the validation split, those of certified rows one half of it.
    """
    from exitwise.calibration.methods import METHODS
    from exitwise.cli import tables
    from exitwise.cli.progress import progress_bars
    from exitwise.policies.scores import SCORES
    from exitwise.runs.budgets import costs_in_budget_unit, is_in_milliseconds, parse_budget
    from exitwise.runs.compare import Comparison, evenly_spaced_budgets
    from exitwise.runs.run import Run

    opened = Run(run)
    trace = opened.trace()
    names = list(METHODS) if method == ["all"] else method or [VANILLA, OURS]
    methods = [get_method(name) for name in names]
    scores = list(SCORES) if score == ["all"] else score or ["confidence"]
    in_ms = any(map(is_in_milliseconds, budget or []))
    costs = costs_in_budget_unit("ms" if in_ms else "", opened, trace)
    budgets = [parse_budget(text, costs) for text in budget or []] or evenly_spaced_budgets(costs, 6)
    comparison = Comparison(tuple(budgets), tuple(methods), tuple(scores), objective, certify or None, repeats)
    with progress_bars("methods") as progress:
        table = comparison.run(opened, trace, costs, lambda done, total: progress("compare", done, total))
    opened.add_results(policies=table.to_dict())
    if as_json:
        return print_json(**table.to_dict())
    out = tables.console()
    for part in tables.policies(table, out.width):
        out.print(part)
    return None
