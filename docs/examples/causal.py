"""A small causal transformer that uses only torch.nn, as an example for `attach`:

net = ew.attach(Causal().eval(), at=["blocks.0", "blocks.1"], example_inputs=torch.randn(1, 12, 6))
"""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention over the steps, then an MLP for each step."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, steps: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(steps)
        steps = steps + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return steps + self.mlp(self.norm2(steps))


class Causal(nn.Module):
    """Classifies a series (n, length, inputs) from its last step, the only one that attends to all steps."""

    def __init__(
        self, classes: int = 5, inputs: int = 6, longest: int = 64, width: int = 32, depth: int = 3, heads: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Linear(inputs, width)
        self.positions = nn.Parameter(torch.randn(longest, width) * 0.02)
        future = torch.full((longest, longest), -torch.inf).triu(1)
        self.register_buffer("future", future, persistent=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, series: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        length = series.shape[1]
        mask = self.future[:length, :length]
        steps = self.embedding(series) + self.positions[:length]
        for block in self.blocks:
            steps = block(steps, mask)
        logits: Tensor = self.classifier(self.norm(steps)[:, -1])
        return logits
