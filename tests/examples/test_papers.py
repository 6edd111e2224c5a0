"""The table of what the papers state, examples/papers.yaml: each config is built and compared with it.

Each config is parsed by the command line, and its objects are made at their full size: the network on the meta device
and without weights, the data module on lists of hundreds of classes. Their settings are then read from what was built:
from parameter groups, from the rates that the scheduler sets, and from a batch of the sampler.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.transforms import v2

from lightning_retrieval.callbacks import LearnWhitening, PublishedResults, RetrievalEvaluation
from lightning_retrieval.cli.fit import RetrievalCLI
from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import AllClassesSampler, CategorySampler, PKSampler
from lightning_retrieval.losses import WeightedSum
from lightning_retrieval.models import Embedder
from lightning_retrieval.models.features import GeM, GlobalAvgPool, GlobalMaxPool
from tests.datamodules.detection.small_voc import write_voc
from tests.datamodules.small_ijbc import write_ijbc
from tests.datamodules.small_revisited import write_revisited
from tests.datamodules.trees import write_image, write_text
from tests.examples.scripts import imported

EXAMPLES = Path(__file__).parents[2] / "examples"
TABLE = yaml.safe_load((EXAMPLES / "papers.yaml").read_text(encoding="utf-8"))
CONFIGS = TABLE["configs"]
MARKS = ("paper", "code", "ours")
EMBEDDER = "model.init_args.embedder"
POOLINGS = {GeM: "gem", GlobalAvgPool: "avg", GlobalMaxPool: "max"}  # a transformer pools by itself
OF_EVERY_TRAINING = (
    *("batch", "sampler", "optimizer", "learning_rate", "weight_decay", "schedule", "training_images"),
    *("evaluation_images", "network", "embedding", "pooling", "normalisation", "loss", "memory", "evaluation"),
)
OF_EVERY_DETECTOR = ("batch", "optimizer", "learning_rate", "weight_decay", "schedule", "epochs", "network", "loss")

NO_HALF = "ignore:You passed `Trainer.accelerator='cpu', precision='16-mixed'.` but AMP with fp16:UserWarning"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(NO_HALF)]


# --- lists as published, of hundreds of classes with eight images each


def products(root):
    for split, first in {"train": 1, "test": 11319}.items():
        lines = ["image_id class_id super_class_id path"]
        for number in range(first, first + 1200):
            category = number % 12 + 1
            lines += [f"{8 * number + i} {number} {category} {category}_final/{number}_{i}.JPG" for i in range(8)]
        write_text(root / f"Ebay_{split}.txt", "\n".join(lines))
    for category in range(1, 13):
        (root / f"{category}_final").mkdir()


def in_shop(root):
    rows = []
    for item in range(1, 1801):
        folder = f"img/WOMEN/Category{item % 23}/id_{item:08d}"
        for i in range(8):
            status = "train" if item < 1500 else "query" if i == 0 else "gallery"
            rows.append(f"{folder}/{i}.jpg id_{item:08d} {status}")
    header = f"{len(rows)}\nimage_name item_id evaluation_status\n"
    write_text(root / "Eval/list_eval_partition.txt", header + "\n".join(rows))
    (root / "img/WOMEN").mkdir(parents=True)


def cub(root):
    images = [(number, i) for number in range(1, 201) for i in range(8)]
    write_text(root / "images.txt", "".join(f"{k} {n:03d}.Bird/{n}_{i}.jpg\n" for k, (n, i) in enumerate(images)))
    write_text(root / "image_class_labels.txt", "".join(f"{k} {n}\n" for k, (n, _) in enumerate(images)))
    (root / "images").mkdir()


def vehicles(root):
    files = {"train_list": 0, "test_list_800": 5000, "test_list_1600": 6000, "test_list_2400": 7000}
    every = ""
    for name, first in files.items():
        rows = "".join(f"{100 * n + i:07d} {n}\n" for n in range(first, first + 800) for i in range(8))
        write_text(root / "train_test_split" / f"{name}.txt", rows)
        every += rows
    write_text(root / "attribute/img2vid.txt", every)
    write_text(root / "attribute/model_attr.txt", "".join(f"{n} {n % 9}\n" for n in range(800)))
    (root / "image").mkdir()


def inaturalist(root):
    for split, first in {"train": 0, "test": 5000}.items():
        paths = [f"train_val2018/Aves/{n}/{n}_{i}.jpg\n" for n in range(first, first + 400) for i in range(8)]
        write_text(root / "Inat_dataset_splits" / f"Inaturalist_{split}_set1.txt", "".join(paths))
    (root / "train_val2018").mkdir()


def vgg_face2(root):
    for split, first in {"train": 2, "test": 5000}.items():
        lines = [f"n{n:06d}/{i:04d}_01.jpg\n" for n in range(first, first + 200) for i in range(8)]
        write_text(root / "meta" / f"{split}_list.txt", "".join(lines))
        (root / split).mkdir()


def landmarks(root):
    for split, classes in {"train": 586, "val": 20}.items():
        names = [(f"{split}{n}_{i}.jpg", n) for n in range(classes) for i in range(8)]
        write_text(
            root / "annotations" / f"annotation_clean_{split}.txt",
            "".join(f"http://example.com/{name} {n} 0 0\n" for name, n in names),
        )
        for name, _ in names:
            write_text(root / "images" / name, "")
    write_image(root / "images" / "train0_0.jpg")


def revisited(root):
    name = root.name
    write_revisited(root.parent, name, pickled=f"gnd_{name}.pkl")


WRITERS = {
    "StanfordOnlineProducts": products,
    "InShop": in_shop,
    "CUB200": cub,
    "VehicleID": vehicles,
    "INaturalist": inaturalist,
    "VGGFace2": vgg_face2,
    "LandmarksClean": landmarks,
    "IJBC": write_ijbc,
    "RevisitedOxford": revisited,
    "RevisitedParis": revisited,
    "PascalVOC": write_voc,
}


@pytest.fixture(scope="module")
def papers():
    with imported(EXAMPLES, "papers") as module:
        yield module


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """The root of a data set, given the class of its data module; each is written once."""
    found = {}

    def root(name):
        if name not in found:
            folder = tmp_path_factory.mktemp("data") / TABLE["data"][name]["root"]
            folder.mkdir()
            WRITERS[name](folder)
            found[name] = folder
        return found[name]

    return root


# --- what was built


def without_weights(settings):
    """Options that leave the network without downloaded weights."""
    if "detector" in settings["model"]["init_args"]:
        return ["--model.init_args.detector.init_args.pretrained=false"]
    embedder = settings["model"]["init_args"]["embedder"]
    if embedder["class_path"] == "timm.create_model":
        return [f"--{EMBEDDER}.init_args.pretrained=false"]
    return [f"--{EMBEDDER}.init_args.weights=null"]


def build(config, root, monkeypatch, tmp_path):
    """The command line's objects, made as for a run that then does nothing."""
    settings = yaml.safe_load((EXAMPLES / config).read_text(encoding="utf-8"))
    built = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RetrievalCLI, "_run_subcommand", lambda self, subcommand: built.append(self))
    command = "fit" if "optimizer" in settings["model"]["init_args"] else "test"
    options = ["--trainer.accelerator=cpu", "--data.init_args.num_workers=0", *without_weights(settings)]
    with torch.device("meta"):
        main([command, "--config", str(EXAMPLES / config), f"--data.root={root}", *options])
    return settings, built[0]


