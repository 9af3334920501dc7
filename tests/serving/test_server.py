"""The server as a process: signals, connections, TLS, and a client of the protocol that others wrote."""

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from command import Command
from serving_cases import INFER, TOLERANCE, Server, family_bundle, infer_body, png, some_images, started, tensor
from uvicorn.server import ServerState

import exitwise as ew
from exitwise.runtime.onnx import Session
from exitwise.serving.connections import limit_connections
from exitwise.serving.security import describe_exposure, describe_open_metrics
from exitwise.serving.settings import Settings, parse_duration, parse_size


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_bundle(tmp_path_factory.mktemp("serving") / "bundle")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    with started(bundle, "--slo", "30s", "--metrics-port", "0", "--max-connections", "40") as server:
        yield server


def refused(command: Command, *words: object) -> str:
    done = command("serve", *words)
    assert done.status == 2
    assert len(done.err.strip().splitlines()) == 1
    return done.err


def test_wrong_options(exitwise: Command, bundle: Path, tmp_path: Path) -> None:
    assert "is not a bundle" in refused(exitwise, tmp_path)
    for words, expected in (
        (["--slo", "fast"], "`--slo` must be like 50ms"),
        (["--max-body", "-3"], "`--max-body` must be like 32MB"),
        (["--floor", "0.99"], "`--floor` must be at most 0.8"),
        (["--name", "../x"], "`--name` must be"),
        (["--budget", "half"], "`--budget` must be like"),
        (["--cors", "page.example"], "`--cors` must be origins"),
        (["--tls-cert", "cert.pem"], "must be given together"),
        (["--api-key-file", "nowhere"], "cannot be read"),
    ):
        assert expected in refused(exitwise, bundle, *words)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "cannot be opened" in refused(exitwise, bundle, "--port", port)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this way to schedule")
def test_the_event_loop_waits_for_batches_only_if_they_use_all_cores(bundle: Path) -> None:
    cores = os.sched_getaffinity(0)

    def find_policies(*words: str) -> list[set[int]]:
        with started(bundle, *words) as server:
            main = server.process.pid
            threads = {int(task.name) for task in Path(f"/proc/{main}/task").iterdir()}
            return [{os.sched_getscheduler(main)}, {os.sched_getscheduler(thread) for thread in threads - {main}}]

    try:
        os.sched_setaffinity(0, {min(cores)})  # the server inherits it
        alone, others = find_policies()
        assert alone == {os.SCHED_BATCH}
        assert os.SCHED_OTHER in others  # the compute thread
    finally:
        os.sched_setaffinity(0, cores)
    if len(cores) > 1:
        assert find_policies()[0] == {os.SCHED_OTHER}


def test_answers_do_not_wait_for_acknowledgments() -> None:
    """On a listening socket like that of `run`, asyncio alone would leave Nagle's algorithm on."""

    async def accept() -> int:
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[int] = loop.create_future()

        class Noting(limit_connections(10, 5.0, 5.0)):  # type: ignore[misc]
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                option = (socket.IPPROTO_TCP, socket.TCP_NODELAY)
                accepted.set_result(transport.get_extra_info("socket").getsockopt(*option))

        async def nothing(scope: Any, receive: Any, send: Any) -> None:
            del scope, receive, send

        config = uvicorn.Config(nothing, log_config=None)
        listener = socket.create_server(("127.0.0.1", 0))
        server = await loop.create_server(lambda: Noting(config, ServerState(), {}), sock=listener)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        value = await accepted
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()
        return value

    assert asyncio.run(accept()) == 1


def test_durations_and_sizes() -> None:
    assert (parse_duration("slo", "50ms"), parse_duration("slo", "1.5 s")) == (0.05, 1.5)
    assert (parse_size("max_body", "32MB"), parse_size("max_body", "7")) == (32 << 20, 7)
    for wrong in ("", "50", "ms", "-1s", "1e3s", "inf"):
        with pytest.raises(ew.InputError, match="`slo`"):
            parse_duration("slo", wrong)
    with pytest.raises(ew.InputError, match="`max_batch`"):
        Settings(max_batch=0)


