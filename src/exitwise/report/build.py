"""Data of the report: everything that it shows, computed with the library's functions, as a JSON-serializable dict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from exitwise import zoo
from exitwise.calibration.calibration import Calibration
from exitwise.calibration.methods import AUTO, DEFAULT_DRAWS, METHODS, VANILLA, Method, get_method, parse_method
from exitwise.calibration.overhead import laplace_macs, naive_laplace_macs
from exitwise.calibration.trace import Split, Trace
from exitwise.calibration.tuning import Tuner
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.files import read_json
from exitwise.core.predictions import Array
from exitwise.core.results import to_jsonable
from exitwise.evaluation.bootstrap import LEVEL, Bootstrap
from exitwise.evaluation.evaluate import BudgetCurve, budget_curve, describe_eefp_disagreement
from exitwise.evaluation.paper_tables import (
    DECISIONS,
    METRICS,
    OUR_MODEL,
    PaperTables,
    Table,
    get_full_method,
    make_paper_tables,
    usable_methods,
)
from exitwise.policies.certificate import describe_guarantee
from exitwise.report import published, uncertainty
from exitwise.report.answers import describe_answers
from exitwise.report.budget_explorer import budget_grid, explore_budgets
from exitwise.report.evaluated_model import EvaluatedModel
from exitwise.report.images import SpriteSheet, images_unavailable_note, make_sprite_sheet
from exitwise.report.provenance import net_provenance, page_provenance, report_provenance
from exitwise.runs.chosen import ChosenClassifier
from exitwise.runs.labels import model_labels
from exitwise.runs.policies import (
    CalibratedSplits,
    PolicyOptions,
    held_out_certificate,
    resolve_method,
    split_held_out_twice,
    tuner_with_settings,
)
from exitwise.runs.run import Run
from exitwise.training.history import History

FORMAT, VERSION = "exitwise.report", 1
COMPARED_SAMPLES = 10_000  # of the validation samples that a method is tuned on that is only compared
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ReportOptions:
    """Options of a report."""

    method: str | None = None  # None is the method of the run's chosen classifier, or else "auto"
    budget: float | None = None  # in `unit`; None is the budget of the run's policy or half of the last exit's cost
    unit: str = "MACs"
    root: Path | None = None  # folder of the dataset; None is the run's
    against: Sequence[Path] = ()  # runs to compare with
    command: str = ""  # command line shown in the report


@dataclass(frozen=True, eq=False)
class Report:
    """Data of a page, and the sprite sheet if images are available."""

    data: dict[str, Any]
    sheet: SpriteSheet | None = None

    @property
    def live(self) -> bool:
        """True if the page reloads itself while the run is training."""
        return bool(self.data.get("live"))


def build_report(
    run: Run,
    options: ReportOptions,
    paper_tables: PaperTables | None = None,
    progress: Progress = lambda step: None,
) -> Report:
    """Compute the report on a run whose trace has a test split.

    Args:
        run: The run. Nothing in it is changed; a missing calibration is computed but not saved.
        options: Method, budget, and runs to compare with.
        paper_tables: Tables of this run if they are already computed.
        progress: Called with a description of each step.

    Raises:
        InputError: The trace has no test split, `method` is vanilla, or a run to compare with does not fit.
    """
    trace = run.trace()
    if trace.test is None:
        raise InputError(f"the trace of {run.directory} has no test split to report on")
    method = _choose_method(run, options.method, trace)
    saved = run.calibration(method, trace)
    tuner = tuner_with_settings(saved, trace)
    points = uncertainty.choose_points(len(trace.test))
    budgets = _choose_budgets(run, trace, options)
    sheet, note = _load_images(run, options.root, trace.test, points)
    progress("reading the runs to compare with")
    other_runs = [_compare_run(Run(path), method, budgets[0][0].unit) for path in options.against]
    progress(f"calibrating with {len(usable_methods(trace))} methods")
    if paper_tables is None:
        calibrations = _load_matching_calibrations(saved, run, trace)
        others = tuner.on_at_most(COMPARED_SAMPLES)
        if others is not tuner and method.name in usable_methods(trace) and method.name not in calibrations:
            calibrations[method.name] = tuner.calibrate(method)
        paper_tables = make_paper_tables(trace, others, calibrations=calibrations, detailed=(VANILLA, method.name))
    progress("predicting with the vanilla and the calibrated net")
    vanilla = _evaluate_tabulated(paper_tables, VANILLA, trace.val, trace.test)
    chosen = _matching_choice(run, method)
    if chosen is None and method.name in paper_tables.calibrations:
        ours = _evaluate_tabulated(paper_tables, method.name, trace.val, trace.test)
    elif chosen is None:
        calibration = saved or tuner.calibrate(method)
        ours = EvaluatedModel.of(CalibratedSplits(calibration, trace.val, None), trace.test)
    else:
        ours = EvaluatedModel.of(_chosen_splits(trace, chosen), trace.test)
    chosen_policy = None if chosen is None else chosen.policy
    bootstrap = Bootstrap(len(trace.test))
    explorers = []
    for costs, budget in budgets:
        progress(f"fitting thresholds for budgets in {costs.unit}")
        explorers.append(explore_budgets(vanilla, ours, costs, budget, bootstrap, points, chosen_policy))
    preset, labels = trace.preset or "", model_labels(trace.preset)
    compared = min(len(trace.val), COMPARED_SAMPLES)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "net": {
            "run": run.name,
            "name": preset or (trace.model or {}).get("module") or "your own net",
            "data": _dataset_name(run),
            "exits": trace.num_exits,
            "classes": trace.num_classes,
            "samples": len(trace.test),
            "level": LEVEL,
        },
        "method": method.name,
        "classes": list(trace.classes) if trace.classes else [f"class {i}" for i in range(trace.num_classes)],
        "explorers": explorers,
        "other_runs": other_runs,
        "curves": [_curve_points(name, paper_tables.curves[name], labels) for name in usable_methods(trace)],
        "published": published.curves(preset),
        "uncertainty": {
            "vanilla": uncertainty.exit_statistics(vanilla, trace.num_classes),
            "ours": uncertainty.exit_statistics(ours, trace.num_classes),
        },
        "points": {
            "index": (points if trace.test.index is None else trace.test.index[points]).tolist(),
            "label": trace.test.labels[points].tolist(),
            "vanilla": uncertainty.point_predictions(vanilla, points),
            "ours": uncertainty.point_predictions(ours, points),
        },
        "galleries": uncertainty.choose_gallery_points(ours, trace.num_classes, points),
        "images": None if sheet is None else sheet.shape,
        "images_note": note,
        "tables": [
            _table_data("ablation", "Ablation", paper_tables.ablation, preset, labels),
            _table_data("decision_experiment", "Decision experiment", paper_tables.decisions, preset, labels),
        ],
        "decisions": [
            _curve_points(name, paper_tables.curves[key], labels)
            for name, key in ((VANILLA, VANILLA), (DECISIONS, DECISIONS), (OUR_MODEL, get_full_method(trace)))
        ],
        "laplace_costs": [*_laplace_costs(trace, ours.splits.calibration), *published.laplace_costs()],
        "answers": describe_answers(ours, trace.test, budgets[0][0], budgets[0][1], points, chosen),
        "cascades": _read_cascades(run),
        "training": _training_history(run),
        "guarantee": _describe_run_guarantee(run),
        "provenance": report_provenance(run, trace, ours.splits.calibration, options.command, chosen_policy, compared),
    }
    return Report(to_jsonable(data), sheet)


def training_report(run: Run, live: bool, command: str = "") -> Report:
    """Build the report on a run that is being trained or has no trace yet."""
    described = run.metadata["model"]
    data = {
        "format": FORMAT,
        "version": VERSION,
        "live": live,
        "net": {
            "run": run.name,
            "name": str(described.get("preset") or described.get("module") or "your own net"),
            "data": _dataset_name(run),
        },
        "training": _training_history(run) or {"epochs": [], "of": _planned_epochs(run)},
        "provenance": [*net_provenance(run), *page_provenance(command)],
    }
    return Report(to_jsonable(data))


def _choose_method(run: Run, name: str | None, trace: Trace) -> Method:
    """Return the named method, or by default that of the run's chosen classifier, or else what "auto" chooses."""
    if name is None:
        chosen = run.chosen()
        if chosen is not None and chosen.calibration.method.name != VANILLA:
            return chosen.calibration.method
        name = AUTO
    method = resolve_method(run, Tuner(trace), parse_method(name))
    if method.name == VANILLA:
        raise InputError(f"`method` must not be {VANILLA!r}: the report compares it with another method")
    return method


