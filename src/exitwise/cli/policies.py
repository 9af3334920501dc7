"""Commands about budgets: evaluate and policies."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from exitwise.calibration.methods import AUTO, VANILLA, parse_method
from exitwise.cli.options import JsonOption, MethodOption, RunArgument, print_json
from exitwise.core.checks import check_choice
from exitwise.core.errors import InputError

ObjectiveOption = Annotated[str, typer.Option(help="Metric that thresholds optimize: accuracy or nlpd.")]


def evaluate(
    run: RunArgument,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Mean cost per sample: 2e7 (MACs), 50% (of the last exit's cost), or 12ms (after `exitwise bench`)."
        ),
    ] = None,
    method: MethodOption = AUTO,
    score: Annotated[
        str,
        typer.Option(
            help="Exit score: confidence, margin, entropy, variance, patience, learned (where stopping is right), or "
            "auto for one that is clearly better than confidence on held-out folds."
        ),
    ] = "auto",
    strategy: Annotated[
        str, typer.Option(help="Threshold strategy: auto, geometric (the paper's), optimized or label_free.")
    ] = "auto",
    objective: ObjectiveOption = "accuracy",
    certify: Annotated[
        float | None,
        typer.Option(
            help="Certify the budget or the loss with this failure probability, such as 0.05; "
            "holds out half of the validation split."
        ),
    ] = None,
    max_loss: Annotated[
        str | None,
        typer.Option(
            metavar="POINTS",
            help="Instead of a budget: the cheapest policy that loses at most this many points of accuracy, such as "
            "0.2, against the last exit of the plain net. With --budget and --certify: also certify a maximum loss "
            "against the last exit of the calibrated net, as a fraction (0.01) or in points (1%).",
        ),
    ] = None,
    risk: Annotated[
        str | None,
        typer.Option(
            help="A number such as 0.02: abstain so that the error rate among answered images is at most this, "
            "certified. Or the kind of loss that --max-loss limits: accuracy or disagreement.",
            show_default="accuracy",
        ),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Failure probability of a --risk that is a number.", show_default="0.05")
    ] = None,
    sets: Annotated[
        float | None,
        typer.Option(
            metavar="COVERAGE",
            help="Fit prediction sets that hold the true class with this probability, such as 0.9; holds out half of "
            "the validation split.",
        ),
    ] = None,
    sets_per: Annotated[
        str | None,
        typer.Option(
            help="Groups that the coverage holds in: all images, those of each exit, or of each class.",
            show_default="all",
        ),
    ] = None,
    sets_score: Annotated[
        str | None,
        typer.Option(help="Score of prediction sets: thr for the smallest ones, aps or raps.", show_default="thr"),
    ] = None,
    abstain: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Leave this share of images unanswered, such as 5%; holds out half of the validation split.",
        ),
    ] = None,
    abstain_at: Annotated[
        str | None,
        typer.Option(
            help="Where to abstain: at the exit that an image takes, or only at the last.", show_default="exit"
        ),
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Another run to compare with, such as a baseline; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit thresholds on the validation split, for a budget or for a loss, and measure them on the test split.

    The run remembers the calibrated net and its thresholds: `predict`, `export`, `bench` and `report` use them.
    """
    from exitwise.cli import tables
    from exitwise.cli.answer_tables import answer_tables
    from exitwise.policies.certificate import RISKS, Certificate
    from exitwise.runs.answers import AnswerOptions, parse_share
    from exitwise.runs.budgets import costs_in_budget_unit, parse_budget, parse_max_loss
    from exitwise.runs.labels import model_labels
    from exitwise.runs.policies import PolicyOptions, evaluate_run
    from exitwise.runs.run import Run

    choice, certificate = parse_method(method), None
    error_rate, risk = _parse_risk(risk)
    share = None if abstain is None else parse_share("--abstain", abstain)
    for option, value, needed, is_given in (
        ("--sets-per", sets_per, "--sets", sets is not None),
        ("--sets-score", sets_score, "--sets", sets is not None),
        ("--abstain-at", abstain_at, "--abstain or --risk", share is not None or error_rate is not None),
        ("--delta", delta, "a --risk that is a number", error_rate is not None),
    ):
        if value is not None and not is_given:
            raise InputError(f"{option} needs {needed}")
    answers = AnswerOptions(
        coverage=sets,
        per=sets_per or "all",
        set_score=sets_score or "thr",
        share=share,
        risk=error_rate,
        delta=0.05 if delta is None else delta,
        at=abstain_at or "exit",
    )
    answers.check()
    if risk is not None and max_loss is None:
        raise InputError("--risk is the kind of loss of --max-loss: give the maximum loss, too")
    if budget is None and max_loss is None:
        raise InputError("evaluate needs --budget 50%, or --max-loss 0.2 for the cheapest policy that loses so little")
    kind = check_choice("risk", risk or "accuracy", RISKS)
    loss = None if max_loss is None else parse_max_loss(max_loss, with_budget=budget is not None)
    if certify is not None and budget is None:
        certificate = Certificate(None, kind, loss, certify)
    elif certify is not None:
        certificate = Certificate(certify, None if loss is None else kind, loss)
    elif budget is not None and max_loss is not None:
        raise InputError(
            "--max-loss with --budget is part of a certificate: give its failure probability with --certify 0.05, or "
            "leave out --budget for the cheapest policy"
        )
    opened = Run(run)
    trace = opened.trace()
    costs = trace.costs if budget is None else costs_in_budget_unit(budget, opened, trace)
    amount = None if budget is None else parse_budget(budget, costs)
    options = PolicyOptions(strategy, score, objective, certificate, answers=answers)
    if budget is None:
        options = replace(options, max_loss=loss, risk=kind)
    evaluation = evaluate_run(opened, trace, choice, costs, amount, options, against or ())
    if as_json:
        return print_json(**evaluation.to_dict())
    policy, result = evaluation.models[evaluation.method]
    out = tables.console()
    labels = model_labels(trace.preset)
    out.print(tables.evaluation(evaluation, costs, labels))
    out.print(tables.exits(policy, result, evaluation.models[VANILLA][1], costs.values, costs.unit))
    out.print(tables.describe_fit(policy))
    for table in () if evaluation.answers is None else answer_tables(evaluation.answers, costs.unit, trace.classes):
        out.print(table)
    tables.print_notes(out, evaluation.notes)
    return None


