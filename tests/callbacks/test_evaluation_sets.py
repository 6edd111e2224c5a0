"""What an evaluation set reads from loaders and data sets, and accepts from evaluation steps."""

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_retrieval import RetrievalMetrics, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.callbacks.evaluation_sets import (
    EvaluationSet,
    MetricProvider,
    batch_indices,
    is_sharded,
    loader_list,
    set_prefixes,
)
from lightning_retrieval.datamodules import ImageSet
from lightning_retrieval.datamodules.readers.revisited import RevisitedImages
from tests.callbacks.point_runs import KS, PointsModule, labelled_points, make_trainer


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("answer", "came"),
    [
        (None, "NoneType"),
        ({"loss": torch.zeros(())}, r"the keys \['loss'\]"),
    ],
)
def test_steps_without_embeddings_and_labels_raise(answer, came):
    class Other(PointsModule):
        def validation_step(self, batch, batch_idx):
            return answer

    with pytest.raises(
        TypeError, match=rf"^RetrievalEvaluation: Other's validation .* ids, got {came}; the steps of Retr"
    ):
        make_trainer(RetrievalEvaluation(KS)).validate(Other(), verbose=False)


@pytest.mark.refusal
def test_roles_must_be_integers():
    evaluation_set = EvaluationSet("test/", DataLoader(labelled_points(3)), RetrievalMetrics(KS))
    message = r"the `roles` that Module's steps return must be a tensor of integers .*, got torch.float32"
    with pytest.raises(TypeError, match=message):
        evaluation_set.add("Module", {"embeddings": torch.ones(2, 3), "labels": torch.ones(2), "roles": torch.ones(2)})


def test_results_have_the_prefix_of_the_set():
    evaluation_set = EvaluationSet("val/small/", DataLoader(labelled_points(3)), RetrievalMetrics(KS))
    assert len(evaluation_set.dataset) == 23
    evaluation_set.metrics.update(torch.eye(3), torch.tensor([1, 1, 2]), torch.arange(3))
    assert {"val/small/mAP", "val/small/R@1"} <= evaluation_set.compute().keys()


def test_cameras_of_the_batches_reach_the_metric():
    """Batches that are dicts with cameras, as an ImageSet's are: `val/mAP` is that of lists without the same camera."""
    points, labels = labelled_points(2).tensors
    cameras = torch.arange(len(labels)) % 2
    items = []
    for row, point in enumerate(points):
        items.append({"images": point, "labels": labels[row], "ids": torch.tensor(row), "cameras": cameras[row]})
    module = PointsModule()
    loader = DataLoader(items, batch_size=5)
    (logged,) = make_trainer(RetrievalEvaluation(KS)).validate(module, loader, verbose=False)
    metrics, without = RetrievalMetrics(KS), RetrievalMetrics(KS)
    with torch.no_grad():
        embeddings = module.eval()(points)
    metrics.update(embeddings, labels, cameras=cameras)
    without.update(embeddings, labels)
    expected = {f"val/{name}": value.item() for name, value in metrics.compute().items()}
    assert logged == pytest.approx(expected, abs=1e-9)
    assert abs(logged["val/mAP"] - without.compute()["mAP"].item()) > 1e-3


@pytest.mark.parametrize("shuffle", [False, True])
def test_ids_are_the_dataset_indices_if_the_batches_have_none(monkeypatch, shuffle):
    """They are known if the loader reads in order, and unknown if it shuffles."""
    given, real = [], RetrievalMetrics.update

    def update(self, embeddings, labels, ids=None, **kwargs):
        given.append(ids if ids is None else ids.tolist())
        real(self, embeddings, labels, ids, **kwargs)

    monkeypatch.setattr(RetrievalMetrics, "update", update)
    loader = DataLoader(labelled_points(2), batch_size=5, shuffle=shuffle)
    make_trainer(RetrievalEvaluation(KS)).validate(PointsModule(), loader, verbose=False)
    assert given == [None if shuffle else list(range(23))[i : i + 5] for i in range(0, 23, 5)]
    given.clear()
    batches = [
        torch.randperm(23).tolist()[:5] for _ in range(4)
    ]  # another sampler may give other batches the next time
    make_trainer(RetrievalEvaluation(KS)).validate(
        PointsModule(), DataLoader(labelled_points(2), batch_sampler=batches), verbose=False
    )
    assert given == [None] * 4


@pytest.mark.refusal
@pytest.mark.parametrize("owner", ["module", "datamodule"])
def test_before_fit_needs_a_test_set(owner):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(labelled_points(1), batch_size=8)

    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss())
    given = {"datamodule": Data()} if owner == "datamodule" else {"train_dataloaders": Data().train_dataloader()}
    name = "Data" if owner == "datamodule" else "RetrievalModule"
    with pytest.raises(ValueError, match=rf"`before_fit` needs a test set, which {name} does not have; define"):
        make_trainer(RetrievalEvaluation(KS, before_fit=True)).fit(module, **given)


def test_prefixes_follow_the_form_of_the_loaders():
    one, other = DataLoader(labelled_points(1)), DataLoader(labelled_points(2))
    assert set_prefixes("val", one) == set_prefixes("val", [one]) == ["val/"]
    assert set_prefixes("test", [one, other]) == ["test/0/", "test/1/"]
    assert set_prefixes("val", {"near": one}) == ["val/near/"]
    assert loader_list({"near": one, "far": other}) == loader_list((one, other)) == [one, other]
    assert loader_list(one) == [one]


def test_each_process_knows_the_indices_of_its_own_shard():
    sampler = DistributedSampler(labelled_points(1, size=6), num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(labelled_points(1, size=6), batch_size=2, sampler=sampler)
    assert is_sharded(loader)
    assert list(batch_indices(loader)) == [[1, 3], [5]]
    shuffled = DistributedSampler(labelled_points(1, size=6), num_replicas=2, rank=1, shuffle=True)
    assert batch_indices(DataLoader(labelled_points(1, size=6), sampler=shuffled)) is None
    assert not is_sharded(DataLoader(labelled_points(1)))


class WithMetric(Dataset):
    """A data set with an evaluation protocol of its own, without any base class of this library."""

    def metrics(self, ks, **settings):
        return RetrievalMetrics(ks, **settings)


def test_a_method_makes_a_data_set_a_provider_of_its_metric():
    assert isinstance(WithMetric(), MetricProvider)
    assert not isinstance(labelled_points(1), MetricProvider)
    assert issubclass(RevisitedImages, MetricProvider)
    assert not issubclass(ImageSet, MetricProvider)