def _load_matching_calibrations(saved: Calibration | None, run: Run, trace: Trace) -> dict[str, Calibration]:
    """Load the run's calibrations that have the same mode and settings as `saved`, by method; `saved` is included."""
    if saved is None:
        return {}
    others = {name: run.calibration(method, trace) for name, method in METHODS.items() if name != saved.method.name}
    return {
        saved.method.name: saved,
        **{
            name: cal
            for name, cal in others.items()
            if cal is not None and (cal.mode, cal.settings) == (saved.mode, saved.settings)
        },
    }


def _evaluate_tabulated(tables: PaperTables, name: str, val: Split, test: Split) -> EvaluatedModel:
    """Evaluate a calibration of the tables, with the predictions that they were computed from."""
    splits = CalibratedSplits(tables.calibrations[name], val, None, val_preds=tables.val_preds.get(name))
    return EvaluatedModel.of(splits, test, tables.test_preds.get(name))


def _matching_choice(run: Run, method: Method) -> ChosenClassifier | None:
    """Return the run's chosen classifier if it is of this method."""
    chosen = run.chosen()
    return chosen if chosen is not None and chosen.calibration.method == method else None


def _chosen_splits(trace: Trace, chosen: ChosenClassifier) -> CalibratedSplits:
    """Return the calibration of the chosen classifier with its tuning samples, and those of its sets or abstention."""
    certificate = held_out_certificate(chosen)
    has_answers = chosen.sets is not None or chosen.abstention is not None
    if certificate is None and not has_answers:
        return CalibratedSplits(chosen.calibration, trace.val, None)
    tuning_trace, _, answers = split_held_out_twice(trace, certificate, has_answers)
    return CalibratedSplits(chosen.calibration, tuning_trace.val, None, answers)


