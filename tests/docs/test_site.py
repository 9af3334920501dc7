"""The pages under docs/: their code runs, their commands parse, their links lead somewhere, and they make a site."""

import ast
import contextlib
import doctest
import inspect
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import typer
from paths import ROOT
from playwright.sync_api import expect, sync_playwright

import exitwise as ew
from exitwise.cli import app

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ELSEWHERE = {DOCS / "policies.md"}  # run by test_docs.py, like the README
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+?) -->\n\s*)?"
    r"^(?P<indent> *)```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```\s*$",
    flags=re.DOTALL | re.MULTILINE,
)
SHELL = ("sh", "bash", "shell", "console")
MODULES = {name for name in ew.__all__ if isinstance(getattr(ew, name), type(ew))}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and on which line its code begins."""

    page: Path
    line: int
    kind: str
    code: str
    reason: str | None = None  # not to run it

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, text: str | None = None) -> list[Block]:
    text = page.read_text(encoding="utf-8") if text is None else text
    return [
        Block(page, text.count("\n", 0, found.start("code")) + 1, found["kind"], dedent(found["code"]), found["reason"])
        for found in FENCE.finditer(text)
    ]


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.kind in ("python", "py")]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run(block: Block, names: dict[str, Any]) -> None:
    """Statement by statement; one whose line ends in `# -> text` must print that text."""
    tree = ast.parse("\n" * (block.line - 1) + block.code, filename=str(block.page))
    lines = block.code.splitlines()
    for statement in tree.body:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module([statement], []), str(block.page), "exec"), names)
        _, arrow, expected = lines[(statement.end_lineno or 0) - block.line].partition("  # -> ")
        if arrow:
            assert printed.getvalue().strip() == expected.strip(), f"{block.page.name}:{statement.end_lineno}"


RUN = [page for page in PAGES if page not in ELSEWHERE and any(block.reason is None for block in python_blocks(page))]


@pytest.mark.parametrize("page", RUN, ids=name_of)
@pytest.mark.slow
def test_python_on_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in python_blocks(page):
        if block.reason is None:
            run(block, names)


NOT_RUN = [block for page in PAGES for block in blocks(page) if block.reason is not None]


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.place)
def test_blocks_that_are_not_run_here_say_why(block: Block) -> None:
    """Seen by `pytest -rs`; at least they are Python."""
    assert block.reason
    if block.kind in ("python", "py"):
        compile(block.code, str(block.page), "exec")
    pytest.skip(f"{block.place} is not run: {block.reason}")


def test_printed_text_is_compared() -> None:
    page = DOCS / "index.md"
    names: dict[str, Any] = {}
    good, bad, quiet = (
        Block(page, 1, "python", code) for code in ("print(2)  # -> 2", "print(2)  # -> 3", "a = 2  # 3")
    )
    run(good, names)
    run(quiet, names)
    with pytest.raises(AssertionError):
        run(bad, names)


@pytest.mark.slow
def test_figures_in_the_guide_to_the_report_are_those_of_the_demo() -> None:
    """The page's numbers on the demo at half of its cost, from the library."""
    page = " ".join((DOCS / "guides" / "report.md").read_text(encoding="utf-8").split())
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    assert trace.test is not None
    labels, samples = trace.test.labels.numpy(), np.arange(len(trace.test))
    avoidable, tricky = [], []
    for method in ("MSDNet (vanilla)", "MIE Laplace T_opt sigma_opt"):
        cal = ew.calibrate(trace, method)
        half = 0.5 * trace.costs.values[-1]
        policy = ew.fit_policy(cal.predict(trace.val), trace.val.labels, trace.costs, budget=half)
        preds = cal.predict(trace.test)
        right, exits = preds.predicted == labels, policy.exits(preds)
        avoidable.append((right[-1] & ~right[exits, samples]).sum())
        third = list(preds.exits())[2]
        entropy = -(third.probs * third.log_probs).sum(axis=1)
        tricky.append(((entropy < np.log(100) / 2) & (third.probs[samples, labels] < 0.5)).mean())
    assert "falls from {} of 10,000 samples to {}".format(*avoidable) in page
    assert f"At exit 3 of the demo, {tricky[0]:.1%} of".replace("%", " %") in page
    assert f"and {tricky[1]:.1%} when calibrated".replace("%", " %") in page


