"""A program gives the embeddings of its model for pixels and for normalised images, in batches of any size."""

import pytest
import torch
from torch import nn

from lightning_retrieval import Embedder, PCAWhitening, RetrievalModule, SmoothAPLoss
from lightning_retrieval.export.program import EmbeddingProgram, export_program, largest_difference
from lightning_retrieval.models import Preparation

GLYPHS = Preparation.named("glyphs")
COLOUR = Preparation(image_size=(40, 48), resize=(44, 50))


def new_module(**settings):
    torch.manual_seed(0)
    return RetrievalModule(Embedder("glyph_net", embedding_dim=12), SmoothAPLoss(), **settings).eval()


@pytest.mark.parametrize("input_type", ["uint8", "float"])
def test_the_program_is_the_model_with_its_preparation(input_type):
    whitening = PCAWhitening(dim=5).fit(torch.randn(50, 12, generator=torch.Generator().manual_seed(0)))
    module = new_module(whitening=whitening, eval_scales=(1.0, 0.5))
    program = EmbeddingProgram(module, GLYPHS, input_type)
    images = program.random_images(4)
    pixels = EmbeddingProgram(module, GLYPHS, "uint8").random_images(4)
    with torch.no_grad():
        torch.testing.assert_close(program(images), module.embed(GLYPHS.normalize(pixels)))


def test_pixels_are_normalised_as_the_preparation_does():
    program = EmbeddingProgram(nn.Identity(), COLOUR, "uint8")
    pixels = program.random_images(3)
    assert pixels.shape == (3, 3, 40, 48)
    torch.testing.assert_close(program(pixels), COLOUR.normalize(pixels))


def test_an_exported_program_takes_any_number_of_images():
    program = EmbeddingProgram(new_module(), GLYPHS, "uint8")
    exported = export_program(program).module()
    for count in (1, 2, 5):
        images = program.random_images(count, seed=count)
        with torch.no_grad():
            assert largest_difference(exported(images), program(images)) <= 1e-6


def test_the_largest_difference_is_relative_for_large_embeddings():
    assert largest_difference(torch.tensor([[0.5, 0.25]]), torch.tensor([[0.5, 0.5]])) == 0.25
    assert largest_difference(torch.tensor([[8.0]]), torch.tensor([[10.0]])) == pytest.approx(0.2)


class DependsOnData(nn.Module):
    def forward(self, images):
        if images.mean() > 0:
            return images.flatten(1)
        return -images.flatten(1)


@pytest.mark.refusal
def test_a_forward_that_depends_on_the_data_raises_one_sentence():
    message = (
        r"^export_program: the model must be one that torch.export can trace .* got an error for DependsOnData \(.*"
    )
    with pytest.raises(ValueError, match=message) as raised:
        export_program(EmbeddingProgram(DependsOnData(), GLYPHS, "float"))
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"^EmbeddingProgram: `input_type` must be one of 'uint8', 'float', got 'int'"):
        EmbeddingProgram(nn.Identity(), GLYPHS, "int")
    program = EmbeddingProgram(nn.Identity(), Preparation.named("ap_gem"), "float")
    with pytest.raises(ValueError, match=r"^export_program: the preparation must have an `image_size`, got None"):
        export_program(program)


@pytest.mark.refusal
@pytest.mark.parametrize("program", [3, nn.Identity()])
def test_what_is_no_program_raises_one_sentence(program):
    message = r"^export_program: `program` must be an instance of EmbeddingProgram, got .+ \((int|Identity)\)\.$"
    with pytest.raises(TypeError, match=message):
        export_program(program)
