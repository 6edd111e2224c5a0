"""A backbone of each family is trained, loaded from its checkpoint and indexed by the commands, without a network."""

import json

import pytest
import torch
import yaml

from lightning_retrieval import RetrievalIndex, RetrievalModule
from lightning_retrieval.cli.main import main
from tests.datamodules.trees_more import write_folders
from tests.lightning_retrieval.cli.glyph_commands import command
from tests.lightning_retrieval.models.hugging_face_folders import write_folder

FAMILIES = {
    "torchvision": ({"backbone": "squeezenet1_1"}, None),
    "timm": (
        {"backbone": "timm/vit_tiny_patch16_224", "backbone_args": {"depth": 1, "embed_dim": 24, "num_heads": 2}},
        "timm",
    ),
    "hugging_face": ({"weights": "DEFAULT"}, "transformers"),
}


def config(folder, embedder):
    """A training of one epoch on four classes of two images."""
    init_args = {"embedding_dim": 8, **embedder}
    return {
        "seed_everything": 0,
        "model": {
            "class_path": "lightning_retrieval.RetrievalModule",
            "init_args": {
                "embedder": {"class_path": "lightning_retrieval.Embedder", "init_args": init_args},
                "loss": {"class_path": "lightning_retrieval.SmoothAPLoss"},
            },
        },
        "data": {
            "class_path": "lightning_retrieval.datamodules.ImageFolder",
            "init_args": {
                "root": str(folder / "images"),
                "classes_per_batch": 2,
                "samples_per_class": 2,
                "test_fraction": 0.5,
                "num_workers": 0,
            },
        },
        "trainer": {
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
        },
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_trains_and_is_indexed_without_a_network(family, tmp_path, capsys, monkeypatch):
    embedder, package = FAMILIES[family]
    if package is not None:
        pytest.importorskip(package)
    if family == "hugging_face":
        write_folder(tmp_path / "model")
        embedder = {"backbone": f"hf/{tmp_path / 'model'}", **embedder}
    write_folders(tmp_path / "images", ["a", "b", "c", "d"], images=2)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config(tmp_path, embedder)))
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", str(tmp_path / "config.yaml")])
    capsys.readouterr()
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    for path in (tmp_path / "model").glob("*"):  # what a checkpoint is loaded from is in it
        path.unlink()
    hyperparameters = torch.load(checkpoint, weights_only=True)["hyper_parameters"]
    assert json.loads(json.dumps(hyperparameters)) == hyperparameters  # plain data
    module = RetrievalModule.load_from_checkpoint(checkpoint, weights_only=True)
    assert module.embedder.backbone_name == hyperparameters["embedder"]["init_args"]["backbone"]
    images = ["--images", tmp_path / "images", "--output", tmp_path / "index"]
    code, out, err = command(capsys, "index", "--checkpoint", checkpoint, *images)
    assert (code, err) == (0, "")
    assert "8 images, 8 dimensions" in out
    assert len(RetrievalIndex.load(tmp_path / "index")) == 8
