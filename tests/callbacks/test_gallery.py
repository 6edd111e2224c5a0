"""RetrievalGallery draws the right images in the right tiles, in the colours of their files; pictures of detections."""

import functools

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from sklearn.metrics import average_precision_score
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from lightning_retrieval import RetrievalModule, SmoothAPLoss, TwoNetworks
from lightning_retrieval.callbacks import DetectionPicture, RetrievalEvaluation, RetrievalGallery, detections, gallery
from lightning_retrieval.callbacks.gallery import (
    ap_caption,
    as_image,
    load_image,
    nearest_images,
    query_ap,
    text_tile,
)
from lightning_retrieval.datamodules import GlyphScenes, ImageFolder, ImageTable, Pairs, TextTable
from lightning_retrieval.detection import DetectionModule, TinyFasterRCNN
from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics, RevisitedMetrics
from lightning_retrieval.models import Preparation, TextEmbedder
from lightning_retrieval.ranking.expansion import DatabaseAugmentation, QueryExpansion
from tests.datamodules.trees import write_image, write_text
from tests.datamodules.trees_more import write_folders
from tests.quiet_trainer import quiet_trainer

GREEN, RED, GREY, WHITE = (34, 160, 70), (208, 48, 48), (120, 120, 120), (255, 255, 255)
LABELS = torch.tensor([0, 1, 2, 3] * 5 + [4, 4])


class Tiles(torch.utils.data.Dataset):
    """Grey or coloured images of 4 x 6 pixels that differ visibly."""

    def __init__(self, size=22, channels=1, shift=0):
        self.images = torch.rand(size, channels, 4, 6, generator=torch.Generator().manual_seed(2))
        self.images += 2 * nn.functional.one_hot(LABELS[:size], 6)[:, None, None]
        self.shift = shift

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": LABELS[index], "ids": torch.tensor(index + self.shift)}


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
def test_queries_are_chosen_by_their_ap(tmp_path, order, monkeypatch):
    model, captions = module(), []
    monkeypatch.setattr(gallery, "ap_caption", lambda ap: captions.append(ap) or ap_caption(ap))
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
        title = pixels[36 + 98 * row - 18 : 36 + 98 * row, 6:86]
        assert (title < 128).any()
        assert (pixels[36 + 98 * row - 18 : 36 + 98 * row, 104:] == 255).all() or row == 0
    assert captions == pytest.approx(ap, abs=1e-9)  # in the order of the ids
    assert (ap_caption(0.25), ap_caption(float("nan"))) == ("AP = 0.250", "no AP")


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
    data = Pairs(TextTable(tmp_path / "texts.csv"), ImageTable(tmp_path, "photos.csv", image_size=12, resize=12))
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
        shown = tile(pixels, row, 0)[4:-4, 4:-4]
        assert np.array_equal(shown, np.asarray(text_tile(data.queries.test_set.texts[query])))
        ranking = (queries[query] @ nn.functional.normalize(rows, dim=1).T).argsort(descending=True).tolist()[:3]
        for column, item in enumerate(ranking, 1):
            square = tile(pixels, row, column)
            with Image.open(tmp_path / f"{item}.png") as file:
                expected = np.asarray(file).repeat(6, axis=0).repeat(6, axis=1)
            assert np.abs(square[4:-4, 4:-4].astype(int) - expected).max() <= 1
            assert border(square) == (GREEN if item % 3 == label else RED)
    assert not np.array_equal(tile(pixels, 0, 0), tile(pixels, 1, 0))


@pytest.mark.refusal
def test_an_error_of_a_data_set_is_not_taken_for_a_wrong_id():
    class Broken(list):
        def __getitem__(self, index):
            return {}["missing"]

    with pytest.raises(KeyError, match="missing"):
        load_image(pl.LightningModule(), Broken([1, 2]), 1)


@pytest.mark.refusal
def test_ids_that_do_not_index_the_data_set_give_a_warning(tmp_path):
    run = trainer(tmp_path, RetrievalEvaluation((1,)), RetrievalGallery(queries=1))
    with pytest.warns(UserWarning, match=r"ids must index the evaluated data set, got 40 for one of 22 items \(Ind"):
        run.test(module(), loader(shift=40), verbose=False)
    with pytest.warns(UserWarning, match=r"ids must index .*, got id 1 .* has the id 2\. test/ is not drawn"):
        run.test(module(), loader(shift=1), verbose=False)
    assert list(tmp_path.rglob("*.*")) == []


