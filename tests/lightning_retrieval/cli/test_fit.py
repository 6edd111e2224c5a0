"""The example config through fit, validate, test and predict, and the messages about mistakes in a config."""

import csv
import os
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_retrieval import RetrievalModule
from lightning_retrieval.cli.main import main
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from tests.lightning_retrieval.cli.example_config import EXAMPLE, IGNORED, SHORT, SMALL, write_example
from tests.lightning_retrieval.cli.glyph_commands import run
from tests.processes import start_processes
from tests.wandb_files import OfflineRun

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(*IGNORED)]


def fit_in_a_folder(rank, world_size, folder):
    os.chdir(folder)
    main(["fit", "--config", str(write_example(folder)), *SMALL, *SHORT])


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """One short fit in a process of its own, with what it printed."""
    folder = tmp_path_factory.mktemp("fitted")
    (folder / "process").mkdir()
    (started,) = start_processes(fit_in_a_folder, 1, folder, folder=folder / "process")
    assert started.wait(120) == 0, started.output()
    (checkpoint,) = folder.rglob("0-*.ckpt")
    return folder, checkpoint, started.output()


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_fit_trains_and_tests(fitted):
    folder, checkpoint, printed = fitted
    logs = folder / "glyphs/version_0"
    written = {"metrics.csv", "curve.png", "retrieval", "config.yaml", "checkpoints"}
    assert written <= {path.name for path in logs.iterdir()}
    assert {path.name for path in (logs / "checkpoints").iterdir()} == {checkpoint.name, "last.ckpt"}
    table = [line.split() for line in printed.splitlines() if line.startswith("test/mAP ")]
    assert ["backbone", "untrained", "trained"] in [line.split() for line in printed.splitlines()]
    assert [len(line) for line in table] == [4]
    logged = [float(row["test/mAP"]) for row in rows(logs / "metrics.csv") if row["test/mAP"]]
    assert [f"{value:.4f}" for value in logged] == table[0][2:]  # before and after
    assert yaml.safe_load((logs / "config.yaml").read_text())["trainer"]["limit_train_batches"] == 2


def test_checkpoint_rebuilds_the_module(fitted):
    saved = torch.load(fitted[1], weights_only=True)
    module = RetrievalModule.load_from_checkpoint(fitted[1], weights_only=True)
    assert saved["state_dict"].keys() == module.state_dict().keys()
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in module.state_dict().items())
    assert (module.embedder.embedding_dim, module.loss.tau, module.gradient_clip_val) == (128, 0.01, 1.0)
    optimizer = module.optimizer(module.parameters())
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.AdamW, 0.003)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_validate_test_and_predict_load_the_checkpoint(fitted, tmp_path, capsys, monkeypatch, command):
    _, checkpoint, printed = fitted
    pytest.importorskip("pyarrow")
    predicted, real = [], RetrievalModule.predict_step

    def predict_step(self, batch, batch_idx):
        output = real(self, batch, batch_idx)
        predicted.append(output["embeddings"])
        return output

    monkeypatch.setattr(RetrievalModule, "predict_step", predict_step)
    main([command, "--config", str(write_example(tmp_path)), *SMALL, f"--ckpt_path={checkpoint}"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    if command == "predict":
        (run,) = tmp_path.glob("*/version_*/embeddings")
        rows = EmbeddingFolder.load("me", run).read(0)
        assert torch.equal(torch.from_numpy(rows.embeddings), torch.cat(predicted))
        assert len(rows.ids) == 128
        return
    name = {"validate": "val/mAP", "test": "test/mAP"}[command]
    expected = [line.split()[-1] for line in printed.splitlines() if line.startswith(f"{name} ")]
    assert len(expected) == 1
    assert [name, *expected] in lines


def test_weights_and_biases_needs_one_line_of_the_config(tmp_path, end_offline_run):
    csv, wandb_logger = "pytorch_lightning.loggers.CSVLogger", "lightning_retrieval.callbacks.RetrievalWandbLogger"
    config = write_example(tmp_path, **{csv: wandb_logger})
    main(["fit", "--config", str(config), *SMALL, *SHORT, "--test_after_fit=false"])
    end_offline_run()
    (run,) = tmp_path.glob("wandb/offline-run-*")
    assert list(run.glob("*.wandb"))
    (saved,) = tmp_path.rglob("config.yaml")
    assert saved.parent == tmp_path / "lightning-retrieval" / OfflineRun(run).id


def test_printed_config_can_be_read_again(tmp_path, capsys):
    _, printed, _ = run(capsys, "fit", "--config", EXAMPLE, "--print_config")
    (tmp_path / "printed.yaml").write_text(printed)
    code, again, _ = run(capsys, "fit", "--config", tmp_path / "printed.yaml", "--print_config")
    assert (code, again) == (0, printed)
    module = yaml.safe_load(printed)["model"]["init_args"]
    assert module["loss"]["init_args"]["tau"] == 0.01
    assert module["chunk_size"] is None


def printed_error(capsys, config, *options, command="fit"):
    """What a command prints that ends with the exit code 2."""
    code, _, err = run(capsys, command, "--config", config, *options)
    assert code == 2
    assert "Traceback" not in err
    return err


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tau: 0.01": "tua: 0.01"}, ["tua"]),
        ({"max_epochs:": "max_epoch:"}, ["max_epoch"]),
        ({"lightning_retrieval.datamodules.Glyphs": "lightning_retrieval.datamodules.Glyps"}, ["Glyps"]),
        ({"lightning_retrieval.Embedder": "lightning_retrieval.SmoothAPLoss"}, ["embedder", "SmoothAPLoss"]),
        ({"tau: 0.01": "tau: cold"}, ["tau", "cold"]),
        ({"gradient_clip_val: 1.0": "chunk_size: 0"}, ["\nerror: ", "RetrievalModule: `chunk_size` must be", "got 0."]),
    ],
)
def test_mistakes_in_the_config_are_named(tmp_path, capsys, changes, named):
    printed = printed_error(capsys, write_example(tmp_path, **changes))
    assert all(name in f"\n{printed}" for name in named)


