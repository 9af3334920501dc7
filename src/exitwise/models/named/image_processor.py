"""The preprocessing that an image processor of Transformers stands for."""

from collections.abc import Mapping
from math import floor
from typing import Any

import numpy as np

from exitwise.core.errors import InputError
from exitwise.core.image_files import require_pillow
from exitwise.core.preprocessing import Preprocessing

_WARPED_FROM = 384  # ConvNeXt's processor crops smaller images, and scales others to a square
_PROBE = (301, 260)  # width and height of an image on which both are compared
_MAX_DIFFERENCE = 0.02  # mean difference of the probe's values in 0..1; a crop that is off by a pixel has .004


def preprocessing_of(name: str, processor: Any) -> Preprocessing:
    """Return the preprocessing of a processor; raise `InputError` if it does something else to a probe image.

    Args:
        name: The network, for messages.
        processor: An image processor with the Pillow backend.
    """
    require_pillow()
    settings = processor.to_dict()
    size, scaled, squash = _sizes(name, settings)
    factor = 255 * (settings.get("rescale_factor") or 1 / 255) if settings.get("do_rescale", True) else 255.0
    normalizes = settings.get("do_normalize", True)
    mean = np.broadcast_to(settings.get("image_mean") or 0.0, 3) if normalizes else np.zeros(3)
    std = np.broadcast_to(settings.get("image_std") or 1.0, 3) if normalizes else np.ones(3)
    interpolation = _interpolation(settings.get("resample"))
    preprocessing = Preprocessing(size, tuple(mean / factor), tuple(std / factor), scaled / size, interpolation, squash)
    _check(name, processor, preprocessing)
    return preprocessing


def _sizes(name: str, settings: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Return the side of the input, the side to which images are scaled before, and whether both sides are."""
    size, crop = settings.get("size") or {}, settings.get("crop_size") if settings.get("do_center_crop") else None
    short = size.get("shortest_edge")
    if short is not None and settings.get("crop_pct") is not None:
        return (short, short, True) if short >= _WARPED_FROM else (short, floor(short / settings["crop_pct"]), False)
    squash = short is None
    side = _side(size) if squash else short
    cropped = _side(crop) if crop else side if squash else None
    if not settings.get("do_resize", True) or side is None or cropped is None or cropped > side:
        raise InputError(f"the image processor of {name} does not make square images: size {size}, crop {crop}")
    return cropped, side, squash


def _side(size: Mapping[str, Any]) -> int | None:
    """Return the side of a square size, None for another."""
    height: int | None = size.get("height")
    return height if height == size.get("width") else None


def _interpolation(resample: Any) -> str:
    from PIL.Image import Resampling

    return Resampling(resample).name.lower() if resample is not None else "bilinear"


def _check(name: str, processor: Any, preprocessing: Preprocessing) -> None:
    """Compare what the processor and the preprocessing make of a smooth image."""
    from PIL import Image

    width, height = _PROBE
    x, y = np.linspace(0, 1, width), np.linspace(0, 1, height)[:, None]
    channels = (x + 0 * y, y + 0 * x, (np.sin(9 * x) * np.cos(7 * y) + 1) / 2)
    image = Image.fromarray((255 * np.stack(channels, -1)).astype(np.uint8))
    theirs = np.asarray(processor(image, return_tensors="np")["pixel_values"][0], dtype=np.float32)
    pixels = np.asarray(preprocessing.crop(image)).transpose(2, 0, 1)
    ours = preprocessing.normalize(np.ascontiguousarray(pixels))
    std = np.asarray(preprocessing.std)[:, None, None]
    if theirs.shape != ours.shape or float(np.abs((theirs - ours) * std).mean()) > _MAX_DIFFERENCE:
        raise InputError(
            f"the image processor of {name} does more than scale, crop and normalize: exitwise cannot repeat it; "
            f"pass the module to exitwise.attach yourself"
        )
