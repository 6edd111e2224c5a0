"""Invalid settings of the callbacks, and runs that cannot give what a callback needs."""

import torch
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_metric_learning import losses as pml
from torch import nn
from torch.utils.data import DataLoader

from lightning_retrieval import CrossBatchMemory, PCAWhitening, RetrievalModule, SharedTags, SmoothAPLoss
from lightning_retrieval.callbacks import (
    APMonitor,
    DetectionPicture,
    LearnWhitening,
    MemoryMonitor,
    PrecisionRecallCurve,
    ProxiesAtClassMeans,
    ResumableCSVLogger,
    RetrievalEvaluation,
    RetrievalGallery,
    ScoreHistogram,
    TrainingCurve,
)
from lightning_retrieval.invalid import InvalidType, InvalidValue
from tests.callbacks.point_runs import PointsModule, make_trainer
from tests.point_set import Points
from tests.refusals import refusal_test

LOADER = DataLoader(Points(3), batch_size=9)


def validate(*callbacks, module=None, **settings):
    make_trainer(*callbacks).validate(module or PointsModule(), verbose=False, **settings)


def fit(*callbacks, module=None, loader=None, **settings):
    make_trainer(*callbacks, logger=False, **settings).fit(module or PointsModule(), loader)


def module_of(loss=None, **settings):
    return RetrievalModule(nn.Linear(6, 5), loss or SmoothAPLoss(), **settings)


def begin(loss, loader=LOADER, **settings):
    """Proxies of points of classes 0 to 6 whose embeddings have 5 dimensions."""
    fit(ProxiesAtClassMeans(**settings), module=module_of(loss), loader=loader, limit_val_batches=0)


def arc_face(num_classes=7):
    return pml.ArcFaceLoss(num_classes, embedding_size=5)


def not_finite():
    points = Points(3)
    points.images[5] = float("nan")
    return DataLoader(points, batch_size=9)


class NoEmbeddings(PointsModule):
    def validation_step(self, batch, batch_idx):
        return {"loss": torch.zeros(())}


def file_at(path):
    path.write_text("")
    return path


def needs_the_evaluation(kind):
    return (lambda: validate(kind()), InvalidValue, "", "RetrievalEvaluation")


UNLABELLED = DataLoader([Points(3)[index] for index in range(27)], batch_size=9)
ITEMS = DataLoader([{"images": torch.ones(4, 6), "labels": torch.tensor([0, 0, 1, 1])}], batch_size=None)


def with_link(folder, name):
    """A folder with a link that leads out of it."""
    link = folder / "run" / name
    link.parent.mkdir()
    link.symlink_to(folder)
    return folder / "run"


TABLE = {
    "APMonitor": [
        needs_the_evaluation(APMonitor),
        (
            lambda: fit(RetrievalEvaluation((1,)), APMonitor(), module=BoringModel(), loader=LOADER),
            InvalidType,
            "",
        ),
    ],
    "DetectionPicture": [
        (lambda: DetectionPicture(images=0), InvalidValue, "images"),
        (lambda: DetectionPicture(detections=-1), InvalidValue, "detections"),
    ],
    "LearnWhitening": [
        (lambda: LearnWhitening(images=1), InvalidValue, "images"),
        (
            lambda: validate(LearnWhitening(images=3), module=module_of(whitening=PCAWhitening(3)), dataloaders=LOADER),
            InvalidValue,
            "images",
        ),
        (lambda: fit(LearnWhitening()), InvalidValue, "", "no whitening"),
        (
            lambda: make_trainer(LearnWhitening()).predict(module_of(whitening=PCAWhitening(3)), LOADER),
            InvalidValue,
            "",
        ),
    ],
    "MemoryMonitor": [
        (lambda: MemoryMonitor(probe=0), InvalidValue, "probe"),
        (lambda: MemoryMonitor(start_drift=-0.1), InvalidValue, "start_drift"),
        (lambda: fit(MemoryMonitor()), InvalidValue, ""),
    ],
    "PrecisionRecallCurve": [
        needs_the_evaluation(PrecisionRecallCurve),
        (lambda: PrecisionRecallCurve(every_n_epochs=0), InvalidValue, "every_n_epochs"),
    ],
    "ProxiesAtClassMeans": [
        (lambda: ProxiesAtClassMeans(images_per_class=0), InvalidValue, "images_per_class"),
        (lambda: begin(SmoothAPLoss()), InvalidValue, "loss"),
        (lambda: begin(pml.MarginLoss(num_classes=7, learn_beta=True)), InvalidValue, "loss"),
        (lambda: begin(arc_face(num_classes=4)), InvalidValue, "labels"),
        (lambda: begin(arc_face(), UNLABELLED, images_per_class=2), InvalidValue, "images_per_class"),
        (lambda: begin(arc_face(), ITEMS), InvalidValue, ""),
        (lambda: begin(arc_face(), not_finite()), InvalidValue, ""),
        (lambda: fit(ProxiesAtClassMeans(), module=BoringModel()), InvalidValue, ""),
    ],
    "SoftTripleLoss": [
        (lambda: begin(pml.SoftTripleLoss(num_classes=7, embedding_size=6)), InvalidValue, "embedding_size"),
    ],
    "ResumableCSVLogger": [
        (lambda tmp_path: ResumableCSVLogger(file_at(tmp_path / "run")), InvalidValue, "folder"),
        (
            lambda tmp_path: ResumableCSVLogger(with_link(tmp_path, "metrics.csv")),
            InvalidValue,
            "folder",
            "metrics.csv",
        ),
        (
            lambda tmp_path: ResumableCSVLogger(with_link(tmp_path, "checkpoints")),
            InvalidValue,
            "folder",
            "checkpoints",
        ),
    ],
    "RetrievalEvaluation": [
        (lambda: validate(RetrievalEvaluation((1,)), module=NoEmbeddings()), InvalidType, ""),
        (
            lambda: fit(RetrievalEvaluation((1,), before_fit=True), module=module_of(), loader=LOADER),
            InvalidValue,
            "before_fit",
            "",
        ),
    ],
    "RetrievalGallery": [
        needs_the_evaluation(RetrievalGallery),
        (lambda: RetrievalGallery(queries=0), InvalidValue, "queries"),
        (lambda: RetrievalGallery(k=0), InvalidValue, "k"),
        (lambda: RetrievalGallery(order="best"), InvalidValue, "order"),
    ],
    "RetrievalModule": [
        (
            lambda: fit(module=module_of(memory=CrossBatchMemory(9, "auto")), loader=LOADER),
            InvalidValue,
            "",
            "start_step='auto'",
        ),
    ],
    "ScoreHistogram": [
        needs_the_evaluation(ScoreHistogram),
        (lambda: ScoreHistogram(bins=0), InvalidValue, "bins"),
    ],
    "SharedTags": [
        (
            lambda: validate(RetrievalEvaluation((1,)), module=module_of(relevance=SharedTags()), dataloaders=LOADER),
            InvalidValue,
            "batch",
        ),
    ],
    "TrainingCurve": [
        (lambda: fit(RetrievalEvaluation((1,)), TrainingCurve("val/R@7")), InvalidValue, "metric"),
    ],
}

test_invalid_arguments_raise = refusal_test(TABLE)
