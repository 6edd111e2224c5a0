"""The command line: the example's configuration through fit, validate, test, predict; what is said to mistakes."""

import csv
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from lightning_retrieval import RetrievalModule, datamodules
from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import RetrievalDataModule
from tests.wandb_files import OfflineRun

QUIET = [
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:The '(train|val|test|predict)_dataloader' does not have many workers:UserWarning",
    "ignore:GPU available but not used:UserWarning",
    r"ignore:The number of training batches \(2\) is smaller than the logging interval:UserWarning",
    "ignore:RetrievalEvaluation. (val|test) metrics cover 2 of:UserWarning",
    "ignore:LightningCLI's args parameter is intended to run from within Python:UserWarning",
    r"ignore:\s*By default only one JsonargparseDeprecationWarning per type is shown:DeprecationWarning",
    # What pytorch-lightning 2.6 calls in jsonargparse 4.53:
    r"ignore:\s*.* was deprecated in v4.49.0 and will be removed in v5.0.0:DeprecationWarning",
    "ignore:The dirpath has changed from .* Only `best_model_path` will be reloaded:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
]
pytestmark = [pytest.mark.filterwarnings(message) for message in QUIET]

EXAMPLE = Path(__file__).parents[3] / "examples" / "glyphs.yaml"
SMALL = [
    "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=2",
    "--trainer.limit_test_batches=2",
    "--trainer.limit_predict_batches=2",
    "--trainer.enable_progress_bar=false",
    "--data.init_args.eval_batch_size=64",
]
SHORT = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.check_val_every_n_epoch=1",
    "--data.init_args.classes_per_batch=4",
]


