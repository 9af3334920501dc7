"""The endpoints of the page over ASGI: one image through all exits, and the load of the last minutes."""

import asyncio
import base64
import hashlib
import re
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import httpx
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
from exitwise.core.predictions import ExitPrediction, Predictions
from exitwise.policies.family import FamilyMember, PolicyFamily
from exitwise.policies.policy import thresholds_to_json
from exitwise.runtime.bundle import MANIFEST, Manifest
from exitwise.runtime.onnx import Session
from exitwise.serving.application import page_app
from exitwise.serving.explain import find_exit
from exitwise.serving.page import render_page
from exitwise.serving.recent import WINDOW, RecentLoad
from exitwise.serving.settings import Settings

KEY = "correct-horse-battery"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_bundle(tmp_path_factory.mktemp("serving") / "bundle")


def change(bundle: Path, folder: Path, **changes: Any) -> Path:
    """Copy a bundle with another manifest."""
    folder.mkdir()
    for file in bundle.iterdir():
        if file.name != MANIFEST:
            (folder / file.name).write_bytes(file.read_bytes())
    replace(Manifest.load(bundle), **changes).save(folder)
    return folder


def members(bundle: Path) -> list[FamilyMember]:
    family = Manifest.load(bundle).family
    assert family is not None
    return list(family)


@run_async
async def test_every_policy_exits_as_a_session_with_it(bundle: Path) -> None:
    preprocessing = Session(bundle).preprocessing
    assert preprocessing is not None
    sessions = [Session(bundle, threads=1, policy=member.policy) for member in members(bundle)]
    taken = set()
    async with serving(bundle) as client:
        for seed in range(12):
            file = png(seed)
            answer = (await client.post("/explain?top=10", content=file)).json()
            pixels = load_image(file, preprocessing)[None]
            assert [each["exit"] for each in answer["exits"]] == [0, 1, 2]
            assert [each["cost"] for each in answer["exits"]] == list(sessions[0].costs.values)
            for policy, session in zip(answer["policies"], sessions, strict=True):
                expected = session(pixels)
                assert policy["exit"] == expected.exits[0]
                assert policy["thresholds"] == thresholds_to_json(session.policy.thresholds)
                probs = {each["class"]: each["probability"] for each in answer["exits"][policy["exit"]]["top"]}
                assert np.abs(np.array([probs[k] for k in range(10)]) - expected.probs[0]).max() < TOLERANCE
                reached = [s >= float(t) for s, t in zip(policy["scores"], policy["thresholds"], strict=True)]
                assert policy["exit"] == reached.index(True)
                taken.add(policy["exit"])
            for exit in range(3):
                confidence = answer["exits"][exit]["top"][0]["probability"]
                assert answer["policies"][0]["scores"][exit] == pytest.approx(confidence, abs=1e-5)
    assert taken == {0, 1, 2}


@pytest.mark.parametrize("score", ["confidence", "margin", "entropy", "patience", "variance", "learned"])
def test_the_exit_of_one_image_is_that_of_the_policy(score: str) -> None:
    generator = np.random.default_rng(0)
    probs = generator.dirichlet(np.full(5, 0.3), (3, 200)).astype(np.float32)
    variance = generator.uniform(0, 0.1, (3, 200)).astype(np.float32)
    labels = probs[2].argmax(axis=1)
    preds = Predictions((3, 200, 5), lambda: map(ExitPrediction, probs), lambda _: variance)
    policy = ew.fit_policy(preds, labels=labels, costs=[1.0, 2.0, 3.0], budget=2.0, score=score, strategy="geometric")
    expected = policy.exits(preds)
    single = [[ExitPrediction(probs[k, [i]], variance=variance[k, [i]]) for k in range(3)] for i in range(200)]
    assert [find_exit(policy, rows) for rows in single] == expected.tolist()
    assert len(set(expected.tolist())) > 1


