"""Datasets by name, their files and downloads, splits and batches."""

from exitwise.data.batches import Batches, Shuffled
from exitwise.data.holdout import HoldOut, Splits
from exitwise.data.images import Augmentation, ImageSet, Pictures
from exitwise.data.registry import DATA_SETS, DataSet, data_set, load

__all__ = [
    "DATA_SETS",
    "Augmentation",
    "Batches",
    "DataSet",
    "HoldOut",
    "ImageSet",
    "Pictures",
    "Shuffled",
    "Splits",
    "data_set",
    "load",
]
