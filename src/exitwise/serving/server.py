"""The server process: listens, drains on SIGTERM, and reloads the bundle on SIGHUP."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from exitwise.core.checks import check_integer, check_number
from exitwise.core.errors import InputError, first_line
from exitwise.serving.application import app, metrics_app, page_app
from exitwise.serving.connections import limit_connections
from exitwise.serving.security import ApiKeys, describe_exposure, describe_open_metrics
from exitwise.serving.service import Service
from exitwise.serving.settings import Settings

_KEEP_ALIVE = 10  # seconds between requests of a connection
_OTHER_FILES = 256  # files that are open beside connections


@dataclass(frozen=True)
class Address:
    """Addresses that the server listens on, with the files for TLS.

    Args:
        host: Name or address.
        port: Port; 0 lets the system choose one.
        metrics_port: Port of /metrics, which then is not on the other one.
        page: Whether there is a page at /.
        page_port: Port of the page and what it needs, which then are not on the other one.
        tls_cert: File with the certificate chain, PEM.
        tls_key: File with its private key, PEM.
        max_connections: Largest number of open connections.
        header_timeout: Seconds within which the headers of a request must arrive.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    metrics_port: int | None = None
    page: bool = True
    page_port: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_connections: int = 1000
    header_timeout: float = 10.0

    def __post_init__(self) -> None:
        check_integer("port", self.port, 0, 65535)
        for name in ("metrics_port", "page_port"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, 65535)
        if self.page_port is not None and not self.page:
            raise InputError("`page_port` and `no_page` exclude each other")
        check_integer("max_connections", self.max_connections, 1, 1 << 20)
        check_number("header_timeout", self.header_timeout, 1e-3, 3600)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InputError("`tls_cert` and `tls_key` must be given together")
        for name in ("tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise InputError(f"`{name}` {path} does not exist")


class _Server(uvicorn.Server):
    """A uvicorn server whose signals are handled by `run`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(bundle: Path, settings: Settings, address: Address, api_keys: ApiKeys | None) -> None:
    """Serve a bundle until SIGTERM or SIGINT; the accepted requests are answered first.

    A second signal ends the process at once, with status 143 or 130. SIGHUP reloads the bundle.

    Raises:
        InputError: If the bundle, the settings or the address are not usable.
    """
    has_page = address.page and address.page_port is None
    application = app(bundle, settings, api_keys=api_keys, metrics=address.metrics_port is None, page=has_page)
    service: Service = application.state.service
    if warning := describe_exposure(address.host, api_keys is not None, address.tls_cert is not None):
        print(f"exitwise: warning: {warning}", file=sys.stderr)
    if warning := describe_open_metrics(address.host, address.metrics_port):
        print(f"exitwise: warning: {warning}", file=sys.stderr)
    others = [("metrics ", address.metrics_port, metrics_app(service))]
    others += [("page ", address.page_port, page_app(service, api_keys))]
    extra = [(name, port, other) for name, port, other in others if port is not None]
    listeners = [_listen(address.host, port) for port in (address.port, *(port for _, port, _ in extra))]
    _allow_open_files(len(listeners) * address.max_connections + _OTHER_FILES)
    limits: dict[str, Any] = {
        "http": limit_connections(address.max_connections, address.header_timeout, settings.timeout),
        "ws": "none",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": _KEEP_ALIVE,
        "timeout_graceful_shutdown": round(settings.timeout + settings.body_timeout) + 1,
    }
    tls: dict[str, Any] = {}
    if address.tls_cert is not None:
        tls = {"ssl_certfile": str(address.tls_cert), "ssl_keyfile": str(address.tls_key)}
    servers = [_Server(uvicorn.Config(application, lifespan="on", **limits, **tls))]
    servers += [_Server(uvicorn.Config(other, lifespan="off", **limits, **tls)) for _, _, other in extra]
    try:
        for server in servers:
            server.config.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InputError(f"`tls_cert` and `tls_key` are not usable: {first_line(error)}") from None
    names = ["", *(name for name, _, _ in extra)]
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_serve(servers, listeners, names, service, "https" if tls else "http"))


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop, which needs less time for a request, or of asyncio on systems without it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _allow_open_files(count: int) -> None:
    """Raise the limit of this process on open files, as far as the system lets it: often it is about 1,000."""
    import resource  # which Windows does not have

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard):
        count = min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _let_batches_finish(threads: int) -> None:
    """Let the event loop, which calls this, wait for the end of a time slice if compute threads use all cores.

    By default Linux interrupts a batch for every request and every answer, and both threads find cold caches. Several
    requests that came meanwhile are then read together. If there is another core, the event loop need not wait: it is
    not changed then, because it would wait for other programs, too.

    Args:
        threads: Number of compute threads, which were started before and are not changed.
    """
    if hasattr(os, "SCHED_BATCH") and len(os.sched_getaffinity(0)) <= threads:  # Linux
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise InputError(f"`host` {host} with `port` {port} cannot be opened: {error.strerror or error}") from None


async def _serve(
    servers: list[_Server], listeners: list[socket.socket], names: list[str], service: Service, scheme: str
) -> None:
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[bool]] = set()
    stopping: list[asyncio.Task[None]] = []
    tasks = [
        asyncio.create_task(server.serve(sockets=[listener]))
        for server, listener in zip(servers, listeners, strict=True)
    ]

    def stop(number: int) -> None:
        if service.draining:
            os._exit(128 + number)
        service.draining = True
        print("exitwise: answering what was accepted, then ending; a second signal ends at once", file=sys.stderr)
        for server in servers[1:]:
            server.should_exit = True
        for listening in getattr(servers[0], "servers", []):
            listening.close()
        stopping.append(loop.create_task(stop_first()))

    async def stop_first() -> None:
        """Stop the first server when the others have ended: its lifespan ends the service that they need, too."""
        if tasks[1:]:
            await asyncio.wait(tasks[1:])
        servers[0].should_exit = True

    def reload() -> None:
        task = loop.create_task(service.reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, reload)
    while not all(server.started for server in servers) and not any(task.done() for task in tasks):
        await asyncio.sleep(0.01)
    _let_batches_finish(service.settings.threads)
    gc.set_threshold(10_000)  # requests make no cycles: a search for each 700 new objects would find nothing
    gc.freeze()  # what was loaded stays: a search for garbage in it would pause all requests for tens of milliseconds
    for name, listener in zip(names, listeners, strict=True):
        host, port = listener.getsockname()[:2] if listener.fileno() >= 0 else ("", 0)
        shown = f"[{host}]" if ":" in str(host) else host
        print(f"exitwise: serving {name}on {scheme}://{shown}:{port}", file=sys.stderr, flush=True)
    await asyncio.gather(*tasks)


def log_to_stderr() -> None:
    """Write the access log as lines of JSON, and other messages with the prefix `exitwise:`, to stderr.

    Warnings of uvicorn and of the multipart parser are left out: any client can cause them, and each such request has
    its line in the access log or no request at all.
    """
    layouts = {
        "exitwise.serving.access": ("%(message)s", logging.INFO),
        "exitwise.serving": ("exitwise: %(message)s", logging.INFO),
        "uvicorn.error": ("exitwise: %(message)s", logging.ERROR),
        "python_multipart": ("exitwise: %(message)s", logging.ERROR),
    }
    for name, (layout, level) in layouts.items():
        logger, handler = logging.getLogger(name), logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(layout))
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
    # What no layout contains need not be found for every line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
