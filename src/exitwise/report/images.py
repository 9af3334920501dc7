"""The images of the points, in one sprite sheet that fits into the page."""

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
from exitwise.core.image_files import require_pillow
from exitwise.runs.data import load_splits
from exitwise.runs.run import Run

_MAX_BYTES = 3_500_000  # of the encoded sheet; a page may have 8 MB, and base64 adds a third
_SIDES = (96, 64, 48, 32)  # pixels per image, tried in this order
_QUALITIES = (85, 60, 40, 20)  # of JPEG; lower ones are tried at the smallest side only
_MAX_PNG_PIXELS = 500_000  # larger sheets are JPEG


class ImagesUnavailableError(InputError):
    """The run's dataset was not found, or is a different one."""


@dataclass(frozen=True, eq=False)
class SpriteSheet:
    """m images in row-major order, `columns` per row, in squares of `side` pixels."""

    pixels: Tensor  # (m, channels, side, side) uint8
    columns: int
    content: bytes
    kind: str  # png or jpeg

    @property
    def side(self) -> int:
        """Width and height of an image in pixels."""
        return int(self.pixels.shape[2])

    @property
    def shape(self) -> dict[str, int]:
        """Columns, rows and side of the sheet, by which the page finds an image."""
        return {"columns": self.columns, "rows": ceil(len(self.pixels) / self.columns), "side": self.side}

    def uri(self) -> str:
        """Return the encoded sheet as a data URI."""
        return f"data:image/{self.kind};base64,{b64encode(self.content).decode()}"


def make_sprite_sheet(run: Run, root: Path | None, test: Split, points: Tensor) -> SpriteSheet:
    """Load the images of the test samples `points` (m,) from the run's dataset; raise an error if it differs."""
    require_pillow("report")
    if test.index is None:
        raise InputError("the trace does not contain the positions of its samples in the dataset")
    try:
        test_set, held_out = load_splits(run, root).test, data.HoldOut.load(run.split_file).test
    except InputError as error:
        raise ImagesUnavailableError(str(error)) from None
    # A copy of the dataset may have another order; a held-out part keeps its own.
    index = test_set.index if held_out is None else held_out.index
    row_of = {position: row for row, position in enumerate(index.tolist())}
    rows = torch.tensor([row_of.get(position, -1) for position in test.index[points].tolist()], dtype=torch.int64)
    if -1 in rows or not torch.equal(test_set.labels[rows], test.labels[points]):
        source = root or run.metadata["data"].get("root") or run.metadata["data"]["name"]
        raise ImagesUnavailableError(f"the test images in {source} are not those that the run was created with")
    return _fit_into_page(test_set.pixels_of(rows, None, None))


def images_unavailable_note(run: Run, reason: InputError) -> str:
    """Return a note that says why there are no images and how to add them."""
    note = f"No images: {reason}."
    if not isinstance(reason, ImagesUnavailableError):
        return note
    name = run.metadata["data"]["name"]
    archives = data.DATA_SETS[name].archives if name in data.DATA_SETS else ()
    files = f" ({archives[0].name}, packed or unpacked)" if archives else ""
    directory = shlex.quote(run.name)
    return f"{note} Put {name}{files} into a folder DIR, then run: exitwise report {directory} --root DIR"


def _fit_into_page(pixels: Tensor) -> SpriteSheet:
    """Encode the images (m, channels, height, width) as one sheet: smaller and then coarser, until it fits."""
    side = max(pixels.shape[2:])
    kind = "png" if len(pixels) * side * side <= _MAX_PNG_PIXELS else "jpeg"
    sides = [side, *(smaller for smaller in _SIDES if smaller < side)]
    attempts = [(s, _QUALITIES[0]) for s in sides] + [(sides[-1], quality) for quality in _QUALITIES[1:]]
    for target, quality in attempts:
        square = _resize_to_square(pixels, target)
        columns = ceil(len(square) ** 0.5)
        content = _encode_sheet(square, columns, kind, quality)
        if len(content) <= _MAX_BYTES:
            break
    return SpriteSheet(square, columns, content, kind)


def _resize_to_square(pixels: Tensor, side: int) -> Tensor:
    """Scale images down to fit into squares, and center them.

    The squares' sides are multiples of eight, so that JPEG's blocks do not mix neighboring images.
    """
    height, width = pixels.shape[2:]
    factor = side / max(height, width)
    if factor < 1:
        size = (max(1, round(height * factor)), max(1, round(width * factor)))
        scaled = torch.nn.functional.interpolate(pixels.float(), size=size, mode="area")
        pixels = scaled.round().clamp(0, 255).to(torch.uint8)
    height, width = pixels.shape[2:]
    padded = ceil(side / 8) * 8
    top, left = (padded - height) // 2, (padded - width) // 2
    return torch.nn.functional.pad(pixels, (left, padded - width - left, top, padded - height - top))


def _encode_sheet(pixels: Tensor, columns: int, kind: str, quality: int) -> bytes:
    from PIL import Image

    m, channels, side, _ = pixels.shape
    rows = ceil(m / columns)
    cells = torch.zeros(rows * columns, channels, side, side, dtype=torch.uint8)
    cells[:m] = pixels
    grid = cells.view(rows, columns, channels, side, side).permute(0, 3, 1, 4, 2)
    array = grid.reshape(rows * side, columns * side, -1).numpy()
    sheet = Image.fromarray(array[:, :, 0] if channels == 1 else array[:, :, :3])
    content = io.BytesIO()
    options = {"quality": quality, "subsampling": 0} if kind == "jpeg" else {"optimize": True}
    sheet.save(content, format=kind.upper(), **options)
    return content.getvalue()
