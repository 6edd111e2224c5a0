"""A small convolutional backbone for glyphs that trains quickly from scratch on a CPU."""

from jaxtyping import Float
from torch import Tensor, nn

from lightning_retrieval.checks import check_device, check_integer, check_maps

MOST_CHANNELS = 1024


class GlyphNet(nn.Module):
    """Six 3 x 3 convolutions, each with batch norm and ReLU, that map a glyph to a feature map of 1/8 of its size.

    Args:
        width: number of channels of the first convolution, from 1 to 1024; the feature map has 8 times as many.
        in_channels: number of channels of the images, from 1 to 1024: 1 for grey, 3 for colour.

    Raises:
        ValueError: if `width` or `in_channels` is out of its range; when called, if the images are no images.
        TypeError: if `width` or `in_channels` is not an integer.

    Example:
        >>> import torch
        >>> from lightning_retrieval.models import GlyphNet
        >>> GlyphNet()(torch.rand(2, 1, 32, 32)).shape
        torch.Size([2, 256, 4, 4])

    Cost:
        0.6 million parameters and 12 million multiply-adds for a 32 x 32 image; both grow with the square of `width`.

    Relations:
        `Embedder("glyph_net")` uses it with the default settings, `Embedder(GlyphNet(width=64))` with others. It is
        slightly faster after `.to(memory_format=torch.channels_last)`.
    """

    def __init__(self, width: int = 32, in_channels: int = 1) -> None:
        super().__init__()
        self.width = check_integer("GlyphNet", "width", width, 1, MOST_CHANNELS)
        self.in_channels = check_integer("GlyphNet", "in_channels", in_channels, 1, MOST_CHANNELS)
        self.layers = nn.Sequential()
        channels = in_channels
        for factor, stride in ((1, 2), (2, 2), (2, 1), (4, 2), (4, 1), (8, 1)):
            convolution = nn.Conv2d(channels, factor * width, 3, stride=stride, padding=1, bias=False)
            self.layers.extend([convolution, nn.BatchNorm2d(factor * width), nn.ReLU(inplace=True)])
            channels = factor * width

    def forward(
        self, images: Float[Tensor, "batch channel height width"]
    ) -> Float[Tensor, "batch channel_out height_out width_out"]:
        check_device("GlyphNet", "images", images, next(self.parameters()).device, "layers")
        check_maps("GlyphNet", "images", images)
        features: Tensor = self.layers(images)
        return features
