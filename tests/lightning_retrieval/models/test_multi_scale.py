"""Embedding at several scales: the mean over scales, and the resizing."""

import math

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import normalize

from lightning_retrieval import multi_scale
from lightning_retrieval.models.multi_scale import SCALE_POOLING


class RecordsSizes:
    """Embeds an image by its mean and its central pixel, and records the sizes of the images."""

    def __init__(self):
        self.seen = []

    def __call__(self, images):
        self.seen.append(tuple(images.shape[2:]))
        middle = images[:, :, images.shape[2] // 2, images.shape[3] // 2]
        return torch.cat([images.mean((2, 3)), middle], 1)


def test_embedding_is_the_mean_of_unit_rows_over_scales():
    images, embed = torch.rand(3, 2, 9, 14), RecordsSizes()
    found = multi_scale(embed, images, scales=(1, 0.5, 1.5))
    assert embed.seen == [(9, 14), (4, 7), (14, 21)]
    sizes = [(9, 14), (4, 7), (14, 21)]
    resized = [nn.functional.interpolate(images, size=s, mode="bilinear", antialias=True) for s in sizes]
    expected = sum(normalize(embed(x)) for x in resized) / 3
    torch.testing.assert_close(found, normalize(expected))


def test_power_mean_keeps_signs():
    embed = lambda images: torch.stack([images.shape[2] * torch.ones(2), -torch.ones(2)], 1)  # noqa: E731
    found = multi_scale(embed, torch.rand(2, 1, 4, 4), scales=[0.5, 1], p=3.0)
    parts = [(2 / 5**0.5, -1 / 5**0.5), (4 / 17**0.5, -1 / 17**0.5)]
    mean = [math.copysign((sum(abs(x) ** 3 for x in column) / 2) ** (1 / 3), column[0]) for column in zip(*parts)]
    torch.testing.assert_close(found[0], normalize(torch.tensor([mean]))[0])


def sympow(x, p, eps=1e-6):
    """`sympow` of dirtorch's pool(), for one number."""
    return math.copysign(max(abs(x), eps) ** p, x) if x else 0.0


def gem_by_loops(rows):
    """dirtorch's `--pooling gem` for the unit rows of all scales, then the normalisation."""
    mean_of_cubes = [sum(sympow(x, 3) for x in column) / len(rows) for column in zip(*rows)]
    pooled = [sympow(x, 1 / 3) for x in mean_of_cubes]
    return [x / math.hypot(*pooled) for x in pooled]


def embeds_rows(rows):
    """A network whose embeddings of the images at each scale are given."""
    given = iter(torch.tensor(rows, dtype=torch.float64))
    return lambda images: next(given)[None]


def test_gem_raises_small_entries_to_one_hundredth():
    """Two scales give the same row: without `eps` it is the result, with it (0.01, 1, -0.01), normalised."""
    row, images = [0.005, 1.0, -0.002], torch.rand(1, 1, 4, 4)
    unit = [x / math.hypot(*row) for x in row]
    found = multi_scale(embeds_rows([row, row]), images, (0.5, 1), p=3)
    torch.testing.assert_close(found, torch.tensor([unit], dtype=torch.float64))
    found = multi_scale(embeds_rows([row, row]), images, (0.5, 1), **SCALE_POOLING["gem"])
    pooled = [0.01, unit[1], -0.01]
    expected = torch.tensor([[x / math.hypot(*pooled) for x in pooled]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


def test_gem_against_loops():
    """Entries with one sign and with both, below and above the floor, and zero."""
    rows = torch.randn(3, 64, dtype=torch.float64)
    rows[:, 3], rows[:, 4] = torch.tensor([1e-9, 1e-8, -1e-7], dtype=torch.float64), 0.0
    rows = rows / rows.norm(dim=1, keepdim=True)
    expected = gem_by_loops(rows.tolist())
    found = multi_scale(embeds_rows(rows.tolist()), torch.rand(1, 1, 4, 4), (0.5, 1, 2), p=3.0, eps=1e-6)
    torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float64))
    assert found[0, 4] == 0


def test_one_scale_is_not_pooled():
    row = [0.6, 0.8, 1e-4]
    found = multi_scale(embeds_rows([row]), torch.rand(1, 1, 4, 4), (0.5,), p=3.0, eps=1e-6)
    torch.testing.assert_close(found[0], normalize(torch.tensor(row, dtype=torch.float64), dim=0))


def test_resizing_equals_pil():
    pixels = (255 * torch.rand(20, 30, generator=torch.Generator().manual_seed(0))).to(torch.uint8)
    by_pil = torch.from_numpy(np.array(Image.fromarray(pixels.numpy()).resize((15, 10), Image.Resampling.BILINEAR)))
    seen = []
    multi_scale(lambda x: (seen.append(x), x.flatten(1))[1], pixels[None, None].float(), scales=[0.5])
    assert (seen[0][0, 0] - by_pil).abs().max() <= 1  # PIL rounds twice


def test_a_resized_image_has_at_least_one_pixel():
    embed = RecordsSizes()
    multi_scale(embed, torch.rand(1, 1, 4, 40), scales=[0.1])
    assert embed.seen == [(1, 4)]
