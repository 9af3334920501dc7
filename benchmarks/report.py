"""How large the report's page is, how long it takes to make, and how quickly it answers in Chromium.

usage: report.py [--small] [--out FILE]

Random traces of the two sizes that matter, in runs that have nothing but a trace: 10,000 test samples x 8 exits x 100
classes with as many pictures as fit, and 50,000 x 5 x 1,000. Run it alone on the machine. `--small` checks the
benchmark itself.
"""

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from method import imagenet_trace
from playwright.sync_api import sync_playwright
from record import command_cost, options, record

from exitwise.calibration.trace import Trace
from exitwise.core.files import write_json
from exitwise.data import HoldOut, load
from exitwise.runs.run import run_metadata

LARGE = (128,) * 8
IMAGENET = (384, 384, 352, 304, 560)

# Milliseconds from a move of the slider to the page as it is then, for every step; and when the page was first seen.
PROBE = """async () => {
  const slider = document.getElementById("budget"), times = [];
  const frame = () => new Promise(requestAnimationFrame);
  for (let step = 0; step <= Number(slider.max); step++) {
    await frame();
    const start = performance.now();
    slider.value = step;
    slider.dispatchEvent(new Event("input"));
    document.body.getBoundingClientRect();
    times.push(performance.now() - start);
  }
  const paint = performance.getEntriesByName("first-contentful-paint")[0].startTime;
  return { times, paint };
}"""


def trace_of(test: int, val: int, classes: int, widths: tuple[int, ...]) -> Trace:
    """Features that look like a net's, of validation and test samples."""
    whole = imagenet_trace(val + test, classes, widths)
    parts = torch.arange(val), torch.arange(val, val + test)
    tested = replace(whole.val.take(parts[1]), index=torch.arange(test))
    return replace(whole, val=whole.val.take(parts[0]), test=tested)


def write_pictures(root: Path, labels: torch.Tensor) -> None:
    """A data set with these test labels in CIFAR's layout, with pictures of smooth noise: as dear as photographs."""
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    names = "\n".join(f"class-{i}" for i in range(100))
    (folder / "fine_label_names.txt").write_text(names)
    (folder / "coarse_label_names.txt").write_text(names)
    generator = torch.Generator().manual_seed(0)
    for name, known in (("train", torch.zeros(6_000, dtype=torch.int64)), ("test", labels)):
        rough = torch.rand(len(known), 3, 12, 12, generator=generator)
        smooth = torch.nn.functional.interpolate(rough, size=32, mode="bicubic").clamp(0, 1)
        pixels = (255 * smooth).to(torch.uint8).flatten(1)
        rows = torch.cat([torch.zeros(len(known), 1, dtype=torch.uint8), known[:, None].to(torch.uint8), pixels], dim=1)
        rows.numpy().tofile(folder / f"{name}.bin")


def measure(test: int, val: int, classes: int, widths: tuple[int, ...], pictures: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        run.mkdir()
        trace = trace_of(test, val, classes, widths)
        root = Path(temporary) / "data" if pictures else None
        trace.save(run / "trace.safetensors", dtype=torch.float16)
        about = {"name": "cifar100", "root": None if root is None else str(root), "image_size": 32}
        write_json(run / "run.json", run_metadata({"net": "random"}, about))
        if root is not None and trace.test is not None:
            write_pictures(root, trace.test.labels)
            HoldOut.random(load("cifar100", root)[0], 5000, 0).save(run / "split.safetensors")
        del trace
        command = [sys.executable, "-m", "exitwise", "report", str(run)]
        cost = command_cost(command)
        page = run / "report.html"
        return {
            "test samples": test,
            "validation samples": val,
            "exits": len(widths),
            "classes": classes,
            "pictures": pictures,
            "seconds to make": cost["seconds"],
            "CPU seconds to make": cost["CPU seconds"],
            "peak gigabytes": cost["peak gigabytes"],
            "page megabytes": round(page.stat().st_size / 1e6, 2),
            **in_browser(page),
        }


def in_browser(page: Path) -> dict[str, Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1440, "height": 900})
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready=yes]", state="attached")
        found = tab.evaluate(PROBE)
        browser.close()
    return {
        "milliseconds to the first picture": round(found["paint"]),
        "milliseconds per move of the slider": {
            "median": round(median(found["times"]), 1),
            "largest": round(max(found["times"]), 1),
        },
    }


def main() -> None:
    arguments = options(__doc__, "report.json").parse_args()
    settings = [(10_000, 5_000, 100, LARGE, True), (50_000, 50_000, 1000, IMAGENET, False)]
    if arguments.small:
        settings = [(300, 200, 100, (8, 9), True)]
    record(arguments.out, {"measured": [measure(*each) for each in settings]})


if __name__ == "__main__":
    main()
