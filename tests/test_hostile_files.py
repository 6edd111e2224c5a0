"""A file is data: whatever a checkpoint, an index or the config of a model names, nothing in it runs or is downloaded.

The same descriptions, each of which would write a file if it were obeyed, stand in every format that holds one.
"""

import json
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch import nn

from lightning_retrieval import Embedder, RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import ImageFolder
from lightning_retrieval.detection import DetectionModule, TinyFasterRCNN
from lightning_retrieval.files import file_digest
from tests.lightning_retrieval.cli.example_config import SHORT, SMALL, write_example
from tests.lightning_retrieval.search.commands.glyph_commands import command, save_checkpoint

pytestmark = [pytest.mark.hostile, pytest.mark.refusal, pytest.mark.slow]

INSTANTIATOR = "pytorch_lightning.cli.instantiate_module"
MODULE = "lightning_retrieval.RetrievalModule"
LINEAR = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 4, "out_features": 2}}
OF_EACH_KIND = ("os.system", "planted_code.Net", "remote code")  # a function, a class and a setting
LOSS = {"class_path": "lightning_retrieval.SmoothAPLoss", "init_args": {"tau": 0.1}}


class Writes:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (self.marker, "w"))


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """The file that obeying a description would write."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "marker"


def hostile(marker: Path) -> dict[str, dict]:
    """Descriptions that write the marker, or open a connection, if they are obeyed."""
    folder, code = marker.parent, f"open({str(marker)!r}, 'w').close()"
    (folder / "planted_code.py").write_text(f"from torch import nn\n{code}\nclass Net(nn.Linear):\n    pass\n")
    (folder / "hubconf.py").write_text(f"{code}\ndef net():\n    pass\n")
    (folder / "evil.pth").write_bytes(pickle.dumps(Writes(str(marker))))
    remote = folder / "remote"
    remote.mkdir(exist_ok=True)
    (remote / "modeling.py").write_text(f"{code}\nclass Config:\n    pass\n")
    auto_map = {"AutoConfig": "modeling.Config", "AutoModel": "modeling.Config"}
    (remote / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    calls = {
        "torch.fx.graph_module.reduce_graph_module": {"body": {"_code": "forward = print"}, "import_block": code},
        "subprocess.Popen": {"args": ["touch", str(marker)]},
        "os.system": {"command": f"touch {marker}"},
        "builtins.exec": {"source": code},
        "runpy.run_path": {"path_name": str(folder / "planted_code.py")},
        "importlib.import_module": {"name": "planted_code"},
        "planted_code.Net": {"in_features": 4, "out_features": 2},
        "torch.hub.load": {"repo_or_dir": str(folder), "model": "net", "source": "local"},
        "torch.load": {"f": str(folder / "evil.pth"), "weights_only": False},
        "pathlib.Path.touch": {"self": str(marker)},
        "timm.task.distillation.DistillationTeacher": {"model_name_or_module": "hf-hub:timm/resnet18.a1_in1k"},
        "torchmetrics.text.BERTScore": {},
        "timm.create_model": {"model_name": "resnet18", "checkpoint_path": str(folder / "evil.pth")},
        "timm.models.create_model": {"model_name": "hf-hub:timm/resnet18.a1_in1k"},
        "lightning_retrieval.cli.main.main": {"args": ["check", "--help"]},
        "transformers.AutoModel.from_pretrained": {
            "pretrained_model_name_or_path": str(remote),
            "trust_remote_code": True,
        },
    }
    found = {path: {"class_path": path, "init_args": arguments} for path, arguments in calls.items()}
    for name, backbone, settings in (
        ("remote code", f"hf/{remote}", {"trust_remote_code": True}),
        ("remote config", f"hf/{remote}", None),
        ("hub", "timm/hf-hub:timm/resnet18.a1_in1k", None),
        ("overlay", "timm/resnet18", {"pretrained": True, "pretrained_cfg_overlay": {"file": "evil.pth"}}),
    ):
        arguments = {"backbone": backbone, "embedding_dim": 4, "backbone_args": settings}
        found[name] = {"class_path": "lightning_retrieval.Embedder", "init_args": arguments}
    return found


def settings(description: dict, place: str, form: str) -> dict:
    """Hyperparameters with a description in one place: those of a config of the command line, or those of Python."""
    found = {"embedder": LINEAR, "loss": LOSS, "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}}
    if place == "backbone":
        arguments = {"backbone": description, "embedding_dim": 2, "feature_dim": 4}
        found["embedder"] = {"class_path": "lightning_retrieval.Embedder", "init_args": arguments}
    elif place == "adapted":
        arguments = {"embedder": description, "from_dim": 2, "embedding_dim": 2}
        found["embedder"] = {"class_path": "lightning_retrieval.models.AdaptedEmbedder", "init_args": arguments}
    elif place == "_class_path":
        found["_class_path"] = description["class_path"]
    else:
        found[place] = description
    if form == "config":
        found = {"_class_path": MODULE, "_instantiator": INSTANTIATOR, **found}
    return found


def write_checkpoint(path: Path, hyperparameters: dict, **more) -> Path:
    """A checkpoint of a linear layer with other hyperparameters."""
    if not path.exists():
        save_checkpoint(path, RetrievalModule(nn.Linear(4, 2), SmoothAPLoss()))
    torch.save({**torch.load(path, weights_only=True), "hyper_parameters": hyperparameters, **more}, path)
    return path


def indexed(folder: Path, capsys) -> RetrievalIndex:
    """An index of three images by a good model."""
    for number in range(3):
        (folder / "images").mkdir(exist_ok=True)
        Image.new("L", (32, 32), 100 * number).save(folder / "images" / f"{number}.png")
    model = save_checkpoint(folder / "good.ckpt", RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss()))
    arguments = [f"--checkpoint={model}", f"--images={folder / 'images'}", f"--output={folder / 'good'}"]
    assert command(capsys, "index", *arguments)[0] == 0
    return RetrievalIndex.load(folder / "good")


@pytest.mark.parametrize("form", ["config", "python"])
@pytest.mark.parametrize(
    "place",
    ["embedder", "adapted", "backbone", "loss", "optimizer", "lr_scheduler", "relevance", "_class_path"],
)
def test_hyperparameters(marker, tmp_path, place, form):
    for name, description in hostile(marker).items():
        path = write_checkpoint(tmp_path / "model.ckpt", settings(description, place, form))
        with pytest.raises((ValueError, TypeError)):
            RetrievalModule.load_from_checkpoint(path)
        assert not marker.exists(), name


def test_a_file_of_hyperparameters(marker, tmp_path):
    path = write_checkpoint(tmp_path / "model.ckpt", settings(LINEAR, "embedder", "python"))
    texts = [yaml.safe_dump(settings(of, "embedder", "config")) for of in hostile(marker).values()]
    texts += [
        f"optimizer: !!{tag} ['touch {marker}']\n" for tag in ("python/object/apply:os.system", "python/name:os.system")
    ]
    for text in texts:
        (tmp_path / "hparams.yaml").write_text(text)
        with pytest.raises((ValueError, TypeError)):
            RetrievalModule.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml")
        assert not marker.exists(), text


def test_an_older_key_of_hyperparameters(marker, tmp_path):
    """Lightning would read it besides."""
    call = {"class_path": "os.system", "init_args": {"command": f"touch {marker}"}}
    saved = settings(LINEAR, "embedder", "config")
    path = write_checkpoint(tmp_path / "model.ckpt", saved, hparams={"lr_scheduler": call})
    assert type(RetrievalModule.load_from_checkpoint(path).embedder) is nn.Linear
    assert not marker.exists()


def test_hyperparameters_of_a_detector(marker, tmp_path):
    path = save_checkpoint(tmp_path / "model.ckpt", DetectionModule(TinyFasterRCNN(num_classes=2)))
    content = torch.load(path, weights_only=True)
    for name, description in hostile(marker).items():
        saved = {"_class_path": "lightning_retrieval.detection.DetectionModule", "_instantiator": INSTANTIATOR}
        torch.save({**content, "hyper_parameters": {**saved, "detector": description}}, path)
        with pytest.raises((ValueError, TypeError)):
            DetectionModule.load_from_checkpoint(path)
        assert not marker.exists(), name


def test_hyperparameters_of_a_data_module(marker, tmp_path):
    for name, description in hostile(marker).items():
        saved = {"_class_path": "lightning_retrieval.datamodules.ImageFolder", "_instantiator": INSTANTIATOR}
        saved |= {"root": str(tmp_path), "sampler": description}
        path = write_checkpoint(tmp_path / "model.ckpt", {}, datamodule_hyper_parameters=saved)
        with pytest.raises((ValueError, TypeError)):
            ImageFolder.load_from_checkpoint(path)
        assert not marker.exists(), name


@pytest.mark.filterwarnings("ignore:RetrievalEvaluation. (val|test) metrics cover 2 of:UserWarning")
@pytest.mark.parametrize(
    ("subcommand", "names"),
    [("fit", OF_EACH_KIND), *((name, ["os.system"]) for name in ("validate", "test", "predict"))],
)
def test_ckpt_path(marker, tmp_path, capsys, subcommand, names):
    config, descriptions = write_example(tmp_path), hostile(marker)
    for name in names:
        description = descriptions[name]
        path = write_checkpoint(tmp_path / "model.ckpt", settings(description, "embedder", "config"))
        with pytest.raises(SystemExit, match=r"^2$"):
            main([subcommand, f"--config={config}", f"--ckpt_path={path}"])
        assert "--ckpt_path" in capsys.readouterr().err
        assert not marker.exists(), name


def test_ckpt_path_of_another_file(marker, tmp_path, capsys):
    for content in (Writes(str(marker)), [1]):
        torch.save(content, tmp_path / "model.ckpt")
        with pytest.raises(SystemExit, match=r"^2$"):
            main(["test", f"--config={write_example(tmp_path)}", f"--ckpt_path={tmp_path / 'model.ckpt'}"])
        assert "--ckpt_path" in capsys.readouterr().err
        assert not marker.exists()


@pytest.mark.filterwarnings("ignore:RetrievalEvaluation. (val|test) metrics cover 2 of:UserWarning")
def test_run_folder(marker, tmp_path, capsys):
    """The checkpoint of a run folder gives weights to the model of the user's config, and nothing else."""
    run = tmp_path / "run"
    arguments = ["fit", f"--config={write_example(tmp_path)}", f"--run_folder={run}", *SMALL, *SHORT]
    main([*arguments, "--trainer.max_steps=1"])
    (path,) = run.rglob("*.ckpt")
    saved = settings(hostile(marker)["os.system"], "embedder", "config")
    torch.save({**torch.load(path, weights_only=True), "hyper_parameters": saved}, path)
    main([*arguments, "--trainer.max_steps=2"])
    assert not marker.exists()


