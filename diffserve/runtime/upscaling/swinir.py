"""SwinIR (Liang et al., 2021, arXiv 2108.10257): shifted-window attention at low resolution, then enlargement."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffserve.models.upscalers import SwinIRShape

MEAN: Final = (0.4488, 0.4371, 0.4040)
"""Mean color that the published networks subtract."""
SLOPE: Final = 0.2


@lru_cache(maxsize=16)
def _relative_index(window: int) -> Tensor:
    """Return the row (window^2, window^2) of the bias table for every pair of pixels of a window."""
    place = torch.arange(window)
    difference = place[:, None] - place[None, :] + window - 1
    vertical = difference.repeat_interleave(window, 0).repeat_interleave(window, 1)
    return vertical * (2 * window - 1) + difference.repeat(window, window)


def _windows(x: Tensor, window: int) -> Tensor:
    """Cut (B, h, w, C) into windows (B, number of windows, window^2, C)."""
    batch, height, width, channels = x.shape
    x = x.view(batch, height // window, window, width // window, window, channels)
    return x.transpose(2, 3).reshape(batch, -1, window * window, channels)


def _regions(height: int, width: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Return which pixels of each window (number of windows, window^2, window^2) may attend to each other.

    After a cyclic shift the last windows hold pixels of opposite borders, which must not attend to each other.
    """

    def bands(length: int) -> Tensor:
        place = torch.arange(length, device=device)
        return (place >= length - window).long() + (place >= length - shift).long()

    numbers = 3 * bands(height)[:, None] + bands(width)[None, :]
    region = _windows(numbers[None, :, :, None], window)[0, :, :, 0]
    return region[:, :, None] == region[:, None, :]


class WindowAttention(nn.Module):
    """Multi-head attention inside windows, with a learned bias for each relative position."""

    relative_position_bias_table: nn.Parameter

    def __init__(self, embed: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.qkv = nn.Linear(embed, 3 * embed)
        self.proj = nn.Linear(embed, embed)

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        """Attend inside windows.

        Args:
            x: (B, number of windows, window^2, embed).
            allowed: (number of windows, window^2, window^2), or None if all pairs are allowed.

        Returns:
            A tensor of the shape of ``x``.
        """
        batch, count, area, embed = x.shape
        query, key, value = self.qkv(x).view(batch, count, area, 3, self.heads, -1).permute(3, 0, 1, 4, 2, 5)
        index = _relative_index(self.window).to(x.device)
        bias = self.relative_position_bias_table[index.flatten()].view(area, area, self.heads).permute(2, 0, 1)
        mask = bias[None]
        if allowed is not None:
            mask = mask.masked_fill(~allowed[:, None], float("-inf"))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.to(query.dtype))
        result: Tensor = self.proj(mixed.transpose(2, 3).reshape(batch, count, area, embed))
        return result


