"""The hash of a network's weights: whether they are still those that were loaded."""

import hashlib

import torch
from torch import nn


def hash_weights(module: nn.Module) -> str:
    """Return the SHA-256 of the names, types, shapes and values of all weights and buffers."""
    digest = hashlib.sha256()
    for key, value in sorted(module.state_dict().items()):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
