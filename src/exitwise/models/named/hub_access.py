"""Access to the Hugging Face Hub: without a network, only its cache is read, and nothing is retried for a minute."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_PROXIES = ("https_proxy", "http_proxy", "all_proxy")


@contextmanager
def offline_without_network() -> Iterator[None]:
    """Use only the cache of the Hub in the block if the name of its server cannot be resolved."""
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    if not was_offline and not _has_proxy() and not _is_known(urlsplit(constants.ENDPOINT).hostname):
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def _has_proxy() -> bool:
    return any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES)


def _is_known(host: str | None) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
