"""Tables of prediction sets and of abstention, as `exitwise evaluate` prints them."""

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table as RichTable

from exitwise.cli.tables import make_table
from exitwise.core.costs import format_cost
from exitwise.core.text import escape_controls
from exitwise.evaluation.answers import AbstentionEvaluation, SetEvaluation, SetGroup
from exitwise.policies.abstention import Abstention
from exitwise.policies.prediction_sets import PredictionSets
from exitwise.runs.answers import ANSWERED, AnswersEvaluation, TradeOffRow

_MAX_CLASSES = 5  # classes that the table lists, those with the lowest coverage


def answer_tables(answers: AnswersEvaluation, unit: str, classes: Sequence[str] | None = None) -> Iterator[RichTable]:
    """Yield a table of the prediction sets, one of the abstention, for what there is, and one of the trade-off."""
    if answers.fitted.sets is not None and answers.sets is not None:
        yield _sets_table(answers.fitted.sets, answers.sets, classes)
    if answers.fitted.abstention is not None and answers.abstention is not None:
        yield _abstention_table(answers.fitted.abstention, answers.abstention, unit)
    if answers.trade_off:
        yield _trade_off_table(answers.trade_off, unit)


def _sets_table(sets: PredictionSets, result: SetEvaluation, classes: Sequence[str] | None) -> RichTable:
    groups = {"all": "", "exit": ", at every exit", "class": ", of every class"}[sets.per]
    table = make_table(
        f"\nPrediction sets: coverage {100 * sets.coverage:g} %{groups}, score {sets.score}",
        f"\nFitted on {sum(sets.samples):,} held-out samples, measured on the test split: "
        f"{100 * result.single:.1f} % of the sets hold one class.",
    )
    for name in ("images", "samples", "coverage %", "mean size"):
        table.add_column(name, justify="left" if name == "images" else "right")
    table.add_row("all", f"{result.samples:,}", f"{100 * result.coverage:.2f}", f"{result.mean_size:.2f}")
    for k, group in enumerate(result.by_exit):
        _add_group(table, f"exit {k + 1}", group)
    present = [(c, group) for c, group in enumerate(result.by_class) if group.coverage is not None]
    for c, group in sorted(present, key=lambda pair: pair[1].coverage or 0.0)[:_MAX_CLASSES]:
        name = f"class {c}" if classes is None else escape(escape_controls(classes[c]))
        _add_group(table, name + (" (lowest coverage)" if len(present) > _MAX_CLASSES else ""), group)
    return table


def _add_group(table: RichTable, name: str, group: SetGroup) -> None:
    coverage = "" if group.coverage is None else f"{100 * group.coverage:.2f}"
    size = "" if group.mean_size is None else f"{group.mean_size:.2f}"
    table.add_row(name, f"{group.samples:,}", coverage, size)


def _abstention_table(abstention: Abstention, result: AbstentionEvaluation, unit: str) -> RichTable:
    """Return the trade-off of cost, answered share and error rate."""
    claim = f"{100 * (abstention.share or 0):.4g} % of images unanswered"
    caption = f"\nFitted on {abstention.samples:,} held-out samples, measured on the test split."
    if abstention.risk is not None and abstention.delta is not None:
        claim = f"at most {100 * abstention.risk:.4g} % errors among answered images"
        caption += f" Certified: with a probability of {100 * (1 - abstention.delta):.4g} % the error rate is so low."
    suffix = " (at the last exit only)" if abstention.at == "last" else ""
    table = make_table(f"\nAbstention: {claim}{suffix}", f"{caption} AURC {result.curve.aurc:.4f}.")
    for name in ("answers", "mean cost", "answered %", "errors among them %"):
        table.add_column(name, justify="left" if name == "answers" else "right")
    cost = "" if result.cost is None else format_cost(result.cost, unit)
    error = "" if result.error is None else f"{100 * result.error:.2f}"
    table.add_row("all images", cost, "100.00", f"{100 * result.error_all:.2f}")
    table.add_row("with abstention", cost, f"{100 * result.answered:.2f}", error)
    return table


def _trade_off_table(rows: Sequence[TradeOffRow], unit: str) -> RichTable:
    """Return cost, share of answered images and errors among them at several budgets."""
    table = make_table(
        "\nCost, answered images and errors",
        "\nErrors among the answered images, %, if this share is answered and the least confident images are not.",
    )
    has_sets = any(row.mean_size is not None for row in rows)
    names = [f"{100 * share:g} %" for share in ANSWERED]
    for name in ("budget", "mean cost", *names, *(["set size"] if has_sets else [])):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [format_cost(row.budget, unit), format_cost(row.cost, unit)]
        cells += ["" if error is None else f"{100 * error:.2f}" for error in row.error]
        if has_sets:
            cells.append("" if row.mean_size is None else f"{row.mean_size:.2f}")
        table.add_row(*cells)
    return table
