"""The configs of the papers in examples/: the command line runs each on a small data set in the published structure.

A run may differ from its config only in the root, in sizes, in the number of steps and in what a CPU needs. This is
tested: the parsed config of the run is compared with the parsed file, key by key. Each trained model is tested, and the
metrics are computed again from its saved embeddings. A config that differs from another in a few settings is not run,
but compared with it.
"""

import csv
import math
import runpy
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
import pytest
import torch
import yaml
from torchvision.transforms import v2

from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import IJBC, AllClassesSampler, CategorySampler, PKSampler
from lightning_retrieval.preparation.of_run import CurrentTransform
from tests.datamodules.detection.small_voc import write_voc
from tests.datamodules.small_ijbc import write_ijbc
from tests.datamodules.small_revisited import GND, IMAGES, QUERIES, write_revisited
from tests.datamodules.trees import write_cub, write_in_shop, write_online_products, write_vehicle_id
from tests.datamodules.trees_more import write_inaturalist, write_landmarks, write_vgg_face2

IGNORED = [
    "ignore:RetrievalEvaluation. .* have a k above the number of ranked images:UserWarning",
    "ignore:RevisitedMetrics:UserWarning",
]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(*IGNORED)]

EXAMPLES = Path(__file__).parents[2] / "examples"
PIXELS = 32
EMBEDDER, DATA = "model.init_args.embedder.init_args", "data.init_args"
FOUND_OUT = (f"{EMBEDDER}.preparation", f"{EMBEDDER}.backbone_args", f"{EMBEDDER}.image_size", f"{EMBEDDER}.pooling")
EVERY_RUN = {"trainer.accelerator": "cpu", "trainer.enable_progress_bar": False, f"{DATA}.num_workers": 0}
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
DEIT = {f"{EMBEDDER}.pretrained": False, "model.init_args.embedder.dict_kwargs.img_size": PIXELS}
LANDMARKS = {  # three landmarks; images of several sizes
    f"{DATA}.classes_per_batch": 3,
    f"{DATA}.eval_batch_size": 1,
    "trainer.val_check_interval": 2,
}
TINY_DINO = {  # the same network with random weights, of two blocks of width 16, for images of two by two patches
    f"{EMBEDDER}.weights": None,
    f"{EMBEDDER}.embedding_dim": 8,
    f"{EMBEDDER}.image_size": 28,
    f"{EMBEDDER}.backbone_args.embed_dim": 16,
    f"{EMBEDDER}.backbone_args.depth": 2,
    f"{EMBEDDER}.backbone_args.num_heads": 2,
    f"{EMBEDDER}.backbone_args.init_values": 1.0,  # with 0.00001, random weights embed all images alike
    f"{DATA}.image_size": 28,
    f"{DATA}.resize.0": 32,
    f"{DATA}.resize.1": 32,
}

DETECTOR = "model.init_args.detector.init_args"
RUN_NAME = "trainer.logger.init_args.name"
SMALL_DETECTOR = {
    f"{DETECTOR}.pretrained": False,
    f"{DETECTOR}.min_size": PIXELS,
    f"{DETECTOR}.max_size": PIXELS,
    f"{DETECTOR}.pyramid_channels": 8,
    f"{DETECTOR}.head_features": 8,
    f"{DATA}.batch_size": 2,
    f"{DATA}.eval_batch_size": 2,
}


class Run(NamedTuple):
    """The function that writes the data set, and the overrides in addition to the root and `EVERY_RUN`."""

    tree: Callable[[Path], Any]
    overrides: dict[str, Any]


def trained(tree: Callable[[Path], Any], *overrides: dict[str, Any]) -> Run:
    return Run(tree, {key: value for part in (STEPS, BATCH, *overrides) for key, value in part.items()})


