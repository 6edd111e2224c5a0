"""RetrievalGallery draws the right images in the right tiles, in the colours of their files."""

import functools

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from sklearn.metrics import average_precision_score
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalModule, SmoothAPLoss, TwoNetworks
from lightning_retrieval.callbacks import DetectionPicture, RetrievalEvaluation, RetrievalGallery
from lightning_retrieval.datamodules import GlyphScenes, ImageTable, Pairs, TextTable
from lightning_retrieval.detection import DetectionModule, TinyFasterRCNN
from lightning_retrieval.metrics import RetrievalMetrics, RevisitedMetrics
from lightning_retrieval.models import TextEmbedder
from lightning_retrieval.ranking.expansion import DatabaseAugmentation, QueryExpansion
from tests.datamodules.trees import write_image, write_text
from tests.quiet_trainer import quiet_trainer

GREEN, RED, GREY, WHITE = (34, 160, 70), (208, 48, 48), (120, 120, 120), (255, 255, 255)
LABELS = torch.tensor([0, 1, 2, 3] * 5 + [4, 4])


class Tiles(torch.utils.data.Dataset):
    """Grey or coloured images of 4 x 6 pixels that differ visibly."""

    def __init__(self, size=22, channels=1, shift=0, **entries):
        self.images = torch.rand(size, channels, 4, 6, generator=torch.Generator().manual_seed(2))
        self.images += 2 * nn.functional.one_hot(LABELS[:size], 6)[:, None, None]
        self.shift = shift
        self.entries = entries

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        item = {"images": self.images[index], "labels": LABELS[index], "ids": torch.tensor(index + self.shift)}
        return {**item, **{name: values[index] for name, values in self.entries.items()}}


def module(channels=1) -> RetrievalModule:
    torch.manual_seed(3)
    embedder = nn.Sequential(nn.Flatten(), nn.Linear(24 * channels, 3))
    return RetrievalModule(embedder, SmoothAPLoss(tau=0.1), optimizer=functools.partial(torch.optim.SGD, lr=0.1))


def trainer(folder, *callbacks, **kwargs) -> pl.Trainer:
    return quiet_trainer(
        callbacks=list(callbacks),
        default_root_dir=folder,
        log_every_n_steps=1,
        **{"logger": False, "max_epochs": 1, **kwargs},
    )


def loader(**kwargs) -> DataLoader:
    return DataLoader(Tiles(**kwargs), batch_size=8)


def tile(picture: np.ndarray, row: int, column: int) -> np.ndarray:
    """A tile with its border: 80 pixels, 6 between two tiles, 12 more after the query, 18 for AP, 18 for the title."""
    left, top = 6 + 86 * column + (12 if column else 0), 36 + 98 * row
    return picture[top : top + 80, left : left + 80]


def border(square: np.ndarray) -> tuple[int, int, int]:
    rim = np.concatenate([square[:4].reshape(-1, 3), square[-4:].reshape(-1, 3), square[:, :4].reshape(-1, 3)])
    (colour,) = {tuple(pixel) for pixel in rim.tolist()}
    return colour


def inside(image: torch.Tensor) -> np.ndarray:
    """The image with its values stretched to the full range, enlarged to 72 x 72 pixels."""
    grey = (image - image.min()) / (image.max() - image.min())
    levels = (grey * 255).byte().expand(3, -1, -1).permute(1, 2, 0).numpy()
    return levels.repeat(18, axis=0).repeat(12, axis=1)


@pytest.mark.parametrize(("stage", "channels"), [("validate", 1), ("test", 3)])
def test_tiles_are_the_nearest_images(tmp_path, stage, channels):
    model, data = module(channels), Tiles(channels=channels)
    run = trainer(tmp_path, RetrievalEvaluation((1,)), RetrievalGallery(queries=4, k=5))
    getattr(run, stage)(model, loader(channels=channels), verbose=False)
    (path,) = tmp_path.rglob("*.*")
    assert path == tmp_path / "retrieval" / ("test.png" if stage == "test" else "val-epoch=000.png")
    with Image.open(path) as picture:
        assert (picture.format, picture.size) == ("PNG", (6 * 86 + 18, 4 * 98 + 24))
        pixels = np.asarray(picture)
    with torch.no_grad():
        rows = nn.functional.normalize(model(data.images), dim=1)
    colours = []
    for row, query in enumerate([0, 7, 14, 21]):  # evenly spread over 22
        ranking = [i for i in (rows @ rows[query]).argsort(descending=True).tolist() if i != query][:5]
        assert border(tile(pixels, row, 0)) == GREY
        for column, item in enumerate([query, *ranking]):
            square = tile(pixels, row, column)
            assert np.array_equal(square[4:-4, 4:-4], inside(data.images[item]))
            if column:
                colours.append(border(square))
                assert colours[-1] == (GREEN if LABELS[item] == LABELS[query] else RED)
    assert set(colours) == {GREEN, RED}


