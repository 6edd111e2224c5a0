"""The configs of the papers: each is built and compared with examples/papers.yaml, and one of them trains.

The command line parses a config and makes its objects: the network on the meta device and without weights, the data
module without its files. Settings are then read from what was built, such as parameter groups and the rates that the
scheduler sets.
"""

import csv
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.transforms import v2

from examples.papers import command, current_files, loss_settings
from lightning_retrieval.callbacks import LearnWhitening, RetrievalEvaluation
from lightning_retrieval.cli.fit import RetrievalCLI
from lightning_retrieval.cli.main import main
from lightning_retrieval.losses import WeightedSum
from lightning_retrieval.models import Embedder
from lightning_retrieval.models.features import GeM, GlobalAvgPool, GlobalMaxPool

EXAMPLES = Path(__file__).parents[2] / "examples"
TABLE = yaml.safe_load((EXAMPLES / "papers.yaml").read_text(encoding="utf-8"))
CONFIGS, PAPERS = TABLE["configs"], TABLE["papers"]
EMBEDDER = "model.init_args.embedder"
POOLINGS = {GeM: "gem", GlobalAvgPool: "avg", GlobalMaxPool: "max"}  # a transformer pools by itself

NO_HALF = "ignore:You passed `Trainer.accelerator='cpu', precision='16-mixed'.` but AMP with fp16:UserWarning"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(NO_HALF)]


def without_weights(settings):
    """Options that leave the network without downloaded weights."""
    if "detector" in settings["model"]["init_args"]:
        return ["--model.init_args.detector.init_args.pretrained=false"]
    embedder = settings["model"]["init_args"]["embedder"]
    if embedder["class_path"] == "timm.create_model":
        return [f"--{EMBEDDER}.init_args.pretrained=false"]
    return [f"--{EMBEDDER}.init_args.weights=null"]


def build(config, monkeypatch, tmp_path):
    """The settings of a config, and the command line's objects, made as for a run that then does nothing.

    Promise 1: that a config makes what the paper says is seen in no other way than in the objects that a command makes.
    """
    settings = yaml.safe_load((EXAMPLES / config).read_text(encoding="utf-8"))
    built = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RetrievalCLI, "_run_subcommand", lambda self, subcommand: built.append(self))
    command = "fit" if "optimizer" in settings["model"]["init_args"] else "test"
    options = ["--trainer.accelerator=cpu", "--data.init_args.num_workers=0", *without_weights(settings)]
    with torch.device("meta"):
        main([command, "--config", str(EXAMPLES / config), "--data.root=data", *options])
    return settings, built[0]


def network_values(settings, model):
    embedder = model.embedder.train()
    given = settings["model"]["init_args"]["embedder"]["init_args"]
    is_ours = isinstance(embedder, Embedder)
    name = embedder.backbone_name if is_ours else embedder.pretrained_cfg["architecture"]
    weights = "pretrained" if given.get("pretrained") else given.get("weights")
    norms = [module for module in embedder.modules() if isinstance(module, _BatchNorm)]
    head = getattr(embedder, "head", nn.Identity())
    normalisation = "layer norms of the network"
    if norms:
        assert not any(norm.training for norm in norms)
        normalisation = "batch norm frozen"
    if is_ours and any(isinstance(part, nn.LayerNorm) for part in head.modules()):
        normalisation += ", layer norm before the linear layer"
    pool = type(getattr(embedder, "pool", nn.Identity()))
    values = {
        "network": f"{name}, {weights or 'random weights'}",
        "pooling": POOLINGS.get(pool) or getattr(embedder, "pooling", "none"),
        "embedding": embedder.eval()(torch.empty(2, 3, 224, 224, device="meta")).shape[1],
        "normalisation": normalisation,
        "memory": "none" if model.memory is None else model.memory.size,
        "chunks": model.chunk_size or "none",
    }
    if model.whitening is not None:
        values["whitening"] = model.whitening.power
    if getattr(embedder, "lora", None):
        values["adapters"] = f"LoRA of rank {embedder.lora['r']}"
    return values