@pytest.mark.parametrize("form", ["config", "python"])
def test_commands(marker, tmp_path, capsys, form):
    checkpoint, images = tmp_path / "model.ckpt", tmp_path / "images"
    good, query = indexed(tmp_path, capsys), images / "0.png"
    descriptions = hostile(marker)
    for name in OF_EACH_KIND:
        description = descriptions[name]
        write_checkpoint(checkpoint, settings(description, "embedder", form))
        good.about["checkpoint"], good.about["checkpoint_sha256"] = str(checkpoint), file_digest(checkpoint)
        good.save(tmp_path / "index")
        of_model = [f"--checkpoint={checkpoint}", f"--images={images}", f"--output={tmp_path / 'output'}"]
        for arguments in (
            ["index", *of_model],
            ["embed", *of_model],
            ["export", f"--checkpoint={checkpoint}", f"--output={tmp_path / 'output'}"],
            ["search", f"--index={tmp_path / 'index'}", query],
            ["demo", f"--index={tmp_path / 'index'}", "--port=7998"],
        ):
            with pytest.raises(SystemExit, match=r"^2$"):
                main(list(map(str, arguments)))
            assert "--checkpoint" in capsys.readouterr().err, (name, arguments[0])
            assert not marker.exists(), (name, arguments[0])


