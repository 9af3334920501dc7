"""The pictures behind the points, in one sheet that fits into the page."""

import io
import shlex
from base64 import b64encode
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from exitwise import data
from exitwise.calibration.trace import Split
from exitwise.core.errors import InputError
from exitwise.data.folders import require_pillow
from exitwise.runs.collect import load_splits
from exitwise.runs.run import Run

_LARGEST = 3_500_000  # bytes of a sheet; a page may have 8 MB, and base64 adds a third
_SIDES = (96, 64, 48, 32)  # of a picture in the sheet, if the larger ones take too much
_QUALITIES = (85, 60, 40, 20)  # of JPEG, if even the smallest do
_PLAIN = 500_000  # pixels that a sheet without loss may have


class ImagesUnavailableError(InputError):
    """The run's data set is not where it was looked for."""


@dataclass(frozen=True, eq=False)
class SpriteSheet:
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


def make_sprite_sheet(run: Run, root: Path | None, test: Split, points: Tensor) -> SpriteSheet:
    """The pictures of some test samples, from the run's own data set; refuses one that is another."""
    require_pillow("report")
    if test.index is None:
        raise InputError("the trace does not say where its samples lie in the data set")
    try:
        found, held = load_splits(run, root).test, data.HoldOut.load(run.split_file).test
    except InputError as error:
        raise ImagesUnavailableError(str(error)) from None
    # A copy of the data set may have another order; parts held out keep theirs.
    known = found.index if held is None else held.index
    places = {position: place for place, position in enumerate(known.tolist())}
    wanted = [places.get(position, -1) for position in test.index[points].tolist()]
    positions = torch.tensor(wanted, dtype=torch.int64)
    if -1 in wanted or not torch.equal(found.labels[positions], test.labels[points]):
        where = root or run.metadata["data"].get("root") or run.metadata["data"]["name"]
        raise ImagesUnavailableError(f"the test pictures in {where} are not those that the run was made with")
    return _fitted(found.pixels_of(positions, None, None))


def images_unavailable_note(run: Run, reason: InputError) -> str:
    """Why there are no pictures, and how to get them."""
    said = f"No pictures: {reason}."
    if not isinstance(reason, ImagesUnavailableError):
        return said
    name = run.metadata["data"]["name"]
    archives = data.DATA_SETS[name].archives if name in data.DATA_SETS else ()
    files = f" ({archives[0].name}, packed or not)" if archives else ""
    place = shlex.quote(run.name)
    return f"{said} Put {name} as it is published{files} into a folder DIR, and run: exitwise report {place} --root DIR"


def _fitted(pixels: Tensor) -> SpriteSheet:
    """As good as the page has room for: smaller first, then coarser."""
    side = max(pixels.shape[2:])
    kind = "png" if len(pixels) * side * side <= _PLAIN else "jpeg"
    sides = [side, *(smaller for smaller in _SIDES if smaller < side)]
    tries = [(each, _QUALITIES[0]) for each in sides] + [(sides[-1], each) for each in _QUALITIES[1:]]
    for target, quality in tries:
        square = _square(pixels, target)
        columns = ceil(len(square) ** 0.5)
        content = _encoded(square, columns, kind, quality)
        if len(content) <= _LARGEST:
            break
    return SpriteSheet(square, columns, content, kind)


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


def _encoded(pixels: Tensor, columns: int, kind: str, quality: int) -> bytes:
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
    options = {"quality": quality, "subsampling": 0} if kind == "jpeg" else {"optimize": True}
    picture.save(content, format=kind.upper(), **options)
    return content.getvalue()
