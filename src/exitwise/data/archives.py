"""Archives of public datasets: addresses, checksums and downloads."""

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
    """Published file of a dataset, with its address and MD5 checksum."""

    name: str
    url: str
    md5: str

    def verify(self, folder: Path) -> Path:
        """Return the path of the archive in `folder`; raise InputError if its checksum does not match."""
        file = folder / self.name
        with file.open("rb") as stream:
            digest = md5(usedforsecurity=False)
            while block := stream.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != self.md5:
            raise InputError(
                f"{file} must have the MD5 checksum {self.md5}, but has {digest.hexdigest()}: "
                f"delete it and download it again from {self.url}"
            )
        return file


def dataset_not_found(root: Path, archives: Sequence[Archive], missing: str) -> InputError:
    """Return the error for a root without the dataset: the archives to put there and their address."""
    state = f"has no {missing}" if root.is_dir() else "does not exist"
    names = ", ".join(archive.name for archive in archives)
    source = archives[0].url.rsplit("/", 1)[0]
    return InputError(f"{root} {state}; put {names} there, from {source}/, or use --download")


def download(archives: Sequence[Archive], root: Path) -> None:
    """Download the archives that are missing in `root`, with a progress bar, and verify all checksums."""
    import pooch
    import requests

    for archive in archives:
        if (root / archive.name).is_file():
            archive.verify(root)
            continue
        try:
            with _silence(pooch.get_logger()), _show_progress(archive.name) as bar:
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
                f"download it elsewhere and put it at {root / archive.name}"
            ) from None
        except ValueError:  # raised by pooch if the checksum does not match
            raise InputError(
                f"the file from {archive.url} must have the MD5 checksum {archive.md5}, but has another: try again"
            ) from None


@contextmanager
def _silence(logger: logging.Logger) -> Iterator[None]:
    """Drop the lines that pooch logs to stderr: the progress bar and our errors replace them."""
    # A filter, not a level: the logger is outside the logging hierarchy, and its cached levels would stay.
    logger.addFilter(_drop_record)
    try:
        yield
    finally:
        logger.removeFilter(_drop_record)


def _drop_record(record: logging.LogRecord) -> bool:
    return False


@contextmanager
def _show_progress(name: str) -> Iterator["_ProgressBar | None"]:
    """Show a progress bar until the download ends or fails; yield None unless stderr is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    bar = _ProgressBar(name, console)
    try:
        yield bar
    finally:
        bar.stop()


class _ProgressBar:
    """Progress bar with the methods that pooch calls."""

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
        """Do nothing: pooch calls it only after a success, `_show_progress` calls `stop` in any case."""

    def stop(self) -> None:
        self._bar.stop()
