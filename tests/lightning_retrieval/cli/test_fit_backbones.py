"""A backbone of each family is trained, loaded, indexed, searched and exported by the commands, without a network."""

import json

import pytest
import torch
import yaml
from PIL import Image

from lightning_retrieval import RetrievalIndex, RetrievalModule
from lightning_retrieval.cli.export import export_model
from lightning_retrieval.cli.main import main
from lightning_retrieval.models import Preparation
from tests.datamodules.trees_more import write_folders
from tests.lightning_retrieval.cli.glyph_commands import command
from tests.lightning_retrieval.models.hugging_face_folders import write_folder

FAMILIES = {
    "torchvision": ({"backbone": "squeezenet1_1", "image_size": 64}, None),
    "timm": (
        {"backbone": "timm/vit_tiny_patch16_224", "backbone_args": {"depth": 1, "embed_dim": 24, "num_heads": 2}},
        "timm",
    ),
    "hugging_face": ({"weights": "DEFAULT"}, "transformers"),
}


# A training of one epoch on four classes of two images.
CONFIG = """
seed_everything: 0
model:
  class_path: lightning_retrieval.RetrievalModule
  init_args:
    embedder: {class_path: lightning_retrieval.Embedder}
    loss: {class_path: lightning_retrieval.SmoothAPLoss}
data:
  class_path: lightning_retrieval.datamodules.ImageFolder
  init_args: {root: images, classes_per_batch: 2, samples_per_class: 2, test_fraction: 0.5, num_workers: 0}
trainer: {max_epochs: 1, accelerator: cpu, logger: false, enable_progress_bar: false, enable_model_summary: false}
"""


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request, tmp_path_factory):
    """The name of a family, and the folder in which its backbone was trained."""
    embedder, package = FAMILIES[request.param]
    if package is not None:
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "hugging_face":
        write_folder(folder / "model")
        embedder = {"backbone": f"hf/{folder / 'model'}", **embedder}
    write_folders(folder / "images", ["a", "b", "c", "d"], images=2)
    config = yaml.safe_load(CONFIG)
    config["model"]["init_args"]["embedder"]["init_args"] = {"embedding_dim": 8, **embedder}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(["fit", "--config", str(folder / "config.yaml")])
    for path in (folder / "model").glob("*"):  # what a checkpoint is loaded from is in it
        path.unlink()
    (checkpoint,) = folder.rglob("*.ckpt")
    return checkpoint, folder / "images"


def test_each_family_is_trained_loaded_and_searched_without_a_network(trained, tmp_path, capsys):
    checkpoint, images = trained
    hyperparameters = torch.load(checkpoint, weights_only=True)["hyper_parameters"]
    assert json.loads(json.dumps(hyperparameters)) == hyperparameters  # plain data
    module = RetrievalModule.load_from_checkpoint(checkpoint, weights_only=True)
    assert module.embedder.backbone_name == hyperparameters["embedder"]["init_args"]["backbone"]
    arguments = ["--checkpoint", checkpoint, "--images", images, "--output", tmp_path / "index"]
    code, out, err = command(capsys, "index", *arguments)
    assert (code, err) == (0, "")
    assert "8 images, 8 dimensions" in out
    assert len(RetrievalIndex.load(tmp_path / "index")) == 8
    code, out, err = command(capsys, "search", "--index", tmp_path / "index", images / "b" / "1.jpg", "-k", 3)
    assert (code, err) == (0, "")
    assert "b/1.jpg" in out


@pytest.mark.slow
def test_each_family_is_exported(trained, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    checkpoint, images = trained
    made = export_model(checkpoint, tmp_path / "exported")
    assert made.differences.keys() == {"model.onnx", "model.pt2"}
    assert max(made.differences.values()) <= 1e-5
    preparation = Preparation(**made.about["preparation"])
    files = sorted(images.rglob("*.jpg"))
    pixels = torch.stack([preparation.to_uint8(Image.open(file)) for file in files])
    session = onnxruntime.InferenceSession(tmp_path / "exported" / "model.onnx")
    (found,) = session.run(None, {"images": pixels.numpy()})
    program = torch.export.load(tmp_path / "exported" / "model.pt2").module()
    module = RetrievalModule.load_from_checkpoint(checkpoint, weights_only=True).eval()
    with torch.no_grad():
        expected = module.embed(torch.stack([module.embedder.preparation(Image.open(file)) for file in files]))
        torch.testing.assert_close(program(pixels), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-5)