class FeedForward(nn.Module):
    """Two linear layers with GELU."""

    def __init__(self, embed: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed, width)
        self.fc2 = nn.Linear(width, embed)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x`` (..., embed)."""
        result: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return result


class SwinBlock(nn.Module):
    """Window attention and a feed-forward layer; every second block shifts its windows by half."""

    def __init__(self, embed: int, heads: int, window: int, mlp_width: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1 = nn.LayerNorm(embed)
        self.attn = WindowAttention(embed, heads, window)
        self.norm2 = nn.LayerNorm(embed)
        self.mlp = FeedForward(embed, mlp_width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x`` (B, h, w, embed)."""
        batch, height, width, embed = x.shape
        window, shift = self.window, self.shift
        normed = self.norm1(x)
        allowed = None
        if shift:
            normed = normed.roll((-shift, -shift), (1, 2))
            allowed = _regions(height, width, window, shift, x.device)
        mixed = self.attn(_windows(normed, window), allowed)
        mixed = mixed.view(batch, height // window, width // window, window, window, embed).transpose(2, 3)
        mixed = mixed.reshape(batch, height, width, embed)
        if shift:
            mixed = mixed.roll((shift, shift), (1, 2))
        x = x + mixed
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


def _last_conv(embed: int, *, has_three: bool) -> nn.Module:
    if not has_three:
        return nn.Conv2d(embed, embed, 3, padding=1)
    narrow = embed // 4
    return nn.Sequential(
        nn.Conv2d(embed, narrow, 3, padding=1),
        nn.LeakyReLU(SLOPE),
        nn.Conv2d(narrow, narrow, 1),
        nn.LeakyReLU(SLOPE),
        nn.Conv2d(narrow, embed, 3, padding=1),
    )


class ResidualGroup(nn.Module):
    """The attention blocks of a group; a module of its own because files have this level in their names."""

    def __init__(self, shape: SwinIRShape, index: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            SwinBlock(shape.embed, shape.heads[index], shape.window, shape.mlp_width, depth % 2 * shape.window // 2)
            for depth in range(shape.depths[index])
        )


class SwinGroup(nn.Module):
    """Attention blocks and a convolution, with a skip connection."""

    def __init__(self, shape: SwinIRShape, index: int) -> None:
        super().__init__()
        self.residual_group = ResidualGroup(shape, index)
        self.conv = _last_conv(shape.embed, has_three=shape.has_three_convs)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x`` (B, h, w, embed)."""
        hidden = x
        for block in self.residual_group.blocks:
            hidden = block(hidden)
        result: Tensor = x + self.conv(hidden.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return result


class _PatchEmbed(nn.Module):
    """Holder of the first norm; a module of its own because files have this level in their names."""

    def __init__(self, embed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embed)


class SwinIR(nn.Module):
    """Groups of shifted-window attention between convolutions, then one of four ways of enlargement.

    Names and shapes of the tensors are those of published files. Height and width of the input are multiples of
    ``multiple_px``, the window. Attention makes ``receptive_px`` a bound of what matters, not of what has any effect.
    """

    def __init__(self, shape: SwinIRShape) -> None:
        super().__init__()
        self.shape = shape
        embed, features, channels = shape.embed, shape.features, shape.channels
        self.conv_first = nn.Conv2d(channels, embed, 3, padding=1)
        self.patch_embed = _PatchEmbed(embed)
        self.layers = nn.ModuleList(SwinGroup(shape, index) for index in range(len(shape.depths)))
        self.norm = nn.LayerNorm(embed)
        self.conv_after_body = _last_conv(embed, has_three=shape.has_three_convs)
        if shape.upsampler in ("pixelshuffle", "nearest+conv"):
            self.conv_before_upsample = nn.Sequential(nn.Conv2d(embed, features, 3, padding=1), nn.LeakyReLU())
        if shape.upsampler == "pixelshuffle":
            factors = [3] if shape.scale == 3 else [2] * (shape.scale.bit_length() - 1)
            shuffles = ((nn.Conv2d(features, f * f * features, 3, padding=1), nn.PixelShuffle(f)) for f in factors)
            self.upsample = nn.Sequential(*(layer for pair in shuffles for layer in pair))
        elif shape.upsampler == "pixelshuffledirect":
            wide = nn.Conv2d(embed, shape.scale**2 * channels, 3, padding=1)
            self.upsample = nn.Sequential(wide, nn.PixelShuffle(shape.scale))
        elif shape.upsampler == "nearest+conv":
            self.conv_up1 = nn.Conv2d(features, features, 3, padding=1)
            if shape.scale == 4:
                self.conv_up2 = nn.Conv2d(features, features, 3, padding=1)
            self.conv_hr = nn.Conv2d(features, features, 3, padding=1)
        if shape.upsampler != "pixelshuffledirect":
            self.conv_last = nn.Conv2d(features if shape.upsampler else embed, channels, 3, padding=1)
        self.scale = shape.scale
        self.receptive_px = 4 * shape.window
        self.multiple_px = shape.window

    def forward(self, x: Tensor) -> Tensor:
        """Enlarge images (B, channels, h, w) in 0..1 to (B, channels, scale h, scale w)."""
        mean = torch.tensor(MEAN, dtype=x.dtype, device=x.device).view(1, 3, 1, 1) if x.shape[1] == 3 else 0.0
        x = x - mean
        first = self.conv_first(x)
        hidden = self.patch_embed.norm(first.permute(0, 2, 3, 1))
        for group in self.layers:
            hidden = group(hidden)
        hidden = first + self.conv_after_body(self.norm(hidden).permute(0, 3, 1, 2))
        match self.shape.upsampler:
            case "pixelshuffle":
                large = self.conv_last(self.upsample(self.conv_before_upsample(hidden)))
            case "pixelshuffledirect":
                large = self.upsample(hidden)
            case "nearest+conv":
                large = self._by_nearest(self.conv_before_upsample(hidden))
            case _:
                large = x + self.conv_last(hidden)
        result: Tensor = large + mean
        return result

    def _by_nearest(self, hidden: Tensor) -> Tensor:
        ups = [self.conv_up1, self.conv_up2] if self.scale == 4 else [self.conv_up1]
        for conv in ups:
            hidden = F.leaky_relu(conv(F.interpolate(hidden, scale_factor=2.0, mode="nearest")), SLOPE)
        result: Tensor = self.conv_last(F.leaky_relu(self.conv_hr(hidden), SLOPE))
        return result
