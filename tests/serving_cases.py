"""A bundle with a family of policies, clients of an application without a network, and server processes."""

import asyncio
import io
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import wraps
from math import inf
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from paths import TESTS
from PIL import Image

import exitwise as ew
from exitwise.core.predictions import Array
from exitwise.policies.family import FamilyMember, PolicyFamily
from exitwise.runtime.bundle import MANIFEST, Manifest
from exitwise.serving.settings import Settings

SHAPE = (1, 8, 8)
# A batch of another size is computed by other kernels, which sum in another order.
TOLERANCE = 1e-5
INFER = "/v2/models/model/infer"
THRESHOLDS = ((-inf, -inf, -inf), (0.6, 0.5, -inf), (0.9, 0.8, -inf), (inf, inf, -inf))


def family_bundle(folder: Path) -> Path:
    """Copy the small bundle of an earlier version, and add a family of four policies."""
    shutil.copytree(TESTS / "former" / "bundle", folder)
    manifest = Manifest.load(folder)
    costs = manifest.costs.values
    members = [
        FamilyMember(ew.Policy(thresholds, costs=costs, budget=cost, cost=cost), accuracy, True)
        for thresholds, cost, accuracy in zip(
            THRESHOLDS, np.linspace(costs[0], costs[-1], 4).tolist(), (0.5, 0.6, 0.7, 0.8), strict=True
        )
    ]
    (folder / MANIFEST).unlink()
    replace(manifest, family=PolicyFamily(tuple(members))).save(folder)
    return folder


def some_images(n: int, seed: int = 0) -> Array:
    """Return normalized images (n, 1, 8, 8) of very different certainty."""
    generator = np.random.default_rng(seed)
    images = generator.standard_normal((n, *SHAPE)) * generator.uniform(0.2, 3, (n, 1, 1, 1))
    return images.astype(np.float32)


def png(seed: int = 0, size: tuple[int, int] = (12, 10), kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()


@asynccontextmanager
async def serving(bundle: Path, settings: Settings | None = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application in this process and yield a client of it; `client.service` is its service."""
    application = ew.serving.app(bundle, settings or Settings(slo=5.0), **options)
    async with application.router.lifespan_context(application):
        transport = httpx.ASGITransport(application, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            client.service = application.state.service  # type: ignore[attr-defined]
            yield client


def infer_body(images: Array, **more: Any) -> dict[str, Any]:
    """Return a V2 request of JSON for images."""
    data = {"name": "image", "shape": list(images.shape), "datatype": "FP32", "data": images.ravel().tolist()}
    return {"inputs": [data], **more}


def tensor(answer: Any, name: str) -> Array:
    """Return an output of a V2 answer of JSON."""
    (output,) = [each for each in answer["outputs"] if each["name"] == name]
    return np.array(output["data"]).reshape(output["shape"])


def assert_rows_equal(probs: Array, exits: Array, images: Array, expected: Any) -> None:
    """Compare rows with what a session answers for each image alone."""
    for row, image in enumerate(images):
        alone = expected(image[None])
        assert exits[row] == alone.exits[0]
        assert np.abs(probs[row] - alone.probs[0]).max() < TOLERANCE


class Server:
    """A server process, its addresses, and what it wrote to stderr."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self.urls: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def close(self) -> None:
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def wait_for(self, pattern: str) -> re.Match[str]:
        while True:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            assert self.process.poll() is None or self._reader.is_alive(), self.lines
            time.sleep(0.01)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.urls[0].split("//")[1].split(":")
        return host, int(port)


@contextmanager
def started(bundle: Path, *options: str) -> Iterator[Server]:
    words = [sys.executable, "-m", "exitwise", "serve", str(bundle), "--port", "0", *options]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    server = Server(process)
    try:
        names = ["", *(f"{name} " for name in ("metrics", "page") if f"--{name}-port" in options)]
        server.urls = [server.wait_for(f"serving {name}on (http\\S+)")[1] for name in names]
        yield server
    finally:
        process.kill()
        process.wait()
        server.close()


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine, in a loop of its own."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


class Gate:
    """Holds the compute thread of a service, so that requests stay queued."""

    def __init__(self, client: Any) -> None:
        self.event = threading.Event()
        backend = client.service.bundle.backend
        run = backend.run

        def wait(exit: int, state: Any) -> Any:
            self.event.wait(30)
            return run(exit, state)

        backend.run = wait
        self.scheduler = client.service.bundle.scheduler

    async def until_pending(self, count: int) -> None:
        while self.scheduler.pending != count:
            await asyncio.sleep(0.005)
