"""Exports a module as a program that maps batches of any size from pixels to embeddings."""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_retrieval.checks import first_line
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.preparation.preparation import Preparation

OWNER = "export_program"
InputType = Literal["uint8", "float"]
EXAMPLE_IMAGES = 2  # number of example images: torch.export would treat a batch size of 1 as a constant


class EmbeddingProgram(nn.Module):
    """The module to export: maps a batch of images to embeddings.

    Args:
        module: a module with the method `embed`, such as a `RetrievalModule`, or any module that maps images to
            embeddings.
        preparation: preparation of the images; its `mean` and `std` become part of a program for uint8.
        input_type: `"uint8"` for pixels, as returned by `preparation.to_uint8`, or `"float"` for normalised images, as
            returned by `preparation`.

    Example:
        >>> import torch
        >>> from lightning_retrieval import Embedder
        >>> from lightning_retrieval.search.export.program import EmbeddingProgram
        >>> from lightning_retrieval.models import Preparation
        >>> program = EmbeddingProgram(Embedder("glyph_net", 8), Preparation.named("glyphs"), "uint8")
        >>> program(torch.zeros(2, 1, 32, 32, dtype=torch.uint8)).shape
        torch.Size([2, 8])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, module: nn.Module, preparation: Preparation, input_type: InputType = "uint8") -> None:
        super().__init__()
        self.input_type = input_type
        self.preparation = preparation
        self.module = module
        values = torch.tensor([preparation.mean, preparation.std])
        self.register_buffer("mean", values[0, :, None, None].clone())
        self.register_buffer("std", values[1, :, None, None].clone())  # not a view: buffers must not share a storage

    def forward(self, images: Tensor) -> Float[Tensor, "batch ..."]:
        """Embed a batch of images of the input type, in the shape (N, channels, height, width)."""
        if self.input_type == "uint8":
            images = (images.to(torch.float32) * (1 / 255) - self.mean) / self.std
        embed: Callable[[Tensor], Tensor] = getattr(self.module, "embed", self.module)
        return embed(images)

    def random_images(self, count: int, seed: int = 0) -> Tensor:
        """Random pixels of the program's input type and size.

        Args:
            count: number of images.
            seed: seed of the random numbers.

        Raises:
            ValueError: if the preparation has no size.
        """
        preparation = self.preparation
        size = preparation.image_size
        if size is None:
            got, cure = "images that keep their sizes", "evaluate the model with an `image_size`"
            raise InvalidValue("the images must have one size", got=got, cure=cure)
        if isinstance(size, int):
            size = (size, size)
        shape = (count, preparation.channels, *size)
        pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        if self.input_type == "uint8":
            return pixels
        return preparation.normalize(pixels)


@owned_by(OWNER)
def export_program(program: EmbeddingProgram) -> ExportedProgram:
    """Export a program with `torch.export`, for any number of images.

    Args:
        program: the program, in eval mode, on the CPU. Its weights get the contiguous format, since torch stores other
            formats with a warning.

    Raises:
        ValueError: if the network cannot be traced, for example because its `forward` depends on the values in a
            tensor.
    """
    images = program.random_images(EXAMPLE_IMAGES).clone()
    dynamic = {0: Dim("batch", min=1)}
    program.to(memory_format=torch.contiguous_format)
    try:
        with torch.no_grad():
            return torch.export.export(program, (images,), dynamic_shapes={"images": dynamic})
    except Exception as error:  # torch.export raises errors of many types, including internal ones
        raise InvalidValue(
            "the model must be one that torch.export can trace for any batch, and its forward must not depend on "
            "the values of tensors",
            got=f"an error for {type(program.module).__name__} ({first_line(error)})",
            cure="replace Python conditions on tensors by torch.where, or fix sizes",
        ) from None


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference between two batches of embeddings, divided by the largest expected value if above one."""
    scale = max(1.0, float(expected.abs().max()))
    return float((found - expected).abs().max()) / scale
