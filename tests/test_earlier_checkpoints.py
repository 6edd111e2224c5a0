"""Checkpoints and configs that earlier commits have written can be read: `tests/checkpoints`.

Commit 35fa523 wrote `hyperparameters.json`, those of a checkpoint of each config in examples/ and of three further runs
of the command line, and the checkpoints of a Python script. Commit 84b9e3ae wrote `run`, the folder of a run, and
`moved_arguments.json`, hyperparameters of Python scripts. In both, each argument that has moved since has a value other
than its default.
"""

import copy
import json
import operator
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, SmoothAPLoss, TwoNetworks, Updates
from lightning_retrieval.cli.main import main
from lightning_retrieval.detection import DetectionModule
from lightning_retrieval.loading import module_of_checkpoint
from lightning_retrieval.training.checkpoint_files import restored_network
from tests.quiet_trainer import quiet_trainer

CHECKPOINTS = Path(__file__).parent / "checkpoints"
EXAMPLES = Path(__file__).parents[1] / "examples"
HYPERPARAMETERS = json.loads((CHECKPOINTS / "hyperparameters.json").read_text())
MOVED = json.loads((CHECKPOINTS / "moved_arguments.json").read_text())
RUN = CHECKPOINTS / "run"
# The attribute of a module that has the value of each argument that has moved, and the value that it had by default.
PLACES = {
    "gradient_clip_val": ("updates.gradient_clip_val", None),
    "gradient_clip_algorithm": ("updates.gradient_clip_algorithm", "norm"),
    "head_lr_factor": ("updates.head_lr_factor", 1.0),
    "layer_decay": ("updates.layer_decay", 1.0),
    "freeze_backbone_epochs": ("updates.freeze_backbone_epochs", 0),
    "memory_mode": ("memory.mode", "one_list"),
    "memory_weight": ("memory.weight", None),
    "query_embedder": ("query_embedder", None),
    "directions": ("sides.directions", "queries"),
    "query_lr_factor": ("sides.query_lr_factor", 1.0),
    "frozen_side": ("sides.frozen_side", None),
    "gather_dtype": ("gather", None),
}


def among(found, saved):
    """What was found, without the arguments that an object has got since it was saved."""
    if isinstance(found, dict) and isinstance(saved, dict):
        return {name: among(found[name], value) for name, value in saved.items() if name in found}
    return found


def assert_settings(module, saved):
    """Compare the settings of a module with its hyperparameters in a file of an earlier commit."""
    kept = {name: value for name, value in saved.items() if name not in {*PLACES, "memory", "gather"}}
    assert among({**module.hparams}, kept) == kept
    assert not PLACES.keys() & module.hparams.keys()
    for name in PLACES.keys() & saved.keys():
        place, _ = PLACES[name]
        if module.memory is None and place.startswith("memory."):
            continue
        if name == "frozen_side" and saved[name] is None:  # the module itself finds a network without gradients
            continue
        found, value = operator.attrgetter(place)(module), saved[name]
        if isinstance(value, dict):
            found, value = type(found).__name__, value["class_path"].rpartition(".")[2]
        elif name == "memory_weight" and value is None:
            value = 1.0
        elif name == "gather_dtype" and value is None:
            value = saved["gather"]
        assert found == value, name


USERS_PACKAGE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.eye(width))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameters_of_the_command_line(name, monkeypatch):
    """The module is rebuilt, keeps the hyperparameters as they are, and downloads nothing."""
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *args, **kwargs: pytest.fail("downloads"))
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *args, **kwargs: pytest.fail("downloads"))
    saved = HYPERPARAMETERS[name]
    cls = RetrievalModule
    if "DetectionModule" in saved["_class_path"]:
        cls = DetectionModule
    module = module_of_checkpoint(cls, {"hyper_parameters": saved})
    assert type(module).__name__ == saved["_class_path"].rpartition(".")[2]
    assert_settings(module, saved)


@pytest.mark.parametrize("name", ["lora", "memory", "users_package"])
def test_checkpoints_of_python(name, tmp_path, monkeypatch):
    if name == "users_package":
        (tmp_path / "users_package.py").write_text(USERS_PACKAGE)
        monkeypatch.syspath_prepend(tmp_path)
        __import__("users_package")
    saved = torch.load(CHECKPOINTS / f"{name}.ckpt", weights_only=True)
    module = RetrievalModule.load_from_checkpoint(CHECKPOINTS / f"{name}.ckpt")
    state = module.state_dict()
    assert str(dict(state)) == str(dict(saved["state_dict"]))
    for key, value in saved["state_dict"].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[key], value), key
    assert_settings(module, saved["hyper_parameters"])