def example(folder: Path, **changes: str) -> Path:
    """The example with its logs in `folder`, and some of its lines changed."""
    text = EXAMPLE.read_text().replace("save_dir: logs", f"save_dir: {folder}")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "glyphs.yaml").write_text(text)
    return folder / "glyphs.yaml"


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """One short fit by the real command, with what it printed."""
    folder = tmp_path_factory.mktemp("fitted")
    command = Path(sys.executable).with_name("lightning-retrieval")
    said = subprocess.run(
        [command, "fit", "--config", example(folder), *SMALL, *SHORT],
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said.returncode == 0, said.stderr
    (checkpoint,) = folder.rglob("0-*.ckpt")
    return folder, checkpoint, said.stdout


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_command_fits_and_tests(fitted):
    folder, checkpoint, said = fitted
    logs = folder / "glyphs/version_0"
    assert {path.name for path in logs.iterdir()} >= {
        "metrics.csv",
        "curve.png",
        "retrieval",
        "config.yaml",
        "checkpoints",
    }
    assert {path.name for path in (logs / "checkpoints").iterdir()} == {checkpoint.name, "last.ckpt"}
    table = [line.split() for line in said.splitlines() if line.startswith("test/mAP ")]
    assert ["untrained", "trained"] in [line.split() for line in said.splitlines()]
    assert [len(line) for line in table] == [3]
    logged = [float(row["test/mAP"]) for row in rows(logs / "metrics.csv") if row["test/mAP"]]
    assert [f"{value:.4f}" for value in logged] == table[0][1:]  # before and after
    assert yaml.safe_load((logs / "config.yaml").read_text())["trainer"]["limit_train_batches"] == 2


def test_the_checkpoint_rebuilds_the_module(fitted):
    saved = torch.load(fitted[1], weights_only=True)
    module = RetrievalModule.load_from_checkpoint(fitted[1], weights_only=True)
    assert saved["state_dict"].keys() == module.state_dict().keys()
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in module.state_dict().items())
    assert (module.embedder.embedding_dim, module.loss.tau, module.gradient_clip_val) == (128, 0.01, 1.0)
    optimizer = module.optimizer(module.parameters())
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.AdamW, 0.002)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_other_commands_take_the_checkpoint(fitted, tmp_path, capsys, monkeypatch, command):
    _, checkpoint, said = fitted
    predicted, real = [], RetrievalModule.predict_step

    def predict_step(self, batch, batch_idx):
        output = real(self, batch, batch_idx)
        predicted.append(output["embeddings"].shape)
        return output

    monkeypatch.setattr(RetrievalModule, "predict_step", predict_step)
    main([command, "--config", str(example(tmp_path)), *SMALL, f"--ckpt_path={checkpoint}"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    if command == "predict":
        assert predicted == [(64, 128)] * 2
        return
    name = {"validate": "val/mAP", "test": "test/mAP"}[command]
    expected = [line.split()[-1] for line in said.splitlines() if line.startswith(f"{name} ")]
    assert len(expected) == 1
    assert [name, *expected] in lines


def test_weights_and_biases_is_one_line_away(tmp_path, end_offline_run):
    csv, wandb_logger = "pytorch_lightning.loggers.CSVLogger", "lightning_retrieval.callbacks.RetrievalWandbLogger"
    config = example(tmp_path, **{csv: wandb_logger, "every_n_epochs: 8": "every_n_epochs: 1"})
    main(["fit", "--config", str(config), *SMALL, *SHORT, "--test_after_fit=false"])
    end_offline_run()
    (run,) = tmp_path.glob("wandb/offline-run-*")
    assert list(run.glob("*.wandb"))
    (saved,) = tmp_path.rglob("config.yaml")
    assert saved.parent == tmp_path / "lightning-retrieval" / OfflineRun(run).id
    sent = [path.name.split("_")[0] for path in run.glob("files/media/images/retrieval/*.png")]
    drawn = [path for path in tmp_path.rglob("retrieval/val-*.png") if run not in path.parents]
    assert sorted(sent) == ["curve", *["val"] * len(drawn)]
    assert drawn


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: lightning-retrieval ")
    listed = [line.split()[0] for line in said.splitlines() if line.startswith("    ")]
    assert {"fit", "validate", "test", "predict"} <= set(listed)


SCREEN = 50, 100  # lines and columns


def help_of(capsys, *args):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(list(args))
    said = capsys.readouterr().out
    options = [line for line in said.splitlines() if line.startswith("  -")]
    assert max(map(len, options)) <= SCREEN[1]
    return said


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_of_a_command_fits_on_a_screen_for_each_group(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(SCREEN[1]))
    said = help_of(capsys, command, "--help")
    groups = said.split("\n\n")
    assert max(len(group.splitlines()) for group in groups) <= SCREEN[0]
    named = {line.split()[0].rstrip(",") for line in said.splitlines() if line.startswith("  -")}
    assert {
        "-h",
        "-c",
        "--trainer.max_epochs",
        "--trainer.model_registry",
        "--model",
        "--model.help",
        "--data",
    } <= named
    (epochs,) = (line for line in said.splitlines() if "--trainer.check_val_every_n_epoch" in line)
    assert re.fullmatch(r"  --trainer.check_val_every_n_epoch +Perform a validation loop after .* \[1\]", epochs)
    assert "--data.help lightning_retrieval.datamodules.CUB200" in said


@pytest.mark.parametrize("kind", ["--model.help=lightning_retrieval.RetrievalModule", *(
    f"--data.help=lightning_retrieval.datamodules.{name}" for name in datamodules.__all__
    if isinstance(found := getattr(datamodules, name), type) and issubclass(found, RetrievalDataModule)
    and not inspect.isabstract(found)
)])  # fmt: skip
def test_help_of_a_class_fits_on_a_screen(kind, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(SCREEN[1]))
    said = help_of(capsys, "fit", kind)
    assert len(said.splitlines()) <= SCREEN[0]
    setting = "--model.loss" if kind.startswith("--model") else "--data.classes_per_batch"
    assert re.search(rf"^  {setting} +\S", said, flags=re.MULTILINE)
    if "--data.root" in said:
        assert re.search(r"^  --data.root .* \(required\)$", said, flags=re.MULTILINE)


def test_print_config_gives_a_configuration_that_is_read_again(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["fit", "--config", str(EXAMPLE), "--print_config"])
    printed = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["fit", "--config", str(tmp_path / "printed.yaml"), "--print_config"])
    assert capsys.readouterr().out == printed
    module = yaml.safe_load(printed)["model"]["init_args"]
    assert module["loss"]["init_args"]["tau"] == 0.01
    assert module["chunk_size"] is None


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tau: 0.01": "tua: 0.01"}, ["tua"]),
        ({"gradient_clip_val": "gradient_clip_vall"}, ["gradient_clip_vall"]),
        ({"max_epochs:": "max_epoch:"}, ["max_epoch"]),
        ({"lightning_retrieval.SmoothAPLoss": "lightning_retrieval.SmothAPLoss"}, ["SmothAPLoss"]),
        ({"lightning_retrieval.datamodules.Glyphs": "lightning_retrieval.datamodules.Glyps"}, ["Glyps"]),
        ({"lightning_retrieval.Embedder": "lightning_retrieval.SmoothAPLoss"}, ["embedder", "SmoothAPLoss"]),
        ({"tau: 0.01": "tau: cold"}, ["tau", "cold"]),
    ],
)
def test_mistakes_in_the_configuration_are_named(tmp_path, capsys, changes, named):
    path = example(tmp_path, **changes)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["fit", "--config", str(path)])
    said = capsys.readouterr().err
    assert all(name in said for name in named)
    assert "Traceback" not in said