@pytest.mark.refusal
def test_a_command_without_a_config_that_exists(tmp_path, capsys):
    code, _, err = run(capsys, "fit")
    missing = "the following arguments are required: fit.data, fit.model; give a config, --config FILE\n"
    assert (code, err.endswith(f"error: {missing}")) == (2, True)
    assert "nowhere.yaml" in printed_error(capsys, tmp_path / "nowhere.yaml")
    printed = printed_error(capsys, write_example(tmp_path), f"--ckpt_path={'n' * 500}", command="test")
    assert "lightning-retrieval test: `--ckpt_path` must have names of at most 255 bytes" in printed


@pytest.mark.refusal
def test_a_package_that_a_config_needs_is_named_in_one_sentence(tmp_path, capsys, monkeypatch):
    for name in ("_TENSORBOARD_AVAILABLE", "_TENSORBOARDX_AVAILABLE"):
        monkeypatch.setattr(f"lightning_fabric.loggers.tensorboard.{name}", False)
    monkeypatch.setitem(sys.modules, "timm", None)
    for option, owner, extra in (
        ("--trainer.logger=TensorBoardLogger", "TensorBoardLogger", "tensorboard"),
        ("--model.embedder.backbone=timm/resnet18", "Embedder", "timm"),
    ):
        last_line = printed_error(capsys, write_example(tmp_path), option).splitlines()[-1]
        assert f"error: {owner}" in last_line
        assert last_line.endswith(f"pip install 'lightning-retrieval[{extra}]'.")


FAULTY = """
from lightning_retrieval import SmoothAPLoss

class Faulty(SmoothAPLoss):
    def __init__(self):
        super().__init__()
        int("my: own mistake")
"""


@pytest.mark.refusal
def test_an_error_of_a_class_of_the_user_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "faulty_loss.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"lightning_retrieval.SmoothAPLoss\n      init_args:\n        tau: 0.01": "faulty_loss.Faulty"}
    with pytest.raises(ValueError, match="my: own mistake"):
        main(["fit", "--config", str(write_example(tmp_path, **changes))])
    sys.modules.pop("faulty_loss")
