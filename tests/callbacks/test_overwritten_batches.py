"""What is kept of a batch stays as it was if the next batch is written to the same memory.

Loops with one buffer do so, and networks that are compiled with `mode="reduce-overhead"`, whose CUDA graphs return the
same memory at each call.
"""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import PCAWhitening, RetrievalMetrics, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import EmbeddingWriter, LearnWhitening, RetrievalEvaluation
from lightning_retrieval.datamodules import RetrievalDataModule
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from tests.callbacks.point_runs import labelled_points
from tests.point_set import Points
from tests.quiet_trainer import quiet_trainer


class Overwriting(nn.Module):
    """A network that returns the same memory at each call without a graph, or new memory."""

    def __init__(self, overwrites):
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(6, 4)
        self.memory = torch.zeros(64, 4)
        self.overwrites = overwrites

    def forward(self, images):
        embeddings = self.layer(images)
        if embeddings.requires_grad or not self.overwrites:
            return embeddings
        self.memory.fill_(9.0)
        return self.memory[: len(images)].copy_(embeddings)


class Data(RetrievalDataModule):
    """Points, of which an evaluation batch has five."""

    train_set, val_set, test_set = Points(1, 27), Points(2, 23), Points(3, 23)

    def __init__(self):
        super().__init__(classes_per_batch=3, samples_per_class=3, eval_batch_size=5)


class TwoSidedData(Data):
    """The same, where each batch of the validation has queries and candidates."""

    def val_dataloader(self):
        def sides(rows):
            images, labels, ids = (torch.stack(column) for column in zip(*rows, strict=True))
            side = {"images": images, "labels": labels, "ids": ids}
            return {"queries": side, "candidates": {**side, "images": images + 0.5}}

        images, labels = labelled_points(2).tensors
        return DataLoader(TensorDataset(images, labels, torch.arange(23)), batch_size=5, collate_fn=sides)


def trained(module, _, data=Data):
    trainer = quiet_trainer(callbacks=[RetrievalEvaluation(ks=(1,))], max_epochs=1)
    trainer.fit(module, data())
    return [trainer.callback_metrics["train/loss"], trainer.callback_metrics["val/mAP"], *module.parameters()]


def predicted(module, _):
    outputs = quiet_trainer().predict(module, Data())
    return [output[name] for output in outputs for name in ("embeddings", "labels", "ids")]


def written(module, folder):
    writer = EmbeddingWriter(folder, shard_size=9)
    quiet_trainer(callbacks=[writer]).predict(module, Data(), return_predictions=False)
    shards = EmbeddingFolder.load(folder)
    return [torch.from_numpy(shards.read(number).embeddings) for number in range(len(shards))]


def whitened(module, _):
    quiet_trainer(callbacks=[LearnWhitening()]).validate(module, Data(), verbose=False)
    with torch.no_grad():
        return [module.eval().embed(labelled_points(2).tensors[0])]


RUNS = {
    "evaluation": (trained, {}),
    "chunks": (trained, {"chunk_size": 2}),
    "two sides": (functools.partial(trained, data=TwoSidedData), {}),
    "predictions": (predicted, {}),
    "writer": (written, {}),
    "whitening": (whitened, {"whitening": PCAWhitening(2)}),
}


@pytest.mark.filterwarnings("ignore:RetrievalModule. the sampler gives each process")
@pytest.mark.parametrize("name", RUNS)
def test_a_network_may_overwrite_what_it_has_returned(name, tmp_path):
    run, settings = RUNS[name]
    results = []
    for overwrites in (False, True):
        module = RetrievalModule(Overwriting(overwrites), SmoothAPLoss(tau=0.1), **settings)
        results.append(run(module, tmp_path / str(overwrites)))
    assert len(results[0]) > 0
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("settings", [{}, {"embeddings_on_cpu": True}])
def test_all_arguments_of_a_metric_may_be_overwritten(settings):
    expected, metrics = RetrievalMetrics(ks=(1,)), RetrievalMetrics(ks=(1,), **settings)
    x, embeddings, values = torch.randn(20, 4), torch.zeros(5, 4), torch.zeros(5, 5, dtype=torch.long)
    for begin in range(0, 20, 5):
        index = torch.arange(begin, begin + 5)
        new = torch.stack([index // 4, index, index * 0 + 3, index, index % 2])
        expected.update(x[index], *new)
        embeddings.copy_(x[index])
        values.copy_(new)
        metrics.update(embeddings, *values)
    assert metrics.compute() == expected.compute()


def test_results_of_each_query_may_be_overwritten():
    """Such as by `nan_to_num_`, which must not count skipped queries in the intervals."""
    metrics = RetrievalMetrics(ks=(1,), reverse=True)
    metrics.update(
        torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 0, 1, 1, 1, 2, 3, 4])
    )
    before = metrics.intervals()
    for reverse in (False, True):
        metrics.per_query(reverse=reverse)["AP"].nan_to_num_()
        assert metrics.per_query(reverse=reverse)["AP"].isnan().sum() == 3
    assert metrics.intervals() == before
