"""Connect to a Ray cluster, or start one on this machine; errors of either are one line.

Ray prints warnings of its own, tries dead addresses for minutes, and sends usage statistics: here it does none of this.
"""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from exitwise.core.errors import InputError, first_line

LOCAL = "local"

_CONNECT_SECONDS = 5.0
_STATUS_SECONDS = 60  # `ray status` takes two on an idle machine
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or Ray warns of its own next default
    "RAY_DEDUP_LOGS_SKIP_REGEX": "(?s).",  # or Ray prints to stdout that a process died
}


class ClusterGoneError(InputError):
    """The cluster ended while a command used it."""


@contextmanager
def ray_cluster(address: str, num_cpus: int | None = None) -> Iterator[Any]:
    """Connect to the cluster at `address`, or start one for the time of the block; yield the module `ray`.

    Args:
        address: HOST:PORT of the head of a cluster that has this machine as a node, or "local".
        num_cpus: CPUs of a local cluster [default: all that this process may use].

    Raises:
        InputError: Ray is not installed, the address is none, or no cluster of the same versions answers there.
    """
    check_ray(address)
    if address != LOCAL:
        _check_cluster(address)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "CRITICAL"}
    if address == LOCAL:
        cpus = num_cpus or _count_cpus()
        options |= {"num_cpus": cpus, "include_dashboard": False}
    sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    except SystemExit as error:  # Ray's handler of SIGTERM exits with the number of the signal
        raise SystemExit(128 + signal.SIGTERM if error.code == signal.SIGTERM else error.code) from None
    except Exception as error:  # whatever Ray raises: versions that differ, no memory, no free port
        reason = first_line(error)
        with suppress(Exception):
            ray.shutdown()
        where = "start Ray on this machine" if address == LOCAL else f"connect to the Ray cluster at {address}"
        raise InputError(f"cannot {where}: {reason}") from None
    with _sigterm_handler(sigterm):
        try:
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def _sigterm_handler(handler: Any) -> Iterator[None]:
    """Handle SIGTERM by `handler`, not by Ray's, and keep the status with which it exits: Ray's calls make it 1."""
    exits: list[SystemExit] = []

    def handle(*arguments: Any) -> None:
        try:
            handler(*arguments)
        except SystemExit as error:
            exits.append(error)
            raise

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, handle if callable(handler) else handler)
    try:
        yield
    except SystemExit as error:
        raise (exits or [error])[0] from None
    finally:
        signal.signal(signal.SIGTERM, handler)


def check_ray(address: str) -> None:
    """Raise InputError unless Ray is installed and the address can be one."""
    if address != LOCAL and not _is_address(address):
        raise InputError(f"`ray` must be HOST:PORT of a cluster's head, or local, but got {address!r}")
    if importlib.util.find_spec("ray") is None:
        raise InputError("`ray` needs Ray: pip install 'exitwise[ray]'")


def _is_address(text: str) -> bool:
    match = re.fullmatch(r"(?:[^\s:/]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", text)
    return match is not None and 0 < int(match[1]) < 1 << 16


def is_listening(address: str) -> bool:
    """Return whether something accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
        return True
    return False


def _count_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_cluster(address: str) -> None:
    """Raise InputError unless a Ray cluster answers at `address`: `ray.init` would try for minutes, and print."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise InputError(f"no Ray cluster answers at {address}: {error.strerror or error}") from None
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    environment = {**os.environ, "RAY_py_gcs_connect_timeout_s": "5"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STATUS_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        raise InputError(f"what listens at {address} is no Ray cluster: it does not answer `ray status`") from None
    if done.returncode:
        output = done.stdout + done.stderr
        lines = [line.strip() for line in output.splitlines() if "mismatch" in line]
        reason = lines[0] if lines else "`ray status` fails"
        if "AuthToken" in output:
            reason = "it wants its token, by RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH in the environment"
        raise InputError(f"what listens at {address} is no usable Ray cluster: {reason}")
