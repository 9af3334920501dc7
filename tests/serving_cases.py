"""A bundle with a family of policies, and clients of an application without a network."""

import io
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
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


Expect = Callable[[Array, int], tuple[Array, Array]]


def assert_rows_equal(probs: Array, exits: Array, images: Array, expected: Any) -> None:
    """Compare rows with what a session answers for each image alone."""
    for row, image in enumerate(images):
        alone = expected(image[None])
        assert exits[row] == alone.exits[0]
        assert np.abs(probs[row] - alone.probs[0]).max() < TOLERANCE
