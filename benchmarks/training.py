"""How fast training, loading and collecting are, as ratios of things interleaved in one run.

usage: training.py [--small] [--out FILE]

Run it alone on the machine. `--small` is a quick check that the benchmark itself works; its figures mean nothing.
The pictures are random: what is measured does not depend on what they show.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from record import options, record
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import exitwise as ew
from exitwise import data
from exitwise.data.folders import scan_class_folders
from exitwise.training.batch_sources import as_batch_source
from exitwise.training.loop import Trainer
from exitwise.training.recipes import RECIPES

EPOCH = 45_000 // 64  # batches
AMORTISED = 30  # epochs
SPREAD = f"ours, compiled, with compiling spread over {AMORTISED} epochs, against the plain loop"
MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


def pictures(n: int, size: int = 32) -> data.ImageSet:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (n, 3, size, size), dtype=torch.uint8, generator=generator)
    labels = torch.randint(100, (n,), generator=generator)
    return data.ImageSet(pixels, labels, torch.arange(n), tuple(map(str, range(100))), MEAN, STD)


class PlainDataset(Dataset[tuple[Tensor, int]]):
    """One picture at a time, by pillow: pad 4, crop, flip, to a tensor, normalise."""

    def __init__(self, images: data.ImageSet) -> None:
        self._arrays = images.pixels.permute(0, 2, 3, 1).numpy()
        self._labels = images.labels.tolist()
        self._mean, self._std = (torch.tensor(x)[:, None, None] for x in (MEAN, STD))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        image = ImageOps.expand(Image.fromarray(self._arrays[k]), border=4)
        left, top = torch.randint(9, (2,)).tolist()
        image = image.crop((left, top, left + 32, top + 32))
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        return (tensor - self._mean) / self._std, self._labels[k]


def endless(make: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
    epoch = 0
    while True:
        yield from make(epoch)
        epoch += 1


def eager(net: nn.Module, batches: Iterator[Any], fused: bool = False, layout: Any = None) -> Callable[[], None]:
    """A step of a plain loop."""
    if layout:
        net.to(memory_format=layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=fused)

    def step() -> None:
        images, labels = next(batches)
        if layout:
            images = images.contiguous(memory_format=layout)
        loss = sum(cross_entropy(logits, labels) for logits in net(images))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()

    return step


def ours(images: data.ImageSet, folder: Path, compile: bool) -> Callable[[], None]:
    """A step of our own loop, with everything that comes with it."""
    torch.manual_seed(0)
    recipe = replace(RECIPES["cifar100"], lr=0.01)
    source = as_batch_source(images, recipe, seed=0)
    fabric = ew.Machine(accelerator="cpu").fabric()
    trainer = Trainer(ew.models.msdnet("cifar100-small"), source, [], recipe, fabric, folder, compile=compile)
    batches = endless(lambda epoch: source.epoch(epoch))

    def step() -> None:
        trainer._step(next(batches), False, False)

    return step


def net(inplace: bool = True) -> ew.MultiExitNet:
    torch.manual_seed(0)
    made = ew.models.msdnet("cifar100-small").train()
    for module in made.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = inplace
    return made


def steps(function: Callable[[], None], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        function()
    return (time.perf_counter() - start) / number


def throughput(threads: int, repeats: int, chunk: int, compiled: bool = True) -> dict[str, Any]:
    """Seconds per batch of 64 of every way to train, interleaved, and their ratios to the plain loop."""
    torch.set_num_threads(threads)
    images = pictures(64 * 40)

    def tensors() -> Iterator[tuple[Tensor, Tensor]]:
        source = as_batch_source(images, RECIPES["cifar100"], seed=0)
        return endless(lambda epoch: (parts[0] for parts in source.epoch(epoch)))

    plain = DataLoader(PlainDataset(images), batch_size=64, shuffle=True)
    last = torch.channels_last
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], None]] = {
            "plain loop, pillow": eager(net(), endless(lambda _: iter(plain))),
            "tensor transforms": eager(net(), tensors()),
            "and fused SGD": eager(net(), tensors(), fused=True),
            "and ReLU not in place": eager(net(inplace=False), tensors(), fused=True),
            "and channels last": eager(net(), tensors(), fused=True, layout=last),
            "ours, eager": ours(images, Path(folder), compile=False),
        }
        if compiled:
            ways["ours, compiled"] = ours(images, Path(folder), compile=True)
        first = {name: steps(way, 1) for name, way in ways.items()}
        for way in ways.values():
            steps(way, 2)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                times[name].append(steps(way, chunk))
    base = times["plain loop, pillow"]
    ratios = {name: median(b / t for b, t in zip(base, each, strict=True)) for name, each in times.items()}
    found = {
        "threads": threads,
        "batches per repeat": chunk,
        "images per second": {name: round(64 / median(each), 1) for name, each in times.items()},
        "speed against the plain loop": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "all seconds per batch": {name: [round(t, 4) for t in each] for name, each in times.items()},
    }
    if compiled:
        mine = times["ours, compiled"]
        warm = first["ours, compiled"] - median(mine)
        spread = warm / (EPOCH * AMORTISED)
        found["seconds to compile"] = round(warm, 1)
        found[SPREAD] = round(median(b / (t + spread) for b, t in zip(base, mine, strict=True)), 3)
    return found


def loader(threads: int, repeats: int, chunk: int) -> dict[str, Any]:
    """Our loader beside the training step that uses what it loads."""
    torch.set_num_threads(threads)
    images = pictures(64 * 200)
    source = as_batch_source(images, RECIPES["cifar100"], seed=0)
    step = eager(net(), endless(lambda epoch: (parts[0] for parts in source.epoch(epoch))))
    load = endless(lambda epoch: source.epoch(epoch))
    steps(step, 2)
    ratios = []
    for _ in range(repeats):
        ratios.append(steps(step, chunk) / steps(lambda: next(load), 10 * chunk))
    return {"threads": threads, "training step / loading its batch": round(median(ratios), 1)}


def folders(images: int, workers: tuple[int, ...]) -> dict[str, Any]:
    """Pictures of 500 x 375 as JPEG files, to 224 x 224 with random crops: images per second."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for k in range(images):
            place = Path(folder) / f"class{k % 2}"
            place.mkdir(exist_ok=True)
            coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            coarse.resize((500, 375), Image.Resampling.BICUBIC).save(place / f"{k}.jpg", quality=90)
        files = scan_class_folders(Path(folder), 224)
        for number in workers:
            source = as_batch_source(files, replace(RECIPES["imagenet"], batch_size=32), seed=0, workers=number)
            batches = source.epoch(0)
            next(batches)  # workers have started
            begun = time.perf_counter()
            count = sum(len(parts[0][1]) for parts in batches)
            found[f"{number} workers"] = round(count / (time.perf_counter() - begun), 1)
    return {"images": images, "images per second": found}


