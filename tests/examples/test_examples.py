"""The examples run as they are, or shortened if they train for long."""

import csv
import hashlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from base64 import b64encode
from collections import Counter
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchvision
import yaml
from PIL import Image
from torch.nn.functional import normalize

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import ImageFolder
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.serialised import serialise_transform
from tests.examples.scripts import imported
from tests.quiet_trainer import quiet_trainer
from tests.wandb_files import OfflineRun

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW = [
    *("--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"),
    *("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1"),
    *("--trainer.limit_test_batches=1", "--test_after_fit=false", "--trainer.enable_progress_bar=false"),
    "--data.eval_batch_size=64",
]


def run_bash(folder, *command, first=Path(sys.executable).parent, **environment):
    """Run a script in a folder, with the programs of `first` before others; returns what it prints."""
    path = f"{first}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", *map(str, command)],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def values(folder, name):
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.fixture
def cut_down(monkeypatch):
    """Limit every Trainer to two steps; the list of the Trainers."""
    make, made = pl.Trainer.__init__, []

    def two_steps(self, **kwargs):
        make(self, **{**kwargs, "limit_train_batches": 2, "limit_val_batches": 2, "enable_checkpointing": False})
        made.append(self)

    monkeypatch.setattr(pl.Trainer, "__init__", two_steps)
    return made


@pytest.mark.filterwarnings("ignore:RetrievalEvaluation. val metrics cover 2 of:UserWarning")
def test_subclass(cut_down, capsys):
    script = EXAMPLES / "subclass.py"
    assert len(script.read_text().splitlines()) < 60
    namespace = runpy.run_path(str(script), run_name="__main__")
    assert namespace["module"].hparams["momentum"] == 0.8
    steps = cut_down[0].optimizers[0].state[namespace["classifier"].head.weight]
    assert steps["momentum_buffer"].abs().max() > 0  # the classifier learns
    assert {"train/loss/ap", "train/loss/classes"} <= cut_down[0].callback_metrics.keys()
    assert [trainer.global_step for trainer in cut_down] == [2]
    assert "val/mAP" in capsys.readouterr().out


@pytest.mark.filterwarnings(
    "ignore:RetrievalEvaluation. val metrics cover 2 of:UserWarning",
    "ignore:RetrievalModule. BatchNorm sees 128 images at a time:UserWarning",
)
def test_a_loss_of_pytorch_metric_learning(cut_down):
    runpy.run_path(str(EXAMPLES / "pml_loss.py"), run_name="__main__")
    assert [trainer.global_step for trainer in cut_down] == [2, 2]
    assert [trainer.lightning_module.memory is None for trainer in cut_down] == [False, True]
    assert {"train/loss/ap", "train/loss/pairs"} <= cut_down[1].callback_metrics.keys()
    assert all(trainer.callback_metrics["val/mAP"] > 0 for trainer in cut_down)


