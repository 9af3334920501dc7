"""The pictures behind the points, in one sheet that fits into the page."""

import io
from base64 import b64encode
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from exitwise import data
from exitwise.commands import pictures
from exitwise.errors import InputError
from exitwise.run import Run
from exitwise.trace import Split

_LARGEST = 3_500_000  # bytes of a sheet; a page may have 8 MB, and base64 adds a third
_SIDES = (96, 64, 48, 32)  # of a picture in the sheet, if the larger ones take too much
_PLAIN = 500_000  # pixels that a sheet without loss may have
_QUALITY = 85


@dataclass(frozen=True, eq=False)
class Sheet:
    """m pictures, row by row in `columns` squares of `side` pixels each."""

    pixels: Tensor  # (m, channels, side, side) uint8
    columns: int
    content: bytes
    kind: str  # png or jpeg

    @property
    def side(self) -> int:
        return int(self.pixels.shape[2])

    @property
    def shape(self) -> dict[str, int]:
        """What the page has to know to find a picture."""
        return {"columns": self.columns, "rows": ceil(len(self.pixels) / self.columns), "side": self.side}

    def uri(self) -> str:
        return f"data:image/{self.kind};base64,{b64encode(self.content).decode()}"


def sheet(run: Run, root: Path | None, test: Split, points: Tensor) -> Sheet:
    """The pictures of some test samples, from the run's own data set; refuses one that is another."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise InputError("pictures need Pillow: pip install 'exitwise[report]'") from None
    if test.index is None:
        raise InputError("the trace does not say where its samples lie in the data set")
    found = pictures(run, root).test
    places = {position: place for place, position in enumerate(found.index.tolist())}
    wanted = [places.get(position, -1) for position in test.index[points].tolist()]
    positions = torch.tensor(wanted, dtype=torch.int64)
    if -1 in wanted or not torch.equal(found.labels[positions], test.labels[points]):
        raise InputError("its test pictures are not those that the run was made with")
    return _fitted(found.pixels_of(positions, None, None))


def missing(run: Run, reason: InputError) -> str:
    """Why there are no pictures, and how to get them."""
    name = run.about["data"]["name"]
    known = data.DATA_SETS.get(name)
    said = f"No pictures: {reason}."
    if known is not None and known.archives:
        files = ", ".join(archive.name for archive in known.archives[:1])
        said += f" Put {name} as it is published ({files}, packed or not) into a folder DIR, and"
    return f"{said} run `exitwise report {run.directory.name} --root DIR`." if known else said


def _fitted(pixels: Tensor) -> Sheet:
    """As large as the page has room for."""
    side = max(pixels.shape[2:])
    plain = pixels.shape[0] * side * side <= _PLAIN
    for target in (side, *(smaller for smaller in _SIDES if smaller < side)):
        square = _square(pixels, target)
        columns = ceil(len(square) ** 0.5)
        content = _encoded(square, columns, "png" if plain else "jpeg")
        if len(content) <= _LARGEST:
            break
    return Sheet(square, columns, content, "png" if plain else "jpeg")


def _square(pixels: Tensor, side: int) -> Tensor:
    """Pictures scaled to fit into squares, in their middle. Sides are multiples of eight: JPEG's blocks then keep
    neighbours apart."""
    height, width = pixels.shape[2:]
    factor = side / max(height, width)
    if factor < 1:
        size = (max(1, round(height * factor)), max(1, round(width * factor)))
        scaled = torch.nn.functional.interpolate(pixels.float(), size=size, mode="area")
        pixels = scaled.round().clamp(0, 255).to(torch.uint8)
    height, width = pixels.shape[2:]
    whole = ceil(side / 8) * 8
    top, left = (whole - height) // 2, (whole - width) // 2
    return torch.nn.functional.pad(pixels, (left, whole - width - left, top, whole - height - top))


def _encoded(pixels: Tensor, columns: int, kind: str) -> bytes:
    from PIL import Image

    m, channels, side, _ = pixels.shape
    rows = ceil(m / columns)
    grid = torch.zeros(rows * columns, channels, side, side, dtype=torch.uint8)
    grid[:m] = pixels
    whole = (
        grid.view(rows, columns, channels, side, side).permute(0, 3, 1, 4, 2).reshape(rows * side, columns * side, -1)
    )
    array = whole.numpy()
    picture = Image.fromarray(array[:, :, 0] if channels == 1 else array[:, :, :3])
    content = io.BytesIO()
    options = {"quality": _QUALITY, "subsampling": 0} if kind == "jpeg" else {"optimize": True}
    picture.save(content, format=kind.upper(), **options)
    return content.getvalue()
