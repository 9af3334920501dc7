"""What the figures for papers have in common: colours, panels, legends, text. Needs matplotlib."""

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
MODEL_COLORS = {"ours": "#0072B2", "vanilla": "#D55E00"}  # colours are Okabe and Ito's, for all eyes
OUTCOMES = {"correct": "#009E73", "misclassified": "#CC79A7"}
EXTRA_COLORS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BOX: dict[str, Any] = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}  # behind text
STYLE: dict[Any, Any] = {
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8,
    "font.size": 8,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "pdf.fonttype": 42,  # TrueType, which publishers ask for
    "text.parse_math": False,  # names of classes are text, whatever is in them
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, Array]:
    """A figure of so many inches, and its panels (rows, columns)."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def legend(figure: Figure, axes: Axes, columns: int, more: Iterable[Artist] = ()) -> None:
    """Above all panels, of what one of them shows."""
    handles = [*axes.get_legend_handles_labels()[0], *more]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(columns, len(handles)))


def scale(unit: str, largest: float) -> tuple[float, str]:
    """What costs are divided by, and the unit that they are in then."""
    words = {1e9: "billion MACs", 1e6: "million MACs"} if unit == "MACs" else {}
    return next(((factor, word) for factor, word in words.items() if largest >= factor), (1.0, unit))


def fit_text(text: str, size: float, width: float) -> str:
    """On one line, in letters that the font has, and no wider than so many points."""
    line = " ".join(text.split())[:200]
    plain = [c if c.isprintable() and _font().get_char_index(ord(c)) else "?" for c in line]
    said, kept = "".join(plain), len(plain)
    while kept and text_to_path.get_text_width_height_descent(said, _face(size), False)[0] > width:
        kept -= 1
        said = "".join(plain[:kept]).rstrip() + "…"
    return said


def _face(size: float) -> FontProperties:
    return FontProperties(family="DejaVu Sans", size=size)  # it comes with matplotlib


@cache
def _font() -> FT2Font:
    return get_font(findfont(_face(10)))
