"""The service on Ray Serve: two replicas of which one is killed, updates, scaling, and what is refused."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from command import Command
from serving_cases import (
    INFER,
    Server,
    assert_rows_equal,
    family_bundle,
    infer_body,
    run_async,
    serving,
    some_images,
    tensor,
)

import exitwise as ew
from exitwise.core.errors import InputError
from exitwise.runtime.bundle import MANIFEST
from exitwise.runtime.onnx import Session
from exitwise.serving import ray as on_ray
from exitwise.serving.settings import Settings

pytest.importorskip("ray.serve", reason="needs pip install 'exitwise[serve,ray-serve]'", exc_type=ImportError)

from exitwise.serving.ray_metrics import MetricsExporter

KEY = "a-key-of-some-length"
CLIENTS = 4


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_bundle(tmp_path_factory.mktemp("serving") / "bundle")


class Replicated(Server):
    """A service on a Ray cluster of its own, found by a variable in the environment of its processes."""

    def __init__(self, process: "subprocess.Popen[str]", mark: str) -> None:
        super().__init__(process)
        self._mark = f"EXITWISE_TEST_SERVICE={mark}\0".encode()

    def processes(self, name: bytes) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if name in (path / "cmdline").read_bytes() and self._mark in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:  # it has ended, or it is another user's
                continue
        return sorted(found)

    def replicas(self) -> list[int]:
        return self.processes(b"ray::ServeReplica")


@contextmanager
def on_a_cluster(bundle: Path, *options: object) -> Iterator[Replicated]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", bundle, "--slo", "60s", "--port", port, "--ray", "local", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "exitwise", *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "EXITWISE_TEST_SERVICE": str(port)},
    )
    server = Replicated(process, str(port))
    try:
        server.urls = [server.wait_for(r"serving on (http\S+)")[1]]
        yield server
    finally:
        process.terminate()
        process.wait(120)
        server.close()


class Clients:
    """Clients that ask one request after the other until they are stopped, or nothing listens any more.

    `outcomes` has the start, the status or the type of the error, and the text of each.
    """

    def __init__(self, url: str, body: bytes) -> None:
        self.outcomes: list[tuple[float, Any, str]] = []
        self._url, self._body, self._stop = url, body, Event()
        self._threads = [Thread(target=self._ask) for _ in range(CLIENTS)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=120, headers={"X-API-Key": KEY}) as client:
            while not self._stop.is_set():
                start = time.monotonic()
                try:
                    done = client.post(self._url + INFER, content=self._body)
                    self.outcomes.append((start, done.status_code, done.text))
                except httpx.ConnectError:
                    return
                except httpx.HTTPError as error:
                    self.outcomes.append((start, type(error).__name__, ""))

    @property
    def statuses(self) -> list[Any]:
        return [status for _, status, _ in self.outcomes]

    def wait_for_more(self, count: int) -> None:
        wanted = len(self.outcomes) + count
        while len(self.outcomes) < wanted:
            assert any(thread.is_alive() for thread in self._threads)
            time.sleep(0.02)


@pytest.mark.slow
def test_two_replicas_live_through_a_kill_and_an_update(bundle: Path, tmp_path: Path) -> None:
    live = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    (tmp_path / "keys").write_text(KEY)
    images = some_images(3)
    body = json.dumps(infer_body(images)).encode()
    with on_a_cluster(live, "--replicas", "2", "--api-key-file", tmp_path / "keys") as server:
        url = server.urls[0]
        assert httpx.get(url + "/v2/health/ready").json() == {"ready": True}
        assert httpx.get(url + "/v2").status_code == 401
        first, second = server.replicas()
        with Clients(url, body) as clients:
            clients.wait_for_more(40)
            os.kill(first, signal.SIGKILL)
            while len(set(server.replicas()) - {first}) < 2:  # Ray starts another one
                time.sleep(0.05)
            clients.wait_for_more(40)
            lost = [status for status in clients.statuses if status != 200]
            assert set(lost) <= {500, 503}, clients.outcomes  # reported, not answered wrongly, and not kept waiting
            assert len(lost) <= CLIENTS  # those that were on their way to the killed one
            assert second in server.replicas()

        family = Session(live).manifest.family
        assert family is not None
        session = Session(live, threads=1, policy=family[-1].policy)
        for text in [text for _, status, text in clients.outcomes if status == 200][::20]:
            answer = json.loads(text)
            assert answer["parameters"]["policy"] == 3
            assert_rows_equal(tensor(answer, "probs"), tensor(answer, "exits"), images, session)

        graph = (live / "stage1.onnx").read_bytes()
        (live / "stage1.onnx").write_bytes(graph[:-1])
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(r"was not reloaded, the former one stays: .*SHA-256")
        (live / "stage1.onnx").write_bytes(graph)
        rename_classes(live)
        before = set(server.replicas())
        with Clients(url, body) as clients:
            server.process.send_signal(signal.SIGHUP)
            server.wait_for("the bundle was reloaded")
            while server.replicas() and before & set(server.replicas()):
                time.sleep(0.05)
            clients.wait_for_more(20)
        assert set(clients.statuses) == {200}
        model = httpx.get(url + "/v2/models/model", headers={"X-API-Key": KEY}).json()
        assert model["parameters"]["classes"][0].startswith("new ")

        with Clients(url, body) as clients:
            clients.wait_for_more(20)
            signalled = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(120) == 0
        assert {status for start, status, _ in clients.outcomes if start < signalled} == {200}
        assert not server.processes(b"ray::")
    messages = [line for line in server.lines if not line.startswith("exitwise: ")]
    assert not messages, messages  # Ray is silent


def rename_classes(bundle: Path) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    manifest["classes"] = [f"new {name}" for name in manifest["classes"]]
    del manifest["sha256"]
    (bundle / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.slow
def test_load_adds_a_replica(bundle: Path) -> None:
    """A replica should have one request at a time with batches of four, and four clients ask."""
    with on_a_cluster(bundle, "--max-replicas", "2", "--max-batch", "4") as server:
        assert len(server.replicas()) == 1
        with Clients(server.urls[0], json.dumps(infer_body(some_images(64))).encode()) as clients:
            while len(server.replicas()) < 2:
                time.sleep(0.1)
            clients.wait_for_more(8)
        assert set(clients.statuses) == {200}


def refused(command: Command, *words: object) -> str:
    done = command("serve", *words)
    assert done.status == 2
    assert len(done.err.strip().splitlines()) == 1, done.err
    return done.err


def test_wrong_options_are_one_line(exitwise: Command, bundle: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, expected in (
            (["--ray", "somewhere"], "`--ray` must be HOST:PORT of a cluster's head, or local, but got 'somewhere'"),
            (["--ray", "127.0.0.1:9"], "no Ray cluster answers at 127.0.0.1:9"),
            (["--ray", "local", "--port", port], "cannot be opened"),
            (["--ray", "local", "--metrics-port", "0"], "--metrics-port and --ray exclude each other"),
            (["--ray", "local", "--replicas", "3", "--max-replicas", "2"], "must be a whole number of at least 3"),
            (["--ray", "local", "--port", "0"], "`--port` must be at least 1 with Ray"),
            (["--replicas", "2"], "need --ray"),
        ):
            assert expected in refused(exitwise, bundle, *words)
        (tmp_path / "key.pem").write_text("no key")
        tls = ["--tls-cert", tmp_path / "key.pem", "--tls-key", tmp_path / "key.pem"]
        assert "are not usable" in refused(exitwise, bundle, "--ray", "local", *tls)
    assert "is not a bundle" in refused(exitwise, tmp_path, "--ray", "local")


def test_without_ray_it_is_one_line(exitwise: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    message = refused(exitwise, bundle, "--ray", "local")
    assert "pip install 'exitwise[serve,ray-serve]'" in message


def test_a_signal_interrupts_only_calls_that_may_take_long() -> None:
    with on_ray._Signals() as signals, pytest.raises(on_ray._InterruptedCall), signals.interrupting():
        signal.raise_signal(signal.SIGTERM)
    with on_ray._Signals() as signals:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        assert {signals.wait(), signals.wait()} == {signal.SIGHUP, signal.SIGTERM}


def test_a_cluster_that_serves_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    running = [{"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"}]
    monkeypatch.setattr("ray.util.list_named_actors", lambda all_namespaces: running)
    with pytest.raises(InputError, match=r"already runs on the cluster at 10\.0\.0\.1:6379"):
        on_ray._check_not_serving("10.0.0.1:6379")
    running.clear()
    on_ray._check_not_serving("10.0.0.1:6379")


def test_the_builder_takes_numbers_and_text(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    values = {
        "slo": "20ms",
        "threads": "2",
        "floor": "0.6",
        "max_body": "1MB",
        "cors": "https://a.example",
        "max_batch": 8,
    }
    options = {
        **values,
        "bundle": str(bundle),
        "replicas": "2",
        "max_replicas": 5,
        "api_key_file": str(tmp_path / "keys"),
    }
    deployment = on_ray.app(options)._bound_deployment
    assert deployment.name == "exitwise"
    assert deployment.ray_actor_options["num_cpus"] == 2
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 4.0)
    fixed = on_ray.app({"bundle": str(bundle), "replicas": 3})._bound_deployment
    assert fixed.num_replicas == 3
    assert fixed.max_ongoing_requests > Settings().max_queue  # the service itself refuses first, with Retry-After
    for wrong, words in (
        ({}, "`bundle` must be"),
        ({"bundle": str(bundle), "speed": 3}, "not 'speed'"),
        ({"bundle": str(bundle), "slo": "fast"}, "`slo` must be like 50ms"),
        ({"bundle": str(bundle), "replicas": "many"}, "`replicas` must be a whole number"),
        ({"bundle": str(bundle), "floor": "high"}, "`floor` must be a number"),
        ({"bundle": str(bundle), "max_batch": 0}, "`max_batch`"),
        ({"bundle": str(tmp_path)}, "is not a bundle"),
    ):
        with pytest.raises(ew.InputError, match=re.escape(words)):
            on_ray.app(wrong)


@run_async
async def test_metrics_of_a_replica_are_exported_with_the_values_of_the_service(bundle: Path) -> None:
    exported: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert (name, *tag_keys) not in made
            made.append((name, *tag_keys))
            self.name, self.tag_keys = name, tag_keys

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self.tag_keys)
            exported[self.name, tuple(sorted(tags.items()))] = value

    made: list[tuple[str, ...]] = []
    async with serving(bundle) as client:
        exporter = MetricsExporter(client.service, Gauge)  # type: ignore[attr-defined]
        exporter.export()
        assert exported["exitwise_images_total", ()] == 0
        await client.post(INFER, json=infer_body(some_images(5)))
        exporter.export()
        while exported["exitwise_images_total", ()] != 5:  # a batch is counted after its answers are sent
            await asyncio.sleep(0.001)
            exporter.export()
        assert exported["exitwise_requests_total", (("endpoint", "infer"), ("status", "200"))] == 1
        assert exported["exitwise_request_seconds_bucket", (("endpoint", "infer"), ("le", "+Inf"))] == 1
        assert exported["exitwise_queue_length", (("stage", "0"),)] == 0
        text = (await client.get("/metrics")).text
    ours = {line.split("{")[0].split()[0] for line in text.splitlines() if line.startswith("exitwise_")}
    assert {name for name, _ in exported} == {name for name in ours if not name.endswith("_created")}