def test_a_loop_in_plain_pytorch(tmp_path, run_python):
    output = run_python(EXAMPLES / "plain_pytorch_loop.py", 5, folder=tmp_path)
    losses = [float(value) for value in re.findall(r"^step \d+: loss (\S+)$", output, flags=re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert "'mAP': 0." in output


def test_own_images_from_a_folder_to_a_search(tmp_path, run_python):
    """The three commands of the README, except for the installation."""
    photos, colours = tmp_path / "my photos", np.random.default_rng(0)
    for label in range(8):
        (photos / f"thing {label}").mkdir(parents=True)
        for number in range(3):
            pixels = np.clip(colours.normal(30 * label, 20, (40, 50, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(photos / f"thing {label}" / f"{number}.jpg")
    own_images = [EXAMPLES / "own_images.py", photos, "--weights", "none", "--workers", 0, "--size", 40]
    own_images += ["--backbone", "squeezenet1_1", "--loss", "fast_ap", "--batch", 8, "--lr", 1e-3]
    output = run_python(*own_images, "--epochs", 1, folder=tmp_path)
    folder = tmp_path / "logs/own_images/version_0"
    assert {path.name for path in folder.iterdir()} >= {"metrics.csv", "curve.png", "retrieval", "checkpoints"}
    (score,) = values(folder, "val/mAP")
    assert 0 < score <= 1
    lines = [line.split() for line in output.splitlines()]
    assert ["backbone", "untrained", "trained", "95", "%", "interval"] in lines
    (table,) = (line for line in lines if line[:1] == ["test/mAP"])
    before = [values(folder, name)[0] for name in ("backbone/test/mAP", "test/mAP")]
    assert table[1:4] == [f"{value:.4f}" for value in (*before, score)]
    assert float(table[4]) <= score <= float(table[6])
    is_worse = score < max(values(folder, name)[0] for name in ("backbone/test/mAP", "test/mAP"))
    assert ("The trained network is worse than " in output) == is_worse
    assert ("To search with the trained network all the same:" in output) == is_worse
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    index, search, demo = (line for line in output.splitlines() if line.startswith("lightning-retrieval "))
    program = Path(sys.executable).with_name("lightning-retrieval")  # a Python script, which pip has written
    output = run_python(program, *shlex.split(index)[1:], folder=tmp_path)
    assert "24 images" in output
    assert "images prepared with Preparation(image_size=40, resize=40), as the checkpoint says" in output
    search = search.replace("IMAGE", "'my photos/thing 1/0.jpg'")
    output = run_python(program, *shlex.split(search)[1:], folder=tmp_path)
    first = output.splitlines()[2]
    assert first.split(maxsplit=3)[3] == "thing 1/0.jpg"  # itself
    assert (tmp_path / "results.html").stat().st_size > 10_000
    assert demo == "lightning-retrieval demo --index trained.index"

    output = run_python(*own_images, "--epochs", 2, "--resume", folder=tmp_path)
    assert f"--resume: continuing from {Path('logs/own_images/version_0/checkpoints/last.ckpt')}" in output
    assert [path.name for path in folder.parent.iterdir()] == ["version_0"]
    assert len(values(folder, "val/mAP")) == 2
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    last = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    assert (last["epoch"], last["global_step"]) == (1, 4)  # two steps in each epoch


def write_noise(folder, classes, images):
    for number in range(classes * images):
        path = folder / f"{number % classes}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((30, 30), 9).save(path)


def error_of_own_images(folder, monkeypatch, capsys):
    """What the script prints when it ends with an error."""
    monkeypatch.setattr(sys, "argv", ["own_images.py", str(folder), "--workers", "0"])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(EXAMPLES / "own_images.py"), run_name="__main__")
    return capsys.readouterr().err


def script_of_own_images():
    """The functions of the script."""
    return runpy.run_path(str(EXAMPLES / "own_images.py"), run_name="own_images")


def test_own_images_offers_the_pretrained_backbone_where_training_did_not_help(tmp_path, monkeypatch, capsys):
    """The printed command makes an index of the features that the table calls `backbone`."""
    script = script_of_own_images()
    weights = tmp_path / "weights.pth"
    torch.save(torchvision.models.get_model("squeezenet1_1").state_dict(), weights)
    write_noise(tmp_path / "photos", 2, 3)
    arguments = [
        "photos",
        "--backbone=squeezenet1_1",
        f"--weights={weights}",
        "--size=40",
        "--mean",
        "0.5",
        "0.5",
        "0.4",
    ]
    monkeypatch.setattr(sys, "argv", ["own_images.py", *arguments])
    monkeypatch.chdir(tmp_path)
    options = script["parse_options"]()[1]
    before, after = {"test/mAP": 0.52}, {"test/mAP": 0.51}
    script["print_commands"](options, {"backbone": after, "untrained": after, "test": before})
    trained = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lightning-retrieval ")]
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert "\n".join(trained[:2]).replace("IMAGE", "query.jpg") in readme
    script["print_commands"](options, {"backbone": before, "untrained": after, "test": after})
    index, *others = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lightning-retrieval ")]
    assert "--checkpoint" not in index
    assert len(others) == 2
    main(shlex.split(index)[1:])
    output = index.rpartition("--output ")[2]
    assert f"--output {output}\n" not in readme  # an index of another size, which would be refused
    made = RetrievalIndex.load(output)
    embedder = script["make_embedder"](options.backbone, options.weights, script["settings_of"](options)).eval()
    images = [embedder.preparation(Image.open(tmp_path / "photos" / path)) for path in made.paths(made.ids)]
    with torch.no_grad():
        expected = normalize(embedder.pooled_features(torch.stack(images)))
    assert torch.allclose(made.embeddings(made.ids), expected, atol=1e-5)


@pytest.mark.parametrize(("weights", "offered"), [("none", False), ("DEFAULT", True)])
def test_own_images_offers_no_backbone_without_pretrained_weights(weights, offered):
    worse = {"backbone": {"test/mAP": 0.5}, "untrained": {"test/mAP": 0.4}, "test": {"test/mAP": 0.3}}
    assert script_of_own_images()["is_backbone_enough"](worse, weights) == offered


def test_own_images_with_other_settings_of_the_images(tmp_path, monkeypatch):
    script = script_of_own_images()
    others = {"mean": [0.5, 0.4, 0.3], "std": None, "interpolation": "bicubic"}
    settings = {"loss": "smooth_ap", "lr": 1e-4, "backbone": "squeezenet1_1", "weights": "none"}
    module = script["make_module"](**settings, preparation=script["image_settings"](48, 60, **others))
    found = module.embedder.preparation
    assert (found.image_size, found.resize, found.interpolation) == (48, 60, "bicubic")
    assert (found.mean, found.std) == ((0.5, 0.4, 0.3), Preparation().std)
    module = script["make_module"](**settings, preparation=script["image_settings"](48))
    assert (module.embedder.preparation.image_size, module.embedder.preparation.resize) == (48, 48)
    module = script["make_module"](**settings, preparation=script["image_settings"](None))
    assert module.embedder.preparation == Preparation()
    module = script["make_module"](**settings, preparation=script["image_settings"](48, fill="black"))
    assert module.embedder.preparation == Preparation(48, resize="fit", fill="black")

    (tmp_path / "own_transforms_of_a_user.py").write_text("def evaluate(image):\n    return image\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = {"train_transform": None, "eval_transform": "own_transforms_of_a_user.evaluate"}
    data = script["make_data"](tmp_path, categories=False, workers=0, **names)
    assert serialise_transform(data.eval_transform.current) == {"function": "own_transforms_of_a_user.evaluate"}
    with pytest.raises(
        ValueError, match=r"^no_such.function cannot be imported as package.function .*PYTHONPATH=\. finds modules"
    ):
        script["make_data"](tmp_path, categories=False, workers=0, train_transform="no_such.function")


@pytest.mark.parametrize(("options", "has_note"), [((), True), (("--fit",), False)])
def test_the_check_of_own_images_is_of_the_images_as_they_are_prepared(
    options, has_note, tmp_path, monkeypatch, capsys
):
    for label in "ab":  # too few classes, so that the script ends after the check
        (tmp_path / label).mkdir()
        Image.effect_noise((80, 40), 50).save(tmp_path / label / "0.png")
    monkeypatch.setattr(sys, "argv", ["own_images.py", str(tmp_path), "--workers", "0", "--size", "48", *options])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "own_images.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "note: all images have 80 x 40 pixels" in printed
    assert ("a centre crop of 48 x 48 pixels cuts" in printed) == has_note
    assert ("--fit pads images" in printed) == has_note


def test_own_images_resumes_no_run_that_has_had_more_epochs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "logs/own_images/version_0/checkpoints"
    folder.mkdir(parents=True)
    torch.save({"epoch": 19}, folder / "last.ckpt")
    monkeypatch.setattr(sys, "argv", ["own_images.py", "photos", "--resume", "--epochs", "18"])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(EXAMPLES / "own_images.py"), run_name="__main__")
    assert "--epochs must be at least 19, that of logs/own_images/version_0/" in capsys.readouterr().err


@pytest.mark.filterwarnings("error:Found .* in eval mode")
def test_own_images_hides_warnings_about_what_its_check_lists_and_what_it_chooses(tmp_path):
    write_noise(tmp_path / "photos", classes=8, images=3)
    for label in range(8, 16):  # these classes have one image
        (tmp_path / f"photos/{label}").mkdir()
        shutil.copy(tmp_path / "photos/0/0.png", tmp_path / f"photos/{label}/0.png")
    weights = tmp_path / "pretrained.pt"
    torch.save(torchvision.models.mobilenet_v3_small().state_dict(), weights)
    script = script_of_own_images()
    data = script["make_data"](tmp_path / "photos", categories=False, workers=0)
    script["set_batch_size"](data, 8)
    settings = {"loss": "log_rank", "lr": 1e-4, "backbone": "mobilenet_v3_small", "weights": str(weights)}
    module = script["make_module"](**settings, preparation=script["image_settings"](32))
    with script["quiet_trainer"](*script["EXPECTED_WARNINGS"]):
        quiet_trainer(fast_dev_run=True).fit(module, data)


def test_errors_of_own_images_name_its_options(tmp_path, monkeypatch, capsys):
    def offline(*args, **settings):
        raise URLError("no network")

    write_noise(tmp_path / "tools", classes=4, images=2)
    write_noise(tmp_path / "few/tools", classes=2, images=3)
    assert script_of_own_images()["with_options"]("give another `image_size`.") == "give another --size."
    monkeypatch.setattr("torchvision.models.get_model", offline)
    wanted = {
        tmp_path / "few/tools": "need at least two classes each that have two or more images, got 1 and 1 in ",
        tmp_path: r"set --categories if .* are categories, or --classes deepest to .*, or pass \S+/tools\. See own",
        tmp_path / "tools": r"could not be loaded \(URLError: .*--weights efficientnet-lite0 .*--weights none trains",
    }
    for folder, message in wanted.items():
        printed = error_of_own_images(folder, monkeypatch, capsys)
        assert re.search(message, printed)
        assert printed.count("\n") == 1


def test_two_processes(tmp_path):
    output = run_bash(tmp_path, EXAMPLES / "ddp.sh", 2, *FEW, OMP_NUM_THREADS="1")
    assert "val/mAP" in output
    folder = tmp_path / "logs/glyphs/version_0"
    logged_settings = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert logged_settings["batch"]["processes"] == 2
    assert logged_settings["batch"]["images"] == 384
    assert len(values(folder, "train/loss")) == 2


def test_two_processes_of_torchrun(tmp_path):
    """The command is passed to torchrun; test_benchmarks.py runs `fit` with it."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\necho "$@"\n')
    torchrun.chmod(0o755)
    output = run_bash(tmp_path, EXAMPLES / "ddp.sh", 2, "--seed_everything=3", LAUNCHER="torchrun", first=tmp_path)
    words = output.split()
    assert words[:5] == ["--standalone", "--nproc_per_node", "2", "-m", "lightning_retrieval.cli"]
    assert words[5:7] == ["fit", "--config"]
    assert words[8:] == ["--trainer.strategy", "ddp", "--trainer.devices", "2", "--seed_everything=3"]


@pytest.mark.filterwarnings("ignore:RetrievalEvaluation. (val|test) metrics cover 1 of:UserWarning")  # as FEW asks
@pytest.mark.filterwarnings("ignore:RetrievalEvaluation. (val|test)/R@100 have a k above:UserWarning")
def test_a_run_of_the_sweep(tmp_path, monkeypatch, end_offline_run):
    """The command that a sweep agent runs, with one value of each parameter; it logs the metric of the sweep."""
    sweep = yaml.safe_load((EXAMPLES / "sweep.yaml").read_text())
    drawn = {name: ({"min": 0, **space}["min"] or space["values"][0]) for name, space in sweep["parameters"].items()}
    command = [part for part in sweep["command"] if part != "${args}"]
    assert sweep["command"][-1] == "${args}"
    assert command[:4] == ["lightning-retrieval", "fit", "--config", "examples/glyphs.yaml"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    main([*command[1:], *(f"--{name}={value}" for name, value in drawn.items()), *FEW])
    end_offline_run()
    (found,) = map(OfflineRun, tmp_path.rglob("offline-run-*"))
    folder = found.folder.parents[1]
    assert folder == tmp_path / "logs/lightning-retrieval" / found.id
    assert {"checkpoints", "config.yaml"} < {path.name for path in folder.iterdir()}
    assert sweep["metric"] == {"name": "val/mAP", "goal": "maximize"}
    assert len(found.column("val/mAP")) == 1
    assert found.config["loss"]["init_args"]["tau"] == 0.001
    assert found.config["embedder"]["init_args"]["embedding_dim"] == 64
    assert found.name != "glyphs"
    assert torch.isfinite(torch.tensor(found.column("train/loss"))).all()


# test_study.py, test_compare.py, test_configs.py, test_papers.py, test_home_page.py and test_reproduced_figures.py test
# the others.
UNTESTED_HERE = {"README.md", "compare.py", "hours.py", "intervals.py", "results_file.py"}
UNTESTED_HERE |= {"papers.py", "papers.yaml", "figures.py", "home_pictures.py"}
UNTESTED_HERE.update(path.name for path in EXAMPLES.glob("study*.py"))


def test_the_study_of_thresholds_prints_means_and_intervals(run_python, tmp_path):
    script = EXAMPLES / "study_thresholds.py"
    printed = run_python(script, "--seeds", "0", "1", "--images", "256", folder=tmp_path)
    table = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    assert [line[0].strip("| ") for line in table] == ["", "---", "SupAP", "SupAP and calibration", "difference"]
    assert all(len(line) == 5 for line in table)
    assert re.fullmatch(r"[+-]0\.\d{4} \([+-]\d\.\d{4} to [+-]\d\.\d{4}\)", table[-1][1])


def test_each_example_is_run():
    run_here = {"glyphs.yaml", *re.findall(r"[\w]+\.(?:py|sh|yaml)", Path(__file__).read_text())}
    assert {path.name for path in EXAMPLES.glob("*.*")} - UNTESTED_HERE <= run_here


def test_the_script_for_slurm_can_be_parsed():
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"], check=True)


def test_the_detector_of_the_glyph_scenes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ["--trainer.max_steps=2", "--data.train_size=16", "--data.eval_size=20", "--trainer.accelerator=cpu"]
    config = ["fit", "--config", str(EXAMPLES / "rambo/glyph_scenes.yaml"), "--trainer.enable_progress_bar=false"]
    main([*config, *few, "--trainer.log_every_n_steps=1"])
    folder = tmp_path / "logs/rambo/glyph_scenes/version_0"
    with Image.open(folder / "detections.png") as picture:
        assert picture.width > 400
    with (folder / "metrics.csv").open() as lines:
        columns = csv.DictReader(lines).fieldnames
    assert {"train/loss_classifier", "val/AP50", "test/AP", "test/AP50/A"} <= set(columns)
    checkpoint = folder / "checkpoints/best.ckpt"
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["hyper_parameters"]["_class_path"] == "lightning_retrieval.detection.DetectionModule"


EMOJI_CATEGORIES = {"1f34e": "Food & Drink", "1f44b": "People & Body", "1f44b-1f3fb": "People & Body"}


def emoji_package(file, maker):
    """Write a package in the layout of emoji-datasource; returns its SHA-512 as npm's registry gives it."""
    entries = [
        {"image": "1f34e.png", "category": "Food & Drink"},
        {
            "image": "1f44b.png",
            "category": "People & Body",
            "skin_variations": {"1F3FB": {"image": "1f44b-1f3fb.png"}},
        },
    ]
    picture = io.BytesIO()
    Image.new("RGBA", (64, 64), (200, 30, 30, 128)).save(picture, "PNG")
    files = {"package/emoji.json": json.dumps(entries).encode(), f"package/img/{maker}/sheets/64.png": b"a sheet"}
    for name in (*EMOJI_CATEGORIES, "unknown"):
        files[f"package/img/{maker}/64/{name}.png"] = picture.getvalue()
    with tarfile.open(file, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()


@pytest.fixture
def emoji(tmp_path, monkeypatch):
    """The script emoji.py with packages of two makers, which it reads through file URLs."""
    namespace = runpy.run_path(str(EXAMPLES / "emoji.py"))["main"].__globals__
    digests = {}
    for maker in ("apple", "google"):
        digests[maker] = emoji_package(tmp_path / f"{maker}.tgz", maker)
    monkeypatch.setitem(namespace, "MAKERS", digests)
    monkeypatch.setitem(namespace, "address", lambda maker: (tmp_path / f"{maker}.tgz").as_uri())
    monkeypatch.setattr(sys, "argv", ["emoji.py", str(tmp_path / "emoji")])
    return namespace["main"]


def test_emoji_become_a_folder_with_categories(emoji, tmp_path, capsys):
    (tmp_path / "emoji.unfinished" / "left").mkdir(parents=True)
    emoji()
    assert capsys.readouterr().out == f"6 images in {tmp_path / 'emoji'}\n"
    found = {}
    for file in (tmp_path / "emoji").rglob("*.png"):
        category, name, maker = file.relative_to(tmp_path / "emoji").parts
        found.setdefault((name, category), []).append(maker)
    assert found.keys() == EMOJI_CATEGORIES.items()
    assert all(sorted(makers) == ["apple.png", "google.png"] for makers in found.values())
    data = ImageFolder(tmp_path / "emoji", categories=True, image_size=64, resize=64)
    assert sum(len(split) for split in data.splits.values()) == 6
    with pytest.raises(SystemExit):
        emoji()
    assert "folder must not exist yet" in capsys.readouterr().err


@pytest.fixture
def photographs():
    with imported(EXAMPLES, "photographs") as script:
        yield script


def noise(width, height):
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_photographs_become_changed_views_of_tiles(photographs, tmp_path):
    """Two photographs: of 2 x 3 tiles of which two are plain, and of 5 x 5 tiles of which 20 are taken."""
    partly_plain = noise(700, 450)
    partly_plain.paste((90, 120, 200), (0, 0, 440, 220))
    files = {}
    for name, picture in (("sky", partly_plain), ("wall", noise(1_110, 1_100))):
        files[name] = tmp_path / f"{name}.png"
        picture.save(files[name])
    contents = []
    for folder, seed in (("first", 0), ("again", 0), ("other", 1)):
        assert photographs.write_views(files, tmp_path / folder, seed) == 4 + 20
        found = {}
        for file in (tmp_path / folder).rglob("*.jpg"):
            found[file.relative_to(tmp_path / folder).as_posix()] = file.read_bytes()
        contents.append(found)
    assert contents[0] == contents[1]
    assert set(contents[0].values()).isdisjoint(contents[2].values())
    tiles, splits = {}, {}
    for path in contents[0]:
        split, name, tile, _ = path.split("/")
        tiles.setdefault((name, tile), []).append(path)
        splits.setdefault(name, set()).add(split)
        with Image.open(tmp_path / "first" / path) as view:
            assert (view.size, view.mode, view.format) == ((96, 96), "RGB", "JPEG")
    assert [len(views) for views in tiles.values()] == [8] * 24
    assert sorted(map(sorted, splits.values())) == [["test"], ["train"]]


def test_a_photograph_is_reduced_before_it_is_cut_into_tiles(photographs):
    tiles = photographs.tiles_of(noise(3_600, 460), np.random.default_rng(0))
    assert [tile.size for tile in tiles] == [(220, 220)] * 8


def test_each_photograph_has_one_split(photographs):
    names = [f"photograph {number}" for number in range(38)]
    splits = photographs.split_of_each(names, 0)
    assert splits == photographs.split_of_each(names[::-1], 0)
    assert splits.keys() == set(names)
    assert Counter(splits.values()) == {"train": 17, "val": 4, "test": 17}
    assert splits != photographs.split_of_each(names, 1)


def test_a_view_shows_nothing_beside_its_tile(photographs):
    random = np.random.default_rng(0)
    for _ in range(200):
        view = photographs.view_of(Image.new("RGB", (220, 220), "white"), random)
        for least, most in view.getextrema():
            assert most - least <= 1


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg")
def test_photographs_of_debian_packages(photographs, tmp_path, monkeypatch, capsys):
    """A package that dpkg builds here, in place of those that apt-get would download; then another one."""
    content = tmp_path / "content"
    (content / "DEBIAN").mkdir(parents=True)
    fields = {"Package": "pictures", "Version": "1", "Architecture": "all", "Maintainer": "a", "Description": "b"}
    (content / "DEBIAN" / "control").write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    (content / "usr").mkdir()
    for name in ("wall", "floor", "drawn"):
        noise(440, 450 + len(name)).save(content / "usr" / f"{name}.png")
    file = tmp_path / "pictures_1_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", content, file], check=True, stdout=subprocess.DEVNULL)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    package = photographs.Package("1", digest, "usr/{}.png", ("wall", "floor"))
    monkeypatch.setattr(photographs, "PACKAGES", {"pictures": package})
    monkeypatch.setattr(photographs, "download", lambda name, package, folder: file)
    monkeypatch.setattr(sys, "argv", ["photographs.py", str(tmp_path / "photographs")])
    photographs.main()
    assert capsys.readouterr().out == f"64 images of 8 tiles in {tmp_path / 'photographs'}\n"
    assert {path.name for path in (tmp_path / "photographs").glob("*/*")} == {"wall", "floor"}
    with pytest.raises(SystemExit):
        photographs.main()
    assert "folder must not exist yet" in capsys.readouterr().err
    file.write_bytes(file.read_bytes() + b"more")
    monkeypatch.setattr(sys, "argv", ["photographs.py", str(tmp_path / "others")])
    with pytest.raises(SystemExit):
        photographs.main()
    assert "pictures_1_all.deb must be the package that this script knows" in capsys.readouterr().err
    assert not (tmp_path / "others").exists()


def test_training_by_rules_is_compared_with_training_without_them(tmp_path, capsys):
    """relevance.py on a few glyphs, and on emoji in the folders of emoji.py; finished runs are not repeated."""
    groups = {f"{0x1F600 + number:x}": "Smileys & Emotion" for number in range(8)}
    groups |= {f"{0x1F34E + number:x}": "Food & Drink" for number in range(8)}
    for number, (code, group) in enumerate({**groups, "1f466-1f3fb": "People & Body"}.items()):
        for maker in ("apple", "google"):
            file = tmp_path / "emoji" / group / code / f"{maker}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((64, 64), 20 * number + 9).convert("RGBA").save(file)
    with imported(EXAMPLES, "relevance") as script:
        assert script.keywords("1f468-200d-1f52c-fe0f") == ["man", "microscope"]
        few = ["--steps", "1", "--seeds", "0", "1", "--tags", "2", "--classes", "4", "--output", str(tmp_path / "out")]
        script.main([*few, "--emoji", str(tmp_path / "emoji")])
        rows = (tmp_path / "out/emoji.csv").read_text()
        assert "Food & Drink/1f34f/apple.png,1f34f,Food & Drink;apple;green" in rows
        assert "1f466-1f3fb" not in rows
        printed = capsys.readouterr().out
        for name, row in {"cameras": "OtherCamera", "tags": "SharedTags"}.items():
            table = (tmp_path / f"out/{name}.md").read_text()
            assert table in printed
            compared = next(line for line in table.splitlines() if line.startswith(f"| {row} | "))
            assert re.fullmatch(r".* \| [+-]\d\.\d{4} \([+-].* to [+-].*\) \| \d+ s \|", compared)
        before = (tmp_path / "out/results.jsonl").read_text()
        assert len(before.splitlines()) == 8
        script.main(few)
        assert (tmp_path / "out/results.jsonl").read_text() == before


def write_emoji(folder, codes):
    """Write noise as the emoji with these characters, by two makers each, as emoji.py does."""
    for number, code in enumerate(codes):
        for maker in ("apple", "google"):
            file = folder / "Objects" / code / f"{maker}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((64, 64), number % 80 + 9).convert("RGBA").save(file)


DIFFERENCE = r"[+-]\d\.\d{4} \([+-]\d\.\d{4} to [+-]\d\.\d{4}\)"


def test_losses_of_two_sides_are_compared_with_settings_that_are_chosen_alike(tmp_path, capsys, monkeypatch):
    """two_sides.py on a few emoji and fonts: what is tried, the tables, and that finished runs are not repeated."""
    write_emoji(tmp_path / "emoji", [f"{0x1F400 + number:x}" for number in range(64)] + ["1f1e9-1f1ea", "1f466-1f3fb"])
    with imported(EXAMPLES, "two_sides") as script:
        monkeypatch.setattr(script, "SANS", ("cmr10",))
        monkeypatch.setattr(script, "SERIF", ("cmtt10",))
        monkeypatch.setattr(script, "LEAST_EMOJI", 2)
        for name in script.LOSSES.keys() - {"InfoNCE", "sigmoid", "Smooth-AP + InfoNCE"}:
            monkeypatch.delitem(script.LOSSES, name)
        few = ["--steps", "2", "--seeds", "0", "1", "--classes", "2", "--output", str(tmp_path / "out")]
        few += ["--emoji", str(tmp_path / "emoji"), "--tasks", "fonts, one network", "names, four pictures"]
        script.main([*few, "keywords, four pictures"])
        names = (tmp_path / "out/names.csv").read_text()
        assert f"\nrat,1f400,{script.split_of('1f400')}\n" in names
        assert "1f1e9" not in names
        assert "1f466-1f3fb" not in names
        printed = capsys.readouterr().out
        for task in ("fonts, one network", "names, four pictures", "keywords, four pictures"):
            table = (tmp_path / f"out/{task}.md").read_text()
            assert table in printed
            (row,) = (line for line in table.splitlines() if line.startswith("| sigmoid | "))
            assert re.fullmatch(rf"(\| [\w.]+ ){{5}}\| {DIFFERENCE} \| 0\.\d+, t at the start \d+ \| \d+ s \|", row)
        results = script.read_results(tmp_path / "out/results.jsonl")
        tried = [key for key in results if key.startswith("names, four pictures, sigmoid, ")]
        assert len([key for key in tried if key.endswith("seed 0, 1 steps, val")]) == 5
        assert len([key for key in tried if key.endswith(", test")]) == len(tried) - 5 == 2
        best = max(tried[:5], key=lambda key: results[key]["metrics"]["mAP"])
        assert {key.partition(", seed")[0] for key in tried[5:]} == {best.partition(", seed")[0]}
        before = (tmp_path / "out/results.jsonl").read_text()
        script.main(few)
        assert (tmp_path / "out/results.jsonl").read_text() == before


def test_the_keyword_of_an_emoji_is_the_rarest_word_that_enough_names_have():
    with imported(EXAMPLES, "two_sides") as script:
        names = {f"cat {number}": f"cat face with {number}" for number in range(6)}
        names |= {f"face {number}": "face" for number in range(4)}
        names |= {"dog": "dog face", "sign": "a cat sign", "owl": "owl"}
        wanted = {code: code.split()[0] for code in names} | {"dog": "face", "sign": "cat"}
        del wanted["owl"]
        assert script.keywords_of(names) == wanted


def test_the_sigmoid_loss_is_that_of_its_paper():
    with imported(EXAMPLES, "two_sides") as script:
        loss = script.SigmoidLoss(t=5.0, b=-2.0).double()
        x, y = torch.nn.functional.normalize(torch.randn(2, 6, 4, dtype=torch.float64), dim=2)
        labels, ref_labels = torch.tensor([0, 1, 2, 2, 0, 1]), torch.tensor([0, 0, 1, 2, 2, 1])
        total = 0.0
        for i in range(6):
            for j in range(6):
                z = 1 if labels[i] == ref_labels[j] else -1
                total -= float(torch.nn.functional.logsigmoid(z * (5 * x[i] @ y[j] - 2)))
        torch.testing.assert_close(loss(x, labels, y, ref_labels).item(), total / 6)

        def value(x, y, t_prime, bias):
            parameters = {"t_prime": t_prime, "bias": bias}
            return torch.func.functional_call(loss, parameters, (x, labels, y, ref_labels))

        arguments = [x, y, *(parameter.detach() for parameter in loss.parameters())]
        assert torch.autograd.gradcheck(value, [argument.clone().requires_grad_() for argument in arguments])


def test_an_upgrade_is_compared_with_the_old_network(tmp_path, capsys, monkeypatch):
    """upgrade.py with two fonts and short runs: the table, and that finished seeds are not repeated."""
    with imported(EXAMPLES, "upgrade") as script:
        monkeypatch.setattr(script, "QUERY_FONTS", ("cmr10",))
        monkeypatch.setattr(script, "INDEX_FONTS", ("cmtt10",))
        few = ["--steps", "1", "--seeds", "0", "1", "--output", str(tmp_path)]
        script.main(few)
        table = (tmp_path / "upgrade.md").read_text()
        assert table in capsys.readouterr().out
        old, upgraded, *_ = table.splitlines()[2:]
        assert re.fullmatch(r"\| old queries, old index (\| 0\.\d{4} ){2}\|  \|", old)
        assert re.fullmatch(rf"\| new queries, old index (\| 0\.\d{{4}} ){{2}}\| {DIFFERENCE} \|", upgraded)
        before = (tmp_path / "results.jsonl").read_text()
        assert len(before.splitlines()) == 2
        script.main(few)
        assert (tmp_path / "results.jsonl").read_text() == before


def test_the_upgraded_network_searches_the_index_of_the_old_one(tmp_path, monkeypatch, capsys):
    """The commands at the beginning of upgrade.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    write_noise(tmp_path / "photos", classes=2, images=3)
    shutil.copy(next((tmp_path / "photos").rglob("*.png")), tmp_path / "query.jpg")
    text = (EXAMPLES / "upgrade.yaml").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^#   lightning-retrieval (.*)$", text, flags=re.MULTILINE)]
    for command in commands:
        if command[0] == "fit":  # the first batch of a validation set with two sides has queries only
            command += [*FEW, "--trainer.limit_val_batches=1.0"]
        capsys.readouterr()
        main(command)
    assert [command[0] for command in commands] == ["fit", "index", "fit", "search"]
    assert len(re.findall(r"\d/\d\.png", capsys.readouterr().out)) == 6
    assert values(tmp_path / "logs/upgrade/version_0", "val/mAP")


def test_emoji_of_another_package_or_without_a_network(emoji, tmp_path, capsys):
    (tmp_path / "apple.tgz").write_bytes((tmp_path / "apple.tgz").read_bytes() + b"more")
    with pytest.raises(SystemExit):
        emoji()
    assert "must be the file that this script knows" in capsys.readouterr().err
    (tmp_path / "apple.tgz").unlink()
    with pytest.raises(SystemExit):
        emoji()
    assert "apple.tgz cannot be downloaded (" in capsys.readouterr().err
    assert not (tmp_path / "emoji").exists()
