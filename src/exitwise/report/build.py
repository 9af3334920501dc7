"""Everything that the report shows, computed by the library's own functions and kept as plain data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from exitwise import zoo
from exitwise.calibration.calibration import Calibration
from exitwise.calibration.methods import DEFAULT_DRAWS, METHODS, OURS, VANILLA, Method, get_method
from exitwise.calibration.overhead import laplace_macs, naive_laplace_macs
from exitwise.calibration.trace import Split, Trace
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.predictions import Array
from exitwise.core.results import to_jsonable
from exitwise.evaluation.bootstrap import LEVEL, Bootstrap
from exitwise.evaluation.evaluate import BudgetCurve, budget_curve
from exitwise.evaluation.paper_tables import DECISIONS, METRICS, OUR_MODEL, PaperTables, Table, make_paper_tables
from exitwise.policies.certificate import describe_guarantee
from exitwise.report import published, uncertainty
from exitwise.report.budget_explorer import budget_grid, explore_budgets
from exitwise.report.evaluated_model import EvaluatedModel
from exitwise.report.images import SpriteSheet, images_unavailable_note, make_sprite_sheet
from exitwise.report.provenance import net_provenance, page_provenance, report_provenance
from exitwise.runs.collect import load_calibration
from exitwise.runs.policies import CalibratedSplits, PolicyOptions, tuner_with_settings
from exitwise.runs.run import Run
from exitwise.training.history import History

FORMAT, VERSION = "exitwise.report", 1
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ReportOptions:
    """What is to be reported."""

    method: str = OURS
    budget: float | None = None  # in the unit of `unit`; the run's own policy's, or half of the last exit's cost
    unit: str = "MACs"
    root: Path | None = None  # of the pictures, instead of the run's
    against: Sequence[Path] = ()
    command: str = ""  # that made the report, to be printed on it


@dataclass(frozen=True, eq=False)
class Report:
    """The data of a page, and the sheet of pictures where there is one."""

    data: dict[str, Any]
    sheet: SpriteSheet | None = None

    @property
    def live(self) -> bool:
        return bool(self.data.get("live"))


def build(
    run: Run, order: ReportOptions, known: PaperTables | None = None, progress: Progress = lambda step: None
) -> Report:
    """The report of a run that has a trace with a test split; `known` is a study of it that exists already."""
    trace = run.trace()
    if trace.test is None:
        raise InputError(f"the trace of {run.directory} has no test split to report on")
    method = get_method(order.method)
    if method.name == VANILLA:
        raise InputError("the report sets a method beside the plain net: `method` must be another than vanilla")
    own = load_calibration(run, trace, method)
    tuner = tuner_with_settings(own, trace)
    points = uncertainty.sample(len(trace.test))
    units = _units(run, trace, order)
    pictures, note = _sheet(run, order.root, trace.test, points)
    progress("reading the runs to compare with")
    others = [_other(Run(place), method, units[0][0].unit) for place in order.against]
    progress("calibrating by twelve methods")
    found = known or make_paper_tables(trace, tuner, calibrations=_saved_like(own, run, trace))
    # A calibration that is made here is not saved: a report changes nothing but itself.
    made = found.calibrations.get(method.name) or own or tuner.calibrate(method)
    vanilla, ours = (
        EvaluatedModel.of(CalibratedSplits(each, trace.val, None), trace.test)
        for each in (found.calibrations[VANILLA], made)
    )
    bootstrap = Bootstrap(len(trace.test))
    explorers = []
    for costs, chosen in units:
        progress(f"fitting thresholds for budgets in {costs.unit}")
        explorers.append(explore_budgets(vanilla, ours, costs, chosen, bootstrap, points))
    preset = trace.preset or ""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "net": {
            "run": run.name,
            "name": preset or "your own net",
            "data": _data(run),
            "exits": trace.num_exits,
            "classes": trace.num_classes,
            "samples": len(trace.test),
            "level": LEVEL,
        },
        "method": method.name,
        "classes": list(trace.classes) if trace.classes else [f"class {i}" for i in range(trace.num_classes)],
        "explorers": explorers,
        "others": others,
        "curves": [_curve(name, found.curves[name]) for name in METHODS],
        "published": published.curves(preset),
        "uncertainty": {
            "vanilla": uncertainty.exit_statistics(vanilla, trace.num_classes),
            "ours": uncertainty.exit_statistics(ours, trace.num_classes),
        },
        "points": {
            "index": _index(trace.test, points),
            "label": trace.test.labels[points].tolist(),
            "vanilla": uncertainty.point_predictions(vanilla, points),
            "ours": uncertainty.point_predictions(ours, points),
        },
        "galleries": uncertainty.galleries(ours, trace.num_classes, points),
        "pictures": None if pictures is None else pictures.shape,
        "pictures_note": note,
        "tables": [
            _table("ablation", "Ablation", found.ablation, preset),
            _table("decision_experiment", "Decision experiment", found.decisions, preset),
        ],
        "decisions": [
            _curve(name, found.curves[key])
            for name, key in ((VANILLA, VANILLA), (DECISIONS, DECISIONS), (OUR_MODEL, OURS))
        ],
        "laplace_costs": [*_laplace_costs(trace, ours.tuned.calibration), *published.laplace_costs()],
        "training": _training(run),
        "guarantee": _guarantee(run),
        "made": report_provenance(run, trace, ours.tuned.calibration, order.command),
    }
    return Report(to_jsonable(data), pictures)


def training_report(run: Run, live: bool, command: str = "") -> Report:
    """The report of a run that is still being trained, or has no trace yet."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "live": live,
        "net": {
            "run": run.name,
            "name": str(run.metadata["model"].get("preset", "your own net")),
            "data": _data(run),
        },
        "training": _training(run) or {"epochs": [], "of": _epochs(run)},
        "made": [*net_provenance(run), *page_provenance(command)],
    }
    return Report(to_jsonable(data))


