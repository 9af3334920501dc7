"""Write docs/serving.png, the guide's screenshot of the page of a service that runs.

usage: serving_screenshot.py URL IMAGE POLICY    needs Chromium and playwright; POLICY counts from 1
"""

import shutil
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1200, 900
OUT = Path(__file__).parent / "serving.png"


def main() -> None:
    """Send an image, select a policy, and write the upper part and the load below each other with a small palette."""
    url, image, policy = sys.argv[1:4]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", reduced_motion="reduce"
        )
        tab.goto(url)
        tab.wait_for_selector("html[data-ready=yes]", state="attached")
        tab.locator("#file").set_input_files(image)
        tab.wait_for_selector(".exit.taken")
        tab.locator("#budget").press("Home")
        for _ in range(int(policy) - 1):
            tab.locator("#budget").press("ArrowRight")
        tab.evaluate("document.activeElement.blur()")
        end = tab.locator("#exits").bounding_box()
        assert end is not None
        shots = [tab.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": end["y"] + end["height"] + 16})]
        shots.append(tab.locator("#bar").screenshot())
        tab.evaluate("document.getElementById('bar').hidden = true")
        load = tab.locator("#load").bounding_box()
        assert load is not None
        area = {"x": 0, "y": load["y"], "width": WIDTH, "height": load["height"] + 8}
        shots.append(tab.screenshot(full_page=True, clip=area))
        browser.close()
    parts = [Image.open(BytesIO(shot)).convert("RGB") for shot in shots]
    joined = Image.new("RGB", (WIDTH, sum(part.height for part in parts)), "white")
    top = 0
    for part in parts:
        joined.paste(part, (0, top))
        top += part.height
    joined.quantize(192).save(OUT, optimize=True)


if __name__ == "__main__":
    main()
