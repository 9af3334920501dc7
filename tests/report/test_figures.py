"""Figures for papers: every file is complete and shows the report's numbers, for any net and any class names."""

import io
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from cases import random_trace
from command import contents
from matplotlib.text import Text
from PIL import Image

import exitwise as ew
from exitwise.calibration.methods import OURS
from exitwise.core.files import write_json
from exitwise.report import published
from exitwise.report.build import Report, ReportOptions, build_report
from exitwise.report.figures import curves, uncertainty
from exitwise.report.figures.style import STYLE, fit_text
from exitwise.report.figures.write import write_figures
from exitwise.report.images import SpriteSheet
from exitwise.runs.run import Run, run_metadata
from exitwise.training.history import History

NAMES = ("$a_b$", "<b>_{x}^2$ & \\frac", "😀 中 🦊", "W" * 60, "two\nlines\x00\ud800")
TRAINING = {
    "epochs": [
        {
            "epoch": i,
            "lr": 0.1,
            "train_loss": 9.0 / i if i != 2 else None,
            "val_loss": 8.0 / i,
            "val_top1": [0.1 * i, 0.12 * i],
            "images_per_second": 90.0,
            "seconds": 2.0,
        }
        for i in range(1, 6)
    ],
    "of": 5,
    "best": 5,
}
FIGURES = ("budget-curves", "uncertainty-error", "entropy-correct-wrong", "reliability", "decisions")
TABLES = ("ablation.tex", "ablation.csv", "decision_experiment.tex", "decision_experiment.csv")