@pytest.mark.refusal
def test_a_missing_configuration_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["fit", "--config", str(tmp_path / "nowhere.yaml")])
    assert "nowhere.yaml" in capsys.readouterr().err


def checked(capsys, *args):
    """The exit code of `lightning-retrieval check`, what it printed and what it complained of."""
    with pytest.raises(SystemExit) as end:
        main(["check", *map(str, args)])
    return end.value.code, *capsys.readouterr()


def test_check_shows_a_layout_beside_the_papers_counts(tmp_path, capsys):
    for label, number in itertools.product("abcd", range(2)):
        (tmp_path / label).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / label / f"{number}.png")
    code, out, err = checked(capsys, "--data", "ImageFolder", "--root", tmp_path, "--test_fraction", 0.25)
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()[1:]] == [["train", "6", "3"], ["test", "2", "1"]]

    (tmp_path / "table.csv").write_text("image,label,split\na/0.png,a,train\nb/0.png,b,test\ngone.png,b,test\n")
    table = tmp_path / "table.csv"
    code, out, err = checked(capsys, "--data=ImageTable", "--root", tmp_path, "--table", table)
    assert (code, err) == (1, "")
    assert out.splitlines()[-1] == "missing: gone.png"


def test_check_says_where_a_data_set_may_be(tmp_path, capsys):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "Ebay_train.txt").write_text("")
    code, out, err = checked(capsys, "--data", "StanfordOnlineProducts", "--root", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("StanfordOnlineProducts: `root` must contain Ebay_train.txt")
    assert err.rstrip().endswith(f"pass root={tmp_path}/set.")


def test_check_of_the_embedded_data_set_needs_no_root(capsys):
    code, out, err = checked(capsys, "--data", "Glyphs")
    assert err == ""
    rows = [line.split() for line in out.splitlines()[:4]]
    assert rows[0] == ["split", "images", "classes", "published:", "images", "classes"]
    assert [row[0] for row in rows[1:]] == ["train", "val", "test"]
    assert (code == 0) == all(row[1:3] == row[3:] for row in rows[1:])  # as with the fonts of the table


def test_check_knows_the_data_modules_by_name(capsys):
    code, _, err = checked(capsys, "--data", "Nothing", "--root", "x")
    assert code == 2
    assert "invalid choice: 'Nothing'" in err
    assert "VehicleID" in err
    assert "DataModule" not in err  # not the classes that are made to be subclassed
    code, out, _ = checked(capsys, "--data", "InShop", "--help")
    assert code == 0
    assert "--high_res" in out
