"""Running the application: keys, other origins, metrics, the access log, reloading, and the OpenAPI document."""

import asyncio
import html
import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from serving_cases import INFER, Gate, family_bundle, infer_body, png, run_async, serving, some_images

import exitwise as ew
from exitwise.core.text import escape_controls
from exitwise.serving.security import ApiKeys
from exitwise.serving.settings import Settings

KEY = "correct-horse-battery"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_bundle(tmp_path_factory.mktemp("serving") / "bundle")


@run_async
async def test_keys(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# clients\n{KEY}\n\nanother-key-of-a-client\n")
    async with serving(bundle, api_keys=ApiKeys.read(file)) as client:
        assert (await client.get("/v2/health/ready")).status_code == 200  # probes have no key
        for headers in ({}, {"X-API-Key": "wrong"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
            for path in ("/v2", "/metrics", "/openapi.json"):
                refused = await client.get(path, headers=headers)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
        for headers in ({"X-API-Key": KEY}, {"Authorization": "Bearer another-key-of-a-client"}):
            assert (await client.get("/v2", headers=headers)).status_code == 200
    for text in ("", "short", "a key with spaces in it", "\x07" * 20):
        file.write_text(text)
        with pytest.raises(ew.InputError, match="`api_key_file`"):
            ApiKeys.read(file)


@run_async
async def test_cors_is_off_unless_asked_for(bundle: Path) -> None:
    origin = {"Origin": "https://page.example"}
    async with serving(bundle) as client:
        assert "access-control-allow-origin" not in (await client.get("/v2", headers=origin)).headers
    async with serving(bundle, Settings(slo=5.0, cors=("https://page.example",))) as client:
        allowed = await client.get("/v2", headers=origin)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        other = await client.get("/v2", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


@run_async
async def test_metrics_count_what_happened(bundle: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    async with serving(bundle) as client:
        await client.post(INFER, json=infer_body(some_images(5)))
        await client.post(INFER, json=infer_body(some_images(2), parameters={"budget": "30%"}))
        await client.post(INFER, content=b"{")
        while "exitwise_images_total 7.0" not in (text := (await client.get("/metrics")).text):
            await asyncio.sleep(0.001)  # a batch is counted after its answers are sent
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["exitwise_images_total",] == 7
    assert (values["exitwise_exits_total", "0"], values["exitwise_exits_total", "2"]) == (2, 5)
    assert values["exitwise_requests_total", "infer", "200"] == 2
    assert values["exitwise_requests_total", "infer", "400"] == 1
    assert values["exitwise_rejected_total", "invalid"] == 1
    assert 0 < values["exitwise_confidence_sum_total",] <= 7
    assert values["exitwise_policy_index",] == 3
    assert values["exitwise_queue_length", "0"] == 0


@run_async
async def test_the_access_log_is_json_with_a_line_per_request(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "exitwise.serving.access")
    async with serving(bundle) as client:
        await client.post(INFER, json=infer_body(some_images(2)))
        await client.get("/no%0Asuch%1B[31mpage")
    lines = [record.getMessage() for record in caplog.records if record.name == "exitwise.serving.access"]
    first, second = (json.loads(line) for line in lines)
    assert (first["path"], first["status"], first["images"], first["policy"]) == (INFER, 200, 2, 3)
    assert second["status"] == 404
    assert all(escape_controls(line) == line for line in lines)


@run_async
async def test_an_error_that_nobody_expected_is_answered(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(bundle) as client:

        async def fail(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(client.service, "classify", fail)  # type: ignore[attr-defined]
        for path in (INFER, INFER.replace("/infer", "/versions/1/infer")):
            answer = await client.post(path, json=infer_body(some_images(1)))
            assert (answer.status_code, answer.json()) == (500, {"error": "internal error"})


@run_async
async def test_a_changed_bundle_is_reloaded_and_a_broken_one_refused(bundle: Path, tmp_path: Path) -> None:
    live = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    async with serving(live, Settings(slo=60.0)) as client:
        gate = Gate(client)
        queued = asyncio.create_task(client.post(INFER, json=infer_body(some_images(2))))
        await gate.until_pending(2)
        graph = (live / "stage1.onnx").read_bytes()
        (live / "stage1.onnx").write_bytes(graph[:-1])
        service = client.service  # type: ignore[attr-defined]
        former = service.bundle
        assert not await service.reload()
        assert service.bundle is former
        (live / "stage1.onnx").write_bytes(graph)
        manifest = json.loads((live / "manifest.json").read_text())
        manifest["classes"] = [f"new {name}" for name in manifest["classes"]]
        del manifest["sha256"]
        (live / "manifest.json").write_text(json.dumps(manifest))
        assert await service.reload()
        assert (await client.post("/classify", content=png())).json()["results"][0]["label"].startswith("new ")
        assert not queued.done()
        gate.event.set()  # the former bundle answers what it accepted
        assert (await queued).status_code == 200
        while former.scheduler._threads[0].is_alive():
            await asyncio.sleep(0.01)
        text = (await client.get("/metrics")).text
        assert 'exitwise_reloads_total{result="refused"} 1.0' in text
        assert 'exitwise_reloads_total{result="ok"} 1.0' in text


@run_async
async def test_openapi_lists_every_path(bundle: Path) -> None:
    async with serving(bundle) as client:
        document = (await client.get("/openapi.json")).json()
        application = client._transport.app  # type: ignore[attr-defined]
        paths = {route.path.replace("{name}", "model") for route in application.routes}
        documented = set(document["paths"])
        assert documented == {path for path in paths if "{version}" not in path} - {"/openapi.json", "/docs"}


@run_async
async def test_the_api_page_has_every_path_and_needs_no_other_server(bundle: Path) -> None:
    async with serving(bundle, Settings(slo=5.0, name="a.name")) as client:
        document = (await client.get("/openapi.json")).json()
        done = await client.get("/docs")
    assert done.headers["content-type"].startswith("text/html")
    assert done.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    text = done.text
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert f"<code>{method.upper()} {path}</code>" in text
            assert html.escape(operation["summary"]) in text
    assert "/v2/models/a.name/infer" in text
    assert "<code>inputs[].datatype</code></th><td>string</td><td>required</td>" in text
    assert "<code>results[].probability</code></th><td>number</td>" in text
    assert not re.search(r"https?:|<script|src=", text)
