"""Tables and sentences that the command prints, made from the library's results."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from exitwise.calibration.calibration import Calibration
from exitwise.calibration.methods import OURS, VANILLA
from exitwise.calibration.overhead import ExitCost
from exitwise.calibration.search_bounds import find_values_at_bounds
from exitwise.core.costs import Costs, format_cost, format_percent
from exitwise.evaluation.best_cascades import CascadeRow, CascadeTable
from exitwise.evaluation.evaluate import Evaluation
from exitwise.evaluation.paper_tables import Table, TableRow
from exitwise.policies.certificate import describe_guarantee
from exitwise.policies.policy import Policy, PolicyFit
from exitwise.policies.score_choice import describe_choice
from exitwise.runs.cascade import NetworkCost
from exitwise.runs.compare import PUBLIC, PolicyTable
from exitwise.runs.policies import RunEvaluation
from exitwise.runtime.bench import FULL as FULL_NET
from exitwise.runtime.bench import VANILLA as VANILLA_NET
from exitwise.runtime.bench import Bench

_SCORE_NAMES = {"learned": "learned score", "entropy": "negative entropy", "variance": "negative variance"}

_WIDE = 110  # columns of the widest table, for pipes and files

_PAPER_NET = "another network, trained far longer (300 epochs on CIFAR-100)"

# Factor, number of digits, and whether more is better.
_DIGITS = {"top1": (100, 2, True), "top5": (100, 2, True), "nlpd": (1, 3, False), "ece": (1, 3, False)}


def console(stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or as wide as the tables if there is no terminal."""
    terminal = Console(stderr=stderr, highlight=False)
    return terminal if terminal.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDE)


def format_metric(name: str, value: float) -> str:
    """Format a metric with its number of digits; accuracies become percentages."""
    factor, digits, _ = _DIGITS[name]
    return f"{value * factor:.{digits}f}"


def format_change(name: str, value: float) -> Text:
    """Return a signed difference: green for an improvement, red for a loss."""
    factor, digits, more_is_better = _DIGITS[name]
    text = _drop_leading_zero(f"{value * factor:+.{digits}f}") if digits == 3 else f"{value * factor:+.{digits}f}"
    if float(text) == 0:
        return Text(text.replace("-", "+"), style="dim")
    return Text(text, style="green" if (value > 0) == more_is_better else "red")


def _drop_leading_zero(number: str) -> str:
    """Return -.247 for -0.247, as the paper prints it."""
    return number.replace("0.", ".", 1) if number.lstrip("+-").startswith("0.") else number


def make_table(title: str, caption: str | None = None, gap: int = 1) -> RichTable:
    """Return an empty table in the style of all commands; columns are `gap` spaces apart."""
    return RichTable(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="dim",
        padding=(0, gap, 0, 0),
        show_edge=False,
        pad_edge=False,
    )


