"""Pages of other sites: what a browser on this machine may send for them."""

from pathlib import Path

import httpx
import pytest
from serving_cases import INFER, family_bundle, infer_body, run_async, serving, some_images, started

import exitwise as ew
from exitwise.serving.application import metrics_app, page_app
from exitwise.serving.security import host_is_allowed, origin_is_allowed
from exitwise.serving.settings import Settings

LOCAL = Settings(slo=5.0, hosts=("127.0.0.1",))
HERE = {"Host": "127.0.0.1:8000"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_bundle(tmp_path_factory.mktemp("serving") / "bundle")


@pytest.mark.parametrize(
    ("header", "hosts", "allowed"),
    [
        ("localhost:8000", ["127.0.0.1"], True),
        ("LOCALHOST", ["127.0.0.1"], True),
        ("127.0.0.1:8000", ["localhost"], True),
        ("[::1]:8000", ["127.0.0.1"], True),
        ("evil.example:8000", ["127.0.0.1"], False),
        ("localhost.evil.example", ["127.0.0.1"], False),
        ("127.0.0.1.evil.example", ["127.0.0.1"], False),
        ("", ["127.0.0.1"], False),
        ("[", ["127.0.0.1"], False),
        ("api.example:443", ["127.0.0.1", "api.example"], True),
        ("api.example.", ["api.example"], True),
        ("127.0.0.1", ["api.example"], False),
        ("anything", [], True),
        ("anything", ["127.0.0.1", "*"], True),
    ],
)
def test_names_of_the_service(header: str, hosts: list[str], allowed: bool) -> None:
    assert host_is_allowed(header, hosts) == allowed


@pytest.mark.parametrize(
    ("origin", "header", "hosts", "cors", "allowed"),
    [
        ("http://localhost:8000", "localhost:8000", [], [], True),
        ("http://LocalHost:8000", "localhost:8000", [], [], True),
        ("https://api.example", "api.example", [], [], True),
        ("http://evil.example", "localhost:8000", ["localhost"], [], False),
        ("http://localhost:3000", "localhost:8000", ["localhost"], [], False),
        ("null", "localhost:8000", [], [], False),
        ("", "", [], [], False),
        ("http://", "", [], [], False),
        ("https://page.example", "localhost:8000", [], ["https://page.example"], True),
        ("http://page.example", "localhost:8000", [], ["https://page.example"], False),
        ("null", "localhost:8000", [], ["*"], True),
        ("https://public.example", "upstream:8000", ["public.example"], [], True),  # a proxy replaced the host
    ],
)
def test_origins_that_may_call(origin: str, header: str, hosts: list[str], cors: list[str], allowed: bool) -> None:
    assert origin_is_allowed(origin, header, hosts, cors) == allowed


@run_async
async def test_pages_of_other_sites_are_refused(bundle: Path) -> None:
    """A page may send text or a form to any address without asking; the request must not be answered."""
    body = infer_body(some_images(1))
    async with serving(bundle, LOCAL) as client:
        foreign = {**HERE, "Origin": "https://evil.example"}
        for path in (INFER, "/classify", "/explain"):
            done = await client.post(path, json=body, headers=foreign)
            assert (done.status_code, "evil.example" in done.json()["error"]) == (403, True)
        rebound = await client.get("/v2", headers={"Host": "evil.example:8000"})
        assert (rebound.status_code, "--allowed-host" in rebound.json()["error"]) == (403, True)
        same = await client.post(INFER, json=body, headers={**HERE, "Origin": "http://127.0.0.1:8000"})
        none = await client.post(INFER, json=body, headers=HERE)  # as curl and clients of the protocol send it
        assert [same.status_code, none.status_code] == [200, 200]
        text = (await client.get("/metrics", headers=HERE)).text
        assert 'exitwise_rejected_total{reason="forbidden"} 4.0' in text


@run_async
async def test_the_ports_of_the_page_and_of_metrics_check_it_too(bundle: Path) -> None:
    async with serving(bundle, LOCAL) as client:
        service = client.service  # type: ignore[attr-defined]
        for application, path in ((page_app(service), "/stats"), (metrics_app(service), "/metrics")):
            transport = httpx.ASGITransport(application)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9") as other:
                assert (await other.get(path)).status_code == 200
                assert (await other.get(path, headers={"Host": "evil.example"})).status_code == 403


@run_async
async def test_allowed_origins_and_keys_still_decide(bundle: Path) -> None:
    from exitwise.serving.security import ApiKeys

    settings = Settings(slo=5.0, cors=("https://page.example",))
    async with serving(bundle, settings, api_keys=ApiKeys(["0123456789abcdef"])) as client:
        page = {"Origin": "https://page.example"}
        keyed = {**page, "Authorization": "Bearer 0123456789abcdef"}
        assert (await client.get("/v2", headers=page)).status_code == 401
        allowed = await client.get("/v2", headers=keyed)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        assert (await client.get("/v2", headers={**keyed, "Origin": "https://other.example"})).status_code == 403


@pytest.mark.slow
def test_the_command_knows_its_names(bundle: Path) -> None:
    with started(bundle, "--slo", "5s", "--allowed-host", "API.example") as server:
        url = f"{server.urls[0]}/v2"
        names = {"localhost": 200, "127.0.0.1:1": 200, "api.example": 200, "evil.example": 403}
        assert {name: httpx.get(url, headers={"Host": name}).status_code for name in names} == names


def test_wrong_names() -> None:
    for name in ("http://api.example", "API.example", "", "a b"):
        with pytest.raises(ew.InputError, match="`hosts` must be names"):
            Settings(hosts=(name,))
