"""IJB-C: both directory structures read as written, videos as one instance, evaluation compared with a plain loop."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lightning_retrieval import RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import IJBC
from tests.datamodules.readers.columns import columns
from tests.datamodules.small_ijbc import write_ijbc, write_ijbc_repack
from tests.datamodules.trees import replace
from tests.datamodules.trees_more import QUICK
from tests.quiet_trainer import quiet_trainer

G1, G2, MIXED = (f"ijbc_1N_{name}.csv" for name in ("gallery_G1", "gallery_G2", "probe_mixed"))


def groups(keys):
    """The sets of positions that have the same key; they do not depend on the names of the keys."""
    return {frozenset(position for position, other in enumerate(keys) if other == key) for key in keys}


@pytest.mark.parametrize("folder", ["protocols", "protocols/archive"])
def test_the_release_is_read_with_each_face_once(tmp_path, folder):
    faces = write_ijbc(tmp_path, folder)
    data = IJBC(tmp_path, least_instances=1)
    assert list(data.splits) == ["test"]
    found = columns(data, "test")
    assert found["paths"] == [f"images/{face.file}" for face in faces]
    assert found["classes"] == [str(face.subject) for face in faces]
    assert found["labels"] == [[5, 12, 100].index(face.subject) for face in faces]
    assert found["boxes"] == [
        [math.floor(x), math.floor(y), math.ceil(x + width), math.ceil(y + height)]
        for x, y, width, height in (face.box for face in faces)
    ]
    assert groups(found["instances"]) == groups([face.sighting for face in faces])
    assert sorted(set(found["instances"])) == list(range(len({face.sighting for face in faces})))
    whole = Image.open(tmp_path / "images/frames/21.png")
    position = [face.file for face in faces].index("frames/21.png")
    assert np.array_equal(np.asarray(data.test_set.read(position)), np.asarray(whole.crop((0, 0, 26, 28))))


def test_the_repack_is_read_with_all_crops(tmp_path):
    crops = write_ijbc_repack(tmp_path)
    data = IJBC(tmp_path, least_instances=1)
    found = columns(data, "test")
    assert found["paths"] == [path for path, _ in crops]
    assert found["labels"] == [[5, 12, 100].index(row.subject) for _, row in crops]
    assert groups(found["instances"]) == groups([row.sighting for _, row in crops])
    assert found["boxes"] is None
    assert data.test_set.read(0).size == (30, 30)


@pytest.mark.parametrize(
    ("settings", "names", "instances"), [({}, ["5", "12"], 11), ({"least_instances": 6}, ["12"], 6)]
)
def test_people_with_few_instances_are_skipped(tmp_path, settings, names, instances):
    write_ijbc(tmp_path)
    found = columns(IJBC(tmp_path, **settings), "test")
    assert list(dict.fromkeys(found["classes"])) == names
    assert len(set(found["instances"])) == instances


@pytest.mark.parametrize("value", ["", "NaN"])
def test_faces_without_subject_or_box_are_counted_in_one_warning(tmp_path, value):
    faces = write_ijbc(tmp_path)
    replace(tmp_path / "protocols" / G2, "2,12,img/11.jpg", f"2,{value},img/11.jpg")
    replace(tmp_path / "protocols" / MIXED, "111,2.5,", f"111,{value},")
    with pytest.warns(UserWarning, match="skipped 2 rows") as caught:
        paths = columns(IJBC(tmp_path, least_instances=1), "test")["paths"]
    assert len(caught) == 1
    skipped = ("img/11.jpg", "img/16.jpg")
    assert paths == [f"images/{face.file}" for face in faces if face.file not in skipped]


def test_crops_without_a_subject_are_counted_in_one_warning(tmp_path):
    crops = write_ijbc_repack(tmp_path)
    for subject in ("9,100,img/15.jpg", "9,100,frames/30.png"):
        replace(tmp_path / "meta" / G2, subject, subject.replace("100", "nan"))
    with pytest.warns(UserWarning, match="skipped 2 rows"):
        paths = columns(IJBC(tmp_path, least_instances=1), "test")["paths"]
    assert paths == [path for path, row in crops if row.template != 9]


def by_plain_loop(embeddings, labels, instances):
    """mAP and R@1 of the instances' mean embeddings, each ranked for against all others."""
    rows = {}
    for embedding, label, instance in zip(embeddings, labels, instances):
        rows.setdefault(instance, (label, []))[1].append(embedding / np.linalg.norm(embedding))
    means = [(label, np.mean(of_one, axis=0)) for label, of_one in rows.values()]
    precisions, hits = [], []
    for position, (label, query) in enumerate(means):
        others = [other for i, other in enumerate(means) if i != position]
        others.sort(key=lambda other: -np.dot(query, other[1]) / np.linalg.norm(other[1]))
        right = [other == label for other, _ in others]
        at_hits = [sum(right[: rank + 1]) / (rank + 1) for rank, hit in enumerate(right) if hit]
        precisions.append(sum(at_hits) / len(at_hits))
        hits.append(right[0])
    return np.mean(precisions), np.mean(hits)


def test_evaluation_averages_the_images_of_an_instance(tmp_path):
    write_ijbc(tmp_path)
    data = IJBC(tmp_path, **QUICK)
    module = RetrievalModule(nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 8)), SmoothAPLoss())
    trainer = quiet_trainer(max_epochs=1, callbacks=[RetrievalEvaluation((1, 3))])
    (validated,) = trainer.validate(module, datamodule=data, verbose=False)
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    items = [data.test_set[position] for position in range(len(data.test_set))]
    with torch.no_grad():
        embeddings = module.eval()(torch.stack([item["images"] for item in items])).double().numpy()
    labels, instances = ([int(item[name]) for item in items] for name in ("labels", "instances"))
    mean_precision, recall = by_plain_loop(embeddings, labels, instances)
    for stage, found in (("val", validated), ("test", tested)):
        assert found[f"{stage}/mAP"] == pytest.approx(mean_precision, abs=1e-6)
        assert found[f"{stage}/R@1"] == pytest.approx(recall, abs=1e-6)
        assert found[f"{stage}/skipped_queries"] == 0
    apart, _ = by_plain_loop(embeddings, labels, range(len(labels)))
    assert abs(apart - mean_precision) > 1e-3  # without averaging it is another number


def test_a_face_with_a_box_in_one_list_only_is_kept(tmp_path):
    faces = write_ijbc(tmp_path)
    replace(tmp_path / "protocols" / MIXED, "101,2.5,", "101,NaN,")
    with pytest.warns(UserWarning, match="skipped 1 rows"):
        assert len(IJBC(tmp_path, least_instances=1).splits["test"]) == len(faces)


def test_a_face_with_two_boxes_keeps_the_first_and_warns(tmp_path):
    write_ijbc(tmp_path)
    path = tmp_path / "protocols" / G1
    header, first, *more = path.read_text().splitlines()
    again = first.replace("20.25", "77")
    path.write_text("\n".join([header, first, *more, again, first]))
    with pytest.warns(UserWarning, match="1 rows have a different box"):
        found = columns(IJBC(tmp_path, least_instances=1), "test")
    left, _, right, _ = found["boxes"][found["paths"].index("images/img/10.jpg")]
    assert right - left < 77