def ablation(
    table: Table,
    title: str,
    published: Mapping[str, Mapping[str, float]] | None,
    width: int = _WIDE,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> RichTable:
    """Return a table of means over the budget range, with the change from the first row and the paper's change."""
    low, high = (format_cost(value, table.unit) for value in table.budget_range)
    budgets = f"mean over budgets from {low} to {high}" if table.budget_range[0] else f"one exit, at {high}"
    caption = f"\nTest set, {budgets}; ± is the change from the first row."
    if published:
        caption += f"\nPaper: the published change for this architecture, of {_PAPER_NET}."
    longest = max(len(row.method) for row in table)
    rich_table = make_table(title, caption, gap=1 if width >= longest + 62 else 0)  # the ablation fits 80 columns
    rich_table.add_column("", overflow="fold")
    metrics = {"top1": "top-1", "top5": "top-5", "nlpd": "NLPD", "ece": "ECE"}
    if width < longest + 83:
        del metrics["top5"]
    for name in metrics.values():
        rich_table.add_column(name, justify="right", no_wrap=True)
        rich_table.add_column("±", justify="right", no_wrap=True)
        if published:
            rich_table.add_column("paper", justify="right", no_wrap=True, style="italic")
    for i, row in enumerate(table):
        cells: list[str | Text] = [
            Text(labels.get(row.method, row.method), style="bold" if row.method in (OURS, "Our model") else "")
        ]
        for name in metrics:
            cells.append(_drop_leading_zero(format_metric(name, getattr(row, name))))
            cells.append(format_change(name, row.change[name]) if i else "")
            if published:
                changes = published.get(row.method) if i else None
                cells.append(format_change(name, changes[name]) if changes else "")
        rich_table.add_row(*cells)
    return rich_table


def networks(costs: Sequence[NetworkCost]) -> RichTable:
    """Return the networks of a cascade with their own costs, and what an image costs that runs up to each."""
    table = make_table("Cascade")
    for name, justify in (("network", "left"), ("images", "right"), ("alone", "right"), ("up to it", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    spent = 0
    for cost in costs:
        spent += cost.macs
        amounts = (format_cost(float(value), "MACs") for value in (cost.macs, spent))
        table.add_row(cost.name, f"{cost.size} x {cost.size}", *amounts)
    return table


def best_cascades(table: CascadeTable) -> Iterator[RichTable]:
    """Yield the best chains at every budget, and the Pareto front of all chains and networks."""
    caption = (
        f"\nCross-fitted on {table.samples:,} validation images: calibration and thresholds from the other folds; 95 % "
        f"intervals.\nGain: against the best network alone within the budget. The best of many looks better than it "
        f"is: choosing in\nevery fold by the others, top-1 is "
        + ", ".join("-" if value is None else f"{100 * value:.2f}" for value in table.chosen_top1)
        + " at these budgets."
    )
    best = make_table("Best networks at every budget", caption)
    _add_cascade_columns(best, "budget", "gain")
    for budget, row in zip(table.budgets, table.best, strict=True):
        if row is not None:
            gain = "" if row.gain is None else f"{100 * row.gain:+.2f}"
            best.add_row(format_cost(budget, table.unit), *_cascade_cells(row, table.unit), gain)
    yield best
    has_times = all(row.milliseconds is not None for row in table.networks)
    for cost, title in (("cost", "MACs"), ("milliseconds", "measured milliseconds")):
        if cost == "milliseconds" and not has_times:
            continue
        front = make_table(f"\nNo other is better and cheaper, in {title}")
        _add_cascade_columns(front)
        for row in table.front(cost):
            front.add_row(*_cascade_cells(row, table.unit))
        yield front


def _add_cascade_columns(table: RichTable, first: str | None = None, last: str | None = None) -> None:
    names = (first, "networks", "cost", "ms", "top-1 %", "95 %", "NLPD", "ECE", last)
    for name in names:
        if name is not None:
            table.add_column(name, justify="left" if name == "networks" else "right")


def _cascade_cells(row: CascadeRow, unit: str) -> tuple[str, ...]:
    low, high = (f"{100 * value:.2f}" for value in row.interval)
    time = "" if row.milliseconds is None else f"{row.milliseconds:.3g}"
    metrics = (f"{100 * row.top1:.2f}", f"{low} to {high}", f"{row.nlpd:.3f}", _drop_leading_zero(f"{row.ece:.3f}"))
    return (row.name, format_cost(row.cost, unit), time, *metrics)


def summary(table: Table) -> str:
    """Summarize the change of NLPD, ECE and accuracy in two sentences."""
    before, after = table[VANILLA], table[OURS]
    return (
        f"With the full method ({OURS}), the negative log-likelihood {_describe_move(before, after, 'nlpd')}, and the "
        f"expected calibration error {_describe_move(before, after, 'ece')}. The network is the same, without "
        f"training: its confidence is now {_format_points(after.ece)} from its accuracy, before it was "
        f"{_format_points(before.ece)}. At equal cost, top-1 accuracy {_describe_move(before, after, 'top1', '%')}."
    )


def _describe_move(before: TableRow, after: TableRow, name: str, unit: str = "") -> str:
    old, new = getattr(before, name), getattr(after, name)
    verb = "falls" if new < old else "rises" if new > old else "stays"
    return f"{verb} from {format_metric(name, old)}{unit} to {format_metric(name, new)}{unit}"


def _format_points(ece: float) -> str:
    return f"{ece * 100:.1f} points"


def calibration(calibration: Calibration, vanilla: Calibration) -> RichTable:
    """Return a table of the tuned values of every exit and the validation NLPD before and after."""
    note = "\nTuned on the validation split; NLPD of the ensemble where there is one."
    if calibration.method.ensemble and len(calibration.exits) > 1 and calibration.val_nlpd[-1] > vanilla.val_nlpd[-1]:
        note += " Ensembling makes the last exit worse; try a method without it, such as T_opt."
    table = make_table(f"\n{calibration.method.name}", note)
    columns = [
        "exit",
        "temperature",
        *(["prior variance"] if calibration.method.laplace else []),
        *(["weights of exits 1, 2, ..."] if calibration.pool else []),
        "NLPD before",
        "NLPD after",
    ]
    for name in columns:
        table.add_column(name, justify="right")
    at_bound = {(value.exit, value.quantity) for value in find_values_at_bounds(calibration)}
    for k, exit in enumerate(calibration.exits):
        prior = [_format_tuned(exit.prior_var, (k, "prior variance") in at_bound)] if calibration.method.laplace else []
        nlpd = [f"{vanilla.val_nlpd[k]:.4f}", f"{calibration.val_nlpd[k]:.4f}"]
        temperature = _format_tuned(exit.temperature, (k, "temperature") in at_bound)
        pooled = [" ".join(f"{weight:.3f}" for weight in calibration.pool[k].weights)] if calibration.pool else []
        table.add_row(str(k + 1), temperature, *prior, *pooled, *nlpd)
    return table


def _format_tuned(value: float, at_bound: bool) -> str:
    """Format a tuned value and mark it if it lies at a bound of its search."""
    return f"{value:.3g}{' (at its bound)' if at_bound else ''}"


def evaluation(evaluated: RunEvaluation, costs: Costs, labels: Mapping[str, str]) -> RichTable:
    """Return a table that compares methods at one budget, or at one loss."""
    models, unit, loss = evaluated.models, costs.unit, evaluated.max_loss
    title = f"\nBudget {format_cost(evaluated.budget, unit)} per sample"
    if loss is not None:
        kind = "disagreement with" if loss["risk"] == "disagreement" else "top-1 below"
        title = f"\nCheapest policies with at most {loss['points']:.4g} points of {kind} the last exit of the plain net"
    table = make_table(title, "\nThresholds fitted on the validation split, all other rows measured on the test split.")
    table.add_column("")
    for name in models:
        table.add_column(labels.get(name, name), justify="right")
    pairs = list(models.values())
    rows: list[tuple[str, list[str]]] = [
        ("mean cost, validation", [format_cost(policy.cost or 0.0, unit) for policy, _ in pairs]),
        ("mean cost, test", [format_cost(result.cost, unit) for _, result in pairs]),
        *_loss_rows(evaluated, costs),
        ("top-1 %", [f"{result.top1:.2%}"[:-1] for _, result in pairs]),
        ("top-5 %", [f"{result.top5:.2%}"[:-1] for _, result in pairs]),
        ("NLPD", [f"{result.nlpd:.4f}" for _, result in pairs]),
        ("ECE", [f"{result.ece:.4f}" for _, result in pairs]),
        ("adaptive ECE", [f"{result.adaptive_ece:.4f}" for _, result in pairs]),
        ("Brier score", [f"{result.brier:.4f}" for _, result in pairs]),
        ("AUROC, correct against wrong", [f"{result.auroc:.4f}" for _, result in pairs]),
        ("AURC", [f"{result.aurc:.4f}" for _, result in pairs]),
        ("EEFP, stopping is right", [_format_eefp(result.eefp) for _, result in pairs]),
        ("EEFP, exits as visited", [_format_eefp(result.eefp_visited) for _, result in pairs]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _format_eefp(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def _loss_rows(evaluated: RunEvaluation, costs: Costs) -> list[tuple[str, list[str]]]:
    """Return the rows of an evaluation at a maximum loss: the share of the full cost, and the loss in points."""
    if evaluated.max_loss is None:
        return []
    losses = evaluated.max_loss["test"]
    return [
        (
            "% of the full cost",
            [f"{100 * result.cost / costs.values[-1]:.1f}" for _, result in evaluated.models.values()],
        ),
        ("loss, points", [f"{losses[name]:+.2f}" if name in losses else "" for name in evaluated.models]),
    ]


def print_notes(out: Console, notes: Sequence[str]) -> None:
    """Print what the user should know about the results, one line each."""
    for note in notes:
        out.print(f"\nNote: {note}", soft_wrap=True, markup=False)


def exits(policy: Policy, result: Evaluation, vanilla: Evaluation, costs: Sequence[float], unit: str) -> RichTable:
    """Return a table of exits: threshold, share of samples, and metrics if all samples exit there; also vanilla's."""
    table = make_table(
        f"\nExits (a sample exits if its {_SCORE_NAMES.get(policy.score, policy.score)} reaches the threshold)",
        "\nTop-1, NLPD and ECE if all samples exit there, calibrated; plain: top-1 without calibration.",
    )
    for name in ("exit", "cost", "threshold", "share %", "top-1 %", "NLPD", "ECE", "plain %"):
        table.add_column(name, justify="right")
    for k, (calibrated, before) in enumerate(zip(result.per_exit, vanilla.per_exit, strict=True)):
        threshold = policy.thresholds[k]
        condition = "all" if threshold == float("-inf") else "none" if threshold == float("inf") else f"{threshold:.4f}"
        share = f"{result.exit_shares[k] * 100:.2f}"
        table.add_row(
            str(k + 1),
            format_cost(costs[k], unit),
            condition,
            share,
            f"{calibrated.top1 * 100:.2f}",
            f"{calibrated.nlpd:.4f}",
            f"{calibrated.ece:.4f}",
            f"{before.top1 * 100:.2f}",
        )
    return table


def cost(preset: str, rows: Sequence[ExitCost], samples: int) -> RichTable:
    """Return a table of the cumulative cost of every exit and of the overhead of each method over vanilla."""
    caption = (
        "\nVanilla: millions of multiply-adds (the paper's FLOPs) up to an exit. Other columns: the overhead "
        f"that a method adds at all exits on the way, with {samples} draws or dropout masks. --json has the counts."
    )
    table = make_table(f"\n{preset}: cost of stopping at each exit", caption)
    table.add_column("exit", justify="right")
    table.add_column("params", justify="right")
    names = {
        "vanilla": "vanilla",
        "laplace": "Laplace",
        "naive_laplace": "naive Laplace",
        "ensemble": "MIE",
        "pool": "Pool",
        "pool_w_opt": "Pool W_opt",
        "ours": "Laplace + MIE",
        "mc_dropout": "MC dropout",
    }
    for name in names.values():
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row.vanilla / 1e6:.2f}"]
        for key in list(names)[1:]:
            cells.append(f"{getattr(row, key) / row.vanilla - 1:+.2%}")
        table.add_row(str(row.exit + 1), f"{row.parameters / 1e6:.2f} M", *cells)
    return table


def _describe_speedups(result: Bench) -> str:
    """Describe the best speed-up of early exits for each batch size."""
    best: dict[int, float] = {}
    for row in result.timings:
        if row.variant not in (VANILLA_NET, FULL_NET):
            best[row.batch_size] = max(row.speedup, best.get(row.batch_size, 0.0))
    speedups = ", ".join(f"{speed:.2f}x in batches of {size}" for size, speed in best.items())
    slower = (
        " Below 1x, the decision takes longer than early exits save." if min(best.values(), default=1.0) < 1 else ""
    )
    return f"Best speed-up of early exits: {speedups}.{slower}" if best else ""


def bench(result: Bench, costs: Costs, macs: Costs, costs_of: str) -> Iterator[RichTable]:
    """Yield two tables: times and speed-ups of all variants, and the stage costs that budgets in ms use."""
    threads = f"{result.threads} thread{'s' * (result.threads > 1)}"
    table = make_table(
        f"\nMilliseconds per image, {threads}, medians of {result.repeats} interleaved rounds",
        "\nPredicted: time of full-batch stages for the samples that reach each stage, the bound for early exits.\n"
        "Reached: share of the predicted speed. Speed-up: relative to the vanilla net on the same backend.\n"
        "Vanilla: the net without its early exits. Full: the calibrated net with all exits.\n"
        f"{_describe_speedups(result)}",
    )
    for name in ("batch", "backend", "budget"):
        table.add_column(name, justify="right" if name == "batch" else "left")
    for name in ("predicted", "measured", "reached", "speed-up", "by MACs"):
        table.add_column(name, justify="right")
    previous: tuple[int, str] | None = None
    for row in result.timings:
        group = (row.batch_size, row.backend)
        lead = [str(row.batch_size), row.backend] if group != previous else ["", ""]
        previous = group
        speedup = Text(f"{row.speedup:.2f}x", style="" if row.variant == VANILLA_NET else _speedup_style(row.speedup))
        table.add_row(
            *lead,
            row.variant,
            "" if row.bound_ms is None else f"{row.bound_ms:.3f}",
            f"{row.ms:.3f}",
            "" if row.reached is None else f"{row.reached:.0%}",
            speedup,
            "" if row.mac_speedup is None else f"{row.mac_speedup:.2f}x",
        )
    yield table
    stages = make_table(f"\nCost up to each exit ({costs_of}), stored for budgets in ms")
    for name in ("exit", "ms", "% of all", "MACs", "% of all"):
        stages.add_column(name, justify="right")
    for k, (ms, count) in enumerate(zip(costs.values, macs.values, strict=True), start=1):
        share = [f"{100 * value / all_[-1]:.1f}" for value, all_ in ((ms, costs.values), (count, macs.values))]
        stages.add_row(str(k), f"{ms:.3f}", share[0], format_cost(count), share[1])
    yield stages


def _speedup_style(speedup: float) -> str:
    return "green" if speedup > 1 else "red"


def describe_fit(policy: Policy) -> str:
    """Describe the fit of a policy and its guarantee."""
    sentences = []
    if policy.fit is not None:
        fit = policy.fit
        chosen = f" ({fit.chosen} was best on held-out folds)" if policy.strategy == "auto" and fit.portfolio else ""
        sentences.append(f"Thresholds: {policy.strategy}{chosen}, on {fit.samples:,} validation samples.")
        if fit.gap is not None and fit.labelled:
            sentences.append(f"On held-out folds (cross-fitting), {_describe_gap(fit)}.")
        if fit.score_choice is not None:
            sentences.append(describe_choice(policy.score, fit.score_choice, fit.objective))
    if policy.guarantee is not None:
        sentences.append(describe_guarantee(policy.guarantee, policy.unit))
    return "\n" + " ".join(sentences) if sentences else ""


def _describe_gap(fit: PolicyFit) -> str:
    gap = fit.gap or 0.0
    if fit.objective == "nlpd":
        return f"their NLPD is {abs(gap):.4f} {'higher' if gap > 0 else 'lower'}"
    return f"their accuracy is {100 * abs(gap):.2f} points {'lower' if gap > 0 else 'higher'}"


_STRATEGY_NAMES = {PUBLIC: "paper's sweep", "label_free": "label-free"}


def policies(
    table: PolicyTable, width: int = _WIDE, labels: Mapping[str, str] = MappingProxyType({})
) -> Iterator[RichTable | str]:
    """Yield one table per method and score, with a block of rows for each budget."""
    narrow = width < 97
    for method, score in dict.fromkeys((row.method, row.requested_score or row.score) for row in table):
        group = [row for row in table if (row.method, row.requested_score or row.score) == (method, score)]
        rich_table = make_table(f"\n{labels.get(method, method)}, {group[0].score}", gap=0 if narrow else 1)
        rich_table.add_column("budget", justify="right", no_wrap=True)
        rich_table.add_column("strategy", no_wrap=True)
        names = (*(() if narrow else ("val cost",)), "test cost", "top-1", "NLPD", "ECE", "EEFP", "vs sweep")
        for name in names:
            rich_table.add_column(name, justify="right", no_wrap=True)
        previous = None
        for row in group:
            if previous not in (None, row.budget):
                rich_table.add_section()
            strategy = _STRATEGY_NAMES.get(row.strategy, row.strategy)
            chosen = f" ({_STRATEGY_NAMES.get(row.chosen or '', row.chosen)})" if row.strategy == "auto" else ""
            if row.score != group[0].score:
                chosen += f" ({row.score})"
            gain: str | Text = ""
            if row.gain is not None:
                low, high = row.intervals["gain"]
                style = "green" if low > 0 else "red" if high < 0 else "dim"
                gain = Text(f"{100 * row.gain:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]", style=style)
            rich_table.add_row(
                "" if row.budget == previous else f"{100 * row.budget / table.full_cost:.0f} %",
                strategy + chosen,
                *(() if narrow else (f"{100 * row.val_cost / row.budget:.1f} %",)),
                f"{100 * row.test_cost / row.budget:.1f} %",
                f"{100 * row.top1:.2f} ±{_half_width(row.intervals['top1'], 100):.2f}",
                f"{row.nlpd:.3f}" + ("" if narrow else f" ±{_half_width(row.intervals['nlpd']):.3f}"),
                _drop_leading_zero(f"{row.ece:.3f}"),
                "" if row.eefp is None else _drop_leading_zero(f"{row.eefp:.3f}"),
                gain,
            )
            previous = row.budget
        yield rich_table
    tested = table.samples["tested_on"]["samples"]
    certified = (
        f" Certified: calibrated and fitted on half of it, certified on the other half: the mean cost is "
        f"within the budget with a probability of {format_percent(1 - table.certify)}."
        if table.certify is not None
        else ""
    )
    yield (
        f"\nBudgets are in percent of the last exit's cost, {format_cost(table.full_cost, table.unit)}; "
        f"costs in percent of the budget. Calibrated and fitted on the validation split, measured on "
        f"{tested:,} test samples; ± and brackets: 95 % intervals of {table.repeats} bootstrap resamples.{certified}\n"
        f"The paper's sweep takes no budget: of its 39 policies, the most expensive one within the budget is shown. "
        f"vs sweep: difference in points of top-1 at equal test cost, where the sweep reaches it. EEFP: how well the "
        f"score detects where stopping is right (AUROC, mean over all exits but the last)."
    )
    for note in table.notes:
        yield f"\n{note}"


def _half_width(ends: tuple[float, float], scale: float = 1.0) -> float:
    return scale * (ends[1] - ends[0]) / 2
