"""The report as files for papers: its figures as PNG and PDF, its tables as LaTeX and CSV."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exitwise.core.errors import InputError
from exitwise.core.files import atomic_write
from exitwise.report.build import Report
from exitwise.training.history import History

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = {"latex": "tex", "csv": "csv"}


def check(folder: Path) -> None:
    """Refuse what would fail after a long computation."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("figures need matplotlib: pip install 'exitwise[report]'") from None
    existing = next((place for place in (folder, *folder.parents) if place.exists()), None)
    if existing is not None and not existing.is_dir():
        raise InputError(f"figures need a folder, but {existing} is a file: choose another place")


def write(report: Report, folder: Path) -> list[Path]:
    """Write every figure and table that the report has data for, and say where; nothing where one cannot be drawn."""
    check(folder)
    contents = {**_drawn(report), **_tables(report)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made ({error.strerror}): choose another place") from None
    for name, content in contents.items():
        with atomic_write(folder / name) as temporary:
            temporary.write_bytes(content)
    return [folder / name for name in contents]


def _tables(report: Report) -> dict[str, bytes]:
    return {
        f"{table['name']}.{ending}": str(table[kind]).encode()
        for table in report.data.get("tables", ())
        for kind, ending in _KINDS.items()
    }


def _drawn(report: Report) -> dict[str, bytes]:
    """The figures' files by name: the same ones whatever the user's own settings of matplotlib are."""
    import matplotlib

    from exitwise.report.figures.style import STYLE

    found = {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        for name, figure in _figures(report):
            found[f"{name}.png"] = _saved(figure, "png")
            figure.set_layout_engine("none")  # laid out already
            found[f"{name}.pdf"] = _saved(figure, "pdf", metadata={"CreationDate": None})
    return found


def _saved(figure: "Figure", kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=200, **options)
    return content.getvalue()


def _figures(report: Report) -> Iterator[tuple[str, "Figure"]]:
    from exitwise.report.figures import curves as curves
    from exitwise.report.figures import uncertainty as uncertainty

    data = report.data
    if "explorers" in data:
        yield "budget-curves", curves.budget_curves_figure(data, data["explorers"][0], data["others"], ())
        counted = next((explorer for explorer in data["explorers"] if explorer["unit"] == "MACs"), None)
        if data["published"] and counted is not None:
            yield "budget-curves-published", curves.budget_curves_figure(data, counted, (), data["published"])
        yield "uncertainty-error", uncertainty.against_error(data)
        yield "entropy-correct-wrong", uncertainty.right_and_wrong(data)
        yield "reliability", uncertainty.reliability(data)
        yield "decisions", curves.decisions(data)
        own, paper = (
            [bars for bars in data["laplace_costs"] if bool(bars.get("own")) is which] for which in (True, False)
        )
        if own:
            yield "laplace-cost", curves.laplace_cost_figure(own[0])
        if paper:
            yield "laplace-cost-published", curves.laplace_published(paper)
        rows = uncertainty.gallery_rows(data)
        if report.sheet is not None and rows:
            yield "galleries", uncertainty.galleries(data, report.sheet.pixels.numpy(), rows)
    if data["training"] is not None and data["training"]["epochs"]:
        yield "training", History.from_dict(data["training"]).figure()