# --- Arguments that have moved


def hyperparameters(name="python"):
    """Those of a script or, for "command line", those of the run."""
    if name == "command line":
        return torch.load(RUN / "checkpoints/last.ckpt", weights_only=True)["hyper_parameters"]
    return copy.deepcopy(MOVED[name])


@pytest.mark.parametrize("name", ["python", "command line"])
def test_all_moved_arguments_at_once(name):
    """Also in a checkpoint that is written now."""
    saved = hyperparameters(name)
    assert all(saved[old] != default for old, (_, default) in PLACES.items())
    module = module_of_checkpoint(RetrievalModule, {"hyper_parameters": saved})
    assert_settings(module, saved)
    trainer = quiet_trainer(max_steps=0)
    trainer.strategy.connect(module)
    written = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
    assert written["lightning_retrieval_format"] == 2
    again = module_of_checkpoint(RetrievalModule, written)
    assert_settings(again, saved)
    assert dict(again.hparams) == written["hyper_parameters"]


@pytest.mark.parametrize("old", PLACES)
def test_each_moved_argument_alone(old):
    """With the defaults of all others, and with what it needs: a memory of two terms, or two networks."""
    saved = hyperparameters()
    needed = {"memory_mode", "memory"} if old == "memory_weight" else {"memory"}
    needed |= {"query_embedder"} if old in ("query_lr_factor", "frozen_side") else set()
    for name, (_, default) in PLACES.items():
        if name not in {old, *needed}:
            saved[name] = default
    assert_settings(module_of_checkpoint(RetrievalModule, {"hyper_parameters": saved}), saved)


class Listed(RetrievalModule):
    """Its own argument has the name of one that has moved."""

    def __init__(self, width, gradient_clip_val=None):
        super().__init__(nn.Linear(width, 2), SmoothAPLoss(), updates=Updates(gradient_clip_val=2 * gradient_clip_val))


class PassedOn(RetrievalModule):
    """It passes on the arguments that it does not know."""

    def __init__(self, embedder, loss, width=3, **settings):
        super().__init__(embedder, loss, **settings)
        self.width = width


class OwnMemory(CrossBatchMemory):
    """A memory with an argument less."""

    def __init__(self, size):
        super().__init__(size)


def test_an_argument_of_a_subclass_stays_where_it_is():
    module = module_of_checkpoint(Listed, {"hyper_parameters": hyperparameters("listed")})
    assert module.updates.gradient_clip_val == 1.0
    assert module.hparams["gradient_clip_val"] == 0.5


def test_a_subclass_gets_the_moved_arguments_that_it_passes_on():
    saved = hyperparameters("passed on")
    module = module_of_checkpoint(PassedOn, {"hyper_parameters": saved})
    assert (module.width, module.updates.head_lr_factor, module.sides.directions) == (5, 10.0, "both")
    assert (module.memory.size, module.memory.mode) == (8, "one_list")
    saved["memory"] = {"class_path": f"{__name__}.OwnMemory", "init_args": {"size": 7}}
    assert module_of_checkpoint(PassedOn, {"hyper_parameters": saved}).memory.size == 7


@pytest.mark.parametrize(
    ("given", "place", "value"),
    [
        ({"memory": CrossBatchMemory(9)}, "memory.mode", "one_list"),
        ({"updates": Updates(layer_decay=0.9)}, "updates.head_lr_factor", 1.0),
        ({"gather": False}, "gather", False),
        ({"sides": None}, "query_embedder", None),
    ],
)
def test_a_given_argument_replaces_those_that_moved_into_it(given, place, value):
    """Whatever the file has for these, since it may name a class that a file may not name."""
    saved = hyperparameters()
    saved["query_embedder"] = {"class_path": "os.system", "init_args": {}} if "sides" in given else None
    saved |= {} if "sides" in given else {"query_lr_factor": 1.0, "frozen_side": None}
    module = module_of_checkpoint(RetrievalModule, {"hyper_parameters": saved}, given)
    assert operator.attrgetter(place)(module) == value