def name_of_network(settings, embedder):
    """The name of the network, and the weights that the config names."""
    if not isinstance(embedder, Embedder):
        return embedder.pretrained_cfg["architecture"], settings["model"]["init_args"]["embedder"]["init_args"]
    return embedder.backbone_name, settings["model"]["init_args"]["embedder"]["init_args"]


def network_values(settings, model):
    embedder = model.embedder.train()
    name, given = name_of_network(settings, embedder)
    weights = given.get("weights")
    if given.get("pretrained"):
        weights = "pretrained"
    norms = [module for module in embedder.modules() if isinstance(module, _BatchNorm)]
    head = getattr(embedder, "head", nn.Identity())
    normalisation = "layer norms of the network"
    if norms:
        assert not any(norm.training for norm in norms)
        normalisation = "batch norm frozen"
    if isinstance(embedder, Embedder) and any(isinstance(part, nn.LayerNorm) for part in head.modules()):
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
    if len(changes) == times:
        line = [rates[0] * (1 - step / times) for step in range(times + 1)]
        if rates == pytest.approx(line, abs=1e-9):
            return f"linear to 0 in {times} steps"
        cosine = [rates[0] * (1 + torch.tensor(torch.pi * step / times).cos().item()) / 2 for step in range(times + 1)]
        assert rates == pytest.approx(cosine, rel=1e-3, abs=1e-9)
        return f"cosine to 0 in {times} epochs"
    return {step: pytest.approx(factor) for step, factor in changes.items()}


