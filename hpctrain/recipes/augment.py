"""Augmentation of whole batches of pictures: vectorised, on torch's random numbers, on the batch's device.

Pictures are float tensors (B, C, H, W) from 0 to 1 throughout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

# ITU-R BT.601 luma: how bright red, green and blue look.
_LUMA = (0.299, 0.587, 0.114)


def move_and_scale(picture: Tensor, shift: float, scale: float, fill: float) -> Tensor:
    """Move each picture by up to `shift` of its side and scale it by up to 1 +- `scale`; `fill` comes in at
    the edges.
    """
    count = len(picture)
    zoom = 1 + scale * _symmetric(picture, count)
    place = torch.zeros(count, 2, 3, device=picture.device)
    place[:, 0, 0] = place[:, 1, 1] = zoom
    place[:, :, 2] = 2 * shift * _symmetric(picture, count, 2)  # the grid's coordinates run from -1 to 1
    grid = functional.affine_grid(place, list(picture.shape), align_corners=False)
    return fill + functional.grid_sample(picture - fill, grid, align_corners=False)  # it pads with 0


def shift_pixels(picture: Tensor, pixels: int, fill: float) -> Tensor:
    """Move each picture by whole pixels, up to `pixels` each way; cheaper than `move_and_scale`."""
    count, channels, height, width = picture.shape
    padded = functional.pad(picture, (pixels,) * 4, value=fill)
    top, left = torch.randint(0, 2 * pixels + 1, (2, count, 1, 1, 1), device=picture.device)
    rows = top + torch.arange(height, device=picture.device).view(1, 1, height, 1)
    columns = left + torch.arange(width, device=picture.device).view(1, 1, 1, width)
    sample = torch.arange(count, device=picture.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=picture.device).view(1, -1, 1, 1)
    return padded[sample, channel, rows, columns]


def jitter_colours(picture: Tensor, mix: float, gain: float, grey: float, invert: float) -> Tensor:
    """Change the colours of each RGB picture at random; the result may leave 0 to 1.

    `mix`: mean weight with which each channel becomes a random mean of all three (hues move, edges stay).
    `gain`: contrast per channel within 1 +- `gain`, brightness within +- `gain`/2. `grey` and `invert`:
    shares of pictures that lose their colours, and that become their negative.
    """
    count = len(picture)
    colours = _mixing_matrices(picture, mix, grey) @ picture.flatten(2)
    factor = 1 + gain * _symmetric(picture, count, 3, 1)
    offset = gain / 2 * _symmetric(picture, count, 3, 1)
    sign = 1 - 2 * (torch.rand(count, 1, 1, device=picture.device) < invert).float()
    return ((colours - 0.5) * factor + offset).mul(sign).add(0.5).view_as(picture)


def _mixing_matrices(picture: Tensor, mix: float, grey: float) -> Tensor:
    """One 3 x 3 matrix per picture (B, 3, 3), each row with sum 1."""
    count, device = len(picture), picture.device
    random = torch.rand(count, 3, 3, device=device)
    share = (2 * mix * torch.rand(count, 1, 1, device=device)).clamp(max=1)
    matrix = torch.lerp(
        torch.eye(3, device=device).expand(count, 3, 3), random / random.sum(2, keepdim=True), share
    )
    luma = torch.tensor(_LUMA, device=device).expand(count, 3, 3)
    return torch.where(torch.rand(count, 1, 1, device=device) < grey, luma, matrix)


def _symmetric(like: Tensor, *shape: int) -> Tensor:
    """Uniform from -1 to 1."""
    return 2 * torch.rand(*shape, device=like.device) - 1
