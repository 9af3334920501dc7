"""Write docs/report.png, the README's screenshot of the report, from the demo's page.

usage: screenshot.py [PAGE]    default: runs/demo/report.html; needs Chromium and playwright
"""

import shutil
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1280, 1420
OUT = Path(__file__).parent / "report.png"


def main() -> None:
    """Take the screenshot and write it with a small palette."""
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo/report.html").resolve()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready=yes]", state="attached")
        shot = tab.screenshot()
        browser.close()
    with Image.open(BytesIO(shot)) as image:
        image.convert("RGB").quantize(128).save(OUT, optimize=True)


if __name__ == "__main__":
    main()