def reported(place: Path, exits: int, unit: str = "MACs", channels: int = 3, **options: Any) -> Report:
    """Report on a random trace, with images, and without the paper's nine nets, which take long to draw."""
    costs = ew.Costs(tuple((2 if unit == "ms" else 1e6) * (k + 1) ** 1.5 for k in range(exits)), unit)
    place.mkdir()
    trace = replace(random_trace(n=60, widths=tuple(range(4, 4 + exits))), classes=NAMES, costs=costs)
    trace.save(place / "trace.safetensors")
    write_json(place / "run.json", run_metadata({"net": "mine:net"}, {"name": "own"}))
    data = build_report(Run(place), ReportOptions(**{"method": OURS, **options})).data
    pixels = torch.randint(0, 256, (60, channels, 8, 8), generator=torch.Generator().manual_seed(0))
    own = [bars for bars in data["laplace_costs"] if bars.get("own")]
    return Report({**data, "laplace_costs": own}, SpriteSheet(pixels.byte(), 8, b"", "png"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return reported(tmp_path_factory.mktemp("static") / "run", 3)


def check_files(files: list[Path], figures: list[str], tables: tuple[str, ...] = TABLES) -> None:
    """Check that exactly these files exist, in this order, and that each is complete."""
    names = [f"{name}.{kind}" for name in figures for kind in ("png", "pdf")]
    assert [file.name for file in files] == [*names, *tables]
    assert {file.name for file in files[0].parent.iterdir()} == {*names, *tables}
    for file in files:
        content = file.read_bytes()
        if file.suffix == ".png":
            with Image.open(io.BytesIO(content)) as image:
                image.load()
                assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1)
                assert image.width >= 700
                assert image.height >= 400
                assert np.asarray(image.convert("L")).std() > 5
        elif file.suffix == ".pdf":
            assert content.startswith(b"%PDF-")
            assert content.rstrip().endswith(b"%%EOF")
            assert b"/FontFile2" in content  # TrueType
            assert b"/Type3" not in content


@pytest.mark.slow
def test_everything_that_a_report_has_is_written(small: Report, tmp_path: Path) -> None:
    data = {
        **small.data,
        "training": TRAINING,
        "published": published.curves("cifar100-small"),
        "laplace_costs": [*small.data["laplace_costs"], *published.laplace_costs()],
    }
    files = write_figures(replace(small, data=data), tmp_path / "new" / "figures")
    first, *rest = FIGURES
    costs = ["laplace-cost", "laplace-cost-published"]
    check_files(files, [first, "budget-curves-published", *rest, *costs, "galleries", "training"])
    for table in data["tables"]:
        for kind, ending in (("latex", "tex"), ("csv", "csv")):
            text = (tmp_path / "new" / "figures" / f"{table['name']}.{ending}").read_text(encoding="utf-8")
            assert text == table[kind]


@pytest.mark.slow
def test_one_exit_beside_nothing_else(tmp_path: Path) -> None:
    report = reported(tmp_path / "run", 1, channels=1)
    check_files(write_figures(report, tmp_path / "out"), [*FIGURES, "laplace-cost", "galleries"])


@pytest.mark.slow
def test_eight_exits_against_runs_with_strange_names(tmp_path: Path) -> None:
    other = tmp_path / "_$x_{run}"
    reported(other, 1)
    report = reported(tmp_path / "run", 8, against=(other,))
    check_files(write_figures(report, tmp_path / "out"), [*FIGURES, "laplace-cost", "galleries"])
    with matplotlib.rc_context(STYLE):
        figure = curves.budget_curves_figure(report.data, report.data["explorers"][0], report.data["other_runs"], ())
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ["run _$x_{run} (_$x_{run}): vanilla", "run _$x_{run} (_$x_{run}): calibrated"]


@pytest.mark.slow
def test_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    """In milliseconds there are no published curves and no costs in MACs; non-finite values are None."""
    data = {**reported(tmp_path / "run", 2, "ms").data, "published": published.curves("cifar100-small")}
    explorer = data["explorers"][0]
    places = [(at["metrics"], at["reliability"]) for exits in data["uncertainty"].values() for at in exits]
    places += [(step[model], step[model]["reliability"]) for step in explorer["steps"] for model in ("ours", "vanilla")]
    for metrics, bins in places:
        metrics |= {"auroc": None, "nlpd": None}
        bins |= {"count": [0] * 10, "confidence": [None] * 10, "accuracy": [None] * 10}
    for step in explorer["steps"]:
        step["ours"]["intervals"]["nlpd"] = [None, None]
    check_files(write_figures(Report(data), tmp_path / "out"), list(FIGURES))


@pytest.mark.slow
def test_budget_curves_are_the_reports(small: Report) -> None:
    explorer = small.data["explorers"][0]
    with matplotlib.rc_context(STYLE):
        panels = curves.budget_curves_figure(small.data, explorer, (), ()).axes
    for axes, metric, times in zip(panels, ("top1", "top5", "nlpd", "ece"), (100, 100, 1, 1), strict=True):
        for model, curve, mark, band in zip(
            ("ours", "vanilla"), axes.lines[::2], axes.lines[1::2], axes.collections, strict=True
        ):
            steps = [step[model] for step in explorer["steps"]]
            expected = sorted([step["cost"] / 1e6, times * step[metric]] for step in steps)
            assert sorted(curve.get_xydata().tolist()) == [pytest.approx(pair) for pair in expected]
            chosen = steps[explorer["chosen"]]
            assert mark.get_xydata().tolist() == [pytest.approx([chosen["cost"] / 1e6, times * chosen[metric]])]
            reach = [times * value for step in steps for value in step["intervals"][metric]]
            drawn = band.get_paths()[0].vertices[:, 1]
            assert (drawn.min(), drawn.max()) == pytest.approx((min(reach), max(reach)))


def test_uncertainty_shows_every_point_and_the_shares(small: Report) -> None:
    with matplotlib.rc_context(STYLE):
        panels = np.reshape(np.array(uncertainty.uncertainty_error_figure(small.data).axes), (4, 3))
    labels = np.array(small.data["points"]["label"])
    for k in range(3):
        shares = [small.data["uncertainty"][model][k]["high_error_share"] for model in ("ours", "vanilla")]
        title = f"calibrated {shares[0]:.1%}\nvanilla {shares[1]:.1%}".replace("%", " %")
        assert panels[0, k].get_title().endswith(title)
        for row, model in ((1, "ours"), (2, "vanilla")):
            preds = {name: np.array(values[k]) for name, values in small.data["points"][model].items()}
            points = np.stack([preds["entropy"], preds["error"]], axis=1) / 1000
            correct, wrong = panels[row, k].lines[-2:]
            np.testing.assert_array_equal(correct.get_xydata(), points[preds["predicted"] == labels])
            np.testing.assert_array_equal(wrong.get_xydata(), points[preds["predicted"] != labels])
            assert [text.get_text() for text in panels[row, k].texts] == ["tricky", "hard", "easy"]
    assert panels[0, 0].get_xlim() == pytest.approx((0, np.log(5)))


def test_reliability_leaves_out_empty_bins(small: Report) -> None:
    explorer = small.data["explorers"][0]
    with matplotlib.rc_context(STYLE):
        panels = np.reshape(np.array(uncertainty.reliability_figure(small.data).axes), (4, 4))
    for row, model in ((0, "vanilla"), (2, "ours")):
        chosen = explorer["steps"][explorer["chosen"]][model]
        shown = [(at["metrics"], at["reliability"]) for at in small.data["uncertainty"][model]]
        for axes, (metrics, bins) in zip(panels[row], [*shown, (chosen, chosen["reliability"])], strict=True):
            full = [accuracy for accuracy in bins["accuracy"] if accuracy is not None]
            assert len(full) < 10
            assert [bar.get_height() for bar in axes.patches] == full
            assert axes.texts[0].get_text() == f"ECE {metrics['ece']:.3f}\nAUROC {metrics['auroc']:.3f}"


@pytest.mark.slow
def test_images_have_label_prediction_and_exit(small: Report) -> None:
    assert small.sheet is not None
    rows = uncertainty.gallery_rows(small.data)
    explorer, points = small.data["explorers"][0], small.data["points"]
    with matplotlib.rc_context(STYLE):
        figure = uncertainty.galleries_figure(small.data, small.sheet.pixels.numpy(), rows)
        figure.draw_without_rendering()
    panels = np.reshape(np.array(figure.axes), (len(rows), 8))
    for row, (name, shown) in zip(panels, rows.items(), strict=True):
        for axes, i in zip(row, shown, strict=False):
            k = int(explorer["exits"]["ours"][explorer["chosen"]][i])
            predicting = k if name in ("saved", "lost") else small.data["net"]["exits"] - 1
            labels = points["label"][i], points["ours"]["predicted"][predicting][i]
            lines = [fit_text(f"{key}: {NAMES[c]}", 6, 66) for key, c in zip(("true", "pred"), labels, strict=True)]
            assert axes.get_title("left").split("\n") == [*lines, f"exit {k + 1}"]
            np.testing.assert_array_equal(axes.images[0].get_array(), small.sheet.pixels[i].permute(1, 2, 0).numpy())
        titles = [axes.findobj(lambda text, at=axes: _is_title(text, at))[0] for axes in row[: len(shown)]]
        assert not any(title.get_parse_math() for title in titles)
        boxes = [title.get_window_extent() for title in titles]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def _is_title(artist: Any, axes: Any) -> bool:
    return isinstance(artist, Text) and artist.get_text() == axes.get_title("left")


def test_names_are_plain_short_lines_in_letters_that_can_be_drawn() -> None:
    assert [fit_text(name, 6, 66) for name in NAMES[:3]] == ["$a_b$", "<b>_{x}^2$ & \\frac", "😀 ? ?"]
    assert fit_text(NAMES[3], 6, 66) == "W" * 10 + "…"
    assert fit_text(NAMES[4], 6, 66) == "two lines??"
    assert fit_text("x" * 10**6, 7, 120).endswith("x…")
    assert fit_text("", 6, 66) == ""


def test_a_training_alone_is_the_same_under_any_settings(tmp_path: Path) -> None:
    report = Report({"net": {"run": "run"}, "training": TRAINING, "provenance": []})
    check_files(write_figures(report, tmp_path / "plain"), ["training"], ())
    with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "red", "font.size": 30}):
        before = dict(matplotlib.rcParams)
        write_figures(report, tmp_path / "other")
        assert dict(matplotlib.rcParams) == before
    for name in ("training.png", "training.pdf"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert write_figures(Report({"training": {"epochs": [], "of": 3}}), tmp_path / "none") == []


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ew.InputError, match=r"figures need matplotlib: pip install 'exitwise\[report\]'"):
        write_figures(Report({"training": TRAINING}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ew.InputError, match="file is a file"):
            write_figures(Report({"training": TRAINING}), place)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ew.InputError, match="link cannot be created"):
        write_figures(Report({"training": TRAINING}), tmp_path / "link")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report({"training": TRAINING})
    write_figures(report, tmp_path / "old")
    before = contents(tmp_path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(History, "figure", interrupt)
        for name in ("old", "new"):
            with pytest.raises(KeyboardInterrupt):
                write_figures(report, tmp_path / name)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_figures(report, tmp_path / "old")
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
