"""Files of public data sets: where they come from, what they must be, and how to get them."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import md5
from pathlib import Path
from typing import TYPE_CHECKING

from exitwise.core.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Archive:
    """A file that a data set's makers offer."""

    name: str
    url: str
    md5: str

    def verify(self, folder: Path) -> Path:
        """The file in a folder, refused where its checksum is another: cut off, changed, or another version."""
        file = folder / self.name
        with file.open("rb") as stream:
            digest = md5(usedforsecurity=False)
            while block := stream.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != self.md5:
            raise InputError(
                f"{file} must have the MD5 checksum {self.md5}, but has {digest.hexdigest()}: "
                f"remove it and get it again from {self.url}"
            )
        return file


def dataset_not_found(root: Path, archives: Sequence[Archive], what: str) -> InputError:
    """The error for a root without a data set: what to put there, and from where."""
    state = f"has no {what}" if root.is_dir() else "does not exist"
    wanted = ", ".join(archive.name for archive in archives)
    source = archives[0].url.rsplit("/", 1)[0]
    return InputError(f"{root} {state}; put {wanted} there, from {source}/, or use --download")


def download(archives: Sequence[Archive], root: Path) -> None:
    """Get the files that are not there yet, with a progress bar and a check of each."""
    import pooch
    import requests

    for archive in archives:
        if (root / archive.name).is_file():
            archive.verify(root)
            continue
        try:
            with _quiet(pooch.get_logger()), _shown(archive.name) as bar:
                pooch.retrieve(
                    archive.url,
                    f"md5:{archive.md5}",
                    fname=archive.name,
                    path=root,
                    downloader=pooch.HTTPDownloader(progressbar=bar, timeout=30),
                )
        except requests.RequestException as error:
            reason = type(error).__name__
            raise InputError(
                f"{archive.url} could not be downloaded ({reason}): "
                f"get it elsewhere and put it at {root / archive.name}"
            ) from None
        except ValueError:  # pooch's word for another checksum
            raise InputError(f"{archive.url} gave a file without the MD5 checksum {archive.md5}: try again") from None


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Without the lines that pooch logs to stderr by itself: the bar says as much, and our errors say more."""
    # Not by its level: the logger is outside the tree of loggers, where a level that was asked for once is kept.
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


@contextmanager
def _shown(name: str) -> Iterator["_Bar | None"]:
    """A bar for people, gone when the download ends, however it does; nothing where nobody watches."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    bar = _Bar(name, console)
    try:
        yield bar
    finally:
        bar.stop()


class _Bar:
    """A progress bar with the methods that pooch calls."""

    def __init__(self, name: str, console: "Console") -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task(name, total=None)
        self._bar.start()

    @property
    def total(self) -> int:
        return int(self._bar.tasks[0].total or 0)

    @total.setter
    def total(self, value: int) -> None:
        self._bar.update(self._task, total=value)

    def update(self, size: int) -> None:
        self._bar.advance(self._task, size)

    def reset(self) -> None:
        self._bar.reset(self._task, total=self.total or None)

    def close(self) -> None:
        """Pooch closes it where all went well; `stop` comes in any case."""

    def stop(self) -> None:
        self._bar.stop()
