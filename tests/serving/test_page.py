"""The page of the service in Chromium, with a server process. Screenshots are saved in build/screenshots."""

import base64
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import FAINT, chromium
from paths import ROOT
from playwright.sync_api import Browser, Page, expect
from serving_cases import Server, family_bundle, png, started

from exitwise.runtime.bundle import MANIFEST, Manifest

SCREENSHOTS = ROOT / "build" / "screenshots"
KEY = "correct-horse-battery"
HOSTILE = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "\"quoted\" & 'single'", "שלום עולם")


# Note how many exits are shown, whenever this changes.
NOTE_SHOWN = """() => {
  window.seen = [];
  const note = () => {
    const shown = document.querySelectorAll(".exit.passed, .exit.taken, .exit.beyond").length;
    if (seen.at(-1) !== shown) seen.push(shown);
  };
  const watched = { subtree: true, childList: true, attributes: true };
  new MutationObserver(note).observe(document.getElementById("exits"), watched);
}"""
# Drop or paste a file.
SEND_FILE = """([event, data]) => {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const items = new DataTransfer(), init = { bubbles: true, cancelable: true };
  items.items.add(new File([bytes], `${event}.png`, { type: "image/png" }));
  document.body.dispatchEvent(event === "drop"
    ? new DragEvent(event, { ...init, dataTransfer: items })
    : new ClipboardEvent(event, { ...init, clipboardData: items }));
}"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@dataclass
class Tab:
    """An open page, what its console shows, and its requests."""

    page: Page
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def explained(self) -> int:
        """Return the number of images that were sent."""
        return sum(request == "POST /explain" for request in self.requests)

    def send(self, data: bytes, name: str = "photo.png", kind: str = "image/png") -> None:
        self.page.locator("#file").set_input_files({"name": name, "mimeType": kind, "buffer": data})

    def taken(self) -> list[int]:
        """Return the exits that are shown as taken."""
        classes = self.page.eval_on_selector_all(".exit", "nodes => nodes.map((node) => node.className)")
        return [k for k, names in enumerate(classes) if "taken" in names.split()]


Open = Callable[..., Tab]


@pytest.fixture
def tab(browser: Browser) -> Iterator[Open]:
    """Return a function that opens a page; a test fails if the console shows an error or it asks another origin."""
    contexts, tabs = [], []

    def open_page(url: str, width: int = 1280, theme: str = "light", motion: str = "reduce", ready: bool = True) -> Tab:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,
            reduced_motion=motion,  # type: ignore[arg-type]
        )
        contexts.append(context)
        opened = Tab(context.new_page())
        tabs.append((url, opened))
        opened.page.on("console", lambda message: opened.problems.append(message.text))
        opened.page.on("pageerror", lambda error: opened.problems.append(str(error)))
        opened.page.on("dialog", lambda dialog: opened.problems.append(f"dialog: {dialog.message}"))

        def note(request: Any) -> None:
            assert request.url.startswith((url, "blob:", "data:")), request.url
            opened.requests.append(f"{request.method} {request.url.removeprefix(url)}")

        opened.page.on("request", note)
        opened.page.goto(url)
        opened.page.wait_for_selector("html[data-ready=yes]", state="attached")
        return opened

    yield open_page
    for _, opened in tabs:
        refusals = "Failed to load resource"  # Chromium notes every answer with an error, and every lost connection
        assert [problem for problem in opened.problems if not problem.startswith(refusals)] == []
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_bundle(tmp_path_factory.mktemp("serving") / "bundle")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    with started(bundle, "--slo", "30s", "--max-body", "20KB") as server:
        yield server


def change(bundle: Path, **changes: Any) -> None:
    """Write another manifest to a bundle."""
    manifest = replace(Manifest.load(bundle), **changes)
    (bundle / MANIFEST).unlink()
    manifest.save(bundle)


def test_the_slider_moves_the_exit_without_another_request(tab: Open, server: Server) -> None:
    files = {seed: httpx.post(f"{server.urls[0]}/explain", content=png(seed)).json() for seed in range(12)}
    exits = {seed: [policy["exit"] for policy in answer["policies"]] for seed, answer in files.items()}
    seed = max(exits, key=lambda seed: len(set(exits[seed])))
    assert len(set(exits[seed])) > 1
    opened = tab(server.urls[0])
    page, answer = opened.page, files[seed]
    opened.send(png(seed))
    page.wait_for_selector(".exit.taken")
    slider = page.get_by_role("slider", name="Budget")
    expect(page.get_by_label("follow the load")).to_be_checked()
    assert opened.taken() == [exits[seed][3]]  # of the policy in use
    slider.focus()
    slider.press("Home")
    for k, policy in enumerate(answer["policies"]):
        assert opened.taken() == [policy["exit"]]
        best = answer["exits"][policy["exit"]]["top"][0]
        lead = page.inner_text("#lead")
        assert f"exit {policy['exit'] + 1} of 3" in lead
        assert f"{100 * best['probability']:.1f} %" in lead
        assert f"expected accuracy {100 * policy['expected_accuracy']:.1f} %" in (
            slider.get_attribute("aria-valuetext") or ""
        )
        assert f"policy {k + 1} of 4" in page.inner_text("#short")
        beyond = page.locator(".exit.beyond")
        expect(beyond).to_have_count(2 - policy["exit"])
        slider.press("ArrowRight")
    expect(page.locator("#announce")).to_contain_text("the image exits at")  # to screen readers
    expect(page.get_by_label("follow the load")).not_to_be_checked()
    low, high = answer["policies"][0]["budget"], answer["policies"][1]["budget"]
    slider.fill(str(low + 0.6 * (high - low)))  # between two budgets: a request with it gets the lower one
    assert "policy 1 of 4" in page.inner_text("#short")
    assert opened.taken() == [exits[seed][0]]
    assert opened.explained() == 1


def test_the_exits_are_shown_one_after_the_other(tab: Open, server: Server) -> None:
    opened = tab(server.urls[0], motion="no-preference")
    page = opened.page
    page.evaluate(NOTE_SHOWN)
    page.get_by_role("slider", name="Budget").press("End")
    opened.send(png())
    page.wait_for_selector(".exit.taken")
    page.wait_for_function("() => seen.at(-1) === 3")
    assert page.evaluate("seen.filter((n) => n)") == [1, 2, 3]  # the last policy runs to the last exit
    page.get_by_role("button", name="Replay").click()
    page.wait_for_function("() => seen.filter((n) => n === 3).length === 2")
    assert opened.explained() == 1


def test_files_are_dropped_and_pasted(tab: Open, server: Server) -> None:
    opened = tab(server.urls[0])
    page = opened.page
    for number, event in enumerate(("drop", "paste"), start=1):
        page.evaluate(
            SEND_FILE,
            [event, base64.b64encode(png(number)).decode()],
        )
        expect(page.locator("#file-name")).to_have_text(f"{event}.png")
        page.wait_for_selector(".exit.taken")
    expect(page.get_by_alt_text("The image that was sent")).to_be_visible()
    assert opened.explained() == 2
    assert "image" in (page.locator("#file").get_attribute("accept") or "")


def test_errors_are_shown_in_a_line(tab: Open, server: Server) -> None:
    opened = tab(server.urls[0])
    page = opened.page
    error = page.locator("#error")
    opened.send(b"no image", "notes.txt", "text/plain")
    expect(error).to_contain_text("The image cannot be read as an image of type JPEG")
    assert error.get_attribute("role") == "alert"
    opened.send(png())
    page.wait_for_selector(".exit.taken")
    expect(error).to_be_hidden()
    opened.send(b"x" * 30000, "large.png")
    expect(error).to_contain_text("0.0 MB")
    assert opened.explained() == 2  # the large one was not sent
    page.route(
        "**/explain",
        lambda route: route.fulfill(
            status=503, headers={"Retry-After": "2"}, json={"error": "the service is overloaded"}
        ),
    )
    opened.send(png())
    expect(error).to_have_text("The service is overloaded. Try again in 2 s.")
    assert opened.taken() == []
    page.unroute("**/explain")
    page.route("**/explain", lambda route: route.abort())
    opened.send(png())
    expect(error).to_have_text("The service does not answer.")


def test_a_key_is_asked_for_and_kept_in_memory(tab: Open, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text(f"{KEY}\n")
    with started(bundle, "--slo", "30s", "--api-key-file", str(tmp_path / "keys.txt"), "--page-port", "0") as server:
        assert httpx.get(server.urls[0]).status_code == 404  # the page is on its own port
        assert httpx.get(f"{server.urls[0]}/stats", headers={"X-API-Key": KEY}).status_code == 404
        opened = tab(server.urls[1])
        page = opened.page
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        expect(page.locator("#content")).to_be_hidden()
        key.fill("wrong-wrong-wrong-wrong")
        key.press("Enter")
        expect(page.locator("#problem")).to_have_text("The service does not accept this key.")
        key.fill(KEY)
        page.get_by_role("button", name="Use key").click()
        expect(page.locator("#content")).to_be_visible()
        opened.send(png())
        page.wait_for_selector(".exit.taken")
        kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        assert KEY not in kept
        assert KEY not in page.content()
        assert page.input_value("#key") == ""


def test_a_bundle_without_family_labels_and_accuracies(tab: Open, bundle: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(bundle, plain)
    change(plain, family=None, classes=None)
    with started(plain, "--slo", "30s") as server:
        opened = tab(server.urls[0])
        page = opened.page
        expect(page.locator("#bar")).to_be_hidden()
        expect(page.locator("#policies")).to_contain_text("The bundle has one policy")
        opened.send(png())
        page.wait_for_selector(".exit.taken")
        assert "class " in page.inner_text("#lead")
        change(plain, preprocessing=None, policy=replace(Manifest.load(plain).policy))
        server.process.send_signal(1)  # SIGHUP: the page notices that there is another bundle
        expect(page.locator("#image-note")).to_contain_text("no preprocessing for image files")
        expect(page.locator("#drop")).to_be_hidden()
        expect(page.locator("#cards")).to_be_visible()


def test_names_of_others_are_text(tab: Open, bundle: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    shutil.copytree(bundle, hostile)
    names = [f"{HOSTILE[k % len(HOSTILE)]} {k}" for k in range(10)]
    change(hostile, classes=tuple(names))
    with started(hostile, "--slo", "30s") as server:
        opened = tab(server.urls[0], width=360)
        opened.send(png(), name="<img src=x onerror=alert(3)>.png")
        opened.page.wait_for_selector(".exit.taken")
        shown = opened.page.eval_on_selector_all(".classes bdi", "nodes => nodes.map((node) => node.textContent)")
        assert set(shown) <= set(names)
        assert opened.page.evaluate("document.documentElement.scrollWidth") == 360


def test_charts_follow_the_load(tab: Open, bundle: Path) -> None:
    with started(bundle, "--slo", "30s") as server:
        opened = tab(server.urls[0])
        page = opened.page
        expect(page.locator("#quiet")).to_contain_text("No request in the last two minutes")
        opened.send(png())
        page.wait_for_selector(".exit.taken")
        with httpx.Client(base_url=server.urls[0]) as client:
            for k in range(20):
                assert client.post("/classify", content=png(k)).status_code == 200
        expect(page.locator("#quiet")).to_be_hidden()
        expect(page.locator("#now-requests .number")).to_have_text("2")  # in ten seconds, without the explained one
        expect(page.locator("#now-latency")).to_contain_text("objective 30000 ms")
        expect(page.locator("#now-budget")).to_contain_text("expected accuracy 80.0 %")
        page.wait_for_selector("#load .bar.exit-share")
        assert page.locator("#load svg[role=img]").count() == 4
        server.process.kill()
        expect(page.locator("#problem")).to_have_text("The service does not answer. Trying again.")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_fits_all_widths_and_themes(tab: Open, server: Server, width: int, theme: str) -> None:
    opened = tab(server.urls[0], width, theme)
    page = opened.page
    opened.send(png())
    page.wait_for_selector(".exit.taken")
    page.locator("summary").click()
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert page.evaluate("document.documentElement.scrollWidth") == width
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"serve-{width}-{theme}.png", full_page=True)
    assert page.evaluate(FAINT) == []
    for name in ("Choose", "Budget", "follow the load"):
        assert page.get_by_label(name).count() >= 1
    page.get_by_role("button", name="Switch to the").click()
    assert page.evaluate("document.documentElement.dataset.theme") != theme
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName.toLowerCase()"))
    assert {"file", "budget", "follow", "summary"} <= reached