def test_config_of_a_hub(marker, tmp_path):
    folder = tmp_path / "model"
    Embedder("glyph_net", 8).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    for name, description in hostile(marker).items():
        arguments = {**content["init_args"], "backbone": description}
        if description["class_path"] == "lightning_retrieval.Embedder":
            arguments = {**content["init_args"], **description["init_args"]}
        (folder / "config.json").write_text(json.dumps({**content, "init_args": arguments}))
        with pytest.raises((ValueError, TypeError)):
            Embedder.from_pretrained(folder)
        assert not marker.exists(), name


def test_recorded_transforms(marker, tmp_path, capsys):
    """Of a checkpoint, and of an index."""
    index, query = indexed(tmp_path, capsys), tmp_path / "images" / "0.png"
    content, images = torch.load(tmp_path / "good.ckpt", weights_only=True), tmp_path / "images"
    transforms = [*hostile(marker).values(), {"function": "os.system"}, {"function": "planted_code.Net"}]
    transforms += [{"class_path": "torchvision.transforms.Lambda", "init_args": {"lambd": "os.system"}}]
    transforms += [{"class_path": "torchvision.transforms.v2.Lambda", "init_args": {"lambda": "os.system"}}]
    transforms += [{"albumentations": {"transform": {"__class_fullname__": "os.system", "p": 1}}}]
    for described in transforms:
        index.about["preparation"] = described
        index.save(tmp_path / "index")
        torch.save({**content, "preparation": described}, tmp_path / "model.ckpt")
        of_model = [f"--checkpoint={tmp_path / 'model.ckpt'}", f"--images={images}", f"--output={tmp_path / 'output'}"]
        for arguments in (["search", f"--index={tmp_path / 'index'}", query], ["index", *of_model]):
            assert command(capsys, *arguments)[0] == 2, described
            assert not marker.exists(), described
