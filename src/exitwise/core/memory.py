"""Memory layout of tensors: contiguous, from a 64-byte boundary on.

Matrix kernels choose their order of summation by the layout and the alignment of their operands, so that equal values
in another layout give results that differ in the last bits. What is loaded or kept has one layout, hence one result.
"""

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: what PyTorch's own CPU allocator returns


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous and starts at a 64-byte boundary."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def align(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it is contiguous and aligned, else a copy that is; differentiable."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def align_fields(record: object, *names: str) -> None:
    """Align the tensors that a frozen dataclass holds under `names`, alone or in tuples; call it in `__post_init__`."""
    for name in names:
        value = getattr(record, name)
        if isinstance(value, tuple):
            object.__setattr__(record, name, tuple(align(item) for item in value))
        elif value is not None:
            object.__setattr__(record, name, align(value))
