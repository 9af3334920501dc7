"""Operations that ONNX Runtime or the exporter would compute in another way or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import exitwise as ew
from exitwise.runtime.onnx import Session

pytestmark = [pytest.mark.numerical, pytest.mark.slow]


class Stage(nn.Module):
    """A stage from images (n, 3, 8, 8) to features (n, 12)."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.out, self._run = nn.Conv2d(3, 12, 1), nn.Linear(12, 12), run
        self.bias = nn.Parameter(torch.randn(3, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self._run(self, self.conv(x) - 3))


def pool_behind_zeros(m: Stage, x: Tensor) -> Tensor:
    """All values are negative, so zeros around them are the maximum at the border."""
    return nn.functional.max_pool2d(nn.functional.pad(x, (1, 1, 1, 1)), 3, 2).mean((2, 3))


def attention_without_heads(m: Stage, x: Tensor) -> Tensor:
    tokens = x.flatten(2).transpose(1, 2)
    return scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=m.bias[:1]).mean(1)


def attention_with_positions(m: Stage, x: Tensor) -> Tensor:
    heads = x.flatten(2).transpose(1, 2).reshape(x.size(0), 64, 3, 4).transpose(1, 2)
    attended = scaled_dot_product_attention(heads, heads, heads, attn_mask=m.bias)
    return attended.transpose(1, 2).reshape(x.size(0), 64, 12).mean(1)


def attention_in_windows(m: Stage, x: Tensor) -> Tensor:
    windows = x.reshape(x.size(0), 3, 4, 4, 16).transpose(1, 2)  # samples, windows, heads, tokens, channels
    bias = m.bias[:, :4, :4]
    attended = scaled_dot_product_attention(windows, windows, windows, attn_mask=bias)
    attended = attended + scaled_dot_product_attention(windows, windows, windows, attn_mask=bias.expand(4, 3, 4, 4))
    return attended.transpose(1, 2).flatten(3).reshape(x.size(0), 12, 64).mean(2)


def difference_from_integers(m: Stage, x: Tensor) -> Tensor:
    mask = (x > -3).long()
    return (x * (1.0 - mask) + torch.ops.aten.rsub.Scalar(mask, 0.5)).mean((2, 3))


RUNS = [pool_behind_zeros, attention_without_heads, attention_with_positions, attention_in_windows]
RUNS += [difference_from_integers]


@pytest.mark.parametrize("run", RUNS)
def test_a_bundle_computes_what_torch_computes(run: Callable[[Any, Tensor], Tensor], tmp_path: Path) -> None:
    stages = [Stage(run), nn.Sequential(nn.Linear(12, 12), nn.ReLU())]
    net = ew.MultiExitNet(stages, [ew.Head(nn.Identity(), nn.Linear(12, 4)) for _ in stages]).eval()
    images = torch.randn(20, 3, 8, 8)
    batches = [(images, torch.arange(20) % 4)]
    cal = ew.calibrate(ew.collect(net, val=batches), "MSDNet (vanilla)")
    clf = ew.Classifier(net, cal, ew.Policy((2.0, -np.inf)))  # all exit at the last
    clf.export(tmp_path / "bundle", example=images[:2])
    probs = Session(tmp_path / "bundle", threads=1)(images).probs
    np.testing.assert_allclose(probs, clf(images).probs.numpy(), atol=1e-5)
