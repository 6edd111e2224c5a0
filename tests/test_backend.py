"""The library works with either package of Lightning, and with the same numbers."""

import os
import subprocess
import sys

import pytest
import pytorch_lightning as pl
import torch

from lightning_retrieval import backend
from lightning_retrieval.cli.main import main
from tests.lightning_retrieval.cli.example_config import write_example

pytestmark = pytest.mark.slow
pytest.importorskip("lightning")

# A user's script; `{package}` is how the user imports Lightning.
TRAIN = """
import sys
import torch
import {package} as L
from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import Glyphs

class MyModule(RetrievalModule):
    def on_train_start(self):
        assert isinstance(self.trainer, L.Trainer)

def trainer(**settings):
    return L.Trainer(accelerator="cpu", callbacks=[RetrievalEvaluation(ks=(1,))], enable_progress_bar=False,
                     limit_val_batches=2, logger=False, enable_checkpointing=False, **settings)

if __name__ == "__main__":
    L.seed_everything(1)
    data = Glyphs(classes_per_batch=8, samples_per_class=4, num_workers={workers})
    module = MyModule(Embedder("glyph_net", 16), SmoothAPLoss(), chunk_size=16)
    first = trainer(max_steps=3)
    first.fit(module, data)
    first.save_checkpoint("{package}.ckpt")
    trainer(max_steps=5).fit(MyModule.load_from_checkpoint(sys.argv[1]), data, ckpt_path=sys.argv[1])
    resumed = MyModule.load_from_checkpoint(sys.argv[1])
    torch.save([module.state_dict(), resumed.state_dict()], "{package}.pt")
    print("other package:", "{other}" in sys.modules)
"""
# A first project: everything at its default, on two processes, with the tracker of the library.
PROJECT = """
import warnings
import {package} as L
from torch import nn
from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import APMonitor, RetrievalEvaluation, RetrievalGallery, RetrievalWandbLogger
from lightning_retrieval.datamodules import Glyphs

if __name__ == "__main__":
    warnings.simplefilter("error")
    for of_lightning in ("`isinstance.treespec", "Using `DistributedSampler`", ".* does not have many workers"):
        warnings.filterwarnings("ignore", of_lightning)
    warnings.filterwarnings("ignore", "RetrievalEvaluation: (val|test) metrics cover")  # of limit_val_batches
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, limit_train_batches=2, limit_val_batches=1,
        limit_test_batches=1, log_every_n_steps=1, logger=RetrievalWandbLogger(offline=True),
        callbacks=[RetrievalEvaluation(before_fit=True), APMonitor(), RetrievalGallery()],
    )
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(1024, 8))
    module = RetrievalModule(Embedder(backbone, 8, feature_dim=8, pooling="avg"), SmoothAPLoss())
    data = Glyphs(classes_per_batch=8, samples_per_class=4, eval_batch_size=40)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
"""
PACKAGES = {"lightning.pytorch": "pytorch_lightning", "pytorch_lightning": "lightning.pytorch"}
BASES = ("lightning", "pytorch_lightning")


def run(folder, code, *arguments, **environment):
    """Run a script in a process of its own; returns what it prints."""
    clean = {name: value for name, value in os.environ.items() if "LIGHTNING_RETRIEVAL" not in name}
    (folder / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "script.py", *map(str, arguments)],
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_a_first_project_has_no_warning_that_the_library_causes(package, tmp_path):
    """Whatever Lightning itself warns of stays visible."""
    printed = run(tmp_path, PROJECT.format(package=package))
    assert "has no effect" not in printed  # what Weights & Biases says of a setting that Lightning gives it


def test_both_packages_train_alike_and_read_each_others_checkpoints(tmp_path):
    for package, other in PACKAGES.items():
        script = TRAIN.format(package=package, other=other, workers=0)
        checkpoint = tmp_path / f"{package}.ckpt"
        if package == "pytorch_lightning":
            checkpoint = tmp_path / f"{other}.ckpt"
        assert "other package: False" in run(tmp_path, script, checkpoint)
    weights = [torch.load(tmp_path / f"{package}.pt") for package in PACKAGES]
    for with_lightning, with_pytorch_lightning in zip(*weights):
        assert with_lightning.keys() == with_pytorch_lightning.keys()
        for name, value in with_lightning.items():
            assert torch.equal(value, with_pytorch_lightning[name]), name


def test_several_processes_train_with_lightning(tmp_path):
    """As processes that are started anew, and so import the package by themselves."""
    code = TRAIN.format(package="lightning.pytorch", other="pytorch_lightning", workers=1)
    code = code.replace("max_steps=3", 'max_steps=3, devices=2, strategy="ddp"')
    lines = [line for line in code.splitlines() if "sys.argv" not in line and "resumed" not in line]
    assert "other package: False" in run(tmp_path, "\n".join(lines))


@pytest.mark.parametrize(
    ("imports", "variable", "expected"),
    [
        ("import lightning.pytorch, pytorch_lightning", {}, "pytorch_lightning"),
        ("", {backend.VARIABLE: "lightning"}, "lightning"),
        ("import lightning.pytorch", {backend.VARIABLE: "pytorch_lightning"}, "pytorch_lightning"),
    ],
)
def test_the_package_is_that_of_the_program(imports, variable, expected, tmp_path):
    code = f"{imports}\nfrom lightning_retrieval.callbacks import RetrievalEvaluation\n"
    code += "print(*{kind.__module__.split('.')[0] for kind in RetrievalEvaluation.__mro__})\n"
    assert set(run(tmp_path, code, **variable).split()) & set(BASES) == {expected}


def test_a_process_uses_the_package_of_its_parent(tmp_path):
    child = "from lightning_retrieval import backend; print(backend.PACKAGE)"
    code = (
        "import lightning.pytorch, subprocess, sys\nfrom lightning_retrieval.callbacks import APMonitor\n"
        f"subprocess.run([sys.executable, '-c', {child!r}])\n"
    )
    assert run(tmp_path, code).split() == ["lightning"]


def test_the_wrong_order_of_imports_is_warned_of_once(tmp_path):
    code = (
        "from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss\n"
        "from lightning_retrieval.datamodules import Glyphs\nimport lightning.pytorch\n"
        'RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss())\nGlyphs()\n'
    )
    printed = run(tmp_path, code)
    assert printed.count("import lightning.pytorch before lightning_retrieval") == 1
    assert "LIGHTNING_RETRIEVAL_BACKEND" in printed
    assert "before lightning_retrieval" not in run(tmp_path, code, LIGHTNING_RETRIEVAL_BACKEND="pytorch_lightning")


@pytest.mark.parametrize("command", ["fit", "search"])
def test_an_unknown_package_is_named(tmp_path, command):
    code = f"from lightning_retrieval.cli.main import main\nmain(['{command}', '--help'])\n"
    environment = {**os.environ, backend.VARIABLE: "tensorflow"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"lightning-retrieval {command}: {backend.VARIABLE} must be ")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_a_config_may_name_classes_of_either_package(package, tmp_path, capsys):
    config = write_example(tmp_path)
    callback = [f"--trainer.callbacks+={package}.callbacks.EarlyStopping", "--trainer.callbacks.monitor=val/mAP"]
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", str(config), *callback, "--print_config"])
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    used = pl.Trainer.__module__.partition(".trainer")[0]
    assert f"class_path: {used}.callbacks.EarlyStopping" in printed.out
