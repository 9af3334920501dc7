"""Requests that are wrong in every way: each is refused with a status of its own fault, and harms nothing."""

from pathlib import Path

import pytest
from malformed_requests import malformed
from serving_cases import (
    INFER,
    assert_rows_equal,
    family_bundle,
    infer_body,
    run_async,
    serving,
    some_images,
    tensor,
)

from exitwise.runtime.onnx import Session
from exitwise.serving.settings import Settings


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_bundle(tmp_path_factory.mktemp("serving") / "bundle")


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
