"""What a user waits for: a job with this library, and with a plain Lightning script around pytorch-metric-learning.

    python benchmarks/waits.py

Both train the same network (torchvision's ResNet-18 with random weights, average pooling and a linear layer) with
Smooth-AP on the same JPEGs, with batches of 16 classes x 4 images, evaluate it by mAP and R@1 on other classes, and
search for one image among those of the test set. A job runs in a process of its own with one thread, in turn with the
other, and reads the images in the training process. The times are CPU times: of the imports and of the first step from
the start of the process; of an epoch and of an evaluation alone; of a search from the start of a second process, which
reads the network and the embeddings of the images that it searches. The install is the size of the package, and of all
packages that it needs, without the development tools. Takes about six minutes.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from packaging.requirements import Requirement
from PIL import Image
from timing import PROGRAM, Timing, arguments, cpu_seconds, environment, report

SIZE, DIMENSION, CLASSES_PER_BATCH, PER_CLASS = 96, 128, 16, 4
IMAGES_OF_CLASS, CLASSES = 8, {"train": 64, "test": 32}
PHOTOGRAPH = (500, 400)
INSTALLED = {
    "ours": ["lightning-retrieval"],
    "peer": ["pytorch-metric-learning", "pytorch-lightning", "torchvision", "faiss-cpu"],
}


def write_images(folder: Path, classes: dict[str, int], size: tuple[int, int]) -> None:
    """JPEGs of smooth noise in class folders; those of a class resemble each other."""
    random = np.random.default_rng(0)
    for split, count in classes.items():
        for number in range(count):
            of_class = random.integers(0, 256, (8, 10, 3))
            of_this = folder / split / f"{split}_{number}"
            of_this.mkdir(parents=True)
            for image in range(IMAGES_OF_CLASS):
                coarse = np.clip(of_class + random.normal(0, 60, of_class.shape), 0, 255).astype(np.uint8)
                pixels = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
                pixels.save(of_this / f"{image}.jpg", quality=90)


class Stages:
    """The CPU seconds of this process at the events of a run, as the hooks of a callback."""

    def __init__(self) -> None:
        self.at = {"imports": time.process_time()}

    def hooks(self) -> dict[str, Callable[..., None]]:
        """Methods of a callback, which note the first time that each is called."""
        names = (
            "on_train_epoch_start",
            "on_train_batch_end",
            "on_train_epoch_end",
            "on_validation_start",
            "on_validation_end",
        )
        return {name: lambda *_, _name=name: self.at.setdefault(_name, time.process_time()) for name in names}

    def waits(self, metrics: dict[str, float]) -> None:
        """Print what a user waits for, as JSON. The evaluation ends before the training epoch does."""
        evaluation = self.at["on_validation_end"] - self.at["on_validation_start"]
        waits = {
            "import": self.at["imports"],
            "first step": self.at["on_train_batch_end"],
            "epoch": self.at["on_train_epoch_end"] - self.at["on_train_epoch_start"] - evaluation,
            "evaluation": evaluation,
        }
        print(json.dumps({"waits": waits, "metrics": metrics}))


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def train_ours(folder: Path, images: Path) -> None:
    """The job with this library, up to a checkpoint."""
    import pytorch_lightning as pl

    from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
    from lightning_retrieval.callbacks import RetrievalEvaluation
    from lightning_retrieval.datamodules import ImageFolder

    stages = Stages()
    torch.set_num_threads(1)
    embedder = Embedder("resnet18", DIMENSION, pooling="avg", image_size=SIZE)
    module = RetrievalModule(embedder, SmoothAPLoss())
    data = ImageFolder(
        images,
        image_size=SIZE,
        classes_per_batch=CLASSES_PER_BATCH,
        samples_per_class=PER_CLASS,
        eval_batch_size=64,
        num_workers=0,
    )
    noted = type("Noted", (pl.Callback,), stages.hooks())()
    trainer = pl.Trainer(callbacks=[RetrievalEvaluation(ks=(1,)), noted], **QUIET)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "ours.ckpt", weights_only=True)
    stages.waits({name: float(trainer.callback_metrics[f"val/{name}"]) for name in ("mAP", "R@1")})


def train_peer(folder: Path, images: Path) -> None:
    """The job as a Lightning script around pytorch-metric-learning, up to a file of weights."""
    import pytorch_lightning as pl
    from pytorch_metric_learning.losses import SmoothAPLoss
    from pytorch_metric_learning.samplers import MPerClassSampler
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    stages = Stages()
    torch.set_num_threads(1)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.loss = peer_network(), SmoothAPLoss()
            self.calculator = AccuracyCalculator(
                include=("mean_average_precision", "precision_at_1"), k="max_bin_count"
            )
            self.embedded: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, labels = batch
            return self.loss(self.network(inputs), labels)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            inputs, labels = batch
            self.embedded.append((self.network(inputs), labels))

        def on_validation_epoch_end(self) -> None:
            embeddings, labels = map(torch.cat, zip(*self.embedded))
            self.log_dict(self.calculator.get_accuracy(embeddings, labels))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    train = ImageFolder(str(images / "train"), peer_transform(training=True))
    test = ImageFolder(str(images / "test"), peer_transform(training=False))
    batch = CLASSES_PER_BATCH * PER_CLASS
    sampler = MPerClassSampler(train.targets, PER_CLASS, batch, length_before_new_iter=len(train))
    noted = type("Noted", (pl.Callback,), stages.hooks())()
    trainer = pl.Trainer(callbacks=[noted], **QUIET)
    model = Model()
    trainer.fit(model, DataLoader(train, batch, sampler=sampler), DataLoader(test, 64))
    torch.save(model.network.state_dict(), folder / "peer.pt")
    named = {"mAP": "mean_average_precision", "R@1": "precision_at_1"}
    stages.waits({name: float(trainer.callback_metrics[theirs]) for name, theirs in named.items()})


def peer_network() -> Any:
    """ResNet-18 with a linear layer in place of the classifier; the losses normalise the embeddings."""
    from torchvision.models import resnet18

    network = resnet18()
    network.fc = torch.nn.Linear(network.fc.in_features, DIMENSION)
    return network


def peer_transform(training: bool) -> Any:
    """The same sizes and random transforms as `ImageFolder` of this library has by default."""
    from torchvision.transforms import v2

    chosen = [v2.RandomCrop(SIZE), v2.RandomHorizontalFlip()] if training else [v2.CenterCrop(SIZE)]
    as_tensor = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    normalize = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return v2.Compose([v2.Resize(round(SIZE * 256 / 224)), *chosen, *as_tensor, normalize])


def index_peer(folder: Path, images: Path) -> None:
    """Write the embeddings and the names of the images of the test set."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    network = peer_network()
    network.load_state_dict(torch.load(folder / "peer.pt"))
    network.eval()
    test = ImageFolder(str(images / "test"), peer_transform(training=False))
    with torch.no_grad():
        embeddings = torch.cat([network(inputs) for inputs, _ in DataLoader(test, 64)])
    np.save(folder / "peer.npy", torch.nn.functional.normalize(embeddings).numpy())
    (folder / "peer.json").write_text(json.dumps([file for file, _ in test.samples]))


