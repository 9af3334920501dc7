"""Chromium for tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

# Texts with too little contrast to the background (WCAG AA: 4.5).
FAINT = """() => {
  const light = (color) => {
    const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.match(/[\\d.]+/g).map((v) => linear(Number(v) / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(color) && color !== "transparent") return color;
    }
    return "rgb(255, 255, 255)";
  };
  const faint = new Set();
  const words = "p, h1, h2, h3, td, th, li, label, legend, dt, dd, button, summary, text, span, output, strong";
  for (const node of document.querySelectorAll(words)) {
    if (!node.textContent.trim() || !node.getClientRects().length) continue;
    const style = getComputedStyle(node), front = node.tagName === "text" ? style.fill : style.color;
    const [a, b] = [light(front), light(behind(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) >= 4.5) continue;
    faint.add(`${node.tagName}.${node.getAttribute("class")} ${front}: ${node.textContent.slice(0, 30)}`);
  }
  return [...faint];
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the browser of the system; skip the test if there is none."""
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield launched
        launched.close()
