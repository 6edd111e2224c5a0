"""The recipes of examples/: each is run by the command line on a small tree in the official layout.

A run differs from its file in the root, in sizes, in the number of steps and in what a CPU needs, and in nothing else:
what it was parsed to is compared with what the file is parsed to, key by key.
"""

import csv
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from torchvision.transforms import v2

from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import reference_transform
from lightning_retrieval.datamodules.images import image_module
from tests.datamodules.small_ijbc import write_ijbc
from tests.datamodules.small_revisited import write_revisited
from tests.datamodules.trees import write_cub, write_in_shop, write_online_products, write_vehicle_id
from tests.datamodules.trees_more import write_inaturalist, write_landmarks, write_vgg_face2

IGNORED = [
    "ignore:RetrievalEvaluation. .* have a k above the number of ranked images:UserWarning",
    "ignore:RevisitedMetrics:UserWarning",
]
pytestmark = [pytest.mark.filterwarnings(message) for message in IGNORED]

EXAMPLES = Path(__file__).parents[1] / "examples"
PIXELS = 32
EMBEDDER, DATA = "model.init_args.embedder.init_args", "data.init_args"
RUN = {"trainer.accelerator": "cpu", "trainer.enable_progress_bar": False, f"{DATA}.num_workers": 0}
STEPS = {
    "trainer.max_epochs": 1,
    "trainer.limit_train_batches": 2,
    "trainer.check_val_every_n_epoch": 1,
    "trainer.log_every_n_steps": 1,
}
BATCH = {f"{DATA}.classes_per_batch": 2, f"{DATA}.samples_per_class": 2, f"{DATA}.eval_batch_size": 16}
HALF = {"trainer.precision": "32-true"}  # a CPU has no half precision to mix in
CHUNK = {"model.init_args.chunk_size": 3}  # of batches of four
RESNET = {f"{EMBEDDER}.embedding_dim": 8, f"{EMBEDDER}.weights": None}
SENET = {f"{EMBEDDER}.embedding_dim": 8, f"{EMBEDDER}.backbone.init_args.pretrained": False}
DEIT = {f"{EMBEDDER}.pretrained": False, "model.init_args.embedder.dict_kwargs.img_size": PIXELS}
LANDMARKS = {f"{DATA}.classes_per_batch": 3, f"{DATA}.eval_batch_size": 1}  # three landmarks; images of several sizes


class Recipe(NamedTuple):
    """What writes the tree that a file is run on, and the overrides beside the root and `RUN`."""

    tree: Callable[[Path], Any]
    overrides: dict[str, Any]


def trained(tree: Callable[[Path], Any], *overrides: dict[str, Any]) -> Recipe:
    return Recipe(tree, {key: value for part in (STEPS, BATCH, *overrides) for key, value in part.items()})


RECIPES = {
    "smooth_ap/online_products.yaml": trained(write_online_products, RESNET, CHUNK),
    "smooth_ap/vehicle_id.yaml": trained(write_vehicle_id, RESNET, CHUNK),
    "smooth_ap/inaturalist.yaml": trained(write_inaturalist, RESNET, CHUNK),
    "smooth_ap/vgg_face2.yaml": trained(write_vgg_face2, SENET, CHUNK),
    "fast_ap/online_products.yaml": trained(write_online_products, RESNET, CHUNK),
    "fast_ap/in_shop.yaml": trained(write_in_shop, RESNET, CHUNK),
    "fast_ap/vehicle_id.yaml": trained(write_vehicle_id, RESNET, CHUNK),
    "rambo/cub_log.yaml": trained(write_cub, RESNET),
    "rambo/cub_loglog.yaml": trained(write_cub, RESNET),
    "rambo/online_products_log.yaml": trained(write_online_products, RESNET),
    "rambo/online_products_loglog.yaml": trained(write_online_products, RESNET),
    "rambo/in_shop_log.yaml": trained(write_in_shop, RESNET),
    "rambo/in_shop_loglog.yaml": trained(write_in_shop, RESNET),
    "roadmap/cub.yaml": trained(write_cub, RESNET, HALF),
    "roadmap/cub_deit.yaml": trained(write_cub, DEIT, HALF),
    "roadmap/online_products.yaml": trained(write_online_products, RESNET, HALF),
    "roadmap/online_products_deit.yaml": trained(write_online_products, DEIT, HALF),
    "roadmap/inaturalist.yaml": trained(write_inaturalist, RESNET, HALF, CHUNK),
    "roadmap/inaturalist_deit.yaml": trained(write_inaturalist, DEIT, HALF, CHUNK),
    "ap_gem/landmarks.yaml": trained(write_landmarks, RESNET, CHUNK, LANDMARKS),
}
# Evaluated with the checkpoint of one that trains: which, on what, and the metrics that the paper has.
CITY = {f"{EMBEDDER}.embedding_dim": 8}
CITIES = ["test/mAP/medium", "test/mAP/hard"]
EVALUATIONS = {
    "smooth_ap/ijbc.yaml": (
        "smooth_ap/vgg_face2.yaml",
        Recipe(write_ijbc, {f"{EMBEDDER}.embedding_dim": 8, f"{DATA}.eval_batch_size": 16}),
        ["test/mAP"],
    ),
    "ap_gem/revisited_oxford.yaml": (
        "ap_gem/landmarks.yaml",
        Recipe(partial(write_revisited, name="roxford5k", pickled="gnd_roxford5k.pkl"), CITY),
        CITIES,
    ),
    "ap_gem/revisited_paris.yaml": (
        "ap_gem/landmarks.yaml",
        Recipe(partial(write_revisited, name="rparis6k", pickled="gnd_rparis6k.pkl"), CITY),
        CITIES,
    ),
}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Logs are written to the working directory; checkpoints of ResNets are large, so that they go at the end.

    Several threads do not make batches of four small images faster, and wait for each other on a busy machine.
    """
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    shutil.rmtree(tmp_path / "logs", ignore_errors=True)


def shrink_images(monkeypatch):
    """The papers' transforms as they are, and their result scaled down where it is larger."""

    def shrunk(name, *, train):
        whole = reference_transform(name, train=train)
        smaller = v2.Resize((PIXELS, PIXELS))

        def transform(image):
            result = whole(image)
            return smaller(result) if min(result.shape[1:]) > PIXELS else result

        return transform

    monkeypatch.setattr(image_module, "reference_transform", shrunk)


