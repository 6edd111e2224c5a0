"""The example config through fit, validate, test and predict, mistakes in a config, and other backbones."""

import json
import os
import sys
import warnings

import pytest
import pytorch_lightning as pl
import torch
import yaml
from PIL import Image
from torch.utils.data import Subset

from lightning_retrieval import RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import Glyphs
from lightning_retrieval.models import Preparation
from lightning_retrieval.search.commands.export import export_model
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from tests.datamodules.trees_more import write_folders
from tests.lightning_retrieval.cli.example_config import EXAMPLE, IGNORED, SHORT, SMALL, metrics_of, write_example
from tests.lightning_retrieval.models.hugging_face_folders import write_folder
from tests.lightning_retrieval.search.commands.glyph_commands import command, run
from tests.lightning_retrieval.training.test_module_checkpoints import OwnParts
from tests.processes import start_processes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(*IGNORED)]


class WarningOfUser(pl.Callback):
    """A callback of the user that issues a warning."""

    def on_train_start(self, *_):
        warnings.warn("from the code of the user", stacklevel=1)


def fit_in_a_folder(rank, world_size, folder):
    os.chdir(folder)
    warnings.simplefilter("default")  # as without pytest
    callback = "--trainer.callbacks+=tests.lightning_retrieval.cli.test_fit.WarningOfUser"
    options = [*SMALL, *SHORT, "--trainer.enable_progress_bar=true", callback]
    sys.argv[1:] = ["fit", "--config", str(write_example(folder)), *options]
    main()  # as the program is started


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """One short fit in a process of its own, with what it printed."""
    folder = tmp_path_factory.mktemp("fitted")
    (folder / "process").mkdir()
    (started,) = start_processes(fit_in_a_folder, 1, folder, folder=folder / "process")
    assert started.wait(120) == 0, started.output()
    (checkpoint,) = folder.rglob("best.ckpt")
    return folder, checkpoint, started.output()


