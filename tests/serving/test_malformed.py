"""Requests that are wrong in every way: each is refused with a status of its own fault, and harms nothing."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving_cases import (
    INFER,
    assert_rows_equal,
    family_bundle,
    infer_body,
    png,
    run_async,
    serving,
    some_images,
    tensor,
)

from exitwise.runtime.onnx import Session
from exitwise.serving.settings import Settings

FILES = ("/classify", "/explain")  # paths that take image files


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_bundle(tmp_path_factory.mktemp("serving") / "bundle")


def malformed(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests that are wrong in one way each, from a fixed seed."""
    generator = random.Random(0)
    good = infer_body(some_images(2))
    spec = good["inputs"][0]
    text = json.dumps(good).encode()
    values: list[Any] = [None, True, -1, 0, 3.5, 1e308, 2**70, "x", [], {}, [[]], "NaN", [1, "2"], {"a": []}, "\ud800"]
    boundary = {"Content-Type": "multipart/form-data; boundary=XX"}
    part = b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n' + png() + b"\r\n--XX--\r\n"

    def changed(**fields: Any) -> bytes:
        return json.dumps({"inputs": [{**spec, **fields}]}).encode()

    makers: list[Callable[[], tuple[str, dict[str, Any]]]] = [
        lambda: (INFER, {"content": text[: generator.randrange(len(text))]}),
        lambda: (INFER, {"content": generator.randbytes(generator.randrange(1, 200))}),
        lambda: (INFER, {"content": b"[" * generator.randrange(1, 100_000)}),
        lambda: (INFER, {"content": changed(shape=generator.choice([*values, [2, 1, 8], [2, -1, 8, 8], [2**40, 1]]))}),
        lambda: (INFER, {"content": changed(shape=[generator.choice([0, 1, 3, 200, 2**31, -2]), 1, 8, 8])}),
        lambda: (INFER, {"content": changed(datatype=generator.choice([*values, "FP8", "BYTES", "INT64", "BOOL"]))}),
        lambda: (INFER, {"content": changed(data=generator.choice([*values, [1.0] * 127, [[1.0], [1.0, 2.0]]]))}),
        lambda: (INFER, {"content": changed(name=generator.choice([*values, "images", "", "a" * 1000]))}),
        lambda: (INFER, {"content": changed(parameters={"binary_data_size": generator.choice([*values, 512])})}),
        lambda: (INFER, {"content": json.dumps(good).replace("0.", "NaN, 0.", 1).encode()}),
        lambda: (
            INFER,
            {"content": json.dumps({**good, "inputs": generator.choice([*values, [spec, spec]])}).encode()},
        ),
        lambda: (
            (INFER, {"content": json.dumps({**good, "parameters": generator.choice(values[2:])}).encode()})
            if (value := generator.choice([-1, 0, "x", "-5%", True, "1e999"])) is None
            else (INFER, {"content": json.dumps({**good, "parameters": {"budget": value}}).encode()})
        ),
        lambda: (INFER, {"content": json.dumps({**good, "outputs": [generator.choice(values[1:])]}).encode()}),
        lambda: (INFER, {"content": json.dumps({**good, "id": generator.choice([*values[1:7], ["a"]])}).encode()}),
        lambda: (
            INFER,
            {
                "content": text,
                "headers": {
                    "Inference-Header-Content-Length": generator.choice(
                        ["-1", "0", "x", "9" * 30, "1e3", "10", "99999"]
                    )
                },
            },
        ),
        lambda: (generator.choice(FILES), {"content": generator.randbytes(generator.randrange(300))}),
        lambda: (generator.choice(FILES), {"content": png()[: generator.randrange(60)]}),
        lambda: (generator.choice(FILES), {"content": part[: generator.randrange(len(part) - 4)], "headers": boundary}),
        lambda: (generator.choice(FILES), {"content": part, "headers": {"Content-Type": "multipart/form-data"}}),
        lambda: (generator.choice(FILES), {"content": part.replace(b"\r\n", b"\n"), "headers": boundary}),
        lambda: (
            generator.choice(FILES),
            {"content": png(), "headers": {"Content-Type": generator.choice(["text/html", "a/b"])}},
        ),
        lambda: (
            generator.choice(FILES),
            {"content": png(), "params": {"top": generator.choice(["0", "-1", "x", "\u0663", "9" * 50])}},
        ),
        lambda: (
            "/classify",
            {"content": png(), "params": {"deadline_ms": generator.choice(["0", "nan", "inf", "-3"])}},
        ),
        lambda: (
            "/v2/models/" + generator.choice(["other", "..%2f..", "\u00e9", "x" * 5000]) + "/infer",
            {"content": text},
        ),
    ]
    return [makers[k % len(makers)]() for k in range(count)]


@run_async
async def test_malformed_requests_are_refused_and_harm_nothing(bundle: Path) -> None:
    limits = Settings(slo=60.0, max_images=100)
    async with serving(bundle, limits) as client:
        for number, (path, request) in enumerate(malformed(480)):
            done = await client.post(path, **request)
            assert 400 <= done.status_code < 500, (number, path, request, done.text)
            assert set(done.json()) == {"error"}, (number, done.text)
            assert str(bundle) not in done.text
        for method, path in (("GET", INFER), ("DELETE", "/v2"), ("POST", "/v2"), ("GET", "/nothing"), ("POST", "/")):
            done = await client.request(method, path)
            assert done.status_code in (404, 405)
            assert set(done.json()) == {"error"}
        family = Session(bundle).manifest.family
        assert family is not None
        session = Session(bundle, threads=1, policy=family[-1].policy)
        images = some_images(4)
        answer = (await client.post(INFER, json=infer_body(images))).json()
        assert_rows_equal(tensor(answer, "probs"), tensor(answer, "exits"), images, session)
        assert client.service.bundle.scheduler.pending == 0  # type: ignore[attr-defined]