@pytest.mark.parametrize(
    ("shape", "shuffle", "reason"),
    [
        ((1, 4, 6), True, "an evaluation set is not drawn, because its batches have no ids"),
        ((24,), False, r"images must have shape \(channels, height, width\) .*, got \(24,\)\. val/ is not"),
    ],
)
def test_images_that_are_unknown_or_vectors_are_not_drawn(tmp_path, shape, shuffle, reason):
    data = torch.utils.data.TensorDataset(torch.rand(8, *shape), torch.arange(8) // 2)
    run = trainer(tmp_path, RetrievalEvaluation((1,)), RetrievalGallery())
    with pytest.warns(UserWarning, match=f"RetrievalGallery: {reason}"):
        run.validate(module(), DataLoader(data, batch_size=4, shuffle=shuffle), verbose=False)
    assert list(tmp_path.rglob("*.*")) == []


def lists_of(metrics, chosen, k):
    rows, _ = metrics.gather()
    return nearest_images(metrics.ranking_input(rows), chosen, k)


@pytest.mark.parametrize("kind", ["roles", "expanded", "instances", "cameras"])
def test_lists_have_the_ap_of_their_caption(kind):
    """The lists are those of the metrics: after post-processing, of the gallery, and one entry for each instance."""
    embeddings, labels = torch.randn(60, 4), torch.arange(60) % 5
    settings, given = {}, {}
    if kind == "expanded":
        settings = {"query_expansion": QueryExpansion(k=4), "database_augmentation": DatabaseAugmentation(k=4)}
    if kind == "roles":
        given = {"roles": torch.where(torch.arange(60) < 20, 1, 2)}
    if kind == "instances":
        given = {"instances": torch.arange(60) % 30}
    if kind == "cameras":
        given = {"cameras": torch.arange(60) // 20}
    metrics = RetrievalMetrics(**settings)
    metrics.update(embeddings, labels, torch.arange(60), **given)
    table = metrics.per_query()
    shown = dict(lists_of(metrics, table["ids"], k=60))
    assert len(shown) == {"roles": 20, "instances": 30}.get(kind, 60)
    for query, ap in zip(table["ids"].tolist(), table["AP"].tolist()):
        right = [is_right for _, is_right in shown[query]]
        precisions = [sum(right[: i + 1]) / (i + 1) for i in range(len(right)) if right[i]]
        assert sum(precisions) / len(precisions) == pytest.approx(ap, abs=1e-9)


def test_junk_is_not_in_the_lists():
    metrics = RevisitedMetrics(easy={4: [0]}, hard={4: [2]}, junk={4: [1]})
    is_query = torch.arange(5) == 4
    x = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.7, 0.3], [1.0, 0.0]])
    metrics.update(x, torch.zeros(5).long(), torch.arange(5), torch.where(is_query, 1, 2))
    assert lists_of(metrics, torch.tensor([4]), k=4) == [(4, [(0, True), (3, False), (2, True)])]


def test_random_galleries_have_no_ap_of_the_whole_list():
    metrics = RandomGalleryMetrics(ks=(1,))
    metrics.update(torch.randn(6, 3), torch.arange(6) % 2, torch.arange(6))
    ids, ap = query_ap(metrics, torch.tensor([3, 1, 2]))
    assert ids.tolist() == [1, 2, 3]
    assert ap is None


TEAL = (0, 128, 120)
NORMALIZE = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TO_TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


def picture():
    """A picture with little contrast, whose colours a stretch would change."""
    values = np.full((8, 8, 3), TEAL, np.uint8)
    values[2:4] += 30
    return Image.fromarray(values)


@pytest.mark.parametrize(
    "transform",
    [
        Preparation(8, 8),
        Preparation(8, 8, mean=(0.9, 0.1, 0.5), std=(0.1, 0.2, 3.0)),
        v2.Compose([*TO_TENSOR, NORMALIZE]),
        v2.Compose(TO_TENSOR),
        v2.PILToTensor(),
    ],
)
def test_colours_are_those_of_the_file(transform):
    assert np.array_equal(np.asarray(as_image(transform(picture()), transform)), np.asarray(picture()))


