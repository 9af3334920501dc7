"""The report in Chromium, without a network. Screenshots are saved in build/screenshots."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import FAINT, chromium
from cases import random_trace
from command import Command, new_run, perform, with_paper_method, zoo_run
from paths import ROOT, SHARED
from PIL import Image
from playwright.sync_api import Browser, Page, expect

import exitwise as ew
from exitwise import data
from exitwise.calibration.methods import OURS, VANILLA
from exitwise.core.costs import Costs
from exitwise.core.files import write_json
from exitwise.report import page as pages
from exitwise.report.build import Report, ReportOptions, build_report, training_report
from exitwise.runs.run import Run
from exitwise.training.history import EpochRecord, History

SCREENSHOTS = ROOT / "build" / "screenshots"
WIDTHS = (1440, 800, 390)
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\"quoted\" & 'single' `tick`",
    "🦊 fox 👩‍👩‍👧",
    "שלום עולם",
)


@pytest.fixture
def exitwise(exitwise: Command) -> Command:
    return with_paper_method(exitwise)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@dataclass
class Tab:
    """An open page, its errors, and its requests."""

    page: Page
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def move(self, step: int) -> None:
        """Move the slider."""
        self.page.locator("#budget").fill(str(step))


Open = Callable[..., Any]


@pytest.fixture
def tab(browser: Browser) -> Iterator[Open]:
    """Return a function that opens files; a test fails if the console shows an error or the page requests a URL."""
    contexts, tabs = [], []

    def open_file(file: Path, width: int = 1440, theme: str = "light") -> Tab:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, offline=True)  # type: ignore[arg-type]
        contexts.append(context)
        opened = Tab(context.new_page())
        tabs.append(opened)
        opened.page.on("console", lambda message: opened.problems.append(message.text))
        opened.page.on("pageerror", lambda error: opened.problems.append(str(error)))
        opened.page.on("dialog", lambda dialog: opened.problems.append(f"dialog: {dialog.message}"))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(file.as_uri())
        opened.page.wait_for_selector("html[data-ready=yes]", state="attached")
        return opened

    yield open_file
    for opened in tabs:
        assert opened.problems == []
        assert all(url.startswith(("file:", "data:")) for url in opened.requests)
    for context in contexts:
        context.close()


@dataclass(frozen=True)
class Written:
    file: Path
    report: Report

    @property
    def data(self) -> dict[str, Any]:
        return self.report.data


def written(report: Report, file: Path) -> Written:
    pages.write_page(report, file)
    return Written(file, report)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Written:
    """Report on the shipped net as after the demo, with its real images if they are available."""
    place = tmp_path_factory.mktemp("zoo")
    root = request.getfixturevalue("cifar100") if SHARED.is_dir() else None
    report = build_report(Run(zoo_run(place / "run")), ReportOptions(method=OURS, root=root))
    return written(report, place / "run" / "report.html")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report on a run on digits, from training on, with times and a second run to compare with."""
    place = tmp_path_factory.mktemp("digits")
    for name in ("run", "other"):
        perform("train", "--data", "digits", "--epochs", "2", "--seed", str(len(name)), "--out", str(place / name))
        perform("collect", str(place / name))
    costs = ew.Trace.load(place / "run" / "trace.safetensors").costs.values
    write_json(place / "run" / "bench.json", {"costs": {"values": [cost / 1e5 for cost in costs]}})
    perform("report", str(place / "run"), "--against", str(place / "other"))
    return place / "run" / "report.html"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Report on a run with hostile class names."""
    place = tmp_path_factory.mktemp("hostile")
    trace = replace(random_trace(), classes=HOSTILE)
    return written(build_report(Run(new_run(place / "<b>run", trace)), ReportOptions()), place / "report.html")


def shown_percent(value: float) -> str:
    return f"{100 * value:.2f}"


@pytest.mark.slow
class TestBudget:
    def test_what_the_slider_shows_is_what_the_library_evaluates(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file)
        trace = ew.Trace.load(zoo.file.parent / "trace.safetensors")
        assert trace.test is not None
        cals = {name: ew.calibrate(trace, method) for name, method in (("vanilla", VANILLA), ("ours", OURS))}
        val = {name: cal.predict(trace.val) for name, cal in cals.items()}
        test = {name: cal.predict(trace.test) for name, cal in cals.items()}
        steps = zoo.data["explorers"][0]["steps"]
        for step in (0, 7, 23, len(steps) - 1):
            seen.move(step)
            budget = steps[step]["budget"]
            for model in cals:
                policy = ew.fit_policy(val[model], trace.val.labels, trace.costs, budget=budget)
                found = ew.evaluate(test[model], labels=trace.test.labels, policy=policy, costs=trace.costs)
                assert seen.text(f"#{model}-top1") == shown_percent(found.top1)
                assert seen.text(f"#{model}-nlpd") == f"{found.nlpd:.3f}"
                assert seen.text(f"#{model}-ece") == f"{found.ece:.3f}"
                assert seen.text(f"#{model}-cost") == f"{found.cost / 1e6:.4g}"
                rows = seen.page.locator("#exits tbody tr")
                first = 1 if model == "vanilla" else 4
                for k, share in enumerate(found.exit_shares):
                    cells = rows.nth(k).locator("td").all_inner_texts()
                    threshold = policy.thresholds[k]
                    word = {np.inf: "no sample", -np.inf: "all samples"}.get(threshold, f"{threshold:.4f}")
                    assert cells[first : first + 2] == [word, f"{100 * share:.1f} %"]

    def test_the_point_moves_along_the_curves_and_the_words_with_it(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file)
        dots = seen.page.locator("#budgets .figure circle.dot.ours")
        places = []
        for step in (3, 30):
            seen.move(step)
            places.append((dots.first.get_attribute("cx"), dots.first.get_attribute("cy"), seen.text("#lead")))
            budget = zoo.data["explorers"][0]["steps"][step]["budget"]
            assert f"{budget / 1e6:.4g} million MACs" in seen.text("#lead")
            assert f"{budget / 1e6:.4g} million MACs" in seen.text("#amount")
        assert all(before != after for before, after in zip(*places, strict=True))
        assert dots.count() == 4

    def test_keys_move_it_and_say_where_it_is(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file)
        slider = seen.page.locator("#budget")
        slider.focus()
        before = (int(slider.input_value()), seen.text("#ours-top1"))
        seen.page.keyboard.press("ArrowRight")
        seen.page.keyboard.press("ArrowRight")
        assert int(slider.input_value()) == before[0] + 2
        assert seen.text("#ours-top1") != before[1]
        assert slider.get_attribute("aria-valuetext") == seen.text("#amount")

    def test_milliseconds_where_they_were_measured(self, digits: Path, tab: Open) -> None:
        seen = tab(digits)
        assert "MACs" in seen.text("#amount")
        seen.page.select_option("#unit", "ms")
        assert " ms (" in seen.text("#amount")
        assert "ms" in seen.page.locator("#cards").inner_text()

    def test_more_curves_can_be_switched_on(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file)
        seen.page.click("#budgets summary")
        figure = seen.page.locator("#budgets .figure").first
        lines = figure.locator("path.line")
        assert lines.count() == 2
        boxes = seen.page.locator("#budgets input[type=checkbox]")
        names = [box.get_attribute("data-curve") or "" for box in boxes.all()]
        for wanted in (
            "Published in the paper (other networks, trained far longer): the paper's model, small",
            "ResNets",
            "MIE T_opt",
        ):
            boxes.nth(next(i for i, name in enumerate(names) if name.endswith(wanted))).check()
        assert lines.count() == 5
        assert "Published in the paper" in seen.page.locator("#budgets .legend").nth(1).inner_text()

    def test_other_runs_are_beside(self, digits: Path, tab: Open) -> None:
        seen = tab(digits)
        seen.page.click("#budgets summary")
        seen.page.locator("#budgets input[data-curve^=other]").first.check()
        assert seen.page.locator("#budgets .figure").first.locator("path.line").count() == 3


@pytest.mark.slow
class TestPoints:
    def test_a_click_shows_the_sample_and_its_image(self, digits: Path, tab: Open) -> None:
        seen = tab(digits)
        scatter = seen.page.locator("svg[data-model=ours]")
        scatter.scroll_into_view_if_needed()
        scatter.focus()
        seen.page.keyboard.press("ArrowRight")
        ring = scatter.locator(".ring").bounding_box()
        assert ring is not None
        seen.page.keyboard.press("Escape")
        assert seen.page.locator("#detail").is_hidden()
        seen.page.mouse.click(ring["x"] + ring["width"] / 2, ring["y"] + ring["height"] / 2)
        detail = seen.page.locator("#detail")
        assert detail.is_visible()
        trace = ew.Trace.load(digits.parent / "trace.safetensors")
        assert trace.test is not None
        assert trace.test.index is not None
        position = int(detail.inner_text().split("test sample ")[1].split(".")[0].replace(",", ""))
        place = trace.test.index.tolist().index(position)
        assert detail.locator("h3").inner_text() == str(int(trace.test.labels[place]))
        images = data.load("digits")[0]
        row = images.index.tolist().index(position)
        pixels = images.pixels_of(images.index[row : row + 1] * 0 + row, None, None)[0, 0].numpy()
        shot = Image.open(BytesIO(detail.locator(".image i").screenshot())).convert("L")
        side = shot.size[0] / 8
        middles = [[shot.getpixel((int((x + 0.5) * side), int((y + 0.5) * side))) for x in range(8)] for y in range(8)]
        assert np.abs(np.array(middles) - pixels.astype(int)).max() <= 2

    def test_every_exit_has_its_say(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file)
        seen.page.locator("#tiles-tricky button").first.click()
        point = zoo.data["galleries"]["tricky"][0]
        rows = seen.page.locator("#detail tbody tr")
        assert rows.count() == 4
        for k in range(4):
            for model, cell in (("vanilla", 1), ("ours", 2)):
                predicted = zoo.data["classes"][zoo.data["points"][model]["predicted"][k][point]]
                assert predicted in rows.nth(k).locator("td").nth(cell).inner_text()
        assert seen.page.locator("#detail").inner_text().count("exits here") == 2

    def test_hovering_says_what_a_point_is(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file)
        scatter = seen.page.locator("svg[data-model=vanilla]")
        scatter.scroll_into_view_if_needed()
        box = scatter.bounding_box()
        assert box is not None
        seen.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
        seen.page.mouse.move(box["x"] + box["width"] / 4 + 2, box["y"] + 52)
        assert " %\nentropy" in seen.text("#tip")

    def test_another_exit_shows_other_points(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file)
        marks = seen.page.locator("svg[data-model=ours] path.points.wrong")
        before = marks.get_attribute("d")
        seen.page.get_by_role("group", name="At").first.get_by_label("exit 1").check()
        assert marks.get_attribute("d") != before
        share = zoo.data["uncertainty"]["ours"][0]["high_error_share"]
        assert f"{100 * share:.2f} % of samples" in seen.page.locator("#uncertainty").inner_text()


@pytest.mark.slow
class TestExamples:
    def test_saved_and_lost_follow_the_budget(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file)
        for step in (10, 30):
            seen.move(step)
            for kind in ("saved", "lost"):
                found = zoo.data["explorers"][0]["steps"][step][kind]
                labels = [zoo.data["classes"][zoo.data["points"]["label"][i]] for i in found["points"]]
                assert seen.page.locator(f"#tiles-{kind} strong").all_inner_texts() == labels
            assert f"{found['samples']:,} of 10,000 samples" in seen.page.locator("#examples").inner_text()

    def test_without_images_it_says_how_to_get_them(self, zoo: Written, tab: Open, tmp_path: Path) -> None:
        bare = replace(zoo.report, data={**zoo.data, "images": None, "images_note": "No images: --root"}, sheet=None)
        seen = tab(written(bare, tmp_path / "bare.html").file)
        assert "No images: --root" in seen.page.locator("#examples .note").inner_text()
        assert seen.page.locator("#examples .image").count() == 0
        assert "entropy 0." in seen.page.locator("#tiles-easy").inner_text()


@pytest.mark.slow
class TestCalibration:
    def test_diagrams_are_of_the_exits_taken_or_of_one(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file)
        step = zoo.data["explorers"][0]["chosen"]
        found = zoo.data["explorers"][0]["steps"][step]["ours"]
        words = seen.page.locator("#calibration-ours")
        assert words.inner_text().startswith(f"ECE {found['ece']:.3f}; AUROC")
        assert f"{found['auroc']:.3f}" in words.inner_text()
        seen.page.locator("#calibration").get_by_label("exit 2").check()
        metrics = zoo.data["uncertainty"]["ours"][1]["metrics"]
        assert words.inner_text().startswith(f"ECE {metrics['ece']:.3f}; AUROC")


@pytest.mark.slow
class TestTables:
    def test_a_click_sorts(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file)
        table = seen.page.locator("#table-ablation")
        names = lambda: table.locator("tbody th").all_inner_texts()  # noqa: E731
        rows = zoo.data["tables"][0]["rows"]
        assert names() == [row["method"] for row in rows]
        table.get_by_label("Sort by ECE", exact=True).click()
        falling = [row["method"] for row in sorted(rows, key=lambda row: -row["metrics"]["ece"])]
        assert names() == falling
        table.get_by_label("Sort by ECE", exact=True).click()
        assert names() == falling[::-1]
        assert table.locator("th[aria-sort=ascending]").inner_text().startswith("ECE")
        table.get_by_label("Sort by method").click()
        assert names() == sorted(names(), key=str.casefold)

    def test_numbers_changes_and_what_was_published(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file)
        cells = seen.page.locator("#table-ablation tbody tr").last.locator("td")
        row = zoo.data["tables"][0]["rows"][-1]
        texts = cells.all_inner_texts()
        assert texts[:2] == [shown_percent(row["metrics"]["top1"]), f"+{shown_percent(row['change']['top1'])}"]
        assert texts[2:4] == ["69.84", "+0.59"]
        kinds = [cells.nth(i).get_attribute("class") for i in (1, 9)]
        assert kinds == ["better", "better"]
        second = seen.page.locator("#table-ablation tbody tr").nth(1).locator("td").nth(1)
        assert (second.inner_text()[0], second.get_attribute("class")) == ("\N{MINUS SIGN}", "worse")

    @pytest.mark.parametrize("kind", ["csv", "latex"])
    def test_copies(self, zoo: Written, tab: Open, kind: str) -> None:
        seen = tab(zoo.file)
        seen.page.evaluate("document.addEventListener('copy', () => { window.copied = document.activeElement.value; })")
        button = seen.page.locator("#tables .buttons button").nth(["csv", "latex"].index(kind))
        button.click()
        assert button.inner_text() == "Copied"
        assert seen.page.evaluate("window.copied") == zoo.data["tables"][0][kind]


@pytest.mark.slow
class TestLook:
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_fits_and_nothing_overlaps(self, zoo: Written, tab: Open, width: int, theme: str) -> None:
        seen = tab(zoo.file, width, theme)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        seen.page.screenshot(path=SCREENSHOTS / f"report-{width}-{theme}.png", full_page=True)
        assert seen.page.evaluate("document.documentElement.scrollWidth") == width
        assert seen.page.evaluate(OVERLAPS) == []
        assert seen.page.evaluate(FAINT) == []

    @pytest.mark.parametrize("width", WIDTHS)
    def test_so_does_a_run_with_two_exits_and_strange_names(self, hostile: Written, tab: Open, width: int) -> None:
        seen = tab(hostile.file, width)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        seen.page.screenshot(path=SCREENSHOTS / f"strange-{width}.png", full_page=True)
        assert seen.page.evaluate("document.documentElement.scrollWidth") == width
        assert seen.page.evaluate(OVERLAPS) == []

    def test_themes(self, zoo: Written, tab: Open) -> None:
        color = "getComputedStyle(document.body).backgroundColor"
        seen = tab(zoo.file, theme="dark")
        dark = seen.page.evaluate(color)
        seen.page.click("#theme")
        light = seen.page.evaluate(color)
        assert (dark, light) == ("rgb(20, 23, 27)", "rgb(255, 255, 255)")
        seen.page.reload()
        seen.page.wait_for_selector("html[data-ready=yes]", state="attached")
        assert seen.page.evaluate(color) == light  # the choice is remembered

    def test_prints(self, zoo: Written, tab: Open) -> None:
        seen = tab(zoo.file, theme="dark")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        printed = seen.page.pdf(path=SCREENSHOTS / "report.pdf", format="A4", print_background=True)
        assert printed.startswith(b"%PDF")
        assert 4 <= printed.count(b"/Type /Page\n") <= 25

    def test_keys_reach_everything(self, digits: Path, tab: Open) -> None:
        seen = tab(digits)
        reached = set()
        for _ in range(150):
            seen.page.keyboard.press("Tab")
            reached.add(seen.page.evaluate("(document.activeElement.id || document.activeElement.tagName)"))
        wanted = {
            "theme",
            "budget",
            "unit",
            "exits",
            "table-ablation",
            "cost-net",
            "A",
            "SUMMARY",
            "BUTTON",
            "INPUT",
            "svg",
        }
        assert wanted <= reached

    def test_images_in_print_and_themes_need_no_network(self, digits: Path, tab: Open) -> None:
        seen = tab(digits)
        style = "getComputedStyle(document.querySelector('#tiles-easy .image i')).backgroundImage.slice(0, 22)"
        assert seen.page.evaluate(style) == 'url("data:image/png;ba'


class TestStrangeNames:
    @pytest.mark.slow
    def test_are_text(self, hostile: Written, tab: Open) -> None:
        seen = tab(hostile.file)
        assert seen.page.title() == "<b>run · exitwise"
        assert "<b>run" in seen.text("#run")
        words = seen.page.locator("main").inner_text()
        labels = {zoo_label for kind in ("easy", "hard", "tricky") for zoo_label in hostile.data["galleries"][kind]}
        shown = {HOSTILE[hostile.data["points"]["label"][i]] for i in labels}
        assert shown
        assert all(name in words for name in shown)
        assert seen.page.locator("main img").count() == 0
        for name in HOSTILE:
            point = hostile.data["points"]["label"].index(HOSTILE.index(name))
            seen.page.evaluate(f"pick({point})")
            assert seen.page.locator("#detail h3").inner_text() == name


@pytest.mark.slow
class TestLive:
    def epochs(self, number: int) -> History:
        return History(
            tuple(EpochRecord(i + 1, 0.1, 3.0 - i, 3.1 - i, (0.3, 0.4 + i / 10), 900.0, 1.5) for i in range(number))
        )

    def test_reloads_itself_while_the_run_trains(self, tab: Open, tmp_path: Path) -> None:
        place = new_run(tmp_path / "run", random_trace(), {"recipe": {"epochs": 3}})
        (place / "trace.safetensors").unlink()
        file = place / "report.html"
        pages.write_page(training_report(Run(place), live=True), file)
        seen = tab(file)
        assert "No epoch is complete" in seen.text("#epochs")
        self.epochs(2).save(place / "history.csv")
        pages.write_page(training_report(Run(place), live=True), file)
        expect(seen.page.locator("#epochs")).to_contain_text("2 of 3 epochs", timeout=60_000)
        assert seen.page.locator("#training .figure path.line").count() == 4
        self.epochs(3).save(place / "history.csv")
        pages.write_page(training_report(Run(place), live=False), file)
        expect(seen.page.locator("#epochs")).to_contain_text("3 of 3 epochs", timeout=60_000)
        assert seen.page.locator("meta[http-equiv=refresh]").count() == 0
        assert "The weights of epoch 3 are kept" in seen.text("#epochs")
        replace(self.epochs(3), kept=(2, 0)).save(place / "history.csv")
        pages.write_page(training_report(Run(place), live=False), file)
        seen.page.reload()
        assert "exit 1 from epoch 2, exit 2 unchanged" in seen.text("#epochs")


def test_one_exit(tab: Open, tmp_path: Path) -> None:
    trace = replace(random_trace(widths=(6,)), costs=Costs((1e6,)))
    seen = tab(
        written(build_report(Run(new_run(tmp_path / "run", trace)), ReportOptions()), tmp_path / "report.html").file,
        390,
    )
    headline = seen.page.locator("#headline").inner_text()
    assert "A network with one exit" in headline
    assert "train-heads --attach auto" in headline
    assert seen.page.evaluate("document.documentElement.scrollWidth") == 390
    # There is no budget, no decision and no earlier exit to speak of.
    expect(seen.page.locator("#bar")).to_be_hidden()
    assert seen.page.locator("#budgets").count() == 0
    assert seen.page.locator("#sections a[href='#budgets']").count() == 0
    text = seen.page.locator("#main").inner_text()
    for phrase in ("At a budget", "slider", "exit early", "Saved", "Decision experiment", "exits taken at this budget"):
        assert phrase not in text, phrase
    assert "MSDNet" not in text
    assert "plain" in seen.text("#table-ablation")
    assert seen.page.locator("#tiles-easy li").count() > 0


# Pairs of texts in one chart that overlap.
OVERLAPS = """() => [...document.querySelectorAll(".figure svg")].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  const over = ([a, p], [b, q]) => Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
    && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 4;
  return boxes.flatMap((first, i) => boxes.slice(i + 1).filter((second) => over(first, second))
    .map((second) => `${first[0]} / ${second[0]}`));
})"""
