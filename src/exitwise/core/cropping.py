"""Scale and crop images with Pillow, which is imported on use. Does not import torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MARGIN = 256 / 224  # short side of the scaled image relative to the center crop
BILINEAR = "bilinear"
INTERPOLATIONS = ("nearest", "box", BILINEAR, "hamming", "bicubic", "lanczos")  # Pillow's filters
_MAX_ASPECT_RATIO = 16  # longer images are cropped before they are scaled


def crop_center(
    image: "Image", size: int, margin: float = MARGIN, interpolation: str = BILINEAR, squash: bool = False
) -> "Image":
    """Scale the short side to `margin * size` and crop the center; an image of the right size is returned unchanged.

    With `squash`, both sides are scaled to `margin * size`.
    """
    from PIL.Image import Resampling

    if image.size == (size, size):
        return image
    resampling = Resampling[interpolation.upper()]
    short = round(size * margin)
    width, height = (short, short) if squash else (short * side // min(image.size) for side in image.size)
    left, top = (round((side - size) / 2) for side in (width, height))
    if max(width, height) > _MAX_ASPECT_RATIO * short:  # scale only the center: the scaled image may take gigabytes
        x_scale, y_scale = image.width / width, image.height / height
        box = (left * x_scale, top * y_scale, (left + size) * x_scale, (top + size) * y_scale)
        return image.resize((size, size), resampling, box=box)
    return image.resize((width, height), resampling).crop((left, top, left + size, top + size))