def test_figures_on_the_front_page_are_those_of_the_readme() -> None:
    """Which test_docs.py compares with what the library gives."""
    front, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/index.md", "README.md"))
    row = {line.split("  ")[2]: line.split() for line in readme.splitlines() if line.startswith("    M")}
    plain, paper = row["MSDNet (vanilla)"], row["MIE Laplace T_opt sigma_opt"]
    words = " ".join(front.split())
    assert f"rises from {plain[-3]} to " in words
    assert f"falls from {plain[-2]} to " in words
    assert f"off by {100 * float(plain[-1]):.0f} points" in words
    assert f"(the paper's full method: {100 * float(paper[-3]):.0f} points, {paper[-9]} %, {paper[-6]})" in words


# Commands


def command_lines(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Where, and the words behind `exitwise`, in shell blocks, fenced or indented."""
    text = page.read_text(encoding="utf-8")
    found = [(block.line, block.code) for block in blocks(page, text) if block.kind in SHELL]
    outside = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in re.finditer(r"(?:^ {4}.*\n)+", outside, flags=re.MULTILINE):
        found.append((outside.count("\n", 0, match.start()) + 1, dedent(match[0])))
    for first, code in found:
        for number, line in enumerate(code.replace("\\\n", "  ").splitlines()):
            if re.search(r"(^|[\s/])exitwise ", line):
                for words in simple_commands(line):
                    yield f"{name_of(page)}:{first + number}", words


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words behind each `exitwise` that a line starts, whatever starts it: a prompt, a variable, torchrun."""
    lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word and set(word) <= set("|&;<>"):
            starts = [
                i
                for i, each in enumerate(words)
                if Path(each).name == "exitwise"
                and (all("=" in w for w in words[:i]) or words[i - 1] in ("-m", "nice"))
            ]
            if starts:
                yield words[starts[0] + 1 :]
            words = []
        else:
            words.append(word)


COMMANDS = [(place, words) for page in [ROOT / "README.md", *PAGES] for place, words in command_lines(page)]


def parse(words: list[str]) -> None:
    """As the command would, up to the moment before it does anything."""
    group: Any = typer.main.get_command(app.app)
    assert words, "exitwise alone does nothing"
    if words[0].startswith("-"):
        assert words in (["--version"], ["--help"])
        return
    assert words[0] in group.commands, f"there is no command {words[0]!r}"
    shown = [word.strip("[]") for word in words[1:]]  # brackets say that something may be left out
    if "--help" in shown:
        return
    try:
        group.commands[words[0]].make_context(words[0], shown)
    except typer.TyperException as error:
        pytest.fail(error.format_message())


@pytest.mark.parametrize(("place", "words"), COMMANDS, ids=[place for place, _ in COMMANDS])
def test_a_command_line_parses(place: str, words: list[str]) -> None:
    parse(words)


@pytest.mark.parametrize(
    "line", ["exitwise demmo", "exitwise evaluate RUN --buget 50%", "exitwise evaluate", "exitwise"]
)
def test_a_wrong_command_line_does_not_parse(line: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        parse(line.split()[1:])


def test_command_lines_are_found_behind_prompts_variables_and_launchers() -> None:
    for line in (
        "$ exitwise models  # names",
        "OMP_NUM_THREADS=1 exitwise models > names",
        "cd runs && .venv/bin/exitwise models",
        "torchrun --nproc-per-node 2 -m exitwise models",
    ):
        assert list(simple_commands(line)) == [["models"]]


# The reference


def parts_of_the_reference() -> dict[str, list[Block]]:
    """The examples of every name: the blocks between its `:::` and the next."""
    found: dict[str, list[Block]] = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        starts = [
            (match.start(), match[1]) for match in re.finditer(r"^::: exitwise\.(\S+)$", text, flags=re.MULTILINE)
        ]
        ends = [start for start, _ in starts[1:]] + [len(text)] * bool(starts)
        for (start, name), end in zip(starts, ends, strict=True):
            assert name not in found, f"{name} is there twice"
            found[name] = [block for block in blocks(page, text[start:end]) if block.kind == "python"]
    return found


def used(code: str) -> set[str]:
    """Names of the library that code uses: `Trace` and `Trace.load` for ew.Trace.load."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and (dotted := ast.unparse(node)).startswith("ew."):
            found.add(dotted.removeprefix("ew."))
    return found


def docstring_example(value: Any) -> str:
    """The code of the doctests in the docstring of a function, class or module; constants have none."""
    if not (inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)):
        return ""
    return "".join(example.source for example in doctest.DocTestParser().get_examples(inspect.getdoc(value) or ""))


@pytest.mark.parametrize("name", sorted(ew.__all__))
def test_every_public_name_is_in_the_reference_with_an_example_that_uses_it(name: str) -> None:
    """In a block of its page or in its docstring, which the page shows."""
    parts = parts_of_the_reference()
    assert name in parts, f"docs/reference has no `::: exitwise.{name}`"
    code = "\n".join(block.code for block in parts[name])
    examples = used(code) | used(docstring_example(getattr(ew, name)))
    assert name in {dotted.split(".")[0] for dotted in examples}, f"no example of ew.{name} uses it"
    if name in MODULES:
        module = getattr(ew, name)
        functions = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
        for member in getattr(module, "__all__", functions):
            value = getattr(module, member)
            if not member.startswith("_") and getattr(value, "__name__", member) == member:  # not a former name
                examples = used(code) | used(docstring_example(value))
                assert f"{name}.{member}" in examples, f"no example of ew.{name} uses its {member}"


@pytest.mark.parametrize("name", sorted(ew.__all__))
def test_a_page_of_the_reference_does_not_repeat_the_example_of_a_docstring(name: str) -> None:
    code = "\n".join(block.code for block in parts_of_the_reference()[name])
    page = {ast.unparse(statement) for statement in ast.parse(code).body}
    for statement in ast.parse(docstring_example(getattr(ew, name))).body:
        if isinstance(statement, ast.Expr):  # what an example shows; assignments and imports prepare it
            shown = ast.unparse(statement)
            assert shown not in page | {each.removeprefix("print(").removesuffix(")") for each in page}, shown


def test_the_reference_names_nothing_else() -> None:
    assert set(parts_of_the_reference()) == {*ew.__all__, "runtime.onnx.Session", "serving.ray.app"}


# Links


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_of_a_page_exist(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    links = re.findall(r"\]\(([^)\s]+)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    missing = [
        link
        for link in links
        if not re.match(r"\w+:|#", link) and not (page.parent / link.split("#")[0]).resolve().exists()
    ]
    assert not missing, f"{name_of(page)} links to {', '.join(missing)}"


def test_every_page_of_the_navigation_exists_and_every_page_is_in_it() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert listed == {page.relative_to(DOCS).as_posix() for page in PAGES}


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        if find_spec(module) is None:
            pytest.skip(f"the site needs {module}: pip install 'exitwise[docs]'")
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.mark.slow
def test_the_site_builds_and_asks_nothing_of_any_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert {page.relative_to(site).with_suffix(".md").as_posix() for page in pages} >= {
        page.relative_to(DOCS).as_posix() for page in PAGES
    }
    for page in pages:
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\">\s]+)", html)
        loaded += re.findall(r"<link[^>]* href=\"?([^\">\s]+)", html)
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], page.name
        assert 'class="arithmatex"' not in html, f"{page.name} has an equation that did not become MathML"


@pytest.mark.slow
def test_the_sites_own_links_lead_somewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        for url in re.findall(r"(?:href|src)=\"?([^\">\s]+)", html):
            if not re.match(r"\w+:|#|//", url) and page.name != "404.html":
                assert (page.parent / url.split("#")[0].split("?")[0]).exists(), f"{page.name} links to {url}"


@pytest.mark.slow
def test_the_reference_has_every_name_with_its_signature_and_members(site: Path) -> None:
    html = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    for name in [
        *ew.__all__,
        "Trace.hold_out",
        "Policy.exits",
        "Classifier.stream",
        "evaluation.metrics.ece",
        "models.msdnet.msdnet",
    ]:
        assert f'id="exitwise.{name}"' in html, name
    index = (site / "reference" / "index.html").read_text(encoding="utf-8")
    assert all(f"<code>ew.{name}</code>" in index for name in ew.__all__)


@pytest.mark.slow
def test_the_site_opened_as_a_file_shows_equations_and_finds_words_with_the_network_off(site: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(offline=True)
        tab = context.new_page()
        wrong: list[str] = []
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on(
            "request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request.url)
        )
        tab.goto((site / "guides" / "report.html").as_uri())
        box = tab.locator("math").first.bounding_box()
        assert box is not None
        assert box["width"] > 2 * box["height"] > 20  # in one line, as an equation in a sentence is
        tab.locator(".md-search__input").click()
        expect(tab.locator(".md-search-result__meta")).to_contain_text("Type to start", timeout=30_000)
        tab.locator(".md-search__input").press_sequentially("certificate")  # as a hand types it
        tab.locator(".md-search-result__link").first.wait_for()
        found = [link.get_attribute("href") or "" for link in tab.locator(".md-search-result__link").all()]
        assert any("reference/policies.html" in link for link in found)
        browser.close()
    assert not wrong
