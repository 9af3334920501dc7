"""Normalization of images: one function for arrays and tensors, against the formula in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from image_files import image_set

import exitwise as ew
from exitwise.core.preprocessing import normalize
from exitwise.data import DATA_SETS, Batches

STATISTICS = {name: (dataset.mean, dataset.std) for name, dataset in DATA_SETS.items()}


def all_bytes(channels: int) -> np.ndarray:
    """Return an image (1, channels, 16, 16) with every byte in every channel."""
    return np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(channels, axis=1)


@pytest.mark.parametrize("name", STATISTICS)
def test_arrays_and_tensors_follow_the_formula(name: str) -> None:
    mean, std = STATISTICS[name]
    pixels = all_bytes(len(mean))
    means, stds = (np.array(values)[:, None, None] for values in (mean, std))
    expected = (pixels / 255 - means) / stds
    for result in (normalize(pixels, mean, std), normalize(torch.from_numpy(pixels), mean, std).numpy()):
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, expected, atol=1e-6)


def test_batches_and_preprocessing_give_the_same_bits() -> None:
    """A net sees the same input in training, evaluation and deployment."""
    dataset = image_set(20)
    preprocessing = ew.Preprocessing(6, dataset.mean, dataset.std)
    ((images, *_),) = Batches(dataset, 20)
    assert torch.equal(images, preprocessing.normalize(dataset.pixels))


def test_statistics_of_numpy_give_float32() -> None:
    dataset = image_set(4)
    mean, std = (tuple(np.array(values)) for values in (dataset.mean, dataset.std))
    result = normalize(dataset.pixels, mean, std)
    assert torch.equal(result, normalize(dataset.pixels, dataset.mean, dataset.std))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "`size` must be a whole number from 1 to 32768, but got 0"),
        ({"size": 8.0}, "`size` must be a whole number"),
        ({"size": True}, "`size` must be a whole number"),
        ({"margin": 0.5}, "`margin` must be a number from 1 to 10, but got 0.5"),
        ({"margin": float("nan")}, "`margin` must be a number"),
        ({"mean": (0.5, 0.5)}, "one for each of 1 or 3 channels"),
        ({"mean": "grey"}, "but got grey and"),
        ({"std": (0.0,)}, "one for each of 1 or 3 channels"),
        ({"std": (float("inf"),)}, "one for each of 1 or 3 channels"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    usable = {"size": 8, "mean": (0.5,), "std": (0.25,), "margin": 1.0}
    with pytest.raises(ew.InputError, match=message):
        ew.Preprocessing.from_dict(usable | options)


def test_it_comes_back_from_its_dict() -> None:
    preprocessing = ew.Preprocessing(32, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), margin=1.5)
    assert ew.Preprocessing.from_dict(preprocessing.to_dict()) == preprocessing
    with pytest.raises(ew.InputError, match="not a usable preprocessing"):
        ew.Preprocessing.from_dict({"size": 8})