def loss_values(loss, name="loss"):
    """The class of a loss and its settings, with those of the parts of a sum."""
    values = {name: type(loss).__name__}
    if isinstance(loss, WeightedSum):
        for part, (weight, inner) in loss.losses.items():
            values |= {f"{name}.{part}.weight": weight, **loss_values(inner, f"{name}.{part}")}
        return values
    return values | {f"{name}.{key}": value for key, value in vars(loss).items() if not key.startswith("_")}


def schedule_of(scheduler, rate, times):
    """{step: factor} of the changes of the rate, or that it falls along a line."""
    if scheduler is None:
        return "constant"
    rates = [rate()]
    for _ in range(times):
        scheduler.step()
        rates.append(rate())
    changes = {step: rates[step] / rates[step - 1] for step in range(1, times + 1) if rates[step] != rates[step - 1]}
    if len(changes) < times:
        return {step: pytest.approx(factor) for step, factor in changes.items()}
    if rates == pytest.approx([rates[0] * (1 - step / times) for step in range(times + 1)], abs=1e-9):
        return f"linear to 0 in {times} steps"
    angles = torch.linspace(0, torch.pi, times + 1, dtype=torch.float64, device="cpu")
    assert rates == pytest.approx((rates[0] * (1 + angles.cos()) / 2).tolist(), rel=1e-3, abs=1e-9)
    return f"cosine to 0 in {times} epochs"


def optimizer_values(model, times):
    configured = model.configure_optimizers()
    optimizer, scheduler = configured, None
    if isinstance(configured, dict):
        optimizer, scheduler = configured["optimizer"], configured.get("lr_scheduler")
    if isinstance(scheduler, dict):
        scheduler = scheduler["scheduler"]
    embedder = getattr(model, "embedder", None)
    head = embedder.head if isinstance(embedder, Embedder) else None
    of_head = set() if head is None else set(head.parameters())
    rates, head_rates, decays = set(), set(), set()
    for group in optimizer.param_groups:
        rate = head_rates if of_head.intersection(group["params"]) else rates
        rate.add(group["lr"])
        decays.add(group["weight_decay"])
        if not of_head.isdisjoint(group["params"]) and not of_head.issuperset(group["params"]):
            rates.add(group["lr"])  # one group of all
    (rate,), (decay,) = rates, decays
    values = {"optimizer": type(optimizer).__name__, "learning_rate": rate, "weight_decay": decay}
    values["head_rate"] = min(head_rates, default="none")
    values["momentum"] = optimizer.param_groups[0].get("momentum")
    optimizer.step()  # without gradients it does nothing, but schedulers warn if it was never called
    values["schedule"] = schedule_of(scheduler, lambda: optimizer.param_groups[0]["lr"], times)
    return values


def words(transform):
    """A random transform of training as the table has it."""

    def size(sides):
        return str(sides[0]) if len(sides) == 1 or sides[0] == sides[1] else f"{sides[0]} x {sides[1]}"

    if isinstance(transform, v2.Resize):
        if len(transform.size) == 1:
            return f"short side {size(transform.size)}"
        return f"resize {transform.size[0]} x {transform.size[1]}"
    if isinstance(transform, v2.RandomResizedCrop):
        return f"random resized crop {size(transform.size)} of {transform.scale[0]:g} to {transform.scale[1]:g}"
    if isinstance(transform, v2.RandomCrop):
        return f"random crop {size(transform.size)}"
    if isinstance(transform, v2.RandomRotation):
        return f"rotation by up to {transform.degrees[1]:g} degrees"
    return {v2.ColorJitter: "colour jitter", v2.RandomHorizontalFlip: "flip"}[type(transform)]


def evaluation_words(data):
    """The preparation of images in evaluation as the table has it."""
    preparation = data.eval_transform.current
    target, crop = preparation.resized_to, preparation.crop_size
    if target is None:
        longest = getattr(data, "image_size", None)
        return "as they are" if longest is None else f"at most {longest:,} pixels"
    resize = f"short side {target}" if isinstance(target, int) else f"resize {target[0]} x {target[1]}"
    if not isinstance(target, int) and tuple(target) == crop:
        return resize
    return f"{resize} and centre crop {crop[0]}"


def callback_of(trainer, kind):
    return next((callback for callback in trainer.callbacks if isinstance(callback, kind)), None)