def _saved_like(own: Calibration | None, run: Run, trace: Trace) -> dict[str, Calibration]:
    """Calibrations that the run has, made by the same settings as `own`, which is one of them."""
    if own is None:
        return {}
    others = {name: run.calibration(each) for name, each in METHODS.items() if name != own.method.name}
    return {
        own.method.name: own,
        **{
            name: made
            for name, made in others.items()
            if made is not None and made.belongs_to(trace) and (made.mode, made.settings) == (own.mode, own.settings)
        },
    }


def _data(run: Run) -> str:
    """The data set's name, of a folder the last part alone."""
    name = str(run.metadata["data"]["name"])
    return Path(name.removeprefix("folder:")).name or name if name.startswith("folder:") else name


def _units(run: Run, trace: Trace, order: ReportOptions) -> list[tuple[Costs, float]]:
    """Costs in each unit that the run knows, with the budget that the page opens at; the asked unit first."""
    known = [trace.costs]
    if trace.costs.unit != "ms" and run.bench_file.is_file():
        known.append(run.measured_costs())
    policy = run.policy()
    budget, unit = order.budget, order.unit
    if budget is not None and unit not in [costs.unit for costs in known]:
        raise InputError(f"{run.directory} has no costs in {unit}")
    if budget is None and policy is not None and policy.budget is not None:
        costs = next((costs for costs in known if costs.unit == policy.unit), None)
        if costs is not None and costs.values[0] <= policy.budget <= costs.values[-1]:
            budget, unit = policy.budget, policy.unit
    found: list[tuple[Costs, float]] = []
    for costs in known:
        low, high = costs.values[0], costs.values[-1]
        if budget is not None and unit == costs.unit:
            costs.check_budget(budget)
            found.insert(0, (costs, budget))
        else:
            share = 0.5 if budget is None else budget / next(c.values[-1] for c in known if c.unit == unit)
            found.append((costs, min(max(share * high, low), high)))
    return found


def _sheet(run: Run, root: Path | None, test: Split, points: Array) -> tuple[SpriteSheet | None, str | None]:
    """The pictures, or why there are none; a folder that the user names must have them."""
    try:
        return make_sprite_sheet(run, root, test, torch.as_tensor(points)), None
    except InputError as error:
        if root is not None:
            raise
        return None, images_unavailable_note(run, error)


