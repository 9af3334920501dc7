"""The service on Ray Serve: replicas of the application that Ray starts, scales, checks, updates and replaces.

`exitwise serve --ray` runs it. `app` is for Ray's own commands: `serve run exitwise.serving.ray:app bundle=/bundle`.
"""

import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from starlette.applications import Starlette

from exitwise.core.checks import check_integer
from exitwise.core.errors import InputError, first_line, shorten
from exitwise.core.ray_cluster import LOCAL, is_listening, ray_cluster
from exitwise.serving import application
from exitwise.serving.metrics import Metrics
from exitwise.serving.ray_metrics import MetricsExporter
from exitwise.serving.security import ApiKeys, describe_exposure
from exitwise.serving.server import Address, log_to_stderr
from exitwise.serving.service import LoadedBundle
from exitwise.serving.settings import Settings, parse_duration, parse_size

_NAME = "exitwise"  # of the Ray Serve application and of its deployment
_UPSCALE_SECONDS, _DOWNSCALE_SECONDS = 5.0, 60.0  # of more or less load, until replicas are added or removed
_LOOK_BACK_SECONDS = 15.0  # over which the load is averaged; Ray measures it every 10 seconds
_HEALTH_PERIOD, _HEALTH_TIMEOUT = 2.0, 10.0  # seconds
_CONTROLLER = "SERVE_CONTROLLER_ACTOR"  # name of the actor that Ray Serve has on a cluster
_CLUSTER_CHECK_SECONDS = 5.0
_SURGE_PERCENT = 1  # rounded up: one more replica during an update, so that a former one ends when a new one is ready


@dataclass(frozen=True)
class Scale:
    """Number of replicas.

    Args:
        replicas: Replicas, or their least number if there is a largest one.
        max_replicas: Largest number of replicas; with it, Ray adds and removes replicas by the number of requests that
            wait or are answered.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> from exitwise.serving.ray import Scale
        >>> Scale(2, max_replicas=1)
        Traceback (most recent call last):
        exitwise.core.errors.InputError: `max_replicas` must be a whole number of at least 2, but got 1
    """

    replicas: int = 1
    max_replicas: int | None = None

    def __post_init__(self) -> None:
        check_integer("replicas", self.replicas, 1)
        if self.max_replicas is not None:
            check_integer("max_replicas", self.max_replicas, self.replicas)

    @property
    def largest(self) -> int:
        """The largest number of replicas."""
        return self.max_replicas or self.replicas

    def options(self, settings: Settings) -> dict[str, Any]:
        """Return the options of the deployment."""
        if self.max_replicas is None:
            return {"num_replicas": self.replicas}
        return {
            "autoscaling_config": {
                "min_replicas": self.replicas,
                "max_replicas": self.max_replicas,
                # A quarter of a full batch per thread: beyond it a replica soon has to use cheaper policies.
                "target_ongoing_requests": max(1.0, settings.max_batch * settings.threads / 4),
                "look_back_period_s": _LOOK_BACK_SECONDS,
                "upscale_delay_s": _UPSCALE_SECONDS,
                "downscale_delay_s": _DOWNSCALE_SECONDS,
            }
        }


def app(args: Mapping[str, Any]) -> Any:
    """Build the Ray Serve application, for `serve run`, `serve deploy` and KubeRay.

    Args:
        args: `bundle`, and optionally `replicas`, `max_replicas`, `api_key_file` and fields of `Settings`; values are
            numbers, or text as the command takes it, such as `slo: 50ms`.

    Returns:
        The application, whose replicas load the bundle from the same path on their nodes.

    Raises:
        InputError: If a value is not usable, or Ray Serve is not installed.

    Example:
        >>> from exitwise.serving.ray import app
        >>> app({"slo": "50ms"})
        Traceback (most recent call last):
        exitwise.core.errors.InputError: `bundle` must be the folder of a bundle
    """
    values = dict(args)
    bundle, keys = values.pop("bundle", None), values.pop("api_key_file", None)
    if not isinstance(bundle, str):
        raise InputError("`bundle` must be the folder of a bundle")
    numbers = {name: _parse_count(name, values.pop(name)) for name in ("replicas", "max_replicas") if name in values}
    settings = Settings(**{name: _parse_field(name, value) for name, value in values.items()})
    return _build(Path(bundle), settings, Scale(**numbers), None if keys is None else ApiKeys.read(Path(keys)))