def values_of_embedding(settings, cli):
    values = {**network_values(settings, cli.model), **loss_values(cli.model.loss)}
    data, trainer = cli.datamodule, cli.trainer
    values["evaluation_images"] = evaluation_words(data)
    evaluation = callback_of(trainer, RetrievalEvaluation)
    values["evaluation"] = [f"R@{k}" for k in evaluation.ks]
    if evaluation.query_expansion is not None:
        values["query_expansion"] = {"alpha": evaluation.query_expansion.alpha, "k": evaluation.query_expansion.k}
    values["least_instances"] = getattr(data, "least_instances", None)
    values["select_by_vid"] = getattr(data, "select_by_vid", None)
    learned = callback_of(trainer, LearnWhitening)
    values["whitening_images"] = learned and learned.images
    if "optimizer" not in settings["model"]["init_args"]:
        return values
    times = trainer.max_steps if trainer.max_steps > 0 else trainer.max_epochs
    values |= optimizer_values(cli.model, times)
    values["training_images"] = [words(step) for step in data.train_transform.current.transforms]
    return values | {
        "sampler": data.sampler,
        "batch": data.classes_per_batch * data.samples_per_class,
        "images_a_class": None if data.sampler == "all_classes" else data.samples_per_class,
        "epochs": None if trainer.max_steps > 0 else trainer.max_epochs,
        "steps": trainer.max_steps if trainer.max_steps > 0 else None,
        "precision": cli.config.fit.trainer.precision or "32-true",
        "clipping": cli.model.updates.gradient_clip_val,
    }


def values_of_detector(settings, cli):
    detector, trainer = cli.model.detector, cli.trainer
    loss = detector.roi_heads.loss
    values = {**loss_values(loss), **optimizer_values(cli.model, trainer.max_epochs)}
    values["loss.lambda_"], values["loss.margin"] = loss.map_loss.lambda_, loss.map_loss.margin
    return values | {
        "network": settings["model"]["init_args"]["detector"]["init_args"]["backbone_name"],
        "training_sets": list(cli.datamodule.train_sets),
        "batch": cli.datamodule.batch_size,
        "epochs": trainer.max_epochs,
        "clipping": trainer.gradient_clip_val,
        "image_sides": [*detector.transform.min_size, detector.transform.max_size],
        "regions": detector.roi_heads.fg_bg_sampler.batch_size_per_image,
        "eleven_points": cli.model.metrics.eleven_points,
    }


def same(found, stated):
    if isinstance(stated, float) and isinstance(found, float):
        return found == pytest.approx(stated, rel=1e-6)
    return found == stated


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_built_is_what_the_table_says(config, monkeypatch, tmp_path):
    settings, cli = build(config, monkeypatch, tmp_path)
    is_detector = "detector" in settings["model"]["init_args"]
    found = (values_of_detector if is_detector else values_of_embedding)(settings, cli)
    stated = {key: entry[0] for key, entry in CONFIGS[config]["values"].items()}
    if "evaluation" in stated:  # mAP is always logged; revisited Oxford and Paris have mP@1, 5 and 10, too
        recalls = [metric for metric in stated["evaluation"] if metric.startswith("R@")]
        stated["evaluation"] = recalls or ["R@1", "R@5", "R@10"]
    assert {key: (found.get(key), value) for key, value in stated.items() if not same(found.get(key), value)} == {}
    given = [key for key, value in found.items() if not key.startswith("loss.") and value not in (None, False, "none")]
    assert {*given, *loss_settings(settings["model"]["init_args"]["loss"])} <= stated.keys()


@pytest.mark.parametrize("config", CONFIGS)
def test_the_published_results_that_a_config_prints_are_those_of_its_row(config):
    callbacks = yaml.safe_load((EXAMPLES / config).read_text(encoding="utf-8"))["trainer"]["callbacks"]
    printed = [each["init_args"] for each in callbacks if each["class_path"].endswith(".PublishedResults")]
    if "table" not in CONFIGS[config]:
        assert printed == []
        return
    table, row = CONFIGS[config]["table"]
    published = PAPERS[CONFIGS[config]["paper"]]["tables"][table]
    *percents, command = published["rows"][row]
    assert command.split()[0] == config
    (of_config,) = printed
    results = zip(published["columns"], percents, strict=True)
    assert of_config["results"] == {name: pytest.approx(percent / 100) for name, percent in results}
    assert f"{published['title'].partition(',')[0]}, " in of_config["source"]
    assert row in of_config["source"]