def optimizer_values(model, times):
    configured = model.configure_optimizers()
    optimizer, scheduler = configured, None
    if isinstance(configured, dict):
        optimizer, scheduler = configured["optimizer"], configured.get("lr_scheduler")
    if isinstance(scheduler, dict):
        scheduler = scheduler["scheduler"]
    head = getattr(getattr(model, "embedder", None), "head", None)
    of_head = set() if head is None else set(head.parameters())
    if not isinstance(getattr(model, "embedder", None), Embedder):
        of_head = set()
    rates, head_rates, decays = set(), set(), set()
    for group in optimizer.param_groups:
        rate = head_rates if of_head.intersection(group["params"]) else rates
        rate.add(group["lr"])
        decays.add(group["weight_decay"])
        if not of_head.isdisjoint(group["params"]) and not of_head.issuperset(group["params"]):
            rates.add(group["lr"])  # one group of all
    (rate,), (decay,) = rates, decays
    head_rate = "none"
    if head_rates:
        (head_rate,) = head_rates
    values = {"optimizer": type(optimizer).__name__, "learning_rate": rate, "weight_decay": decay}
    values["head_rate"] = head_rate
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


def data_values(data):
    """What a batch of the sampler holds."""
    sampler = data.train_sampler()
    batch = torch.as_tensor(next(iter(sampler)))
    labels = data.train_set.labels[batch]
    counts = labels.unique(return_counts=True)[1]
    name = {PKSampler: "pk", CategorySampler: "category", AllClassesSampler: "all_classes"}[type(sampler)]
    if name == "category":
        assert len(data.train_set.categories[batch].unique()) == 2
    elif name == "all_classes":
        assert len(counts) == len(data.train_set.labels.unique())
    elif data.train_set.categories is not None:
        assert len(data.train_set.categories[batch].unique()) > 2 or "Aves" in data.train_set.index.paths[0]
    values = {"batch": len(batch), "sampler": name}
    if name != "all_classes":
        values["images_a_class"] = int(counts.unique())
    return values


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
    if "optimizer" in settings["model"]["init_args"]:
        times = trainer.max_steps if trainer.max_steps > 0 else trainer.max_epochs
        values |= {**optimizer_values(cli.model, times), **data_values(data)}
        values["training_images"] = [words(step) for step in data.train_transform.current.transforms]
        values |= {
            "epochs": trainer.max_epochs,
            "steps": trainer.max_steps,
            "precision": cli.config.fit.trainer.precision or "32-true",
        }
        values["clipping"] = cli.model.updates.gradient_clip_val
    learned = callback_of(trainer, LearnWhitening)
    values["whitening_images"] = learned and learned.images
    return values


