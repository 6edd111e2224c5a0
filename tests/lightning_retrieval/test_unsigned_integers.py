"""Labels, ids, roles and cameras of unsigned types are those of int64, and numbers that int64 cannot hold raise."""

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss
from torch.utils.data import DataLoader

from lightning_retrieval import (
    CrossBatchMemory,
    GalleryOnly,
    HAPLoss,
    OtherCamera,
    RetrievalIndex,
    RetrievalMetrics,
    RetrievalModule,
    SharedTags,
    SmoothAPLoss,
    SupervisedWhitening,
)
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import PKSampler, TagSampler
from lightning_retrieval.losses.third_party import as_batch_loss
from tests.lightning_retrieval.training.small_training import SGD, batches, fit, net
from tests.quiet_trainer import quiet_trainer

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
LABELS, IDS, ROLES = torch.arange(12) // 3, torch.arange(12), torch.full((12,), 3)
LEVELS, TAGS = torch.stack([LABELS, LABELS // 2], 1), torch.stack([LABELS, 9 + IDS % 2], 1)


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
    "references of int64": lambda to: SmoothAPLoss()(X, to(LABELS), X, LABELS, ids=to(IDS), ref_ids=IDS),
    "levels": lambda to: HAPLoss()(X, to(LEVELS)),
    "third-party loss": lambda to: as_batch_loss(ContrastiveLoss())(X, to(LABELS), X, LABELS, ids=to(IDS), ref_ids=IDS),
    "memory": lambda to: of_memory(to(LABELS), to(IDS)),
    "metrics": lambda to: of_metrics(to(LABELS), to(IDS), to(IDS % 2), to(ROLES)),
    "cameras": lambda to: of_rule(OtherCamera(), OtherCamera().columns(to(LABELS), {"cameras": to(IDS)})),
    "columns": lambda to: of_rule(OtherCamera(), to(torch.stack([LABELS, IDS % 2], 1))),
    "roles": lambda to: of_rule(GalleryOnly(), to(torch.stack([LABELS, IDS % 4], 1))),
    "tags": lambda to: of_rule(SharedTags(), to(TAGS)),
    "sampler": lambda to: torch.tensor([*PKSampler(to(LABELS), classes_per_batch=2, samples_per_class=2)]),
    "sampler of tags": lambda to: torch.tensor([*TagSampler(to(TAGS), tags_per_batch=2, samples_per_tag=2)]),
    "whitening": lambda to: SupervisedWhitening(2).fit(X[:, :2], to(LABELS))(X[:, :2]),
    "index": lambda to: of_index(to(IDS)),
    "run": lambda to: of_run(to(LABELS), to(IDS), to(IDS % 2), to(ROLES)),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("name", CALLS)
def test_unsigned_integers_are_those_of_int64(name, dtype):
    found = CALLS[name](lambda values: values.to(dtype))
    assert torch.equal(found, CALLS[name](lambda values: values))


@pytest.mark.refusal
@pytest.mark.parametrize("name", CALLS)
def test_numbers_that_int64_cannot_hold_raise(name):
    def too_large(values):
        large = values.to(torch.uint64)
        large.view(torch.int64)[-1] = -5
        return large

    rule = r"^\w+: `(labels|ids|tags|cameras|roles)` must be below 2\*\*63, got 18446744073709551611 of "
    with pytest.raises(ValueError, match=rule):
        CALLS[name](too_large)