def _other(run: Run, method: Method, unit: str) -> dict[str, Any]:
    """Curves of another run: plain and calibrated, over its own range of costs."""
    trace = run.trace()
    if trace.test is None:
        raise InputError(f"the trace of {run.directory} has no test split to compare on")
    costs = run.measured_costs() if unit == "ms" and trace.costs.unit != "ms" else trace.costs
    if costs.unit != unit:
        raise InputError(f"the costs of {run.directory} are in {costs.unit}, not in {unit}")
    name = trace.preset or run.directory.name
    own = load_calibration(run, trace, method)
    tuner = tuner_with_settings(own, trace)
    plain = load_calibration(run, trace, get_method(VANILLA)) or tuner.calibrate(VANILLA)
    budgets = budget_grid(costs, costs.values[-1])[:: 1 if len(costs) == 1 else 2]
    curves = []
    for calibration in (plain, own or tuner.calibrate(method)):
        made = CalibratedSplits(calibration, trace.val, None)
        policies = [made.policy(costs, budget, PolicyOptions()) for budget in budgets]
        preds = calibration.predict(trace.test)
        curve = budget_curve(preds, labels=trace.test.labels, policies=policies, costs=costs)
        curves.append(_curve(calibration.method.name, curve))
    return {"name": f"{run.name} ({name})", "unit": unit, "curves": curves}


def _curve(name: str, curve: BudgetCurve) -> dict[str, Any]:
    """{name, metrics: {metric: [[cost, value], ...]}}, by cost."""
    points = sorted(curve, key=lambda point: point.cost)
    return {"name": name, "metrics": {m: [[point.cost, getattr(point, m)] for point in points] for m in METRICS}}


def _index(test: Split, points: Array) -> list[int]:
    found: list[int] = (points if test.index is None else test.index[points]).tolist()
    return found


def _table(name: str, title: str, table: Table, preset: str) -> dict[str, Any]:
    """A table with what the paper printed beside it, also as CSV and LaTeX."""
    changes = zoo.published_changes(name, preset) or {}
    numbers = zoo.published_rows(name, preset) or {}
    rows = [
        {
            "method": row.method,
            "metrics": {m: getattr(row, m) for m in METRICS},
            "change": row.change,
            "published": numbers.get(row.method),
            "published_change": changes.get(row.method),
        }
        for row in table
    ]
    texts = {"csv": table.to_csv(), "latex": table.to_latex()}
    return {"name": name, "title": title, "range": list(table.budget_range), "unit": table.unit, "rows": rows, **texts}


def _laplace_costs(trace: Trace, calibration: Calibration) -> list[dict[str, Any]]:
    """The cost of Laplace at every exit of this net, each method paying at every exit on the way."""
    if trace.costs.unit != "MACs":
        return []
    c, vanilla = trace.num_classes, list(trace.costs.values)
    draws = DEFAULT_DRAWS if calibration.draws is None else len(calibration.draws)
    widths = [head.weight.shape[1] for head in trace.heads]
    bars: dict[str, list[float]] = {"vanilla": vanilla}
    for name, of in (("efficient", laplace_macs), ("naive", naive_laplace_macs)):
        passed = numpy.cumsum([of(p, c, draws) for p in widths])
        bars[name] = [float(cost + extra) for cost, extra in zip(vanilla, passed, strict=True)]
    return [{"name": "this net", "own": True, "draws": draws, **bars}]


def _epochs(run: Run) -> int | None:
    recipe = (run.metadata.get("training") or {}).get("recipe") or {}
    epochs = recipe.get("epochs")
    return epochs if isinstance(epochs, int) else None


def _training(run: Run) -> dict[str, Any] | None:
    file = run.directory / "history.csv"
    if not file.is_file():
        return None
    history = History.load(file)
    best = history.best.epoch if history.epochs and not history.kept else None
    return {**history.to_dict(), "of": _epochs(run), "best": best}


def _guarantee(run: Run) -> str | None:
    """What the run's policy guarantees, in words."""
    policy = run.policy()
    return None if policy is None or policy.guarantee is None else describe_guarantee(policy.guarantee, policy.unit)