def _dataset_name(run: Run) -> str:
    """Return the dataset's name; for a folder, only the last part of its path."""
    name = str(run.metadata["data"]["name"])
    return Path(name.removeprefix("folder:")).name or name if name.startswith("folder:") else name


def _choose_budgets(run: Run, trace: Trace, options: ReportOptions) -> list[tuple[Costs, float]]:
    """Return the run's costs in each unit with the budget that the page opens at; the requested unit comes first."""
    available = [trace.costs]
    if trace.costs.unit != "ms" and run.bench_file.is_file():
        available.append(run.measured_costs())
    policy = run.policy()
    budget, unit = options.budget, options.unit
    if budget is not None and unit not in [costs.unit for costs in available]:
        raise InputError(f"{run.directory} has no costs in {unit}")
    if budget is None and policy is not None and policy.budget is not None:
        costs = next((costs for costs in available if costs.unit == policy.unit), None)
        if costs is not None and costs.values[0] <= policy.budget <= costs.values[-1]:
            budget, unit = policy.budget, policy.unit
    budgets: list[tuple[Costs, float]] = []
    for costs in available:
        low, high = costs.values[0], costs.values[-1]
        if budget is not None and unit == costs.unit:
            costs.check_budget(budget)
            budgets.insert(0, (costs, budget))
        else:
            share = 0.5 if budget is None else budget / next(c.values[-1] for c in available if c.unit == unit)
            budgets.append((costs, min(max(share * high, low), high)))
    return budgets


def _load_images(run: Run, root: Path | None, test: Split, points: Array) -> tuple[SpriteSheet | None, str | None]:
    """Return the sprite sheet, or a note why there is none; without the images, an explicit `root` is an error."""
    try:
        return make_sprite_sheet(run, root, test, torch.as_tensor(points)), None
    except InputError as error:
        if root is not None:
            raise
        return None, images_unavailable_note(run, error)