def test_grey_images_are_grey():
    grey = Preparation(8, 8, channels=1, mean=[0.3], std=[0.2])
    shown = np.asarray(as_image(grey(picture()), grey))
    assert np.array_equal(shown, np.asarray(picture().convert("L").convert("RGB")))


def test_other_values_are_stretched():
    values = torch.tensor([[[-1.0, 0.0, 3.0]]])
    assert np.asarray(as_image(values))[0, :, 0].tolist() == [0, 63, 255]


def test_a_data_set_of_image_files_says_what_normalised_its_images(tmp_path):
    write_folders(tmp_path, ["a", "b", "c", "d"])
    images = ImageFolder(tmp_path, image_size=(16, 16)).test_set
    shown = as_image(images[0]["images"], images.transform)
    wanted = np.asarray(images.read(0).resize((16, 16), Image.Resampling.BILINEAR)).astype(int)
    assert abs(np.asarray(shown) - wanted).max() <= 1  # the difference of torch's filter to Pillow's


@pytest.mark.parametrize("form", ["pair", "triple", "dict"])
def test_a_module_without_unpack_batch_has_batches_of_the_usual_forms(form):
    pixels = torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2)
    item = {"pair": (pixels, 5), "triple": (pixels, 5, 0), "dict": {"labels": 5, "ids": 0, "images": pixels}}[form]
    image = load_image(pl.LightningModule(), [item], 0)
    assert torch.equal(torch.from_numpy(np.array(image)).permute(2, 0, 1), pixels)


# --- detections


def test_a_picture_of_detections_has_images_boxes_and_classes(tmp_path):
    """Nothing stays of a run."""
    picture = DetectionPicture(images=5, detections=2)
    before = dict(vars(picture))
    drawn = []
    draw = picture._draw
    picture._draw = lambda names, values: drawn.append((names, values, list(picture._shown))) or draw(names, values)
    data = GlyphScenes(num_classes=3, eval_size=7, eval_batch_size=3)
    trainer(tmp_path, picture).test(
        DetectionModule(TinyFasterRCNN(3, detections_per_image=2)), datamodule=data, verbose=False
    )
    ((names, values, shown),) = drawn
    assert names == ["A", "E", "R"]
    assert values.keys() == {"A", "E", "R"}
    assert len(shown) == 5
    assert all(torch.equal(shown[i][0], data.test_set[i][0]) for i in range(5))
    with Image.open(tmp_path / "detections.png") as image:
        assert image.size == (968, 726)  # 8.8 by 6.6 inches: two rows of images and the bars
    del picture._draw
    assert {name: vars(picture)[name] for name in before} == before


def test_a_test_of_a_detector_that_an_error_ends_keeps_no_images(tmp_path):
    picture, shown = DetectionPicture(), []

    class Stops(pl.Callback):
        def on_test_epoch_end(self, *_):
            shown.extend(picture._shown)
            raise RuntimeError("stopped")

    data = GlyphScenes(num_classes=3, eval_size=3, eval_batch_size=3)
    with pytest.raises(RuntimeError, match=r"^stopped$"):
        trainer(tmp_path, picture, Stops()).test(DetectionModule(TinyFasterRCNN(3)), datamodule=data, verbose=False)
    assert len(shown) == 3
    assert picture._shown == []


def test_the_detections_of_the_highest_scores_are_drawn(monkeypatch):
    picture, texts = DetectionPicture(detections=2), []
    monkeypatch.setattr(detections, "_draw_box", lambda axes, box, color, style, text: texts.append(text))
    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0]] * 3)
    found = {"boxes": boxes, "labels": torch.tensor([1, 2, 1]), "scores": torch.tensor([0.1, 0.03, 0.2])}
    picture._shown = [(torch.zeros(3, 8, 8), {"boxes": boxes[:1]}, found)]
    picture._draw(["A", "B"], {"A": 0.5})
    assert texts == ["", "A 0.20", "A 0.10"]  # the object has no text