CONFIGS = {
    "smooth_ap/online_products.yaml": trained(write_online_products, RESNET, CHUNK),
    "smooth_ap/vehicle_id.yaml": trained(write_vehicle_id, RESNET, CHUNK),
    "smooth_ap/inaturalist.yaml": trained(write_inaturalist, RESNET, CHUNK),
    "smooth_ap/vgg_face2.yaml": trained(write_vgg_face2, RESNET, CHUNK),
    "fast_ap/online_products.yaml": trained(write_online_products, RESNET, CHUNK),
    "fast_ap/in_shop.yaml": trained(write_in_shop, RESNET, CHUNK),
    "fast_ap/vehicle_id.yaml": trained(write_vehicle_id, RESNET, CHUNK),
    "rambo/cub_log.yaml": trained(write_cub, RESNET),
    "rambo/online_products_log.yaml": trained(write_online_products, RESNET),
    "rambo/in_shop_log.yaml": trained(write_in_shop, RESNET),
    "rambo/voc07_resnet50.yaml": Run(write_voc, {**STEPS, **SMALL_DETECTOR}),
    "rambo/voc0712_resnext101_32x4d.yaml": Run(write_voc, {**STEPS, **SMALL_DETECTOR}),
    "roadmap/cub.yaml": trained(write_cub, RESNET, HALF),
    "roadmap/cub_deit.yaml": trained(write_cub, DEIT, HALF),
    "roadmap/online_products.yaml": trained(write_online_products, RESNET, HALF),
    "roadmap/online_products_deit.yaml": trained(write_online_products, DEIT, HALF),
    "roadmap/inaturalist.yaml": trained(write_inaturalist, RESNET, HALF, CHUNK),
    "roadmap/inaturalist_deit.yaml": trained(write_inaturalist, DEIT, HALF, CHUNK),
    "ap_gem/landmarks.yaml": trained(write_landmarks, RESNET, CHUNK, LANDMARKS),
    "foundation/online_products.yaml": trained(write_online_products, TINY_DINO, HALF, CHUNK),
}
# {config: (another one that is run, the settings in which they differ)}; the published results differ, too
WEIGHTING = {"model.init_args.loss.init_args.weighting": "loglog"}
BACKBONE = f"{DETECTOR}.backbone_name"
VARIANTS = {
    "fast_ap/online_products_resnet18.yaml": (
        "fast_ap/online_products.yaml",
        {f"{EMBEDDER}.backbone": "resnet18", "model.init_args.chunk_size": None, "trainer.max_epochs": 28},
    ),
    "fast_ap/online_products_128.yaml": (
        "fast_ap/online_products.yaml",
        {f"{EMBEDDER}.embedding_dim": 128, f"{DATA}.classes_per_batch": 24, "trainer.max_epochs": 16},
    ),
    "rambo/cub_loglog.yaml": ("rambo/cub_log.yaml", WEIGHTING),
    "rambo/online_products_loglog.yaml": ("rambo/online_products_log.yaml", WEIGHTING),
    "rambo/in_shop_loglog.yaml": ("rambo/in_shop_log.yaml", WEIGHTING),
    "rambo/voc0712_resnet50.yaml": ("rambo/voc0712_resnext101_32x4d.yaml", {BACKBONE: "resnet50.tv_in1k"}),
    "rambo/voc0712_resnet101.yaml": ("rambo/voc0712_resnext101_32x4d.yaml", {BACKBONE: "resnet101.tv_in1k"}),
    "ap_gem/revisited_paris.yaml": (
        "ap_gem/revisited_oxford.yaml",
        {"data.class_path": "lightning_retrieval.datamodules.RevisitedParis"},
    ),
}
# Without files: test_examples.py runs it.
DRAWN = {"rambo/glyph_scenes.yaml"}
# Evaluated with the checkpoint of a config that trains: that config, the run, and the metrics of the paper.
EVALUATIONS = {
    "smooth_ap/ijbc.yaml": (
        "smooth_ap/vgg_face2.yaml",
        Run(write_ijbc, {f"{EMBEDDER}.embedding_dim": 8, f"{DATA}.eval_batch_size": 16}),
        ["test/mAP"],
    ),
    "ap_gem/revisited_oxford.yaml": (
        "ap_gem/landmarks.yaml",
        Run(partial(write_revisited, name="roxford5k", pickled="gnd_roxford5k.pkl"), {f"{EMBEDDER}.embedding_dim": 8}),
        ["test/mAP/medium", "test/mAP/hard"],
    ),
}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Write the logs to a temporary folder, and remove them at the end, since checkpoints of ResNets are large."""
    monkeypatch.chdir(tmp_path)
    yield
    shutil.rmtree(tmp_path / "logs", ignore_errors=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The root of a data set, given the function that writes it; each is written once."""
    roots = {}

    def root(tree):
        if tree not in roots:
            roots[tree] = tmp_path_factory.mktemp("data") / "root"
            tree(roots[tree])
        return roots[tree]

    return root


def shrink_images(monkeypatch):
    """Keep the transforms of the papers, but scale their result down if it is larger."""

    smaller = v2.Resize((PIXELS, PIXELS))
    to_uint8 = CurrentTransform.to_uint8.fget

    def shrunk(result):
        return smaller(result) if min(result.shape[1:]) > PIXELS else result

    def shrunk_to_uint8(self):
        transform = to_uint8(self)
        return None if transform is None else lambda image: shrunk(transform(image))

    monkeypatch.setattr(CurrentTransform, "__call__", lambda self, image: shrunk(self.current(image)))
    monkeypatch.setattr(CurrentTransform, "to_uint8", property(shrunk_to_uint8))