@pytest.mark.parametrize("score", ["confidence", "patience"])
@run_async
async def test_explained_images_share_batches_and_change_no_other_answer(
    score: str, bundle: Path, tmp_path: Path
) -> None:
    manifest = Manifest.load(bundle)
    policy = ew.Policy((inf, 0.5, -inf), score=score, costs=manifest.costs.values, cost=2.0)
    if score == "patience":  # its state passes from exit to exit
        bundle = change(bundle, tmp_path / "bundle", policy=policy, family=PolicyFamily((FamilyMember(policy),)))
    images = some_images(6)
    async with serving(bundle, Settings(slo=60.0)) as client:
        service = client.service  # type: ignore[attr-defined]
        gate = Gate(client)
        requests = [asyncio.create_task(client.post(INFER, json=infer_body(images[[k]]))) for k in range(3)]
        await gate.until_pending(3)
        explained = asyncio.create_task(client.post("/explain", content=png()))
        await gate.until_pending(4)
        requests += [asyncio.create_task(client.post(INFER, json=infer_body(images[[k]]))) for k in range(3, 6)]
        await gate.until_pending(7)
        gate.event.set()
        answers = [task.json() for task in await asyncio.gather(*requests)]
        explanation = (await explained).json()
        alone = (await client.post("/explain", content=png())).json()
        assert [policy["exit"] for policy in explanation["policies"]] == [
            policy["exit"] for policy in alone["policies"]
        ]
        session = Session(bundle, threads=1, policy=service.bundle.family[answers[0]["parameters"]["policy"]].policy)
        probs = np.concatenate([tensor(answer, "probs") for answer in answers])
        exits = np.concatenate([tensor(answer, "exits") for answer in answers])
        assert_rows_equal(probs, exits, images, session)
        metrics = service.metrics.render().decode()
        assert "exitwise_images_total 6.0" in metrics  # an explained image exits nowhere


@run_async
async def test_one_image_at_a_time_is_explained(bundle: Path) -> None:
    async with serving(bundle, Settings(slo=60.0)) as client:
        gate = Gate(client)
        tasks = [asyncio.create_task(client.post("/explain", content=png(k))) for k in range(13)]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 4:
            done, waiting = await asyncio.wait(tasks, timeout=0.05)
        assert {task.result().status_code for task in done} == {503}
        assert all("Retry-After" in task.result().headers for task in done)
        await gate.until_pending(1)
        gate.event.set()
        assert [task.result().status_code for task in (await asyncio.wait(waiting))[0]] == [200] * 9
        assert gate.scheduler.pending == 0


@run_async
async def test_an_overloaded_service_explains_nothing(bundle: Path) -> None:
    async with serving(bundle, Settings(slo=60.0, max_queue=2)) as client:
        gate = Gate(client)
        tasks = [asyncio.create_task(client.post(INFER, json=infer_body(some_images(1)))) for _ in range(2)]
        await gate.until_pending(2)
        refused = await client.post("/explain", content=png())
        assert refused.status_code == 503
        assert "the queue is full" in refused.json()["error"]
        gate.event.set()
        await asyncio.gather(*tasks)


@run_async
async def test_what_cannot_be_explained(bundle: Path, tmp_path: Path) -> None:
    async with serving(bundle, Settings(slo=5.0, max_body=5000, max_pixels=200)) as client:
        for content, headers, status, expected in (
            (b"no image", {}, 400, "cannot be read as an image"),
            (b"", {}, 400, "the request holds no image"),
            (png(size=(20, 20)), {}, 400, "has 20 x 20 pixels"),
            (b"x" * 6000, {}, 413, "at most 5000 bytes"),
            (png(), {"Content-Type": "text/html"}, 415, "`Content-Type` must be"),
        ):
            refused = await client.post("/explain", content=content, headers=headers)
            assert (refused.status_code, expected in refused.json()["error"]) == (status, True), refused.text
        files = [("file", png(k)) for k in range(2)]
        assert (await client.post("/explain", files=files)).status_code == 413
        assert (await client.post("/explain?top=0", content=png())).status_code == 400
        assert (await client.post("/explain", content=png())).status_code == 200
    plain = change(bundle, tmp_path / "plain", preprocessing=None, family=None)
    async with serving(plain) as client:
        assert "no preprocessing" in (await client.post("/explain", content=png())).json()["error"]
        described = (await client.get("/explain")).json()
        assert described["image"] is None
        assert len(described["policies"]) == 1