def test_fit_trains_and_tests(fitted):
    """What it prints has the user's warnings, and no advice of Lightning."""
    folder, _, printed = fitted
    logs = folder / "glyphs/version_0"
    written = {"metrics.csv", "curve.png", "retrieval", "config.yaml", "checkpoints"}
    assert written <= {path.name for path in logs.iterdir()}
    assert {path.name for path in (logs / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    table = [line.split() for line in printed.splitlines() if line.startswith("test/mAP ")]
    assert ["backbone", "untrained", "trained"] in [line.split()[:3] for line in printed.splitlines()]
    assert len(table) == 1
    logged = [float(row["test/mAP"]) for row in metrics_of(logs) if row["test/mAP"]]
    assert [f"{value:.4f}" for value in logged] == table[0][2:4]  # before and after
    assert yaml.safe_load((logs / "config.yaml").read_text())["trainer"]["limit_train_batches"] == 2
    assert "from the code of the user" in printed
    assert "Tip: " not in printed


def test_checkpoint_rebuilds_the_module(fitted):
    saved = torch.load(fitted[1], weights_only=True)
    module = RetrievalModule.load_from_checkpoint(fitted[1], weights_only=True)
    assert saved["state_dict"].keys() == module.state_dict().keys()
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in module.state_dict().items())
    assert (module.embedder.embedding_dim, module.loss.tau, module.updates.gradient_clip_val) == (128, 0.01, 0.05)
    optimizer = module.optimizer(module.parameters())
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.AdamW, 0.006)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_validate_test_and_predict_load_the_checkpoint(fitted, tmp_path, capsys, command):
    folder, checkpoint, printed = fitted
    given = {"validate": folder / "glyphs", "test": folder / "glyphs/version_0", "predict": checkpoint}[command]
    main([command, "--config", str(write_example(tmp_path)), *SMALL, f"--ckpt_path={given}"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    if command == "predict":
        (run,) = tmp_path.glob("*/version_*/embeddings")
        rows = EmbeddingFolder.load(run).read(0)
        assert rows.ids.tolist() == list(range(128))
        images = torch.stack([image["images"] for image in Subset(Glyphs().test_set, range(128))])
        module = RetrievalModule.load_from_checkpoint(checkpoint, weights_only=True).eval()
        torch.testing.assert_close(torch.from_numpy(rows.embeddings), module(images).detach(), rtol=0, atol=1e-5)
        return
    name = {"validate": "val/mAP", "test": "test/mAP"}[command]
    (line,) = (line.split() for line in printed.splitlines() if line.startswith(f"{name} "))
    trained = line[:4][-1]  # after the backbone and the untrained network, if there are three columns
    assert [name, trained] in [line[:2] for line in lines]


@pytest.mark.parametrize("command", ["fit", "test"])
def test_settings_of_the_model_that_a_checkpoint_replaces_are_named(fitted, tmp_path, monkeypatch, command):
    """Those of training only for a training. Without a change nothing is named, else other tests would raise."""
    monkeypatch.chdir(tmp_path)
    changed = ["--model.init_args.loss.init_args.tau=0.5", "--model.init_args.eval_scales=[1.0, 0.5]"]
    named = r"eval_scales \[1.0, 0.5\]"
    if command == "fit":
        named = rf"loss.tau 0.5 .*{named}"
    with pytest.warns(UserWarning, match=named):
        main([command, "--config", str(write_example(tmp_path)), *SMALL, *SHORT, f"--ckpt_path={fitted[1]}", *changed])


def test_printed_config_can_be_read_again(tmp_path, capsys):
    _, printed, _ = run(capsys, "fit", "--config", EXAMPLE, "--print_config")
    (tmp_path / "printed.yaml").write_text(printed)
    code, again, _ = run(capsys, "fit", "--config", tmp_path / "printed.yaml", "--print_config")
    assert (code, again) == (0, printed)
    module = yaml.safe_load(printed)["model"]["init_args"]
    assert module["loss"]["init_args"]["tau"] == 0.01
    assert module["chunk_size"] is None


@pytest.mark.parametrize("name", ["25921e05", "1.5e3", "007", "12:30", "on"])
def test_texts_like_numbers_stay_texts_in_the_config_of_a_run(name, tmp_path, capsys):
    """Such as the hash of a commit, or the id of a run of Weights & Biases."""
    printed = run(capsys, "fit", "--config", EXAMPLE, f"--trainer.logger.init_args.name={name}", "--print_config")[1]
    assert yaml.safe_load(printed)["trainer"]["logger"]["init_args"]["name"] == name
    (tmp_path / "printed.yaml").write_text(printed)
    assert run(capsys, "fit", "--config", tmp_path / "printed.yaml", "--print_config")[:2] == (0, printed)


def error_of(capsys, config, *options):
    """What `fit` prints that ends with the exit code 2."""
    code, _, err = run(capsys, "fit", "--config", config, *options)
    assert code == 2
    assert "Traceback" not in err
    return err


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("tau: 0.01", "tua: 0.01", ["tua"]),
        ("tau: 0.01", "tau: cold", ["tau", "cold"]),
        ("max_epochs:", "max_epoch:", ["max_epoch"]),
        ("datamodules.Glyphs", "datamodules.Glyps", ["Glyps"]),
        ("lightning_retrieval.Embedder", "lightning_retrieval.SmoothAPLoss", ["embedder", "SmoothAPLoss"]),
        ("lr: 0.006", "lr: 0,006", ["lr", "0,006"]),
        ("T_max: 1672", "T_max: 1.52e3", ["T_max", "1520.0"]),
        ("ks: [1, 10, 100]", "ks: 1", ["RetrievalEvaluation", "ks"]),
        ("name: glyphs", "name: 25921e05", ["CSVLogger", "name"]),
        ("    optimizer:", "    optimiser:", ["optimiser"]),
        ("lr_scheduler_interval: step", "chunk_size: 0", ["RetrievalModule", "chunk_size", "0"]),
    ],
)
def test_mistakes_in_the_config_are_named(tmp_path, capsys, right, wrong, named):
    config = write_example(tmp_path, **{right: wrong})
    printed = error_of(capsys, config)
    assert [name for name in (*named, str(config)) if name not in printed] == []