def flat(config: Any, path: str = "") -> dict[str, Any]:
    """{path: value} of each leaf of a config."""
    if isinstance(config, dict) and config:
        parts = [flat(value, f"{path}.{key}" if path else str(key)) for key, value in config.items()]
    elif isinstance(config, list) and config:
        parts = [flat(value, f"{path}.{place}") for place, value in enumerate(config)]
    else:
        return {path: config}
    return {key: value for part in parts for key, value in part.items()}


def without_published(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those of PublishedResults, which test_papers.py tests."""
    places = [key for key, value in settings.items() if str(value).endswith("PublishedResults")]
    prefixes = tuple(f"{place.removesuffix('.class_path')}.init_args" for place in places)
    return {key: value for key, value in settings.items() if not key.startswith(prefixes)}


def parsed(command, file, root, monkeypatch, capsys) -> dict[str, Any]:
    """The file as the command line parses it, with only the root given."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([command, "--config", str(EXAMPLES / file), f"--data.root={root}", "--print_config"])
    assert ended.value.code == 0
    return flat(yaml.safe_load(capsys.readouterr().out))


def run_config(command, file, run, root, monkeypatch, capsys, checkpoint=None) -> dict[str, list[str]]:
    """Run a file with its overrides, test that nothing else is changed, and return {column: logged values}."""
    of_file = parsed(command, file, root, monkeypatch, capsys)
    shrink_images(monkeypatch)
    config, overrides = yaml.safe_load((EXAMPLES / file).read_text()), {**EVERY_RUN, **run.overrides}
    for place, callback in enumerate(config["trainer"]["callbacks"]):
        if callback["class_path"].endswith("ModelCheckpoint"):  # 100 MB in place of 300
            overrides[f"trainer.callbacks.{place}.init_args.save_weights_only"] = True
    for key, value in overrides.items():
        *folders, name = key.split(".")
        part = config
        for folder in folders:
            part = part[int(folder)] if isinstance(part, list) else part.setdefault(folder, {})
        part[int(name) if isinstance(part, list) else name] = value
    Path(f"{command}.yaml").write_text(yaml.safe_dump(config))
    options = [] if checkpoint is None else [f"--ckpt_path={checkpoint}"]
    main([command, "--config", f"{command}.yaml", f"--data.root={root}", *options])
    folder = Path("logs", file.removesuffix(".yaml"), "version_0")
    of_run = flat(yaml.safe_load((folder / "config.yaml").read_text()))
    if checkpoint is not None:  # the command line takes the settings of the model from it
        of_training = flat(yaml.safe_load((checkpoint.parents[1] / "config.yaml").read_text()))
        of_file = {key: value for key, value in of_file.items() if not key.startswith("model.")}
        of_file |= {key: value for key, value in of_training.items() if key.startswith("model.")}
        # The checkpoint also says in full what the embedder has found out about its weights.
        found_out = {key for key in of_run if key.startswith(FOUND_OUT) and of_training.get(key) is None}
        assert found_out
        of_run = {key: value for key, value in of_run.items() if key not in found_out}
        of_file = {key: value for key, value in of_file.items() if key not in found_out}
    changed = {key for key in {*of_file, *of_run} if of_file.get(key) != of_run.get(key)}
    assert changed - {"ckpt_path"} == {key for key, value in overrides.items() if of_file.get(key) != value}
    with (folder / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    return {name: [row[name] for row in rows if row[name]] for name in rows[0]}


def fit(file: str, written, monkeypatch, capsys) -> Path:
    """Train with a config and test the losses, the metric and the checkpoint; returns the checkpoint."""
    run = CONFIGS[file]
    logged = run_config("fit", file, run, written(run.tree), monkeypatch, capsys)
    config = yaml.safe_load((EXAMPLES / file).read_text())
    checkpoints = [
        callback["init_args"]
        for callback in config["trainer"]["callbacks"]
        if callback["class_path"].endswith("ModelCheckpoint")
    ]
    assert [settings["filename"] for settings in checkpoints] == ["best", "last"]
    assert not any(settings["enable_version_counter"] for settings in checkpoints)  # a resumed run writes no best-v1
    monitored = checkpoints[0]["monitor"]
    losses = [float(value) for value in logged["train/loss"]]
    assert len(losses) == STEPS["trainer.limit_train_batches"]
    assert all(map(math.isfinite, losses))
    assert 0 <= float(logged[monitored][0]) <= 1
    (checkpoint,) = Path("logs").rglob("best.ckpt")
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    assert saved["global_step"] == len(losses)
    return checkpoint


def saved_rows(folder: Path) -> tuple[list[str], np.ndarray, list[str]]:
    """The path, the embedding and the label of each image in a folder of embeddings."""
    table = pyarrow.parquet.read_table(sorted(map(str, folder.glob("*.parquet")))).to_pydict()
    paths, embeddings, labels = table["path"], table["embedding"], table["label"]
    return paths, np.array(embeddings, dtype=np.float64), labels


def recomputed(folder: Path, root: Path) -> dict[str, float]:
    """mAP and R@1 of saved embeddings: each image is ranked against all others, or queries against the gallery."""
    paths, embeddings, labels = saved_rows(folder)
    embeddings = unit(embeddings)
    if (root / "protocols").exists():  # IJB-C, whose frames of a video are averaged
        instances = IJBC(root).splits["test"].instances
        embeddings = unit(np.stack([embeddings[instances == i].mean(0) for i in np.unique(instances)]))
        labels = [labels[int(np.argmax(instances == i))] for i in np.unique(instances)]
    labels, places = np.array(labels), np.arange(len(labels))
    queries, gallery = places, np.ones(len(labels), dtype=bool)
    partition = root / "Eval/list_eval_partition.txt"
    if partition.exists():
        status = dict(line.split()[::2] for line in partition.read_text().splitlines()[2:] if line)
        gallery = np.array([status[path] == "gallery" for path in paths])
        queries = places[~gallery]
    values = []
    for query in queries:
        listed = gallery & (places != query)
        scores = (embeddings[listed] * embeddings[query]).sum(1)
        positive = scores[labels[listed] == labels[query]]
        ranks = np.array([(scores >= score).sum() for score in positive])
        among = np.array([(positive >= score).sum() for score in positive])
        # R@1: a positive has no negative that scores at least as high
        values.append([(among / ranks).mean(), float((ranks == among).any())])
    return dict(zip(("mAP", "R@1"), np.mean(values, axis=0)))


def recomputed_revisited(folder: Path, _: Path) -> dict[str, float]:
    """mAP of revisited Oxford: queries are expanded with alpha 2, junk is removed, and AP is a sum of trapezoids."""
    paths, embeddings, _ = saved_rows(folder)
    rows = {Path(path).stem: row for path, row in zip(paths, unit(embeddings))}
    gallery = np.stack([rows[name] for name in IMAGES])
    found: dict[str, list[float]] = {"medium": [], "hard": []}
    for query, truth in zip(QUERIES, GND):
        scores = gallery @ rows[query]
        nearest = scores.argsort()[::-1][:10]
        scores = gallery @ (rows[query] + (scores[nearest, None] ** 2 * gallery[nearest]).sum(0))
        judged = {"medium": (truth["easy"] + truth["hard"], truth["junk"])}
        judged["hard"] = (truth["hard"], truth["easy"] + truth["junk"])
        for protocol, (positives, junk) in judged.items():
            order = [image for image in scores.argsort()[::-1] if image not in junk]
            places = sorted(order.index(image) for image in positives)
            before = [found_already / place if place else 1.0 for found_already, place in enumerate(places)]
            after = [(number + 1) / (place + 1) for number, place in enumerate(places)]
            if positives:
                found[protocol].append(float(np.mean(before + after)))
    return {f"mAP/{protocol}": float(np.mean(values)) for protocol, values in found.items()}


def unit(rows: np.ndarray) -> np.ndarray:
    """The rows, divided by their lengths."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def check_saved_embeddings(file: str, root: Path, checkpoint: Path) -> None:
    """Test a trained model, save the embeddings of its test sets, and compare the metrics with those of these."""
    options = ["--config", "fit.yaml", f"--data.root={root}", f"--ckpt_path={checkpoint}"]
    main(["test", *options])
    newest = max(Path("logs", file.removesuffix(".yaml")).glob("version_*"), key=lambda path: path.stat().st_mtime)
    with (newest / "metrics.csv").open() as lines:
        tested = {name: float(value) for row in csv.DictReader(lines) for name, value in row.items() if value}
    main(["predict", *options, "--output", "embeddings"])
    folders = [path for path in Path("embeddings").iterdir() if path.is_dir()] or [Path("embeddings")]
    for folder in folders:
        prefix = "test/" if folder == Path("embeddings") else f"test/{folder.name}/"
        for name, value in recomputed(folder, root).items():
            assert tested[prefix + name] == pytest.approx(value, abs=1e-6), (prefix, name)


@pytest.mark.parametrize("file", CONFIGS)
def test_a_config_trains_and_evaluates(file, written, monkeypatch, capsys):
    checkpoint = fit(file, written, monkeypatch, capsys)
    if "voc" not in file:
        check_saved_embeddings(file, written(CONFIGS[file].tree), checkpoint)
    for evaluation, (trained_by, run, metrics) in EVALUATIONS.items():
        if trained_by == file:
            root = written(run.tree)
            logged = run_config("test", evaluation, run, root, monkeypatch, capsys, checkpoint)
            options = ["--config", "test.yaml", f"--data.root={root}", f"--ckpt_path={checkpoint}"]
            main(["predict", *options, "--output=of_test"])
            recompute = recomputed_revisited if "revisited" in evaluation else recomputed
            found = recompute(Path("of_test"), root)
            for metric in metrics:
                assert float(logged[metric][0]) == pytest.approx(found[metric.removeprefix("test/")], abs=1e-6)


@pytest.mark.parametrize("file", VARIANTS)
def test_a_variant_differs_in_one_setting(file, monkeypatch, capsys):
    other, changed = VARIANTS[file]
    command = "test" if other in EVALUATIONS else "fit"
    settings, expected = (
        without_published(parsed(command, name, "data", monkeypatch, capsys)) for name in (file, other)
    )
    assert settings == {**expected, **changed, RUN_NAME: file.removesuffix(".yaml")}


def test_all_configs_are_run_and_listed():
    found = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/*.yaml")}
    assert found == {*CONFIGS, *VARIANTS, *EVALUATIONS, *DRAWN}
    listed = (EXAMPLES / "README.md").read_text()
    assert [name for name in sorted(found) if f"({name})" not in listed] == []


# --- the hours that they take, which follow from their epochs, the published sizes and the throughput


@pytest.fixture(scope="module")
def hours():
    return runpy.run_path(str(EXAMPLES / "hours.py"))


def test_hours_worked_by_hand(hours):
    found = {row[0]: row for row in hours["rows"](EXAMPLES, 100)}
    # 200 batches of 4,096, fewer than 19 epochs of 11
    assert found["ap_gem/landmarks.yaml"][1:4] == (19, 42_410, pytest.approx(0.8192))
    # 11,318 classes with 59,551 images: 156 batches of 384, 400 times
    assert found["smooth_ap/online_products.yaml"][1:4] == (400, 59_551, pytest.approx(23.9616))
    assert found["smooth_ap/online_products.yaml"][4] == pytest.approx(156 * 384 * 400 / 100 / 3600)
    assert found["roadmap/cub.yaml"][1:4] == (200, 5_864, pytest.approx(46 * 128 * 200 / 1e6))


def test_every_config_that_trains_an_embedding_has_a_row(hours):
    found = {row[0] for row in hours["rows"](EXAMPLES, 100)}
    paths = [EXAMPLES / file for file in (*CONFIGS, *VARIANTS)]
    trained = [path for path in paths if "max_epochs" in path.read_text() and "detection" not in path.read_text()]
    assert found == {f"{path.parent.name}/{path.name}" for path in trained}


def test_an_epoch_of_each_sampler_has_the_images_of_the_set_in_full_batches(hours):
    labels = torch.arange(23 * 7) // 7  # 161 images
    data = {"init_args": {"classes_per_batch": 4, "samples_per_class": 5}}
    expected = hours["images_of_an_epoch"](data, len(labels))
    assert expected == 180
    sizes = {"classes_per_batch": 4, "samples_per_class": 5}
    categories = labels // 12
    for sampler in (PKSampler(labels, **sizes), CategorySampler(labels, categories, **sizes)):
        assert 20 * len(sampler) == expected
    assert 50 * len(AllClassesSampler(labels, batch_size=50)) == hours["images_of_an_epoch"](
        {"init_args": {"classes_per_batch": 25, "samples_per_class": 2}}, len(labels)
    )


def test_the_table_of_the_documentation_is_that_of_the_command(hours, capsys):
    hours["main"](["--images_per_second", "400"])
    assert capsys.readouterr().out in (EXAMPLES.parent / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_a_throughput_is_a_positive_number(hours, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        hours["main"](["--images_per_second=nan"])
    assert "--images_per_second must be a number > 0, got" in capsys.readouterr().err