def aps(model: RetrievalModule) -> np.ndarray:
    """AP of each image as a query against the others, by scikit-learn."""
    with torch.no_grad():
        rows = nn.functional.normalize(model(Tiles().images).double(), dim=1)
    others = ~np.eye(22, dtype=bool)
    scores, relevant = (rows @ rows.T).numpy(), (LABELS[:, None] == LABELS).numpy()
    return np.array([average_precision_score(relevant[q, others[q]], scores[q, others[q]]) for q in range(22)])


@pytest.mark.parametrize("order", ["hardest", "quantiles"])
def test_queries_are_chosen_by_their_ap(tmp_path, order):
    model = module()
    trainer(tmp_path, RetrievalEvaluation((1,)), RetrievalGallery(queries=4, k=2, order=order)).test(
        model, loader(), verbose=False
    )
    ap = aps(model)
    positions = [0, 1, 2, 3] if order == "hardest" else [0, 7, 14, 21]
    with Image.open(tmp_path / "retrieval/test.png") as picture:
        pixels = np.asarray(picture)
    assert len(set(ap.round(6))) == 22
    for row, query in enumerate(ap.argsort()[positions]):
        assert np.array_equal(tile(pixels, row, 0)[4:-4, 4:-4], inside(Tiles().images[query]))


def test_only_spread_draws_queries_without_ap(tmp_path):
    """Of five images of four classes, only the first and the last have the same class."""
    for order, rows in {"spread": 5, "hardest": 2, "quantiles": 2}.items():
        run = trainer(tmp_path / order, RetrievalEvaluation((1,)), RetrievalGallery(k=2, order=order))
        run.test(module(), loader(size=5), verbose=False)
        with Image.open(tmp_path / order / "retrieval/test.png") as picture:
            assert picture.height == 98 * rows + 24


def test_set_smaller_than_k_leaves_tiles_empty(tmp_path):
    run = trainer(tmp_path, RetrievalEvaluation((1,)), RetrievalGallery(queries=8, k=6))
    run.test(module(), loader(size=5), verbose=False)
    with Image.open(tmp_path / "retrieval/test.png") as picture:
        assert picture.size == (7 * 86 + 18, 5 * 98 + 24)  # five queries only
        pixels = np.asarray(picture)
    for row in range(5):
        assert [border(tile(pixels, row, column)) for column in (0, 5, 6)] == [GREY, WHITE, WHITE]
        assert border(tile(pixels, row, 4)) in (GREEN, RED)


def test_queries_and_candidates_are_drawn_from_their_own_sides(tmp_path):
    """The queries are texts, which are drawn as texts."""
    photos = ["image,label,split", *[f"{i}.png,{name},test" for i, name in enumerate(["cat", "eel", "owl"] * 2)]]
    texts = ["text,label,split", *[f"one {name} alone,{name},test" for name in ("owl", "cat", "eel")]]
    for file, lines, other in (("photos.csv", photos, "x.png,x,train"), ("texts.csv", texts, "an x,x,train")):
        write_text(tmp_path / file, "\n".join([*lines, other]))
    for number in range(6):
        write_image(tmp_path / f"{number}.png", size=(12, 12), seed=number)
    data = Pairs(
        TextTable(tmp_path / "texts.csv"),
        ImageTable(tmp_path, "photos.csv", image_size=12, resize=12, mean=(0.9, 0.1, 0.5), std=(0.1, 0.2, 3.0)),
    )
    torch.manual_seed(3)
    network = nn.Sequential(nn.Flatten(), nn.Linear(432, 6))
    model = RetrievalModule(network, SmoothAPLoss(), sides=TwoNetworks(TextEmbedder("ngram_net", 6)))
    run = trainer(tmp_path, RetrievalEvaluation((1,)), RetrievalGallery(queries=2, k=3))
    run.test(model, datamodule=data, verbose=False)
    with Image.open(tmp_path / "retrieval" / "test.png") as picture:
        pixels = np.asarray(picture)

    candidates = data.candidates.test_set
    with torch.no_grad():
        queries = model.eval().embed_queries(model.query_embedder.tokenizer(data.queries.test_set.texts[:]))
        rows = model.embed(torch.stack([item["images"] for item in candidates]))
    for row, (query, label) in enumerate([(0, 2), (2, 1)]):  # an owl, and an eel
        assert (tile(pixels, row, 0)[4:-4, 4:-4] < 128).any()  # its letters
        ranking = (queries[query] @ nn.functional.normalize(rows, dim=1).T).argsort(descending=True).tolist()[:3]
        for column, item in enumerate(ranking, 1):
            square = tile(pixels, row, column)
            with Image.open(tmp_path / f"{item}.png") as file:
                expected = np.asarray(file).repeat(6, axis=0).repeat(6, axis=1)
            assert np.abs(square[4:-4, 4:-4].astype(int) - expected).max() <= 1
            assert border(square) == (GREEN if item % 3 == label else RED)
    assert not np.array_equal(tile(pixels, 0, 0), tile(pixels, 1, 0))


