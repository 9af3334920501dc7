"""Scikit-learn's handwritten digits: 1,797 pictures of 8 x 8, which come with the library."""

import numpy as np
import torch

from exitwise.core.errors import InputError
from exitwise.data.images import ImageSet

MEAN, STD = (0.3053,), (0.3760,)


def load() -> ImageSet:
    """All of them: the data set has no test set of its own."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError("the digits come with scikit-learn: pip install 'exitwise[train]'") from None
    found = load_digits()
    pixels = torch.from_numpy(np.rint(found.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = torch.from_numpy(found.target.astype(np.int64))
    classes = tuple(str(name) for name in found.target_names)
    return ImageSet(pixels, labels, torch.arange(len(labels)), classes, MEAN, STD)