def values_of_detector(settings, cli):
    detector, trainer = cli.model.detector, cli.trainer
    loss = detector.roi_heads.loss
    values = {**loss_values(loss), **optimizer_values(cli.model, trainer.max_epochs)}
    values["loss.lambda_"], values["loss.margin"] = loss.map_loss.lambda_, loss.map_loss.margin
    name = settings["model"]["init_args"]["detector"]["init_args"]["backbone_name"]
    return values | {
        "network": name,
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
def test_what_is_built_is_what_the_table_says(config, roots, monkeypatch, tmp_path):
    name = yaml.safe_load((EXAMPLES / config).read_text(encoding="utf-8"))["data"]["class_path"].rpartition(".")[2]
    settings, cli = build(config, roots(name), monkeypatch, tmp_path)
    is_detector = "detector" in settings["model"]["init_args"]
    found = (values_of_detector if is_detector else values_of_embedding)(settings, cli)
    stated = {key: entry[0] for key, entry in CONFIGS[config]["values"].items()}
    if "evaluation" in stated:  # mAP and the metrics of revisited Oxford and Paris are always logged
        recalls = [metric for metric in stated["evaluation"] if metric.startswith("R@")]
        assert found.pop("evaluation") == recalls or not recalls
        del stated["evaluation"]
    assert {key: (found.get(key), value) for key, value in stated.items() if not same(found.get(key), value)} == {}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_of_a_config_is_in_the_table(config, papers):
    entry = CONFIGS[config]
    settings = yaml.safe_load((EXAMPLES / config).read_text(encoding="utf-8"))["model"]["init_args"]
    expected = {"loss", *papers.loss_settings(settings["loss"])}
    if "detector" in settings:
        expected.update(OF_EVERY_DETECTOR)
    elif "optimizer" in settings:
        expected.update(OF_EVERY_TRAINING)
    assert expected - entry["values"].keys() == set()
    for name, (_, mark, source, *_) in entry["values"].items():
        assert mark in MARKS, name
        assert isinstance(source, str), name
        assert source, name


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_prints_the_results_of_its_row(config):
    settings = yaml.safe_load((EXAMPLES / config).read_text(encoding="utf-8"))
    printed = [
        callback["init_args"]
        for callback in settings["trainer"]["callbacks"]
        if callback["class_path"].endswith(PublishedResults.__name__)
    ]
    if "table" not in CONFIGS[config]:
        assert printed == []
        return
    name, row = CONFIGS[config]["table"]
    paper = TABLE["papers"][CONFIGS[config]["paper"]]
    published = paper["tables"][name]
    *values, command = published["rows"][row]
    assert command.split()[0] == config
    (of_config,) = printed
    assert of_config["results"] == {k: pytest.approx(v / 100) for k, v in zip(published["columns"], values)}
    assert of_config["source"].startswith(f"{paper['name']} (")
    assert f" {published['title'].partition(',')[0]}, " in of_config["source"]
    assert row in of_config["source"]
    for option, value in options_of(command).items():  # the name of the row says what the config has not
        assert f"{option.rpartition('.')[2]} {value}" in row


def options_of(row):
    """{option: value} of the options of a row that change what is trained or tested."""
    _, *words = row.split()
    return {option: value for option, value in zip(words[::2], words[1::2], strict=True) if option != "--ckpt_path"}


def test_converted_epochs_have_the_batches_of_the_code():
    pattern = re.compile(r"(\d+)(?: epochs)?(?: \(.*?\))? of (\d+) batches, of which an epoch has (\d+) here")
    found = 0
    for config, entry in CONFIGS.items():
        epochs, *notes = entry["values"].get("epochs", [None])
        if numbers := pattern.search(" ".join(notes)):
            epochs_of_code, batches_of_code, batches = map(int, numbers.groups())
            assert epochs == round(epochs_of_code * batches_of_code / batches), config
            found += 1
    assert found == 6


TABLES = [published for paper in TABLE["papers"].values() for published in paper.get("tables", {}).values()]


def commands_of(published):
    rows = [row[-1] for row in published["rows"].values() if row[-1] != "none"]
    return [*rows, *published.get("then", ())]


COMMANDS = {row for published in TABLES for row in commands_of(published)}


def test_a_command_has_one_published_result():
    """So that the header of a config and the command on the page name the same number."""
    for metric in ("AP50", "R@1"):
        results = {}
        for published in TABLES:
            if metric not in published["columns"]:
                continue
            place = published["columns"].index(metric)
            for row in published["rows"].values():
                results.setdefault(row[-1], set()).add(row[place])
        assert results
        assert {row: values for row, values in results.items() if len(values) > 1} == {}


@pytest.mark.parametrize("published", TABLES, ids=lambda published: published["title"].partition(",")[0])
def test_a_table_names_the_data_of_its_commands(published, papers):
    used = {papers.dataset(row.split()[0]) for row in commands_of(published)}
    assert used - set(published["data"]) == set()


@pytest.mark.parametrize("row", sorted(COMMANDS))
def test_the_command_of_a_row_is_valid(row, papers, capsys, monkeypatch, tmp_path):
    program, command, *options = papers.command(row).split()
    assert program == "lightning-retrieval"
    monkeypatch.chdir(EXAMPLES.parent)
    if "--ckpt_path" in options:
        del options[options.index("--ckpt_path") :][:2]
        options = [option for option in options if option not in ("--ckpt_path", "CHECKPOINT")]
    with pytest.raises(SystemExit) as ended:
        main([command, *options, "--print_config"])
    assert ended.value.code == 0, capsys.readouterr().err
    parsed = yaml.safe_load(capsys.readouterr().out)
    assert parsed["data"]["init_args"]["root"]


# --- what is written from it


def test_comments_page_and_table_are_current(papers):
    old = [path.name for path, text in papers.current_files().items() if path.read_text(encoding="utf-8") != text]
    assert old == [], "run python examples/papers.py"


def test_a_comment_follows_the_table(papers):
    table = json.loads(json.dumps(TABLE))
    config = "fast_ap/in_shop.yaml"
    text = (EXAMPLES / config).read_text(encoding="utf-8")
    table["configs"][config]["values"]["epochs"] = [7, "ours", "a reason"]
    changed = papers.commented(table, config, text)
    assert "  max_epochs: 174 # ours: a reason\n" in changed
    assert yaml.safe_load(changed) == yaml.safe_load(text)
    assert papers.commented(TABLE, config, changed) == text


def test_every_claim_of_a_study_about_a_paper_is_on_the_page():
    """A claim that names a table, a figure, a section or a number of a paper, with its verdict and its data."""
    page = (EXAMPLES.parent / "docs" / "reproduce.md").read_text(encoding="utf-8")
    cites = re.compile(r"Table \d|Fig\. \d|section \d|[Aa]bstract|SOP, R@1")
    of_detectors = 0
    for path in sorted((EXAMPLES.parent / "docs" / "study").glob("*.md")):
        for line in path.read_text(encoding="utf-8").splitlines():
            claim, *verdicts = [part.strip() for part in line.strip("|").split(" | ") if not part.startswith(" [")]
            if not line.startswith("|") or not cites.search(claim):
                continue
            of_detectors += path.stem == "detection"
            for verdict in verdicts:
                kinds = "GlyphScenes, " if path.stem == "detection" else "Glyphs;|emoji;|emoji, a pretrained network;"
                assert re.search(rf"^- {re.escape(claim)}: \*\*{verdict}\*\* \(({kinds})", page, re.M), (path, claim)
    assert of_detectors == 5
    assert "Glyphs and emoji" not in page


def test_results_against_a_paper_are_on_its_page():
    """A larger temperature is better for a head on frozen features; FastAP is above Smooth-AP in one comparison."""
    page = (EXAMPLES.parent / "docs" / "reproduce.md").read_text(encoding="utf-8")
    (smooth_ap,) = re.findall(r"^## Smooth-AP$.*?^## ", page, re.M | re.S)
    for claim in ("Smooth-AP: 0.1 is above 0.01", "FastAPLoss is better than Smooth-AP, without a memory"):
        assert f"- {claim}: **same direction**" in smooth_ap


def test_every_page_of_a_paper_has_its_published_numbers():
    page = (EXAMPLES.parent / "docs" / "reproduce.md").read_text(encoding="utf-8")
    for paper in TABLE["papers"].values():
        for published in paper.get("tables", {}).values():
            for row, (*values, _) in published["rows"].items():
                assert f"| {row} | {''.join(f'{value} | ' for value in values)}" in page
