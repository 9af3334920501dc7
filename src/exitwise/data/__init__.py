"""Datasets by name, their files and downloads, splits and batches."""

from exitwise.data.batches import Batches, TrainBatches
from exitwise.data.batches import Shuffled as Shuffled
from exitwise.data.holdout import HoldOut, Splits
from exitwise.data.images import Augmentation, ImageDataset, ImageSet
from exitwise.data.images import Pictures as Pictures
from exitwise.data.registry import DATA_SETS, DataSet, get_dataset, load
from exitwise.data.registry import data_set as data_set

# The former names `Pictures`, `Shuffled` and `data_set` still work, but are not listed.
__all__ = [
    "DATA_SETS",
    "Augmentation",
    "Batches",
    "DataSet",
    "HoldOut",
    "ImageDataset",
    "ImageSet",
    "Splits",
    "TrainBatches",
    "get_dataset",
    "load",
]
