"""API keys, and the warning of a service that anyone can reach."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from exitwise.core.errors import InputError

_MIN_LENGTH = 16  # characters of a key
# Probes have no key. Nor has the browser that opens the page, which holds no data; it asks for the key itself.
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready", "/")


class ApiKeys:
    """Keys that clients may use, kept as SHA-256 digests.

    Args:
        keys: The keys, each of at least 16 characters.

    Raises:
        InputError: If there are none, or one is too short or not printable ASCII.

    Example:
        >>> from exitwise.serving.security import ApiKeys
        >>> keys = ApiKeys(["correct-horse-battery-staple"])
        >>> keys.accept("correct-horse-battery-staple"), keys.accept("wrong")
        (True, False)
    """

    def __init__(self, keys: Iterable[str]) -> None:
        listed = list(keys)
        for number, key in enumerate(listed, start=1):
            if len(key) < _MIN_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
                raise InputError(f"API key {number} must be at least {_MIN_LENGTH} printable ASCII characters")
        if not listed:
            raise InputError("there must be at least one API key")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in listed]

    @classmethod
    def read(cls, path: Path) -> "ApiKeys":
        """Read a file with a key per line; empty lines and lines that begin with # are skipped."""
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise InputError(f"`api_key_file` {path} cannot be read: {reason}") from None
        try:
            return cls(line for line in lines if line and not line.startswith("#"))
        except InputError as error:
            raise InputError(f"`api_key_file` {path}: {error}") from None

    def accept(self, key: str) -> bool:
        """Return whether a key is one of these; the time does not depend on which, or on where it differs."""
        digest = hashlib.sha256(key.encode(errors="replace")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_is_allowed(header: str, hosts: Sequence[str]) -> bool:
    """Return whether the header `Host` names the service.

    A page whose name was pointed to this machine after it was loaded ("DNS rebinding") sends its own name.

    Args:
        header: Value of the header, with or without a port.
        hosts: Names of the service; one on loopback stands for all of them. None, or "*", allow every name.

    Example:
        >>> from exitwise.serving.security import host_is_allowed
        >>> host_is_allowed("127.0.0.1:8000", ["localhost"]), host_is_allowed("evil.example", ["localhost"])
        (True, False)
    """
    if not hosts or "*" in hosts:
        return True
    name = _host_name(header)
    return name in hosts or (is_loopback(name) and any(map(is_loopback, hosts)))


def origin_is_allowed(origin: str, header: str, hosts: Sequence[str], cors: Sequence[str]) -> bool:
    """Return whether a browser may send a request for a page of this origin.

    A page can send some requests to any address without asking; only their answers are hidden from it.

    Args:
        origin: Value of the header `Origin`.
        header: Value of the header `Host`; pages of the service itself are allowed.
        hosts: Names of the service, which a proxy may replace in the header. Ports of loopback belong to others, too.
        cors: Origins that are allowed besides, or "*".
    """
    if "*" in cors or origin in cors:
        return True
    authority = origin.partition("://")[2]
    name = _host_name(authority)
    return bool(authority) and (authority.lower() == header.lower() or (name in hosts and not is_loopback(name)))


def _host_name(authority: str) -> str:
    """Return the name or address in lower case, without the port and the brackets of IPv6; empty if it is invalid."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def describe_exposure(host: str, has_keys: bool, has_tls: bool) -> str | None:
    """Return the warning of a service that others can reach without a key or without TLS; None if it is safe."""
    if is_loopback(host) or (has_keys and has_tls):
        return None
    if not has_keys:
        tls = "" if has_tls else ", and nothing is encrypted"
        return (
            f"anyone who reaches {host} can classify images, and read metrics and metadata of the model{tls}: "
            f"use --api-key-file, or --host 127.0.0.1"
        )
    return f"keys, images and answers travel to {host} without encryption: use --tls-cert and --tls-key"


def describe_open_metrics(host: str, port: int | None) -> str | None:
    """Return the warning of metrics on a port of their own that others can reach; None if there is none."""
    if port is None or is_loopback(host):
        return None
    return f"anyone who reaches {host} can read the metrics on port {port}, also without a key"
