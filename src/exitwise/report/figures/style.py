"""Common parts of the figures: colors, panels, legends, text. Needs matplotlib."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ft2font import FT2Font
from matplotlib.textpath import text_to_path

from exitwise.core.predictions import Array

Data = Mapping[str, Any]
MODEL_COLORS = {"ours": "#0072B2", "vanilla": "#D55E00"}  # Okabe and Ito's colors suit color-blind readers, too
MODEL_LABELS = {"ours": "calibrated", "vanilla": "vanilla"}
OUTCOME_COLORS = {"correct": "#009E73", "misclassified": "#CC79A7"}
EXTRA_COLORS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TEXT_BOX: dict[str, Any] = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}
STYLE: dict[Any, Any] = {
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8,
    "font.size": 8,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "pdf.fonttype": 42,  # TrueType, which publishers require
    "text.parse_math": False,  # class names may contain $
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, Array]:
    """Create a figure of `width` x `height` inches with panels (rows, columns)."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def legend(figure: Figure, axes: Axes, columns: int, more: Iterable[Artist] = ()) -> None:
    """Add a legend above all panels, with the labels of `axes` and the artists `more`."""
    handles = [*axes.get_legend_handles_labels()[0], *more]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(columns, len(handles)))


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return a divisor of costs and the name of the unit that results."""
    names = {1e9: "billion MACs", 1e6: "million MACs"} if unit == "MACs" else {}
    return next(((factor, name) for factor, name in names.items() if largest >= factor), (1.0, unit))


def fit_text(text: str, size: float, width: float) -> str:
    """Return `text` on one line of at most `width` points; characters that the font lacks become `?`."""
    line = " ".join(text.split())[:200]
    characters = [c if c.isprintable() and _load_font().get_char_index(ord(c)) else "?" for c in line]
    fitted, kept = "".join(characters), len(characters)
    while kept and text_to_path.get_text_width_height_descent(fitted, _font_of_size(size), False)[0] > width:
        kept -= 1
        fitted = "".join(characters[:kept]).rstrip() + "…"
    return fitted


def _font_of_size(size: float) -> FontProperties:
    return FontProperties(family="DejaVu Sans", size=size)  # shipped with matplotlib


@cache
def _load_font() -> FT2Font:
    return get_font(findfont(_font_of_size(10)))