def search_peer(folder: Path, query: Path) -> None:
    """Print the ten images that are nearest to the query."""
    import faiss

    torch.set_num_threads(1)
    network = peer_network()
    network.load_state_dict(torch.load(folder / "peer.pt"))
    network.eval()
    index = faiss.IndexFlatIP(DIMENSION)
    index.add(np.load(folder / "peer.npy"))
    names = json.loads((folder / "peer.json").read_text())
    with Image.open(query) as image, torch.no_grad():
        embedding = network(peer_transform(training=False)(image.convert("RGB"))[None])
    scores, found = index.search(torch.nn.functional.normalize(embedding).numpy(), 10)
    for score, position in zip(scores[0], found[0]):
        print(f"{score:.4f} {names[position]}")


def call(function: Callable[..., None], *paths: Path) -> list[str]:
    """The command that runs a function of this file in a process of its own."""
    given = ", ".join(f"Path({str(path)!r})" for path in paths)
    start = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from pathlib import Path; import waits"
    return [sys.executable, "-W", "ignore", "-c", f"{start}; waits.{function.__name__}({given})"]


def waits_of(train: Callable[..., None], folder: Path, images: Path) -> dict[str, Any]:
    """Run a job, and return what a user waited for and the metrics."""
    done = subprocess.run(call(train, folder, images), check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def prepare_search(folder: Path, images: Path) -> dict[str, list[str]]:
    """Embed the images of the test set by both, and return the commands that search for one of them."""
    given = [f"--checkpoint={folder / 'ours.ckpt'}", f"--images={images / 'test'}", f"--output={folder / 'index'}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*PROGRAM, "index", *given, "--device=cpu"], check=True, **quiet)
    subprocess.run(call(index_peer, folder, images), check=True, **quiet)
    query = images / "test" / "test_0" / "0.jpg"
    ours = [*PROGRAM, "search", f"--index={folder / 'index'}", "--device=cpu", str(query)]
    return {"ours": ours, "peer": call(search_peer, folder, query)}


def gigabytes(packages: list[str]) -> float:
    """The size of the files of these packages and of all that they need, without optional dependencies."""
    open_names, sizes = list(packages), {}
    while open_names:
        name = open_names.pop()
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of another system
            continue
        if found.name in sizes:
            continue
        sizes[found.name] = size_of(found)
        needed = [Requirement(text) for text in found.requires or []]
        open_names += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return sum(sizes.values()) / 1e9


def size_of(package: Distribution) -> int:
    """The size of the files of a package. Of one that is installed as a link, those of the linked source count too."""
    files = [Path(str(package.locate_file(file))) for file in package.files or []]
    if package.name == "lightning-retrieval":
        source = Path(__file__).parents[1]
        files += [
            file for top in ("lightning_retrieval", "callbacks", "datamodules") for file in (source / top).rglob("*")
        ]
    return sum(file.stat().st_size for file in set(files) if file.is_file())


def row_of(what: str, ours: list[float], peer: list[float]) -> dict[str, Any]:
    """One row of the table, from the seconds of each turn."""
    return {
        "wait for": what,
        "lightning-retrieval": Timing(median(ours), min(ours), max(ours), len(ours)),
        "pytorch-metric-learning": Timing(median(peer), min(peer), max(peer), len(peer)),
        "ratio": median(mine / theirs for mine, theirs in zip(ours, peer)),
    }


def main() -> None:
    options = arguments("What a user waits for, beside pytorch-metric-learning.")
    torch.set_num_threads(1)
    classes, size, runs = CLASSES, PHOTOGRAPH, 3
    if options.quick:
        classes, size, runs = {"train": 16, "test": 2}, (120, 100), 1
    jobs = {"ours": train_ours, "peer": train_peer}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in jobs}
    with tempfile.TemporaryDirectory() as name:
        folder, images = Path(name), Path(name, "images")
        write_images(images, classes, size)
        for _ in range(runs):
            for job, train in jobs.items():
                result = waits_of(train, folder, images)
                for what, waited in result["waits"].items():
                    seconds[job].setdefault(what, []).append(waited)
        searches = prepare_search(folder, images)
        for _ in range(runs):
            for job, command in searches.items():
                seconds[job].setdefault("search", []).append(cpu_seconds(command))
    sizes = {job: gigabytes(packages) for job, packages in INSTALLED.items()}
    rows: list[dict[str, Any]] = [
        {
            "wait for": "install, GB",
            "lightning-retrieval": sizes["ours"],
            "pytorch-metric-learning": sizes["peer"],
            "ratio": sizes["ours"] / sizes["peer"],
        }
    ]
    rows += [row_of(what, ours, seconds["peer"][what]) for what, ours in seconds["ours"].items()]
    title = "What a user waits for, with this library and with a script around pytorch-metric-learning; CPU time"
    packages = ("pytorch-metric-learning", "pytorch-lightning", "torchvision", "faiss-cpu")
    report(title, environment("cpu", *packages), rows, options.json)


if __name__ == "__main__":
    main()