def test_the_warning_names_what_is_exposed() -> None:
    assert describe_exposure("127.0.0.1", False, False) is None
    assert describe_exposure("::1", False, False) is None
    assert describe_exposure("0.0.0.0", True, True) is None
    assert "anyone who reaches 0.0.0.0" in (describe_exposure("0.0.0.0", False, False) or "")
    assert describe_open_metrics("127.0.0.1", 9000) is None
    assert describe_open_metrics("0.0.0.0", None) is None
    assert "metrics on port 9000, also without a key" in (describe_open_metrics("0.0.0.0", 9000) or "")
    assert "without encryption" in (describe_exposure("10.0.0.1", True, False) or "")


def test_a_client_that_others_wrote(server: Server, bundle: Path) -> None:
    triton = pytest.importorskip("tritonclient.http", reason="needs pip install 'tritonclient[http]'")
    family = Session(bundle).manifest.family
    assert family is not None
    session, images = Session(bundle, threads=1, policy=family[-1].policy), some_images(6)
    client = triton.InferenceServerClient("{}:{}".format(*server.address))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("model")
    assert client.is_model_ready("model", "1")
    assert client.get_server_metadata()["name"] == "exitwise"
    (spec,) = client.get_model_metadata("model")["inputs"]
    expected = session(images)
    for binary in (True, False):
        tensor = triton.InferInput(spec["name"], images.shape, spec["datatype"])
        tensor.set_data_from_numpy(images, binary_data=binary)
        outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("probs", "exits")]
        for names in (None, outputs):
            answer = client.infer("model", [tensor], request_id="7", outputs=names)
            assert answer.get_response()["id"] == "7"
            assert np.abs(answer.as_numpy("probs") - expected.probs).max() < TOLERANCE
            assert answer.as_numpy("exits").tolist() == expected.exits.tolist()
    with pytest.raises(Exception, match="the model is model, version 1, not 'other'"):
        client.infer("other", [tensor])
    client.close()


def test_metrics_have_a_port_of_their_own(server: Server) -> None:
    assert httpx.get(server.urls[0] + "/metrics").status_code == 404
    assert "exitwise_policy_index" in httpx.get(server.urls[1] + "/metrics").text
    assert httpx.get(server.urls[1] + "/v2").status_code == 404


def receive_all(connection: socket.socket) -> bytes:
    connection.settimeout(30)
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


def test_data_that_are_not_http_are_refused(server: Server) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    ):
        with socket.create_connection(server.address) as connection:
            connection.sendall(data + b"\r\n\r\n")
            answer = receive_all(connection)
            assert answer.startswith(b"HTTP/1.1 400")
            assert set(json.loads(answer.split(b"\r\n\r\n", 1)[1])) == {"error"}
    with socket.create_connection(server.address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000)
        assert receive_all(connection).startswith(b"HTTP/1.1 400")


def test_headers_have_a_limit(server: Server) -> None:
    """Also while a value is not complete, and in those that follow a body in chunks."""
    start = b"POST /classify HTTP/1.1\r\nHost: localhost\r\n"
    many = b"".join(b"X-%d: %b\r\n" % (k, b"a" * 200) for k in range(100))
    chunks = b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    for data in (start + b"X: " + b"a" * 20_000, start + many, start + many + b"\r\n", start + chunks + many):
        with socket.create_connection(server.address) as connection:
            connection.sendall(data)
            assert receive_all(connection).startswith(b"HTTP/1.1 4")


def test_a_request_for_another_protocol_is_answered_in_this_one(server: Server) -> None:
    lines = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with socket.create_connection(server.address) as connection:
        connection.sendall(lines)
        answers = receive_all(connection)
    assert answers.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answers.lower()


def test_damaged_requests_write_nothing_but_the_access_log(server: Server) -> None:
    damaged = b"--XX\nContent-Disposition: form-data\n\nabc"
    headers = {"Content-Type": "multipart/form-data; boundary=XX"}
    assert httpx.post(server.urls[0] + "/classify", content=damaged, headers=headers).status_code == 400
    server.wait_for('"path": "/classify", "status": 400')
    assert all(line.startswith(("{", "exitwise: serving ")) for line in server.lines), server.lines


def test_too_many_connections_are_refused_and_the_others_served(server: Server) -> None:
    connections = [socket.create_connection(server.address) for _ in range(45)]
    try:
        answers = receive_all(connections[-1])
        assert answers.startswith(b"HTTP/1.1 503")
        connections[0].sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert receive_all(connections[0]).startswith(b"HTTP/1.1 200")
    finally:
        for connection in connections:
            connection.close()


