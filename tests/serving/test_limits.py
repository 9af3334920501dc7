"""Limits for all requests together, deadlines that begin when a request comes, probes, and bundles that do not run."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from serving_cases import INFER, Gate, family_bundle, infer_body, png, run_async, serving, some_images
from uvicorn.server import ServerState

from exitwise.serving import service as service_module
from exitwise.serving.connections import LimitedProtocol
from exitwise.serving.images import Upload, decode_uploads
from exitwise.serving.queues import DeadlineError
from exitwise.serving.settings import Settings


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_bundle(tmp_path_factory.mktemp("serving") / "bundle")


@run_async
async def test_all_bodies_together_have_a_limit(bundle: Path) -> None:
    """The limit is sixteen bodies of the largest size: bodies that arrive slowly count, and are released at the end."""
    part = b" " * 1000
    async with serving(bundle, Settings(slo=60.0, max_body=10_000)) as client:
        arrived, release = 0, asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            nonlocal arrived
            for _ in range(9):
                yield part
            arrived += 1
            await release.wait()
            yield b"{}"

        waiting = [asyncio.create_task(client.post(INFER, content=slow())) for _ in range(17)]
        while arrived < 17:
            await asyncio.sleep(0.001)
        done = await client.post(INFER, content=part * 8)
        assert done.status_code == 503
        assert int(done.headers["retry-after"]) >= 1
        assert "bodies of all requests together" in done.json()["error"]
        release.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {400}
        assert (await client.post(INFER, content=part * 8)).status_code == 400


@run_async
async def test_under_overload_a_request_is_refused_before_it_is_parsed(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(bundle, Settings(slo=60.0, max_queue=2)) as client:
        gate = Gate(client)
        waiting = asyncio.create_task(client.post(INFER, json=infer_body(some_images(2))))
        await gate.until_pending(2)
        assert (await client.post(INFER, content=b"not JSON")).status_code == 503
        gate.event.set()
        assert (await waiting).status_code == 200
        assert (await client.post(INFER, content=b"not JSON")).status_code == 400


@run_async
async def test_a_deadline_begins_when_the_request_comes(bundle: Path) -> None:
    """The body takes longer to arrive than the deadline allows: nothing is computed."""
    async with serving(bundle, Settings(slo=60.0)) as client:
        ran: list[int] = []
        backend = client.service.bundle.backend  # type: ignore[attr-defined]
        run = backend.run

        def count(exit: int, state: Any) -> Any:
            ran.append(exit)
            return run(exit, state)

        backend.run = count

        async def slow() -> AsyncIterator[bytes]:
            yield png()[:20]
            await asyncio.sleep(0.1)
            yield png()[20:]

        late = await client.post("/classify", params={"deadline_ms": 50}, content=slow())
        assert late.status_code == 504
        assert not ran
        assert (await client.post("/classify", params={"deadline_ms": 30_000}, content=png())).status_code == 200


def test_images_are_not_decoded_after_the_deadline(bundle: Path) -> None:
    from exitwise.runtime.onnx import Session

    preprocessing = Session(bundle, threads=1).preprocessing
    assert preprocessing is not None
    uploads = [Upload(None, png())] * 3
    assert len(decode_uploads(uploads, preprocessing, 1000, time.monotonic() + 60)) == 3
    with pytest.raises(DeadlineError, match="after 0 of 3 images"):
        decode_uploads(uploads, preprocessing, 1000, time.monotonic())


@run_async
async def test_a_compute_thread_that_has_ended_makes_the_service_unhealthy(bundle: Path) -> None:
    async with serving(bundle) as client:
        assert (await client.get("/v2/health/live")).status_code == 200
        scheduler = client.service.bundle.scheduler  # type: ignore[attr-defined]
        dead = threading.Thread(target=lambda: None)
        dead.start()
        dead.join()
        (alive,) = scheduler._threads
        scheduler._threads[0] = dead
        done = await client.get("/v2/health/live")
        assert (done.status_code, done.json()) == (503, {"live": False})
        scheduler._threads[0] = alive


@run_async
async def test_a_new_bundle_whose_graphs_do_not_run_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(bundle) as client:
        service = client.service  # type: ignore[attr-defined]
        former = service.bundle

        def fail(_: Any) -> None:
            raise RuntimeError("onnxruntime cannot run it\nand says more")

        monkeypatch.setattr(service_module.LoadedBundle, "warm_up", fail)
        assert not await service.reload()
        assert service.bundle is former
        assert (await client.post("/classify", content=png())).status_code == 200
        assert 'exitwise_reloads_total{result="refused"} 1.0' in (await client.get("/metrics")).text


@run_async
async def test_answers_do_not_wait_for_acknowledgments() -> None:
    """An answer is two writes: with Nagle's algorithm, the second waits for the client to acknowledge the first."""
    accepted: list[socket.socket] = []

    class Protocol(LimitedProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            accepted.append(transport.get_extra_info("socket"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, log_config=None)
    config.load()
    listener = socket.create_server(("127.0.0.1", 0))  # as the server makes it
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Protocol(config, ServerState(), {}), sock=listener)
    async with server, httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{listener.getsockname()[1]}/")).status_code == 204
        assert accepted[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