class Repeated:
    """The same batch again and again, so that the data set takes no memory."""

    def __init__(self, batches: int) -> None:
        images = pictures(64)
        self._batch = next(iter(data.Batches(images, 64)))
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._batches):
            yield self._batch


def collecting(threads: int, repeats: int, batches: int) -> dict[str, Any]:
    """`ew.collect` on training images beside a bare forward pass over them."""
    torch.set_num_threads(threads)
    trained = ew.load_net(ew.zoo.path("net.safetensors"))
    train, val = Repeated(batches), Repeated(1)

    def forward() -> None:
        with torch.inference_mode():
            for loader in (val, train):
                for images, *_ in loader:
                    trained(images)

    def collect() -> None:
        ew.collect(trained, train, val, costs=costs)  # counting takes a tenth of a second, whatever the data

    costs = ew.macs(trained, (3, 32, 32))
    steps(forward, 1)
    ratios = []
    for _ in range(repeats):
        bare = steps(forward, 1)
        ratios.append(steps(collect, 1) / bare)
    return {
        "threads": threads,
        "images": 64 * batches,
        "collect / forward pass": round(median(ratios), 4),
        "all ratios": [round(ratio, 4) for ratio in ratios],
    }


def memory(batches: int) -> float:
    """Peak megabytes of a process that collects from so many batches."""
    code = f"import training; training.peak({batches})"
    place = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=True)
    return float(done.stdout)


def peak(batches: int) -> None:
    torch.set_num_threads(2)
    ew.collect(ew.load_net(ew.zoo.path("net.safetensors")), Repeated(batches), Repeated(1))
    # Not getrusage's figure: a new process begins with the peak of the one that started it.
    status = Path("/proc/self/status").read_text()
    print(int(status.split("VmHWM:")[1].split()[0]) / 1024)


def main() -> None:
    arguments = options(__doc__, "training.json").parse_args()
    small = arguments.small
    threads = (1,) if small else (2, 1)
    repeats, chunk = (1, 1) if small else (7, 5)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # an empty one: compiling is measured, not remembered
        report["training, MSDNet-small, batches of 64"] = [throughput(t, repeats, chunk, not small) for t in threads]
    report["loader, CIFAR"] = [loader(t, repeats, chunk) for t in threads]
    report["loader, 224-pixel files"] = folders(64 if small else 640, (0,) if small else (0, 1, 2))
    report["collect"] = [collecting(t, 1 if small else 5, 2 if small else 40) for t in threads]
    sizes = (2, 4) if small else (79, 782)
    report["collect, peak megabytes"] = {f"{64 * n} images": round(memory(n), 1) for n in sizes}
    record(arguments.out, report)


if __name__ == "__main__":
    main()