def _compare_run(run: Run, method: Method, unit: str) -> dict[str, Any]:
    """Compute the curves of another run, vanilla and calibrated, over its own range of costs."""
    trace = run.trace()
    if trace.test is None:
        raise InputError(f"the trace of {run.directory} has no test split to compare on")
    costs = run.measured_costs() if unit == "ms" and trace.costs.unit != "ms" else trace.costs
    if costs.unit != unit:
        raise InputError(f"the costs of {run.directory} must be in {unit} for a comparison, but are in {costs.unit}")
    name = trace.preset or run.directory.name
    saved = run.calibration(method, trace)
    tuner = tuner_with_settings(saved, trace)
    vanilla = run.calibration(get_method(VANILLA), trace) or tuner.calibrate(VANILLA)
    budgets = budget_grid(costs, costs.values[-1])[:: 1 if len(costs) == 1 else 2]
    curves = []
    for calibration in (vanilla, saved or tuner.calibrate(method)):
        splits = CalibratedSplits(calibration, trace.val, None)
        policies = [splits.fit_policy(costs, budget, PolicyOptions()) for budget in budgets]
        preds = calibration.predict(trace.test)
        curve = budget_curve(preds, labels=trace.test.labels, policies=policies, costs=costs)
        curves.append(_curve_points(calibration.method.name, curve, model_labels(trace.preset)))
    return {"name": f"{run.name} ({name})", "unit": unit, "curves": curves}


def _curve_points(name: str, curve: BudgetCurve, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return {name, label, metrics: {metric: [[cost, value], ...]}}, sorted by cost."""
    points = sorted(curve, key=lambda point: point.cost)
    metrics = {m: [[point.cost, getattr(point, m)] for point in points] for m in METRICS}
    return {"name": name, "label": labels.get(name, name), "metrics": metrics}


def _table_data(name: str, title: str, table: Table, preset: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the rows of a table beside the published ones, and the table as CSV and LaTeX."""
    changes = zoo.published_changes(name, preset) or {}
    numbers = zoo.published_rows(name, preset) or {}
    rows = [
        {
            "method": row.method,
            "label": labels.get(row.method, row.method),
            "metrics": {m: getattr(row, m) for m in METRICS},
            "eefp": row.eefp,
            "change": row.change,
            "published": numbers.get(row.method),
            "published_change": changes.get(row.method),
        }
        for row in table
    ]
    texts = {"csv": table.to_csv(), "latex": table.to_latex()}
    note = describe_eefp_disagreement({labels.get(row.method, row.method): (row.ece, row.eefp) for row in table})
    return {
        "name": name,
        "title": title,
        "range": list(table.budget_range),
        "unit": table.unit,
        "rows": rows,
        "eefp_note": note if name == "ablation" else None,
        **texts,
    }


def _laplace_costs(trace: Trace, calibration: Calibration) -> list[dict[str, Any]]:
    """Return the cumulative cost of Laplace at every exit of this net: each exit on the way adds its overhead."""
    if trace.costs.unit != "MACs" or not trace.curvature:
        return []
    c, vanilla = trace.num_classes, list(trace.costs.values)
    draws = DEFAULT_DRAWS if calibration.draws is None else len(calibration.draws)
    widths = [head.weight.shape[1] for head in trace.heads]
    bars: dict[str, list[float]] = {"vanilla": vanilla}
    for name, count_macs in (("efficient", laplace_macs), ("naive", naive_laplace_macs)):
        overhead = numpy.cumsum([count_macs(p, c, draws) for p in widths])
        bars[name] = [float(cost + extra) for cost, extra in zip(vanilla, overhead, strict=True)]
    return [{"name": "this net", "own": True, "draws": draws, **bars}]


def _read_cascades(run: Run) -> dict[str, Any] | None:
    """Return the comparison of chains that the run was chosen by, if it was."""
    file = run.directory / "cascades.json"
    if not file.is_file():
        return None
    table = read_json(file)
    wanted = ("unit", "samples", "budgets", "best", "chosen_top1", "front", "front_milliseconds")
    if table.get("format") != "exitwise.cascades" or any(name not in table for name in wanted):
        raise InputError(f"{file} is not a comparison of cascades: make the run again")
    return {name: table[name] for name in wanted}


def _planned_epochs(run: Run) -> int | None:
    recipe = (run.metadata.get("training") or {}).get("recipe") or {}
    epochs = recipe.get("epochs")
    return epochs if isinstance(epochs, int) else None


def _training_history(run: Run) -> dict[str, Any] | None:
    file = run.directory / "history.csv"
    if not file.is_file():
        return None
    history = History.load(file)
    best = history.best.epoch if history.epochs and not history.kept else None
    return {**history.to_dict(), "of": _planned_epochs(run), "best": best}


def _describe_run_guarantee(run: Run) -> str | None:
    policy = run.policy()
    return None if policy is None or policy.guarantee is None else describe_guarantee(policy.guarantee, policy.unit)