def _parse_count(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise InputError(f"`{name}` must be a whole number, but is {shorten(value)}") from None


def _parse_field(name: str, value: Any) -> Any:
    """Return a field of `Settings` from a number or text."""
    defaults = asdict(Settings())
    if name not in defaults:
        known = ", ".join(defaults)
        raise InputError(f"`args` may have bundle, replicas, max_replicas, api_key_file, {known}, not {shorten(name)}")
    if name in ("cors", "hosts"):
        return tuple(value.split(",")) if isinstance(value, str) else tuple(value)
    if not isinstance(value, str):
        return value
    if name in ("slo", "timeout", "body_timeout"):
        return parse_duration(name, value)
    if name == "max_body":
        return parse_size(name, value)
    if isinstance(defaults[name], int):
        return _parse_count(name, value)
    if name in ("floor", "budget"):
        try:
            return float(value)
        except ValueError:
            raise InputError(f"`{name}` must be a number, but is {shorten(value)}") from None
    return value


class Replica:
    """Class of the replicas, which answers the health checks of Ray; the application answers the requests."""

    app: Starlette  # set by Ray Serve: what `make_app` returns

    def check_health(self) -> None:
        """Raise an error if no answer would come: Ray then replaces the replica."""
        if not self.app.state.service.is_alive:
            raise RuntimeError("a compute thread has ended")


def _build(bundle: Path, settings: Settings, scale: Scale, api_keys: ApiKeys | None) -> Any:
    serve = _import_serve()
    folder = bundle.absolute()
    LoadedBundle(folder, settings, Metrics()).warm_up()  # refused here if it does not run, before any replica loads it

    def make_app() -> Starlette:
        from ray.serve.metrics import Gauge

        log_to_stderr()  # Ray keeps it in a file of the replica
        built = application.app(folder, settings, api_keys=api_keys, metrics=False, page=False)
        MetricsExporter(built.state.service, Gauge).start()
        return built

    options = scale.options(settings) | {
        "name": _NAME,
        "max_surge_percent": _SURGE_PERCENT,
        "ray_actor_options": {"num_cpus": settings.threads},
        # The queue of the service refuses requests long before, with `Retry-After`.
        "max_ongoing_requests": 2 * settings.max_queue,
        "max_queued_requests": settings.max_queue,
        "graceful_shutdown_timeout_s": settings.timeout + settings.body_timeout,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": _HEALTH_PERIOD,
        "health_check_timeout_s": _HEALTH_TIMEOUT,
    }
    return serve.deployment(**options)(serve.ingress(make_app)(Replica)).bind()


def _import_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:  # Ray itself, or a package of its extra `serve`
        raise InputError(f"`ray` needs {error.name}: pip install 'exitwise[serve,ray-serve]'") from None
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # what goes wrong is raised, too
    return serve


def run(
    bundle: Path, settings: Settings, address: Address, api_keys: ApiKeys | None, cluster: str, scale: Scale
) -> None:
    """Serve a bundle with replicas on a Ray cluster, until SIGTERM or SIGINT; SIGHUP loads a changed bundle.

    Args:
        bundle: Folder of the bundle, which every node sees under this path.
        settings: Limits and objectives of each replica.
        address: Where Ray's proxies listen, with the files for TLS.
        api_keys: Keys that clients must have.
        cluster: HOST:PORT of the head of the cluster, or "local" for one on this machine that ends with the service.
        scale: Number of replicas.

    Raises:
        InputError: If the bundle, the settings, the address or the cluster are not usable.
    """
    serve, target = _import_serve(), _build(bundle, settings, scale, api_keys)
    _check_tls(address)
    if cluster == LOCAL:
        _check_port(address)
    if warning := describe_exposure(address.host, api_keys is not None, address.tls_cert is not None):
        print(f"exitwise: warning: {warning}", file=sys.stderr)
    cpus = (scale.largest + 1) * settings.threads  # one more for updates
    with ray_cluster(cluster, cpus), _Signals() as signals:
        _check_not_serving(cluster)
        try:
            with _short_errors("start the service on Ray"), signals.interrupting():
                serve.start(http_options=_http_options(address, settings), proxy_location="EveryNode")
                serve.run(target, name=_NAME, route_prefix="/")
            scheme = "http" if address.tls_cert is None else "https"
            host = f"[{address.host}]" if ":" in address.host else address.host
            print(f"exitwise: serving on {scheme}://{host}:{address.port}", file=sys.stderr, flush=True)
            while (number := signals.wait()) is None or number == signal.SIGHUP:
                if number == signal.SIGHUP:
                    with signals.interrupting():
                        _reload(serve, bundle, settings, scale, api_keys)
                elif cluster != LOCAL and not is_listening(cluster):
                    raise InputError(f"the Ray cluster at {cluster} has ended")
        except _InterruptedCall:
            pass
        print("exitwise: answering what was accepted, then ending; a second signal ends at once", file=sys.stderr)
        with _short_errors("end the service on Ray"):
            serve.delete(_NAME)  # waits for the replicas; a cluster of this machine ends with the block
            if cluster != LOCAL:
                serve.shutdown()


def _check_not_serving(cluster: str) -> None:
    """Raise InputError if Ray Serve runs on the cluster: it would keep its own address, without our TLS."""
    from ray.util import list_named_actors

    if any(actor["name"] == _CONTROLLER for actor in list_named_actors(all_namespaces=True)):
        raise InputError(
            f"Ray Serve already runs on the cluster at {cluster}, with its own address: end it with `serve shutdown`, "
            "or add exitwise.serving.ray:app to it with `serve deploy`"
        )


def _http_options(address: Address, settings: Settings) -> dict[str, Any]:
    options: dict[str, Any] = {"host": address.host, "port": address.port}
    # Longer than any answer of the service: this is for a replica that does not answer at all.
    options["request_timeout_s"] = settings.timeout + settings.body_timeout + _HEALTH_TIMEOUT
    if address.tls_cert is not None:
        options |= {"ssl_certfile": str(address.tls_cert), "ssl_keyfile": str(address.tls_key)}
    return options


def _reload(serve: Any, bundle: Path, settings: Settings, scale: Scale, api_keys: ApiKeys | None) -> None:
    """Replace the replicas one after the other by some with the changed bundle; one that is not usable is refused."""
    try:
        with _short_errors("update the service on Ray"):
            serve.run(_build(bundle, settings, scale, api_keys), name=_NAME, route_prefix="/")
    except (InputError, OSError) as error:
        print(f"exitwise: the bundle was not reloaded, the former one stays: {error}", file=sys.stderr, flush=True)
        return
    print("exitwise: the bundle was reloaded", file=sys.stderr, flush=True)


def _check_tls(address: Address) -> None:
    if address.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(address.tls_cert, address.tls_key)
    except (OSError, ValueError) as error:
        raise InputError(f"`tls_cert` and `tls_key` are not usable: {first_line(error)}") from None


def _check_port(address: Address) -> None:
    if address.port == 0:
        raise InputError("`port` must be at least 1 with Ray, but is 0")
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"`host` {address.host} with `port` {address.port} cannot be opened: {reason}") from None


@contextmanager
def _short_errors(action: str) -> Iterator[None]:
    """Turn whatever Ray raises into one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"cannot {action}: {first_line(error)}") from None


class _InterruptedCall(BaseException):
    """A signal to end came during a call that may take long; no `except Exception` stops it."""


class _Signals:
    """Signals of the command while it is entered; a second one to end does so at once."""

    _numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self._received: SimpleQueue[int] = SimpleQueue()
        self._ending = self._interrupts = False
        self._former: list[Any] = []

    def __enter__(self) -> "_Signals":
        self._former = [signal.signal(number, self._note) for number in self._numbers]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self._numbers, self._former, strict=True):
            signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        if number != signal.SIGHUP:
            if self._ending:
                os._exit(128 + number)
            self._ending = True
            if self._interrupts:
                raise _InterruptedCall
        self._received.put(number)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a signal to end interrupt the calls of the block."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def wait(self) -> int | None:
        """Wait for the next signal, for some seconds."""
        with suppress(Empty):
            return self._received.get(timeout=_CLUSTER_CHECK_SECONDS)
        return None
