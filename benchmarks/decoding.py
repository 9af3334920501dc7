"""What reading and decoding an image takes beside the net at a quarter of its cost, and what faster decoders give.

usage: decoding.py [--small] [--images DIR] [--count N] [--repeats R] [--out FILE]

The shipped net with a 25 % budget answers images of CIFAR-100 (DIR holds cifar-100-binary/; without it, smooth random
ones) as PNG, as JPEG, scaled up to JPEG of 500 x 375, and with noise added to these. CPU milliseconds per image on one
thread, in turn: the net, Pillow, drafts of Pillow, and the wheel simplejpeg if it is installed, which decodes the whole
JPEG and leaves scaling to Pillow. Pixels, classes and exits are compared with those of Pillow. `--small` checks the
benchmark itself.
"""

import io
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image, ImageFilter
from record import options, record, zoo_trace

import exitwise as ew
from exitwise.core.cropping import crop_center
from exitwise.core.image_files import DECODERS, PILLOW, load_image
from exitwise.data import cifar
from exitwise.runtime.onnx import Session

LOOK = ew.Preprocessing(32, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
PHOTO = (500, 375)
NOISE = 12.0  # standard deviation in levels
SIMPLEJPEG = "simplejpeg"


def load_images(root: Path | None, count: int) -> list[Image.Image]:
    """Return images of 32 x 32 pixels."""
    if root is not None:
        pixels = cifar.load(cifar.CIFAR100, root)[1].pixels[:count].permute(0, 2, 3, 1).numpy()
        return [Image.fromarray(image) for image in pixels]
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return [Image.fromarray(image).filter(ImageFilter.GaussianBlur(2)) for image in noise]


def encode_all(images: Sequence[Image.Image]) -> dict[str, list[bytes]]:
    """Return the files of the images, by what they are."""
    rng = np.random.default_rng(0)

    def encode(image: Image.Image, kind: str) -> bytes:
        data = io.BytesIO()
        image.save(data, kind, **({"quality": 90} if kind == "JPEG" else {}))
        return data.getvalue()

    def add_noise(image: Image.Image) -> Image.Image:
        pixels = np.asarray(image) + rng.normal(0, NOISE, (*image.size[::-1], 3))
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))

    photos = [image.resize(PHOTO, Image.Resampling.BICUBIC) for image in images]
    return {
        "PNG, 32 x 32": [encode(image, "PNG") for image in images],
        "JPEG, 32 x 32": [encode(image, "JPEG") for image in images],
        "JPEG, 500 x 375": [encode(photo, "JPEG") for photo in photos],
        "JPEG, 500 x 375, with noise": [encode(add_noise(photo), "JPEG") for photo in photos],
    }


def decode_with_simplejpeg(data: bytes) -> np.ndarray:
    import simplejpeg

    image = Image.fromarray(simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False))
    return np.array(np.asarray(crop_center(image, LOOK.size, LOOK.margin)).transpose(2, 0, 1), order="C")


def decoders_of(kind: str) -> dict[str, Callable[[bytes], np.ndarray]]:
    """Return the functions from a file to its pixels (3, 32, 32) that can read this kind of file, by name."""

    def with_pillow(name: str) -> Callable[[bytes], np.ndarray]:
        return lambda data: load_image(data, LOOK, decoder=name)

    decoders = {name: with_pillow(name) for name in (DECODERS if "JPEG" in kind else (PILLOW,))}
    if "JPEG" in kind and find_spec(SIMPLEJPEG):
        decoders[SIMPLEJPEG] = decode_with_simplejpeg
    return decoders


def write_bundle(folder: Path, small: bool) -> None:
    """Export the shipped net with thresholds for a quarter of its cost."""
    trace, net = zoo_trace(small), ew.load_net(ew.zoo.path("net.safetensors"))
    cal = ew.calibrate(trace, "Pool")
    budget = trace.costs.values[-1] / 4
    policy = ew.fit_policy(cal.predict(trace.val), trace.val.labels, trace.costs, budget=budget)
    ew.Classifier(net, cal, policy, preprocessing=LOOK).export(folder)


def cpu_seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def compare(pixels: np.ndarray, expected: np.ndarray, answers: Sequence[Any], others: Sequence[Any]) -> dict[str, Any]:
    """Compare pixels (n, 3, 32, 32) in levels and answers with those of Pillow."""
    difference = np.abs(pixels.astype(np.int16) - expected)
    pairs = list(zip(answers, others, strict=True))
    return {
        "mean difference": round(float(difference.mean()), 3),
        "99.9 % of the differences": int(np.quantile(difference, 0.999, method="higher")),
        "largest difference": int(difference.max()),
        "other class": sum(a.predicted != b.predicted for a, b in pairs) / len(pairs),
        "other exit": sum(a.exit != b.exit for a, b in pairs) / len(pairs),
    }


def measure(kind: str, files: Sequence[bytes], session: Session, repeats: int) -> dict[str, Any]:
    """Measure the net and all decoders of one kind of file, in turn."""
    decoders = decoders_of(kind)
    times: dict[str, list[float]] = {name: [] for name in ("net", *decoders)}
    pixels: dict[str, np.ndarray] = {}
    answers: dict[str, list[Any]] = {}
    for _ in range(repeats):
        for name, decode in decoders.items():
            seconds, images = cpu_seconds(lambda decode=decode: [decode(file) for file in files])
            times[name].append(seconds)
            pixels[name] = np.stack(images)
            seconds, answers[name] = cpu_seconds(lambda name=name: list(session.stream(iter(pixels[name]), 64)))
            if name == PILLOW:
                times["net"].append(seconds)
    per_image: Mapping[str, float] = {name: 1000 * median(found) / len(files) for name, found in times.items()}
    return {
        "bytes": round(sum(map(len, files)) / len(files)),
        "CPU milliseconds per image": {name: round(value, 3) for name, value in per_image.items()},
        "share of decoding": {name: per_image[name] / (per_image[name] + per_image["net"]) for name in decoders},
        "Pillow / decoder": {
            name: median(a / b for a, b in zip(times[PILLOW], times[name], strict=True))
            for name in decoders
            if name != PILLOW
        },
        "beside Pillow": {
            name: compare(pixels[name], pixels[PILLOW], answers[name], answers[PILLOW])
            for name in decoders
            if name != PILLOW
        },
    }


def table_rows(measured: Mapping[str, Any]) -> list[str]:
    """Return the rows of the table in docs/guides/scoring.md."""

    def cell(found: Mapping[str, Any], name: str) -> str:
        if name not in found["share of decoding"]:
            return "-"
        return f"{found['CPU milliseconds per image'][name]:.2f} ms ({found['share of decoding'][name]:.0%})"

    return [
        f"| {kind} ({found['bytes'] / 1000:.1f} kB) | {found['CPU milliseconds per image']['net']:.2f} ms | "
        + " | ".join(cell(found, name) for name in (*DECODERS, SIMPLEJPEG))
        + " |"
        for kind, found in measured.items()
    ]


def main() -> None:
    parser = options(__doc__, "decoding.json")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    count, repeats = (64, 1) if arguments.small else (arguments.count, arguments.repeats)
    files = encode_all(load_images(arguments.images, count))
    with tempfile.TemporaryDirectory() as folder:
        write_bundle(Path(folder) / "bundle", arguments.small)
        session = Session(Path(folder) / "bundle", threads=1)
        measured = {kind: measure(kind, data, session, repeats) for kind, data in files.items()}
    record(arguments.out, {"images": count, "measured": measured})


if __name__ == "__main__":
    main()
