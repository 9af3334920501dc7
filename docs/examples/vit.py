"""A small vision transformer that uses only torch.nn, as an example for `attach`:

net = ew.attach(ViT().eval(), at=["blocks.0", "blocks.2"], example_inputs=torch.rand(1, 3, 32, 32))
"""

import torch
from torch import Tensor, nn


class ViT(nn.Module):
    """Classifies images (n, 3, side, side) from a class token that is prepended to their patches."""

    def __init__(
        self, classes: int = 10, side: int = 32, patch: int = 8, width: int = 32, depth: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        class_tokens = self.class_token.expand(images.shape[0], -1, -1)
        tokens = torch.cat([class_tokens, tokens], dim=1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        logits: Tensor = self.classifier(self.norm(tokens)[:, 0])
        return logits