@pytest.mark.refusal
def test_ids_that_do_not_index_the_data_set_give_a_warning(tmp_path):
    run = trainer(tmp_path, RetrievalEvaluation((1,)), RetrievalGallery(queries=1))
    for shift in (40, 1):
        with pytest.warns(UserWarning, match="RetrievalGallery: test/ is not drawn"):
            run.test(module(), loader(shift=shift), verbose=False)
    assert list(tmp_path.rglob("*.*")) == []


@pytest.mark.parametrize(
    ("shape", "shuffle", "reason"),
    [((1, 4, 6), True, "its batches have no ids"), ((24,), False, "images must have shape")],
)
def test_images_that_are_unknown_or_vectors_are_not_drawn(tmp_path, shape, shuffle, reason):
    data = torch.utils.data.TensorDataset(torch.rand(8, *shape), torch.arange(8) // 2)
    run = trainer(tmp_path, RetrievalEvaluation((1,)), RetrievalGallery())
    with pytest.warns(UserWarning, match=reason):
        run.validate(module(), DataLoader(data, batch_size=4, shuffle=shuffle), verbose=False)
    assert list(tmp_path.rglob("*.*")) == []


def drawn_lists(folder, data, **settings):
    """For each row of a gallery of all images, whether each drawn candidate is relevant."""
    gallery = RetrievalGallery(queries=22, k=21)
    run = trainer(folder, RetrievalEvaluation((1,), **settings), gallery)
    run.test(module(), DataLoader(data, batch_size=8), verbose=False)
    with Image.open(folder / "retrieval" / "test.png") as picture:
        pixels = np.asarray(picture)
    lists = []
    for row in range((len(pixels) - 24) // 98):
        borders = [border(tile(pixels, row, column)) for column in range(1, 22)]
        lists.append([colour == GREEN for colour in borders if colour != WHITE])
    return lists


@pytest.mark.parametrize(
    ("entries", "settings", "rows"),
    [
        ({"roles": torch.where(torch.arange(22) < 9, 1, 2)}, {}, 9),
        ({"instances": torch.where(LABELS == 4, 12, torch.arange(22) % 12)}, {}, 13),
        ({"cameras": torch.arange(22) // 8}, {}, 22),
        ({}, {"query_expansion": QueryExpansion(k=4), "database_augmentation": DatabaseAugmentation(k=4)}, 22),
    ],
    ids=["roles", "instances", "cameras", "expanded"],
)
def test_drawn_lists_have_the_ap_of_the_metrics(entries, settings, rows, tmp_path):
    """After post-processing, of the gallery alone, and with one entry for each instance."""
    data, model = Tiles(**entries), module()
    metrics = RetrievalMetrics((1,), **settings)
    with torch.no_grad():
        metrics.update(model(data.images), LABELS, torch.arange(22), **entries)
    expected = metrics.per_query()["AP"].tolist()
    lists = drawn_lists(tmp_path, data, **settings)
    shown = []
    for right in lists:
        precisions = [sum(right[: i + 1]) / (i + 1) for i in range(len(right)) if right[i]]
        shown.append(sum(precisions) / len(precisions) if precisions else float("nan"))
    assert len(expected) == rows
    assert shown == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_junk_is_not_drawn(tmp_path):
    class Revisited(Tiles):
        def metrics(self, ks, **settings):
            return RevisitedMetrics(easy={4: [0]}, hard={4: [2]}, junk={4: [1]}, ks=ks, **settings)

    roles = torch.tensor([2, 2, 2, 2, 1])
    (shown,) = drawn_lists(tmp_path, Revisited(size=5, roles=roles))
    assert sorted(shown) == [False, True, True]


def test_a_picture_of_detections_is_written(tmp_path):
    data = GlyphScenes(num_classes=3, eval_size=7, eval_batch_size=3)
    detector = DetectionModule(TinyFasterRCNN(3, detections_per_image=2))
    trainer(tmp_path, DetectionPicture(images=5, detections=2)).test(detector, datamodule=data, verbose=False)
    with Image.open(tmp_path / "detections.png") as image:
        assert image.size == (968, 726)  # 8.8 by 6.6 inches: two rows of images and the bars
