"""Settings of a service, checked once."""

import re
from dataclasses import dataclass
from typing import Literal

from exitwise.core.checks import check_choice, check_integer, check_number
from exitwise.core.errors import InputError
from exitwise.serving.strategies import STRATEGIES

Strategy = Literal["deepest", "oldest", "fullest"]


@dataclass(frozen=True)
class Settings:
    """Settings of a service.

    Args:
        name: Name of the model in URLs and answers.
        slo: Latency objective in seconds: under load the service uses cheaper policies to meet it.
        threads: Number of compute threads.
        floor: Least accuracy on validation samples that the service may trade for speed, as a fraction.
        budget: Largest budget that the service uses, in the unit of the bundle [default: that of its family].
        strategy: Stage that a free thread runs next: deepest, oldest or fullest.
        max_batch: Largest batch, in samples.
        max_queue: Largest number of images that are queued or running.
        max_images: Largest number of images per request.
        max_body: Largest body of a request, in bytes.
        max_pixels: Largest number of pixels of an image file.
        timeout: Seconds after which a request without its own deadline is given up.
        body_timeout: Seconds within which a body must arrive.
        cors: Origins whose pages may call the service, or "*".
        hosts: Names of the service in the header `Host`, of which one on loopback stands for all of them; none, or "*",
            for any name.

    Raises:
        InputError: If a value is out of range.

    Example:
        >>> from exitwise.serving.settings import Settings
        >>> Settings(slo=0.02).max_queue
        1024
    """

    name: str = "model"
    slo: float = 0.05
    threads: int = 1
    floor: float | None = None
    budget: float | None = None
    strategy: Strategy = "deepest"
    max_batch: int = 32
    max_queue: int = 1024
    max_images: int = 256
    max_body: int = 32 << 20
    max_pixels: int = 25_000_000
    timeout: float = 30.0
    body_timeout: float = 10.0
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name):
            raise InputError(f"`name` must be letters, digits, dots, - and _, but got {self.name!r}")
        check_number("slo", self.slo, 1e-3, 3600)
        for name in ("threads", "max_batch", "max_queue", "max_images", "max_body", "max_pixels"):
            check_integer(name, getattr(self, name), 1, 1 << 40)
        check_integer("max_images", self.max_images, 1, 1 << 16)
        for name in ("timeout", "body_timeout"):
            check_number(name, getattr(self, name), 1e-3, 86400)
        if self.floor is not None:
            check_number("floor", self.floor, 0, 1)
        if self.budget is not None:
            check_number("budget", self.budget, 0)
        check_choice("strategy", self.strategy, STRATEGIES)
        for origin in self.cors:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise InputError(f"`cors` must be origins such as https://example.org, or *, but got {origin!r}")
        for host in self.hosts:
            if host != host.lower() or not re.fullmatch(r"\*|[^\s/\[\]@]+", host):
                raise InputError(f"`hosts` must be names such as api.example.org, or *, but got {host!r}")


def parse_duration(name: str, text: str) -> float:
    """Return seconds from text such as "50ms" or "2s".

    Raises:
        InputError: If the text is not a duration; the message names the argument `name`.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s)\s*", text)
    if match is None:
        raise InputError(f"`{name}` must be like 50ms or 2s, but got {text!r}")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def parse_size(name: str, text: str) -> int:
    """Return bytes from text such as "32MB", "500KB" or "1048576".

    Raises:
        InputError: If the text is not a size; the message names the argument `name`.
    """
    match = re.fullmatch(r"\s*([0-9]{1,12})\s*(B|KB|MB|GB)?\s*", text, flags=re.IGNORECASE)
    if match is None:
        raise InputError(f"`{name}` must be like 32MB, but got {text!r}")
    return int(match[1]) << {"B": 0, "KB": 10, "MB": 20, "GB": 30}[(match[2] or "B").upper()]