def flat(config: Any, path: str = "") -> dict[str, Any]:
    """Each leaf of a configuration by its path."""
    if isinstance(config, dict) and config:
        parts = [flat(value, f"{path}.{key}" if path else str(key)) for key, value in config.items()]
    elif isinstance(config, list) and config:
        parts = [flat(value, f"{path}.{place}") for place, value in enumerate(config)]
    else:
        return {path: config}
    return {key: value for part in parts for key, value in part.items()}


def parsed(command, file, root, monkeypatch, capsys) -> dict[str, Any]:
    """The file as the command line parses it, with nothing but the root given."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([command, "--config", str(EXAMPLES / file), f"--data.root={root}", "--print_config"])
    assert ended.value.code == 0
    return flat(yaml.safe_load(capsys.readouterr().out))


def run(command, file, recipe, root, monkeypatch, capsys, checkpoint=None) -> dict[str, list[str]]:
    """Run a file with its overrides, and see that nothing else is changed; the columns of what was logged."""
    of_file = parsed(command, file, root, monkeypatch, capsys)
    shrink_images(monkeypatch)
    config, overrides = yaml.safe_load((EXAMPLES / file).read_text()), {**RUN, **recipe.overrides}
    for place, callback in enumerate(config["trainer"]["callbacks"]):
        if callback["class_path"].endswith("ModelCheckpoint"):  # 100 MB in place of 300
            overrides[f"trainer.callbacks.{place}.init_args.save_weights_only"] = True
    for key, value in overrides.items():
        *folders, name = key.split(".")
        part = config
        for folder in folders:
            part = part[int(folder) if isinstance(part, list) else folder]
        part[name] = value
    Path(f"{command}.yaml").write_text(yaml.safe_dump(config))
    options = [] if checkpoint is None else [f"--ckpt_path={checkpoint}"]
    main([command, "--config", f"{command}.yaml", f"--data.root={root}", *options])
    folder = Path("logs", file.removesuffix(".yaml"), "version_0")
    of_run = flat(yaml.safe_load((folder / "config.yaml").read_text()))
    if checkpoint is not None:  # from which the command line takes the model's settings
        of_training = flat(yaml.safe_load((checkpoint.parents[1] / "config.yaml").read_text()))
        of_file = {key: value for key, value in of_file.items() if not key.startswith("model.")}
        of_file |= {key: value for key, value in of_training.items() if key.startswith("model.")}
    changed = {key for key in {*of_file, *of_run} if of_file.get(key) != of_run.get(key)}
    assert changed - {"ckpt_path"} == {key for key, value in overrides.items() if of_file.get(key) != value}
    with (folder / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    return {name: [row[name] for row in rows if row[name]] for name in rows[0]}


def fit(file: str, tmp_path, monkeypatch, capsys) -> Path:
    """Train by a recipe and look at what came of it; the checkpoint that it chose."""
    recipe = RECIPES[file]
    recipe.tree(tmp_path / "data")
    logged = run("fit", file, recipe, tmp_path / "data", monkeypatch, capsys)
    config = yaml.safe_load((EXAMPLES / file).read_text())
    (monitored,) = [
        callback["init_args"]["monitor"]
        for callback in config["trainer"]["callbacks"]
        if callback["class_path"].endswith("ModelCheckpoint")
    ]
    losses = [float(value) for value in logged["train/loss"]]
    assert len(losses) == STEPS["trainer.limit_train_batches"]
    assert all(map(math.isfinite, losses))
    assert 0 <= float(logged[monitored][0]) <= 1
    (checkpoint,) = Path("logs").rglob("*.ckpt")
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    assert saved["global_step"] == len(losses)
    return checkpoint


@pytest.mark.parametrize("file", RECIPES)
def test_recipe(file, tmp_path, monkeypatch, capsys):
    checkpoint = fit(file, tmp_path, monkeypatch, capsys)
    for evaluation, (trained_by, recipe, metrics) in EVALUATIONS.items():
        if trained_by == file:
            root = tmp_path / Path(evaluation).stem
            recipe.tree(root)
            logged = run("test", evaluation, recipe, root, monkeypatch, capsys, checkpoint)
            assert all(0 <= float(logged[metric][0]) <= 1 for metric in metrics)


def test_all_recipes_are_run_and_listed():
    found = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/*.yaml")}
    assert found == {*RECIPES, *EVALUATIONS}
    listed = (EXAMPLES / "README.md").read_text()
    assert [name for name in sorted(found) if f"({name})" not in listed] == []