def _parse_risk(risk: str | None) -> tuple[float | None, str | None]:
    """Return the value of `--risk` as an error rate, if it is a number, and otherwise as the kind of a loss."""
    from exitwise.runs.answers import parse_share

    if risk is None or not risk.strip().removeprefix("-")[:1].isdigit():
        return None, risk
    return parse_share("--risk", risk), None


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
            help="Method by name, auto, or all for the twelve; may be repeated.",
            show_default="vanilla and auto",
        ),
    ] = None,
    score: Annotated[
        list[str] | None,
        typer.Option(help="Exit score, auto, or all; may be repeated.", show_default="auto; confidence for vanilla"),
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
    from exitwise.core.costs import evenly_spaced_budgets
    from exitwise.policies.scores import AUTO as AUTO_SCORE
    from exitwise.policies.scores import LEARNED, SCORES
    from exitwise.runs.budgets import costs_in_budget_unit, is_in_milliseconds, parse_budget
    from exitwise.runs.compare import Comparison
    from exitwise.runs.labels import model_labels
    from exitwise.runs.run import Run

    opened = Run(run)
    trace = opened.trace()
    names = list(METHODS) if method == ["all"] else method or [VANILLA, AUTO]
    methods = [parse_method(name) for name in names]
    scores = [*SCORES, LEARNED] if score == ["all"] else score or [AUTO_SCORE]
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
    for part in tables.policies(table, out.width, model_labels(trace.preset)):
        out.print(part)
    return None
