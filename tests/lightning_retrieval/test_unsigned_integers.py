"""Labels, ids, roles and cameras of unsigned types are those of int64."""

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss
from torch.utils.data import DataLoader

from lightning_retrieval import (
    CrossBatchMemory,
    GalleryOnly,
    OtherCamera,
    RetrievalIndex,
    RetrievalMetrics,
    RetrievalModule,
    SharedTags,
    SmoothAPLoss,
    SupervisedWhitening,
)
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import PKSampler
from lightning_retrieval.losses.third_party import as_batch_loss
from tests.lightning_retrieval.training.small_training import SGD, batches, fit, net
from tests.quiet_trainer import quiet_trainer

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
LABELS, IDS, ROLES = torch.arange(12) // 3, torch.arange(12), torch.full((12,), 3)
TAGS = torch.stack([LABELS, 9 + IDS % 2], 1)


def of_memory(labels, ids):
    memory = CrossBatchMemory(12)
    memory.update(X[:6], labels[:6], ids[:6])
    return SmoothAPLoss().of_batch(memory.references(X[3:], labels[3:], ids[3:]))


def of_metrics(labels, ids, cameras, roles):
    metrics = RetrievalMetrics()
    for half in (slice(6), slice(6, 12)):
        metrics.update(X[half], labels[half], ids[half], roles[half], instances=ids[half], cameras=cameras[half])
    return metrics.compute()["mAP"]


def of_rule(rule, columns):
    metrics = RetrievalMetrics(relevance=rule)
    metrics.update(X, columns)
    return torch.stack([SmoothAPLoss()(X, columns, relevance=rule).double(), metrics.compute()["mAP"]])


def of_index(ids):
    index = RetrievalIndex(4)
    index.add(X, ids=ids)
    return torch.cat([index.search(X[:3], k=2)[1].flatten(), index.embeddings(ids[:2]).flatten()])


def of_run(labels, ids, cameras, roles):
    columns = {"labels": labels, "ids": ids, "cameras": cameras, "roles": roles}
    batch = {"images": batches(1)[0][0], **{name: values[-10:] for name, values in columns.items()}}
    memory = CrossBatchMemory(20)
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), optimizer=SGD, memory=memory, relevance=OtherCamera())
    loss = fit(module, [batch], max_epochs=2).callback_metrics["train/loss"]
    run = quiet_trainer(callbacks=[RetrievalEvaluation(ks=(1,))])
    (found,) = run.validate(module, DataLoader([batch], batch_size=None), verbose=False)
    return torch.tensor([float(loss), found["val/mAP"]])


CALLS = {
    "loss": lambda to: SmoothAPLoss(class_balanced=True)(X, to(LABELS), ids=to(IDS)),
    "third-party loss": lambda to: as_batch_loss(ContrastiveLoss())(X, to(LABELS), X, LABELS, ids=to(IDS), ref_ids=IDS),
    "memory": lambda to: of_memory(to(LABELS), to(IDS)),
    "metrics": lambda to: of_metrics(to(LABELS), to(IDS), to(IDS % 2), to(ROLES)),
    "roles": lambda to: of_rule(GalleryOnly(), to(torch.stack([LABELS, IDS % 4], 1))),
    "tags": lambda to: of_rule(SharedTags(), to(TAGS)),
    "sampler": lambda to: torch.tensor([*PKSampler(to(LABELS), classes_per_batch=2, samples_per_class=2)]),
    "whitening": lambda to: SupervisedWhitening(2).fit(X[:, :2], to(LABELS))(X[:, :2]),
    "index": lambda to: of_index(to(IDS)),
    "run": lambda to: of_run(to(LABELS), to(IDS), to(IDS % 2), to(ROLES)),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint64])
@pytest.mark.parametrize("name", CALLS)
def test_unsigned_integers_are_those_of_int64(name, dtype):
    found = CALLS[name](lambda values: values.to(dtype))
    assert torch.equal(found, CALLS[name](lambda values: values))
