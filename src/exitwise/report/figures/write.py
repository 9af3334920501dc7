"""Files for papers: the report's figures as PNG and PDF, its tables as LaTeX and CSV."""

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

_TABLE_SUFFIXES = {"latex": "tex", "csv": "csv"}


def check_folder(folder: Path) -> None:
    """Raise an error early if figures could not be written to `folder` after a long computation."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("figures need matplotlib: pip install 'exitwise[report]'") from None
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if existing is not None and not existing.is_dir():
        raise InputError(f"figures need a folder, but {existing} is a file: choose another path")


def write_figures(report: Report, folder: Path) -> list[Path]:
    """Write the figures and tables that the report has data for, and return their paths.

    All are drawn before the first is written, so that a failure leaves earlier files unchanged.
    """
    check_folder(folder)
    contents = {**_draw_figures(report), **_encode_tables(report)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be created ({error.strerror}): choose another path") from None
    for name, content in contents.items():
        with atomic_write(folder / name) as temporary:
            temporary.write_bytes(content)
    return [folder / name for name in contents]


def _encode_tables(report: Report) -> dict[str, bytes]:
    return {
        f"{table['name']}.{suffix}": str(table[kind]).encode()
        for table in report.data.get("tables", ())
        for kind, suffix in _TABLE_SUFFIXES.items()
    }


def _draw_figures(report: Report) -> dict[str, bytes]:
    """Draw the figures and return the content of their files by name, independent of the user's matplotlib settings."""
    import matplotlib

    from exitwise.report.figures.style import STYLE

    contents = {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        for name, figure in _iter_figures(report):
            contents[f"{name}.png"] = _encode_figure(figure, "png")
            figure.set_layout_engine("none")  # the PNG has set the layout
            contents[f"{name}.pdf"] = _encode_figure(figure, "pdf", metadata={"CreationDate": None})
    return contents


def _encode_figure(figure: "Figure", kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=200, **options)
    return content.getvalue()


def _iter_figures(report: Report) -> Iterator[tuple[str, "Figure"]]:
    from exitwise.report.figures import curves, uncertainty

    data = report.data
    if "explorers" in data:
        yield "budget-curves", curves.budget_curves_figure(data, data["explorers"][0], data["other_runs"], ())
        in_macs = next((explorer for explorer in data["explorers"] if explorer["unit"] == "MACs"), None)
        if data["published"] and in_macs is not None:
            yield "budget-curves-published", curves.budget_curves_figure(data, in_macs, (), data["published"])
        yield "uncertainty-error", uncertainty.uncertainty_error_figure(data)
        yield "entropy-correct-wrong", uncertainty.entropy_figure(data)
        yield "reliability", uncertainty.reliability_figure(data)
        yield "decisions", curves.decisions_figure(data)
        own_bars = [bars for bars in data["laplace_costs"] if bars.get("own")]
        if own_bars:
            yield "laplace-cost", curves.laplace_cost_figure(own_bars[0])
        published_bars = [bars for bars in data["laplace_costs"] if not bars.get("own")]
        if published_bars:
            yield "laplace-cost-published", curves.published_laplace_cost_figure(published_bars)
        rows = uncertainty.gallery_rows(data)
        if report.sheet is not None and rows:
            yield "galleries", uncertainty.galleries_figure(data, report.sheet.pixels.numpy(), rows)
    if data["training"] is not None and data["training"]["epochs"]:
        yield "training", History.from_dict(data["training"]).figure()
