"""Memory layout of tensors: contiguous and aligned to 64 bytes.

Matrix kernels choose their order of summation by the layout and the alignment of their operands: equal values in
another layout give results that differ in the last bits. Loaded and stored tensors therefore have one layout.
"""

import torch
from torch import Tensor

from exitwise.core.mapped_rows import MappedRows

ALIGNMENT = 64  # bytes, as PyTorch's CPU allocator


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous and starts at a 64-byte boundary."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def align(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is contiguous and aligned, else a copy that is; differentiable.

    Rows in files are returned as they are: what is read of them is aligned.
    """
    if isinstance(tensor, MappedRows):
        return tensor
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def align_fields(record: object, *names: str) -> None:
    """Align the tensors, or tuples of tensors, in the fields `names` of a frozen dataclass, in its `__post_init__`."""
    for name in names:
        value = getattr(record, name)
        if isinstance(value, tuple):
            object.__setattr__(record, name, tuple(align(item) for item in value))
        elif value is not None:
            object.__setattr__(record, name, align(value))