@pytest.mark.refusal
def test_a_checkpoint_of_another_program_or_a_folder_is_no_checkpoint(tmp_path, capsys):
    torch.save({"state_dict": {"module.encoder_q.conv1.weight": torch.ones(2)}, "epoch": 200}, tmp_path / "other.ckpt")
    for path in (tmp_path / "other.ckpt", tmp_path):
        printed = error_of(capsys, write_example(tmp_path), f"--ckpt_path={path}")
        assert "`--ckpt_path` must be a checkpoint" in printed
        assert str(path) in printed


class Faulty(SmoothAPLoss):
    def __init__(self):
        super().__init__()
        int("my: own mistake")


@pytest.mark.refusal
def test_an_error_of_a_class_of_the_user_keeps_its_traceback(tmp_path):
    loss = "lightning_retrieval.LogRankLoss\n      init_args:\n        tau: 0.01\n        negative_weight: 10.0"
    config = write_example(tmp_path, **{loss: f"{__name__}.Faulty"})
    with pytest.raises(ValueError, match="my: own mistake"):
        main(["fit", "--config", str(config)])


@pytest.mark.refusal
def test_what_the_run_refuses_is_one_line(tmp_path, capsys):
    printed = error_of(capsys, write_example(tmp_path), *SMALL, *SHORT, "--trainer.overfit_batches=2")
    assert "overfit_batches" in printed.splitlines()[-1]


TINY = {"depth": 1, "embed_dim": 24, "num_heads": 2}
FAMILIES = {
    "torchvision": {"backbone": "squeezenet1_1", "image_size": 64},
    "timm": {"backbone": "timm/vit_tiny_patch16_224", "backbone_args": TINY},
    "transformers": {"weights": "DEFAULT"},
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


def test_a_rule_of_relevance_of_ones_own_in_a_config(tmp_path, monkeypatch):
    """The config and the checkpoint name its class and its arguments."""
    write_folders(tmp_path / "images", ["a", "b", "c", "d"], images=2)
    config = yaml.safe_load(CONFIG)
    config["model"]["init_args"]["embedder"]["init_args"] = {"embedding_dim": 8, **FAMILIES["torchvision"]}
    own = {"class_path": "tests.lightning_retrieval.relevance_rules.Coarse", "init_args": {"size": 2}}
    config["model"]["init_args"]["relevance"] = own
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", "config.yaml"])
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["hyper_parameters"]["relevance"] == own
    assert RetrievalModule.load_from_checkpoint(checkpoint, weights_only=True).relevance.size == 2


def test_a_subclass_in_a_config_passes_arguments_on(tmp_path):
    path = write_example(tmp_path)
    config = yaml.safe_load(path.read_text())
    own = "tests.lightning_retrieval.training.test_module_checkpoints.OwnParts"
    config["model"] = {"class_path": own, "init_args": {"dim": 6, "chunk_size": 200}}
    path.write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(path), *SMALL, *SHORT, "--test_after_fit=false"])
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    loaded = OwnParts.load_from_checkpoint(checkpoint, seed=3, weights_only=True)
    assert (loaded.embedder.embedding_dim, loaded.chunk_size, loaded.seed) == (6, 200, 3)


@pytest.mark.refusal
def test_a_config_of_another_format_is_refused(tmp_path, capsys):
    path = write_example(tmp_path)
    path.write_text("# lightning_retrieval format 7\n" + path.read_text())
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["fit", "--config", str(path), *SMALL, *SHORT])
    assert "format 7" in capsys.readouterr().err


def test_the_precision_of_products_is_set_and_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = torch.get_float32_matmul_precision()
    try:
        main(["fit", "--config", str(write_example(tmp_path)), *SMALL, *SHORT, "--matmul_precision=high"])
        assert torch.get_float32_matmul_precision() == "high" != before
    finally:
        torch.set_float32_matmul_precision(before)
    (config,) = tmp_path.glob("glyphs/*/config.yaml")
    assert yaml.safe_load(config.read_text())["matmul_precision"] == "high"


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request, tmp_path_factory):
    """The name of a family, and the folder in which its backbone was trained."""
    embedder = FAMILIES[request.param]
    pytest.importorskip(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "transformers":
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
