"""The application over ASGI: protocol V2, image files, overload, keys, metrics, reload, and malformed requests."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_cases import (
    INFER,
    TOLERANCE,
    Gate,
    assert_rows_equal,
    family_bundle,
    infer_body,
    png,
    run_async,
    serving,
    some_images,
    tensor,
)

import exitwise as ew
from exitwise.core.image_files import load_image
from exitwise.runtime.onnx import Session
from exitwise.serving.settings import Settings

KEY = "correct-horse-battery"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_bundle(tmp_path_factory.mktemp("serving") / "bundle")


@pytest.fixture(scope="module")
def session(bundle: Path) -> Session:
    """A session with the most expensive policy of the family, which a service uses without load."""
    family = Session(bundle, threads=1).manifest.family
    assert family is not None
    return Session(bundle, threads=1, policy=family[-1].policy)


@run_async
async def test_health_and_metadata_follow_the_protocol(bundle: Path) -> None:
    async with serving(bundle) as client:
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/model/ready", "/v2/models/model/versions/1"):
            assert (await client.get(path)).status_code == 200
        server = (await client.get("/v2")).json()
        assert set(server) == {"name", "version", "extensions"}
        model = (await client.get("/v2/models/model")).json()
        assert model["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
        assert [(each["name"], each["datatype"], each["shape"]) for each in model["outputs"]] == [
            ("probs", "FP32", [-1, 10]),
            ("predicted", "INT64", [-1]),
            ("exits", "INT64", [-1]),
            ("costs", "FP64", [-1]),
        ]
        assert [each["expected_accuracy"] for each in model["parameters"]["policies"]] == [0.5, 0.6, 0.7, 0.8]
        client.service.draining = True  # type: ignore[attr-defined]
        assert (await client.get("/v2/health/live")).status_code == 200
        assert (await client.get("/v2/health/ready")).status_code == 503


@run_async
async def test_json_tensors(bundle: Path, session: Session) -> None:
    images = some_images(5)
    async with serving(bundle) as client:
        done = await client.post(INFER, json=infer_body(images, id="an id"))
        answer = done.json()
        assert done.status_code == 200, answer
        assert (answer["id"], answer["model_name"], answer["model_version"]) == ("an id", "model", "1")
        assert answer["parameters"]["policy"] == 3
        assert_rows_equal(tensor(answer, "probs"), tensor(answer, "exits"), images, session)
        assert tensor(answer, "predicted").tolist() == tensor(answer, "probs").argmax(axis=1).tolist()
        assert tensor(answer, "costs").tolist() == [session.costs.values[-1]] * 5
        nested = infer_body(images)
        nested["inputs"][0]["data"] = images.tolist()
        nested["outputs"] = [{"name": "predicted"}]
        again = (await client.post(INFER, json=nested)).json()
        assert "id" not in again
        assert [each["name"] for each in again["outputs"]] == ["predicted"]
        assert tensor(again, "predicted").tolist() == tensor(answer, "predicted").tolist()


@run_async
async def test_binary_tensors(bundle: Path, session: Session) -> None:
    images = some_images(3)
    spec = {"name": "image", "shape": [3, 1, 8, 8], "datatype": "FP32", "parameters": {"binary_data_size": 768}}
    header = json.dumps({"inputs": [spec], "parameters": {"binary_data_output": True}}).encode()
    async with serving(bundle) as client:
        sent = {"Inference-Header-Content-Length": str(len(header))}
        done = await client.post(INFER, content=header + images.tobytes(), headers=sent)
        assert done.headers["content-type"] == "application/octet-stream"
        length = int(done.headers["inference-header-content-length"])
        outputs, position, found = json.loads(done.content[:length])["outputs"], length, {}
        for output in outputs:
            size = output["parameters"]["binary_data_size"]
            kind = {"FP32": "<f4", "INT64": "<i8", "FP64": "<f8"}[output["datatype"]]
            found[output["name"]] = np.frombuffer(done.content[position : position + size], kind)
            position += size
        assert position == len(done.content)
    assert_rows_equal(found["probs"].reshape(3, 10), found["exits"], images, session)


@run_async
async def test_bytes_are_normalized_as_a_session_does(bundle: Path, session: Session) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 1, 8, 8), dtype=np.uint8)
    body = infer_body(pixels)
    body["inputs"][0]["datatype"] = "UINT8"
    async with serving(bundle) as client:
        answer = (await client.post(INFER, json=body)).json()
    assert_rows_equal(tensor(answer, "probs"), tensor(answer, "exits"), pixels, session)


@run_async
async def test_requests_of_mixed_sizes_at_once(bundle: Path, session: Session) -> None:
    requests = [some_images(1 + seed % 5, seed) for seed in range(60)]
    async with serving(bundle, Settings(slo=60.0, max_batch=8, threads=2)) as client:
        answers = await asyncio.gather(
            *(client.post(INFER, json=infer_body(images, id=str(k))) for k, images in enumerate(requests))
        )
    policies = [Session(session_path(bundle), threads=1, policy=p) for p in family_policies(bundle)]
    for k, (images, done) in enumerate(zip(requests, answers, strict=True)):
        answer = done.json()
        assert answer["id"] == str(k)
        used = policies[answer["parameters"]["policy"]]
        assert_rows_equal(tensor(answer, "probs"), tensor(answer, "exits"), images, used)


def session_path(bundle: Path) -> Path:
    return bundle


def family_policies(bundle: Path) -> list[ew.Policy]:
    family = Session(bundle, threads=1).manifest.family
    assert family is not None
    return [member.policy for member in family]


@pytest.mark.parametrize(("budget", "policy"), [(1.0, 0), ("30%", 0), ("75%", 1), ("76.1%", 2), ("100%", 3), (1e12, 3)])
@run_async
async def test_a_request_may_ask_for_a_budget(bundle: Path, budget: Any, policy: int) -> None:
    async with serving(bundle) as client:
        answer = (await client.post(INFER, json=infer_body(some_images(2), parameters={"budget": budget}))).json()
        assert answer["parameters"]["policy"] == policy
        assert tensor(answer, "exits").tolist() == ([0, 0] if policy == 0 else tensor(answer, "exits").tolist())
        by_file = (await client.post("/classify", params={"budget": budget}, content=png())).json()
        assert by_file["policy"] == policy


@run_async
async def test_the_service_has_a_floor_and_a_largest_budget(bundle: Path) -> None:
    async with serving(bundle, Settings(slo=5.0, floor=0.65)) as client:
        load = client.service.bundle.load  # type: ignore[attr-defined]
        assert (load.lowest, load.highest) == (2, 3)
    full = Session(bundle).costs.values[-1]
    async with serving(bundle, Settings(slo=5.0, budget=0.8 * full)) as client:
        assert (await client.post(INFER, json=infer_body(some_images(1)))).json()["parameters"]["policy"] == 2
    with pytest.raises(ew.InputError, match="`floor` must be at most"):
        ew.serving.app(bundle, Settings(floor=0.9))
    with pytest.raises(ew.InputError, match="allows no policy"):
        ew.serving.app(bundle, Settings(floor=0.75, budget=0.5 * full))


@run_async
async def test_a_bundle_without_a_family_is_served_with_its_own_policy(bundle: Path, tmp_path: Path) -> None:
    from paths import TESTS

    former = Session(TESTS / "former" / "bundle", threads=1)
    images = some_images(3)
    async with serving(TESTS / "former" / "bundle") as client:
        answer = (await client.post(INFER, json=infer_body(images))).json()
        assert answer["parameters"]["budget"] == former.policy.budget
        assert_rows_equal(tensor(answer, "probs"), tensor(answer, "exits"), images, former)


@run_async
async def test_image_files(bundle: Path, session: Session, tmp_path: Path) -> None:
    files = {f"{k}.png": png(k, (9 + k, 14)) for k in range(3)} | {"3.jpg": png(3, kind="JPEG")}
    assert session.preprocessing is not None
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    expected = session(np.stack([load_image(tmp_path / name, session.preprocessing) for name in files]))
    async with serving(bundle) as client:
        parts = [("file", (name, data, "image/png")) for name, data in files.items()]
        parts.insert(2, ("file", ("broken.png", b"no image", "image/png")))
        answer = (await client.post("/classify", files=parts, params={"top": "2"})).json()
        single = (await client.post("/classify", content=files["0.png"], headers={"Content-Type": "image/png"})).json()
    results = answer["results"]
    assert [each["file"] for each in results] == ["0.png", "1.png", "broken.png", "2.png", "3.jpg"]
    assert "cannot be read" in results[2]["error"]
    good = [each for each in results if "error" not in each]
    assert [each["class"] for each in good] == expected.predicted.tolist()
    assert [each["exit"] for each in good] == expected.exits.tolist()
    assert [each["probability"] for each in good] == pytest.approx(expected.probs.max(axis=1), abs=TOLERANCE)
    assert [len(each["top"]) for each in good] == [2] * 4
    assert single["results"][0]["class"] == good[0]["class"]
    assert single["results"][0]["label"] == str(good[0]["class"])


@run_async
async def test_images_with_too_many_pixels_are_refused_before_they_are_decoded(bundle: Path) -> None:
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    size = (12_000).to_bytes(4, "big")
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + size + b"\x08\x02\x00\x00\x00")
    bomb += chunk(b"IDAT", zlib.compress(bytes(100_000))) + chunk(b"IEND", b"")
    async with serving(bundle, Settings(slo=5.0, max_pixels=100)) as client:
        for data, words in ((bomb, "12000 x 12000 pixels"), (png(), "10 x 12 pixels")):
            done = await client.post("/classify", content=data)
            assert done.status_code == 400
            assert words in done.json()["error"]


@run_async
async def test_limits(bundle: Path) -> None:
    limits = Settings(slo=5.0, max_body=20_000, max_images=4, body_timeout=0.05)
    async with serving(bundle, limits) as client:
        assert (await client.post(INFER, content=b" " * 20_001)).status_code == 413

        async def many() -> Any:
            for _ in range(30):
                yield b" " * 1000

        assert (await client.post(INFER, content=many())).status_code == 413  # without a length

        async def slow() -> Any:
            yield b"{"
            await asyncio.sleep(5)

        assert (await client.post(INFER, content=slow())).status_code == 408
        done = await client.post(INFER, json=infer_body(some_images(5)))
        assert done.status_code == 400
        assert "at most 4 images" in done.json()["error"]
        files = [("file", (f"{k}.png", png(k))) for k in range(5)]
        assert (await client.post("/classify", files=files)).status_code == 413
        packed = await client.post(INFER, content=b"", headers={"Content-Encoding": "gzip"})
        assert packed.status_code == 415


@run_async
async def test_overload_is_refused_at_once(bundle: Path) -> None:
    async with serving(bundle, Settings(slo=60.0, max_queue=6)) as client:
        gate = Gate(client)
        waiting = [asyncio.create_task(client.post(INFER, json=infer_body(some_images(3)))) for _ in range(2)]
        await gate.until_pending(6)
        for request in (client.post(INFER, json=infer_body(some_images(1))), client.post("/classify", content=png())):
            refused = await request
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "queue is full" in refused.json()["error"]
        gate.event.set()
        assert [done.status_code for done in await asyncio.gather(*waiting)] == [200, 200]


@run_async
async def test_a_client_that_disconnects_while_queued_costs_nothing(bundle: Path) -> None:
    async with serving(bundle, Settings(slo=60.0)) as client:
        gate = Gate(client)
        first = asyncio.create_task(client.post(INFER, json=infer_body(some_images(1))))
        await gate.until_pending(1)
        application = client._transport.app  # type: ignore[attr-defined]
        body = json.dumps(infer_body(some_images(8))).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
        sent: list[Any] = []

        async def receive() -> Any:
            if len(messages) == 1:
                await gate.until_pending(9)
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": INFER,
            "raw_path": INFER.encode(),
            "query_string": b"",
            "headers": [],
            "http_version": "1.1",
            "scheme": "http",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await application(scope, receive, send)
        assert sent == []
        assert gate.scheduler.pending == 1
        gate.event.set()
        assert (await first).status_code == 200
        assert 'exitwise_rejected_total{reason="disconnected"} 1.0' in (await client.get("/metrics")).text


@run_async
async def test_a_deadline_that_passes_is_a_504(bundle: Path) -> None:
    async with serving(bundle, Settings(slo=60.0)) as client:
        gate = Gate(client)
        first = asyncio.create_task(client.post(INFER, json=infer_body(some_images(1))))
        await gate.until_pending(1)
        late = asyncio.create_task(
            client.post(INFER, json=infer_body(some_images(2), parameters={"deadline_ms": 0.001}))
        )
        await asyncio.wait({late}, timeout=0.05)
        gate.event.set()
        assert (await late).status_code in (503, 504)
        assert (await first).status_code == 200


@run_async
async def test_an_image_that_fails_is_a_422_of_its_own_request(bundle: Path) -> None:
    async with serving(bundle, Settings(slo=60.0)) as client:
        backend = client.service.bundle.backend  # type: ignore[attr-defined]
        run = backend.run

        def fail(exit: int, state: Any) -> Any:
            if (state[0] == 17.125).any():
                raise RuntimeError("internal")
            return run(exit, state)

        backend.run = fail
        bad = some_images(2)
        bad[1, 0, 2, 2] = 17.125
        answers = await asyncio.gather(
            *(client.post(INFER, json=infer_body(images)) for images in (some_images(3), bad, some_images(1)))
        )
        assert [done.status_code for done in answers] == [200, 422, 200]
        assert answers[1].json() == {"error": "image 1: exit 0 cannot be computed"}
