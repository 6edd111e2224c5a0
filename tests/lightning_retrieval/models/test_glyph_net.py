"""GlyphNet: its shapes, and that it learns."""

import pytest
import torch
from torch import nn

from lightning_retrieval.models import Embedder, GlyphNet


def test_feature_map_has_an_eighth_of_the_size():
    assert GlyphNet()(torch.rand(2, 1, 32, 32)).shape == (2, 256, 4, 4)
    net = GlyphNet(width=8, in_channels=3)
    assert net(torch.rand(2, 3, 64, 48)).shape == (2, 64, 8, 6)
    assert (net.width, net.in_channels) == (8, 3)
    assert Embedder(net).feature_dim == 64


def test_channels_last_gives_the_same_features():
    net, images = GlyphNet(8).eval(), torch.rand(2, 1, 32, 32)
    expected = net(images)
    net = net.to(memory_format=torch.channels_last)
    torch.testing.assert_close(net(images.to(memory_format=torch.channels_last)), expected)


@pytest.mark.slow
def test_it_learns_a_few_glyphs():
    torch.manual_seed(0)
    glyphs = torch.rand(4, 1, 32, 32).round().repeat(4, 1, 1, 1)
    labels = torch.arange(4).repeat(4)
    embedder = Embedder(GlyphNet(4), 4, normalize=False)
    optimizer = torch.optim.AdamW(embedder.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        noisy = glyphs + 0.3 * torch.randn(glyphs.shape)
        nn.functional.cross_entropy(embedder(noisy), labels).backward()
        optimizer.step()
    assert (embedder.eval()(glyphs).argmax(1) == labels).all()


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"width": 0}, ValueError, "GlyphNet: `width` must be an integer >= 1, got 0"),
        ({"in_channels": 1.0}, TypeError, r"GlyphNet: `in_channels` must be an integer >= 1, got 1\.0 \(float\)"),
    ],
)
def test_invalid_settings(settings, error, message):
    with pytest.raises(error, match=message):
        GlyphNet(**settings)