def test_the_networks_of_an_earlier_checkpoint_embed_as_its_module():
    module = RetrievalModule.load_from_checkpoint(RUN / "checkpoints/last.ckpt").eval()
    network = restored_network(torch.load(RUN / "checkpoints/last.ckpt", weights_only=True)).eval()
    images = torch.rand(3, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(network.embed(images), module.embed(images))
        assert torch.equal(network.embed_queries(images), module.embed_queries(images))
        assert not torch.equal(network.embed(images), network.embed_queries(images))


def test_the_file_of_an_earlier_logger_replaces_the_hyperparameters_of_a_checkpoint(tmp_path):
    embedders = [Embedder("glyph_net", 4, backbone_args={"width": 4}) for _ in range(2)]
    trainer = quiet_trainer(max_steps=0)
    trainer.strategy.connect(RetrievalModule(embedders[0], SmoothAPLoss(), sides=TwoNetworks(embedders[1])))
    trainer.save_checkpoint(tmp_path / "m.ckpt", weights_only=True)
    settings = {"hparams_file": RUN / "hparams.yaml", "strict": False}
    module = RetrievalModule.load_from_checkpoint(tmp_path / "m.ckpt", **settings)
    assert (module.sides.frozen_side, module.updates.layer_decay) == ("candidates", 0.5)


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"query_embedder": {"class_path": "os.system", "init_args": {}}}, "`query_embedder` names os.system"),
        ({"query_embedder": {"class_path": "torch.optim.SGD", "init_args": {}}}, "`query_embedder` names torch.optim"),
        ({"query_embedder": {"class_path": "x.<locals>.Net", "init_args": None}}, "`sides` was a .* sides="),
        ({"query_embedder": 3}, "`query_embedder` must be a .*Module, got int"),
        ({"memory": "os.system"}, "`memory` must be a .*CrossBatchMemory, got str"),
        ({"memory_mode": torch.ones(1)}, "`memory_mode` must be plain data"),
        ({"memory_mode": "three_terms"}, "`mode` must be one of"),
        ({"head_lr_factor": {"class_path": "os.system", "init_args": {}}}, "`head_lr_factor` names os.system"),
        ({"gather_dtype": ["float16"]}, "`gather` must be one of"),
    ],
)
def test_moved_arguments_of_a_hostile_file_raise(change, sentence):
    checkpoint = {"hyper_parameters": {**hyperparameters(), **change}}
    with pytest.raises((TypeError, ValueError), match=sentence):
        module_of_checkpoint(RetrievalModule, checkpoint)


@pytest.mark.refusal
@pytest.mark.parametrize("number", [0, 3, True, "2", None])
def test_a_checkpoint_of_an_unknown_format_raises(number):
    checkpoint = {"hyper_parameters": hyperparameters(), "lightning_retrieval_format": number}
    with pytest.raises(ValueError, match=rf"^a checkpoint must have a format from 1 to 2, got {number!r}; update"):
        module_of_checkpoint(RetrievalModule, checkpoint)


@pytest.mark.slow
def test_an_earlier_run_of_the_command_line_is_continued(tmp_path, capsys, caplog, monkeypatch):
    """Its config is read under the present names, and a present config of the same model and data continues it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RUN, tmp_path / "run")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["fit", "--config=run/config.yaml", "--print_config"])
    printed = capsys.readouterr().out
    arguments = yaml.safe_load(printed)["model"]["init_args"]
    assert not PLACES.keys() & arguments.keys()
    assert arguments["sides"]["init_args"]["frozen_side"] == "candidates"
    (tmp_path / "present.yaml").write_text(printed)
    options = ["--config=present.yaml", "--run_folder=run", "--trainer.max_steps=2"]
    for other in ("memory.weight=0.25", "updates.loss_lr_factor=2"):  # one of format 1, and one added since
        with pytest.raises(SystemExit, match=r"^2$"):
            main(["fit", *options, f"--model.{other}"])
        assert re.search("must be the folder of a run of this model and data", capsys.readouterr().err)
    main(["fit", *options])
    assert "--run_folder: continuing from run/checkpoints/last.ckpt." in caplog.text
    assert torch.load("run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 2
    assert "memory_mode" not in Path("run/config.yaml").read_text()
    main(["fit", *options, "--trainer.max_steps=3"])
    assert torch.load("run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 3
