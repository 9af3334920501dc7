"""API keys, and the warning of a service that anyone can reach."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path

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