@run_async
async def test_keys_guard_the_data_but_not_the_page(bundle: Path) -> None:
    keys = ew.serving.ApiKeys([KEY])
    async with serving(bundle, api_keys=keys) as client:
        assert (await client.get("/")).status_code == 200
        for method, path in (("GET", "/explain"), ("POST", "/explain"), ("GET", "/stats")):
            assert (await client.request(method, path)).status_code == 401
        assert (await client.get("/stats", headers={"X-API-Key": KEY})).status_code == 200
        own = page_app(client.service, keys)  # type: ignore[attr-defined]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(own), base_url="http://page") as page:
            assert (await page.get("/")).status_code == 200
            assert (await page.get("/stats")).status_code == 401
            key = {"Authorization": f"Bearer {KEY}"}
            assert (await page.post("/explain", content=png(), headers=key)).status_code == 200
            assert (await page.post("/explain", content=b"no image", headers=key)).status_code == 400
            assert (await page.post("/classify", content=png(), headers=key)).status_code == 404
    async with serving(bundle, page=False) as client:
        for path in ("/", "/explain", "/stats"):
            assert (await client.get(path)).status_code == 404


@run_async
async def test_the_page_allows_itself_only_its_own_script_and_style(bundle: Path) -> None:
    async with serving(bundle) as client:
        answer = await client.get("/")
    assert answer.text == render_page()[0]
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for tag, source in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, flags=re.DOTALL)
        assert policy[source] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert set(re.findall(r"https?://[^'\"`\s]+", answer.text)) == {"http://www.w3.org/2000/svg"}
    assert "{{" not in answer.text


@run_async
async def test_stats_count_requests_latencies_exits_and_the_policy(bundle: Path) -> None:
    async with serving(bundle) as client:
        for k in range(5):
            await client.post("/classify", content=png(k))
        await client.post("/explain", content=png())
        await client.post("/classify", content=b"no image")
        while (stats := (await client.get("/stats")).json())["now"]["requests_per_second"] < 0.5:  # five in ten seconds
            await asyncio.sleep(0.05)
        now = stats["now"]
        assert sum(now["exit_shares"]) == pytest.approx(1)
        assert 0 < now["p50_ms"] <= now["p99_ms"]
        assert (now["policy"], now["budget"], now["expected_accuracy"]) == (3, members(bundle)[3].budget, 0.8)
        assert {len(stats[name]) for name in ("requests", "p50_ms", "policy", "exits")} == {WINDOW}
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert {"/", "/explain", "/stats"} <= set(paths)
        described = paths["/stats"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert set(described["properties"]) == set(stats)
        answer = (await client.post("/explain", content=png())).json()
        described = paths["/explain"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert set(described["properties"]) == set(answer)
        assert set(described["properties"]["policies"]["items"]["properties"]) == set(answer["policies"][0])


@run_async
async def test_the_budget_comes_back_while_there_are_no_requests(bundle: Path) -> None:
    async with serving(bundle) as client:
        scheduler = client.service.bundle.scheduler  # type: ignore[attr-defined]
        now = scheduler._clock()
        scheduler.load.index, scheduler._clock = 0, lambda: now
        scheduler.load.update(now, 0)
        assert scheduler.policy_in_use() == 0
        scheduler._clock = lambda: now + 20
        assert (await client.get("/stats")).json()["now"]["policy"] == 3


def test_recent_load_has_a_value_per_second() -> None:
    time = [1000.0]
    recent = RecentLoad(clock=lambda: time[0])
    generator = np.random.default_rng(0)
    latencies = generator.lognormal(-4, 1, (200, 50))
    for second in range(200):
        time[0] = 1000.5 + second
        for value in latencies[second]:
            recent.add_answer(value)
        recent.add_exits(second % 3, 7)
        if second in (3, 150):
            recent.set_policy(second)
    recent.add_rejected()
    time[0] += 1
    stats = recent.summarize(3)
    assert stats["requests"] == [50] * (WINDOW - 1) + [51]
    assert stats["rejected"] == [0] * (WINDOW - 1) + [1]
    assert stats["exits"][-2:] == [[7, 0, 0], [0, 7, 0]]
    assert stats["policy"] == [3] * (WINDOW - 50) + [150] * 50
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
        expected = 1000 * np.quantile(latencies[-WINDOW:], share, axis=1, method="inverted_cdf")
        assert np.abs(np.log(np.array(stats[name]) / expected)).max() < np.log(1.05)
    assert stats["now"]["requests_per_second"] == 50.1
    assert len(recent._seconds) <= 2 * WINDOW + 1
    time[0] += WINDOW + 1
    stats = recent.summarize(3)
    assert (stats["p50_ms"], stats["policy"]) == ([None] * WINDOW, [150] * WINDOW)
    assert stats["now"]["exit_shares"] is None