def test_there_are_files_for_all_connections(bundle: Path) -> None:
    """The process begins with a limit of 256 open files, less than the connections that it shall have."""
    import resource

    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, former[1]))
    try:
        with started(bundle, "--max-connections", "400") as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, former)
            connections = [socket.create_connection(server.address) for _ in range(350)]
            connections[-1].sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert receive_all(connections[-1]).startswith(b"HTTP/1.1 200")
            for connection in connections:
                connection.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)


def test_slow_headers_are_given_up() -> None:
    import asyncio

    from exitwise.serving.connections import limit_connections

    class Transport:
        closed = False

        def get_extra_info(self, name: str) -> Any:
            return None

        def is_closing(self) -> bool:
            return self.closed

        def close(self) -> None:
            self.closed = True

        abort = close

    async def try_it() -> None:
        import uvicorn
        from uvicorn.server import ServerState

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.Event().wait()

        config = uvicorn.Config(app, log_config=None)
        config.load()
        kind = limit_connections(5, header_timeout=0.02, write_timeout=0.02)
        for parts, closes in (
            ([], True),
            ([b"GET / HT"], True),
            ([b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"], False),
        ):
            transport = Transport()
            protocol = kind(config, ServerState(), {})
            protocol.connection_made(transport)  # type: ignore[arg-type]
            for part in parts:
                protocol.data_received(part)
            await asyncio.sleep(0.1)
            assert transport.closed == closes
        protocol.pause_writing()  # the client does not read its answer
        await asyncio.sleep(0.1)
        assert transport.closed
        for task in protocol.tasks:
            task.cancel()

    asyncio.run(try_it())


@pytest.mark.slow
def test_sigterm_answers_what_was_accepted_and_ends_with_status_0(bundle: Path, tmp_path: Path) -> None:
    """Requests are in flight all the time: every one that was accepted has its answer. Before, SIGHUP reloads."""
    live = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    with started(live, "--slo", "30s") as server:
        url, answers, done = server.urls[0], [], False
        body = json.dumps(infer_body(some_images(64))).encode()

        def ask() -> None:
            with httpx.Client() as client:
                while not done:
                    try:
                        answers.append(client.post(url + INFER, content=body, timeout=60).status_code)
                    except httpx.ConnectError:  # the server does not accept any more
                        return
                    except httpx.TransportError as error:
                        # An idle connection may be closed while the next request is on its way; no answer is cut off.
                        answers.append(str(type(error)))
                        return

        threads = [Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        while len(answers) < 8:
            time.sleep(0.01)
        (live / "stage2.onnx").rename(live / "away.onnx")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("was not reloaded, the former one stays")
        (live / "away.onnx").rename(live / "stage2.onnx")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("the bundle was reloaded")
        before = len(answers)
        while len(answers) < before + 8:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        done = True
        for thread in threads:
            thread.join(60)
    assert set(answers) - {200} <= {"<class 'httpx.RemoteProtocolError'>", "<class 'httpx.ReadError'>"}
    assert sum(answer != 200 for answer in answers) <= 4
    assert not any("Traceback" in line for line in server.lines), server.lines


@pytest.mark.slow
def test_a_second_signal_ends_at_once(bundle: Path) -> None:
    """A body that never comes keeps the server waiting after the first."""
    with started(bundle, "--body-timeout", "60s") as server, socket.create_connection(server.address) as connection:
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("a second signal ends at once")
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_tls_and_keys_of_the_command(bundle: Path, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *subject]
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
    (tmp_path / "keys").write_text("a-key-of-some-length\n")
    options = ["--tls-cert", certificate, "--tls-key", key, "--api-key-file", tmp_path / "keys"]
    with started(bundle, *map(str, options)) as server:
        assert server.urls[0].startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        for headers, status in (({}, 401), ({"X-API-Key": "a-key-of-some-length"}, 200)):
            with httpx.Client(verify=context) as client:
                assert client.post(server.urls[0] + "/classify", content=png(), headers=headers).status_code == status


@pytest.mark.slow
def test_serving_does_not_import_torch(bundle: Path) -> None:
    script = f"""
import sys
import exitwise.cli.app
from exitwise.serving.application import app
import exitwise.serving.server
app({str(bundle)!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)


def test_the_standard_library_is_client_enough(server: Server) -> None:
    body = json.dumps(infer_body(some_images(2))).encode()
    with urllib.request.urlopen(server.urls[0] + INFER, data=body) as answer:
        assert tensor(json.load(answer), "probs").shape == (2, 10)
