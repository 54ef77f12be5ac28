"""Vision transformers: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, in DeiT's tiny size.

Touvron et al., "Training Data-Efficient Image Transformers", ICML 2021: 192 features, 3 heads, 12 encoders, layer by layer as
timm's. `vit` cuts an image into patches of 16 pixels (FeDepth's ViT-T/16; 5,717,416 parameters for 3x224x224 and 1,000
classes), `deit-tiny` into patches of 4 (PriSM's for 3x32x32). `width` scales the features of each head.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.models.cascade import Atom, Blueprint, Shape
from piecework.models.layers import require_at_least_one, scale_channels

HEADS, HEAD_FEATURES, EXPANSION = 3, 64, 4
EPSILON = 1e-6  # of the layer norms


class Embed(nn.Module):
    """Embed patches with a class token in front and learned positions."""

    def __init__(self, inputs: int, features: int, patch: int, patches: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(inputs, features, patch, patch)
        self.class_token = nn.Parameter(_small_normal(torch.empty(1, 1, features)))
        self.positions = nn.Parameter(_small_normal(torch.empty(1, 1 + patches, features)))

    def forward(self, x: Tensor) -> Tensor:
        """Return out[B, 1 + patches, features] for x[B, inputs, H, W]."""
        patches = self.proj(x).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(x.shape[0], -1, -1), patches], dim=1) + self.positions


class Encoder(nn.Module):
    """An encoder: norm and attention with a residual connection, then norm and MLP with another."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features, EPSILON)
        self.qkv = _linear(features, 3 * features)
        self.proj = _linear(features, features)
        self.norm2 = nn.LayerNorm(features, EPSILON)
        self.fc1 = _linear(features, EXPANSION * features)
        self.fc2 = _linear(EXPANSION * features, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return out[B, tokens, features] for x[B, tokens, features]."""
        x = x + self._attention(self.norm1(x))
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out

    def _attention(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, tokens, F]
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class ClassTokenHead(nn.Module):
    """The head: layer norm, then a linear layer on the class token."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, EPSILON)
        self.fc = _linear(features, num_classes)

    def forward(self, z: Tensor) -> Tensor:
        """Return logits[B, classes] for z[B, tokens, features]."""
        # A layer norm treats each token separately, so only the class token is normalised.
        logits: Tensor = self.fc(self.norm(z[:, 0]))
        return logits


def _vit(
    name: str,
    num_classes: int,
    input_shape: Shape,
    width: float = 1.0,
    batch_norm: str = "running",
    *,
    patch: int,
    depth: int = 12,
) -> Blueprint:
    """Build the atoms `embed`, `encoder1` .. `encoder<depth>`, without batch norms."""
    require_at_least_one("patch", patch)
    require_at_least_one("depth", depth)
    channels, height, width_pixels = input_shape
    if height % patch or width_pixels % patch:
        raise ValueError(f"{name} with patch = {patch} needs image sides divisible by it, got {height}x{width_pixels}")
    patches = (height // patch) * (width_pixels // patch)
    features = HEADS * scale_channels(HEAD_FEATURES, width)
    shape = (1 + patches, features)
    atoms = [Atom("embed", partial(Embed, channels, features, patch, patches), shape)]
    atoms += [Atom(f"encoder{number}", partial(Encoder, features), shape) for number in range(1, depth + 1)]
    head = partial(ClassTokenHead, features, num_classes)
    return Blueprint(name, input_shape, num_classes, tuple(atoms), head, batch_norm)


vit = partial(_vit, "vit", patch=16)
deit_tiny = partial(_vit, "deit-tiny", patch=4)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    _small_normal(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _small_normal(tensor: Tensor) -> Tensor:
    """Fill a tensor with DeiT's initial values: normal with a standard deviation of 0.02.

    DeiT truncates them at 2, a hundred deviations away. torch's truncating function reads values, which fake tensors do not
    have.
    """
    return nn.init.normal_(tensor, std=0.02)
