"""Decode image files with Pillow, which is imported on use. Does not import torch."""

import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exitwise.core.errors import InputError
from exitwise.core.predictions import Array
from exitwise.core.preprocessing import Preprocessing

if TYPE_CHECKING:
    from PIL import Image

PILLOW, DRAFT = DECODERS = ("pillow", "draft")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")  # Pillow's names of the formats of these suffixes
_DRAFT_FACTOR = 2  # a draft has at least this many times the pixels per side that scaling leaves
_ORIENTATION = 0x0112  # EXIF tag: how the stored pixels must be turned to be upright


def require_pillow(extra: str = "train") -> None:
    """Raise an `InputError` that names the extra to install, unless Pillow can be imported."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise InputError(f"image files need Pillow: pip install 'exitwise[{extra}]'") from None


def load_image(
    file: Path | bytes, preprocessing: Preprocessing, name: str | None = None, decoder: str = PILLOW
) -> Array:
    """Return an image as uint8 (channels, size, size), scaled and cropped for a net's preprocessing.

    Args:
        file: The path of an image file, or its content.
        preprocessing: Size and channels of the result.
        name: What messages call the image; its path by default.
        decoder: "pillow", or "draft", which decodes JPEG at 1/2, 1/4 or 1/8 of its size where that leaves at least
            twice the pixels per side that are needed. Large photos take less time, and pixels differ a little.
    """
    side = _DRAFT_FACTOR * round(preprocessing.size * preprocessing.margin) if decoder == DRAFT else None
    image = open_rgb(file, name, side)
    return _to_pixels(image, preprocessing)


def decode_image(data: bytes, preprocessing: Preprocessing, max_pixels: int, name: str = "the image") -> Array:
    """Return the bytes of an image file as uint8 (channels, size, size), as `load_image` does.

    Args:
        data: Contents of an image file from an unknown sender.
        preprocessing: Size and channels of the result.
        max_pixels: Largest number of pixels; a larger image is refused before it is decoded.
        name: Name of the image for messages.

    Raises:
        InputError: If the data are not an image of a known format, or it has too many pixels.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(BytesIO(data), formats=FORMATS) as file:
            width, height = file.size
            if width * height > max_pixels:
                raise InputError(f"{name} has {width} x {height} pixels, but at most {max_pixels:,} are allowed")
            return _to_pixels(_load_rgb(file), preprocessing)
    except InputError:
        raise
    except MemoryError:
        raise
    except Exception:  # Pillow's decoders raise errors of many types for damaged data, some of which name internals
        raise InputError(f"{name} cannot be read as an image of type {', '.join(FORMATS)}") from None


def _to_pixels(image: "Image.Image", preprocessing: Preprocessing) -> Array:
    image = image.convert("L") if len(preprocessing.mean) == 1 else image
    pixels = np.asarray(preprocessing.crop(image))
    return np.array(np.atleast_3d(pixels).transpose(2, 0, 1), order="C")  # a writable copy


def read_or_error(
    file: Path | bytes, preprocessing: Preprocessing, name: str | None = None, decoder: str = PILLOW
) -> Array | InputError:
    """Return the pixels of an image as `load_image` does, or the error that prevents it."""
    name = str(file) if name is None else name
    try:
        pixels = load_image(file, preprocessing, name, decoder)
    except (InputError, ValueError) as error:  # a name with a zero byte is a ValueError
        return error if isinstance(error, InputError) else InputError(f"{name!r} is not a file name")
    color = pixels[:, 0, 0]
    if (pixels == color[:, None, None]).all():  # the net would answer with confidence, but there is nothing to see
        value = tuple(color.tolist()) if len(color) > 1 else int(color[0])
        return InputError(f"{name} is blank: every pixel is {value}")
    return pixels


def open_rgb(file: Path | bytes, name: str | None = None, draft_side: int | None = None) -> "Image.Image":
    """Return an image as RGB, turned upright by its EXIF orientation; raise InputError if it cannot be decoded.

    With `draft_side`, a JPEG may be decoded at a part of its size, but with at least so many pixels per side.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(file) if isinstance(file, bytes) else file) as opened:
            if draft_side is not None:
                opened.draft(None, (draft_side, draft_side))  # does nothing to other formats
            return _load_rgb(opened)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's errors for bad files
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        if isinstance(error, UnidentifiedImageError) and isinstance(file, bytes):
            reason = "cannot identify image file"  # Pillow names an address in memory
        raise InputError(f"{name or file!s} cannot be read as an image ({reason})") from None


def _load_rgb(file: "Image.Image") -> "Image.Image":
    file.load()  # Pillow turns a TIFF here and removes its orientation, so the tag is read afterwards
    image, transpose = _convert_to_rgb(file), _upright_transpose(file)
    return image if transpose is None else image.transpose(transpose)


def _convert_to_rgb(file: "Image.Image") -> "Image.Image":
    """Return an image of any mode as RGB, without transparency."""
    from PIL import Image

    if file.mode.startswith("I;16") or (file.mode == "I" and file.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")  # Pillow would clip at 255
    if file.mode in ("I", "F"):
        raise ValueError("pixels of 32 bits, of unknown range")
    file.info.pop("transparency", None)  # a palette's: Pillow would warn that RGB has none
    return file.convert("RGB")


def _upright_transpose(file: "Image.Image") -> "Image.Transpose | None":
    """Return how the pixels must be turned or mirrored according to EXIF; None if they are upright."""
    from PIL.Image import Transpose

    try:
        orientation = file.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF, for which Pillow raises many types: image viewers ignore it, too
        return None
    turns = (
        Transpose.FLIP_LEFT_RIGHT,
        Transpose.ROTATE_180,
        Transpose.FLIP_TOP_BOTTOM,
        Transpose.TRANSPOSE,
        Transpose.ROTATE_270,
        Transpose.TRANSVERSE,
        Transpose.ROTATE_90,
    )
    return turns[orientation - 2] if orientation in range(2, 9) else None
