"""Scikit-learn's handwritten digits: 1,797 images of 8 x 8 that ship with the library."""

import numpy as np
import torch

from exitwise.core.errors import InputError
from exitwise.data.images import ImageSet

MEAN, STD = (0.3053,), (0.3760,)


def load() -> ImageSet:
    """Load all images: the dataset has no test set."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError("the digits come with scikit-learn: pip install 'exitwise[train]'") from None
    digits = load_digits()
    pixels = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = torch.from_numpy(digits.target.astype(np.int64))
    classes = tuple(str(name) for name in digits.target_names)
    return ImageSet(pixels, labels, torch.arange(len(labels)), classes, MEAN, STD)