@pytest.mark.parametrize("paper", [name for name, paper in PAPERS.items() if "tables" in paper])
def test_the_options_of_a_published_row_are_valid(paper, monkeypatch, capsys):
    monkeypatch.chdir(EXAMPLES.parent)
    for published in PAPERS[paper]["tables"].values():
        for *_, words in published["rows"].values():
            _, *options = command(words.replace(" --ckpt_path CHECKPOINT", "")).split()
            with pytest.raises(SystemExit) as ended:
                main([*options, "--print_config"])
            assert ended.value.code == 0, capsys.readouterr().err


def test_the_comments_and_the_page_are_current():
    assert [path.name for path, text in current_files().items() if path.read_text(encoding="utf-8") != text] == []


def test_the_table_has_every_config():
    found = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/*.yaml")}
    assert found == {*CONFIGS, "rambo/glyph_scenes.yaml"}  # scenes of glyphs are not from a paper


def columns(folder):
    with (folder / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


def test_the_config_of_a_paper_trains_and_is_tested(monkeypatch, tmp_path):
    """Two small steps of ROADMAP on 200 species of birds with two images each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CUB/images").mkdir(parents=True)
    lists = {"images": "", "image_class_labels": ""}
    for number in range(1, 201):
        for image in range(2):
            name = f"{number:03d}.Bird/{image}.jpg"
            file = tmp_path / "CUB/images" / name
            file.parent.mkdir(exist_ok=True)
            # Both images of an even class are the same; those of an odd one differ more than neighbouring classes do.
            Image.new("RGB", (40, 40), (number, 255 - number, 40 * image * (number % 2))).save(file)
            lists["images"] += f"{2 * number + image} {name}\n"
            lists["image_class_labels"] += f"{2 * number + image} {number}\n"
    for name, text in lists.items():
        (tmp_path / f"CUB/{name}.txt").write_text(text)
    small = ["--data.classes_per_batch=4", "--data.samples_per_class=2", "--data.num_workers=0"]
    small += ["--data.image_size=32", "--data.resize=36", "--trainer.accelerator=cpu", "--trainer.max_epochs=1"]
    small += ["--trainer.precision=32-true", "--trainer.check_val_every_n_epoch=1", "--trainer.log_every_n_steps=1"]
    small += ["--trainer.limit_train_batches=2", "--trainer.enable_progress_bar=false"]
    small += ["--model.embedder.weights=null", "--model.embedder.backbone=resnet18"]
    small.append("--model.embedder.freeze_batch_norm=false")  # of a network without pretrained weights
    config = ["--config", str(EXAMPLES / "roadmap/cub.yaml"), "--data.root=CUB", *small]
    main(["fit", *config])
    folder = Path("logs/roadmap/cub")
    logged = columns(folder / "version_0")
    assert len(logged["train/loss"]) == 2
    assert 0 < logged["val/mAP@R"][0] < 1
    checkpoint = folder / "version_0/checkpoints/best.ckpt"
    main(["test", *config, "--ckpt_path", str(checkpoint)])
    assert columns(folder / "version_1")["test/mAP"] == pytest.approx(logged["val/mAP"])
    shutil.rmtree(folder)


def test_the_detector_of_the_glyph_scenes_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ["--trainer.max_steps=2", "--data.train_size=16", "--data.eval_size=20", "--trainer.accelerator=cpu"]
    config = ["fit", "--config", str(EXAMPLES / "rambo/glyph_scenes.yaml"), "--trainer.enable_progress_bar=false"]
    main([*config, *few, "--trainer.log_every_n_steps=1"])
    folder = Path("logs/rambo/glyph_scenes/version_0")
    assert {"train/loss_classifier", "val/AP50", "test/AP", "test/AP50/A"} <= set(columns(folder))
    assert (folder / "detections.png").exists()
    assert (folder / "checkpoints/best.ckpt").exists()
