"""Invalid settings of RetrievalModule, its updates, sides, memory and strategy, and of chunked backward."""

import math

import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_metric_learning.losses import NCALoss
from torch import nn
from torch.optim import lr_scheduler as schedulers

from lightning_retrieval import (
    CrossBatchMemory,
    FSDP2Strategy,
    OtherCamera,
    RetrievalModule,
    SmoothAPLoss,
    TwoNetworks,
    TwoSides,
    Updates,
    WeightedSum,
    chunked_backward,
    largest_chunk_size,
)
from lightning_retrieval.invalid import InvalidType, InvalidValue
from tests.lightning_retrieval.training.small_training import SGD, batches, fit, net
from tests.quiet_trainer import quiet_trainer
from tests.refusals import refusal_test

FACTORS = Updates(layer_decay=0.5, head_lr_factor=2)
SAME = net()
NORM = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
INPUTS = torch.randn(4, 5)


def module(embedder=None, loss=None, **settings):
    return RetrievalModule(embedder or net(), loss or SmoothAPLoss(), **{"optimizer": SGD, **settings})


class WithBackbone(nn.Module):
    """A network with a backbone of two layers and a head, which can have learning rates of their own."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)).double()
        self.head = nn.Linear(5, 4).double()

    def forward(self, x):
        return self.head(self.backbone(x))


def optimizers_of(embedder=None, **settings):
    module(embedder or WithBackbone(), **settings).configure_optimizers()


class OneRate(schedulers.LRScheduler):
    """Sets a rate of its own, whatever that of the group is."""

    def get_lr(self):
        return [0.1 / (1 + self.last_epoch) for _ in self.base_lrs]


def one_group(groups):
    return SGD([value for group in groups for value in group["params"]])


def batch_of(rows=3, dim=3, levels=0):
    labels = torch.arange(rows)
    if levels:
        labels = torch.stack([labels] * levels, 1)
    return torch.randn(rows, dim), labels, torch.arange(rows)


def remember(*batch):
    memory = CrossBatchMemory(5)
    memory.update(*batch_of(4))
    memory.update(*batch)


def restored():
    """Load the state of a memory whose network had another dimension."""
    memory, other = CrossBatchMemory(5), CrossBatchMemory(5)
    memory.update(*batch_of())
    other.update(*batch_of(dim=7))
    memory.load_state_dict(other.state_dict())


def not_finite():
    embeddings, labels, ids = batch_of()
    embeddings[2, 1] = math.nan
    return embeddings, labels, ids


def fit_with(memory=None, relevance=None, **changed):
    """Train with a batch whose entries are changed."""
    labels, ids = torch.arange(10) // 2, torch.arange(10)
    batch = {"images": batches(1)[0][0], "labels": labels, "ids": ids, **changed}
    fit(module(memory=memory, relevance=relevance), [batch])


def mesh_of(devices, strategy):
    quiet_trainer(devices=devices, strategy=strategy).strategy.setup_environment()


def begin_with(strategy):
    """Check the flags of a Trainer without a run, which would start processes."""
    begun = module()
    begun.trainer = quiet_trainer(devices=2, strategy=strategy)
    begun.configure_callbacks()


def loaded_again(embedder):
    """Load the checkpoint of a network that cannot be described in a file."""
    trainer = quiet_trainer()
    trainer.strategy.connect(module(embedder))
    trainer.save_checkpoint("m.ckpt")
    RetrievalModule.load_from_checkpoint("m.ckpt", weights_only=True)


BATCH = batches(1)[0]
PAIR = {"queries": BATCH, "candidates": BATCH}
NARROW = TwoNetworks(nn.Linear(6, 3).double())
BOTH = TwoSides(directions="both")
WITH_NCA = WeightedSum({"ap": (1.0, SmoothAPLoss()), "other": (1.0, NCALoss())})
DETACHED = CrossBatchMemory(9, mode="one_list_detached")
TEXTS = [f"{number}.jpg" for number in range(10)]
TABLE = {
    "chunked_backward": [
        (lambda: chunked_backward(nn.Identity(), INPUTS, torch.sum, 0), InvalidValue, "chunk_size"),
        (lambda: chunked_backward(nn.Identity(), INPUTS, torch.sum, 2, keep_graphs=-1), InvalidValue, "keep_graphs"),
        (lambda: chunked_backward(lambda x: x.sum(1), INPUTS, torch.sum, 2), InvalidValue, "embed"),
        (lambda: chunked_backward(lambda x: x[:1], INPUTS, torch.sum, 2), InvalidValue, "embed"),
        (lambda: chunked_backward(nn.Identity(), INPUTS, lambda y: y[0], 2), InvalidValue, "loss"),
    ],
    "largest_chunk_size": [
        (lambda: largest_chunk_size(nn.Identity(), INPUTS, reserve=-1), InvalidValue, "reserve"),
    ],
    "CrossBatchMemory": [
        (lambda: CrossBatchMemory(0), InvalidValue, "size"),
        (lambda: CrossBatchMemory(8, start_step=-1), InvalidValue, "start_step"),
        (lambda: CrossBatchMemory(8, mode="xbm"), InvalidValue, "mode"),
        (lambda: CrossBatchMemory(8, weight=0.5), InvalidValue, "weight"),
        (lambda: remember(*batch_of(6)), InvalidValue, "size"),
        (lambda: remember(*batch_of()[:2], None), InvalidType, "ids"),
        (lambda: remember(*batch_of(dim=4)), InvalidValue, "embeddings"),
        (lambda: remember(*batch_of(levels=2)), InvalidValue, "labels"),
        (lambda: remember(*not_finite()), InvalidValue, "embeddings"),
        (lambda: restored(), InvalidValue, "embeddings"),
        (
            lambda: fit(module(memory=CrossBatchMemory(9, 2)), [(*batches(1)[0], torch.arange(10))]),
            InvalidValue,
            "size",
        ),
    ],
    "TwoSides": [(lambda: TwoSides(directions="reverse"), InvalidValue, "directions")],
    "TwoNetworks": [
        (lambda: TwoNetworks(net(), query_lr_factor=0), InvalidValue, "query_lr_factor"),
        (lambda: TwoNetworks(net(), frozen_side="both"), InvalidValue, "frozen_side"),
    ],
    "Updates": [
        (lambda: Updates(gradient_clip_val=-1), InvalidValue, "gradient_clip_val"),
        (lambda: Updates(gradient_clip_algorithm="max"), InvalidValue, "gradient_clip_algorithm"),
        (lambda: Updates(head_lr_factor=0), InvalidValue, "head_lr_factor"),
        (lambda: Updates(loss_lr_factor=0), InvalidValue, "loss_lr_factor"),
        (lambda: Updates(layer_decay=2), InvalidValue, "layer_decay"),
        (lambda: Updates(freeze_backbone_epochs=-1), InvalidValue, "freeze_backbone_epochs"),
    ],
    "FSDP2Strategy": [
        (lambda: FSDP2Strategy(shard_size=0), InvalidValue, "shard_size"),
        (lambda: mesh_of(4, FSDP2Strategy(shard_size=3)), InvalidValue, "shard_size"),
    ],
    "RetrievalModule": [
        (lambda: fit_with(labels=TEXTS), InvalidType, "labels"),
        (lambda: fit_with(ids=TEXTS), InvalidType, "ids"),
        (lambda: module(chunk_size=0), InvalidValue, "chunk_size"),
        (lambda: module(chunk_size={"queries": 0, "candidates": None}), InvalidValue, "chunk_size['queries']"),
        (lambda: module(keep_graphs=0), InvalidValue, "keep_graphs"),
        (lambda: module(gather="float32"), InvalidValue, "gather"),
        (lambda: module(eval_scales=(1, 0)), InvalidValue, "eval_scales"),
        (lambda: module(eval_scales_pooling="max"), InvalidValue, "eval_scales_pooling"),
        (lambda: module(seed=-1), InvalidValue, "seed"),
        (lambda: module(lr_scheduler_interval="batch"), InvalidValue, "lr_scheduler_interval"),
        (lambda: module(lr_scheduler_frequency=0), InvalidValue, "lr_scheduler_frequency"),
        (lambda: module(SAME, sides=TwoNetworks(SAME)), InvalidValue, "sides"),
        (lambda: module(sides=NARROW, memory=DETACHED), InvalidValue, "", "one_list_detached"),
        (lambda: module(loss=WITH_NCA, memory=CrossBatchMemory(8)), InvalidType, "", "NCALoss"),
        (lambda: module(loss=WITH_NCA, sides=BOTH), InvalidType, "", "NCALoss"),
        (lambda: fit(module(loss=WITH_NCA), [PAIR]), InvalidType, "", "NCALoss"),
        (lambda: fit(module(sides=BOTH), [BATCH]), InvalidType, "", "2 items"),
        (lambda: fit(module(), [{"queries": BATCH}]), InvalidValue, "", "only queries"),
        (lambda: module(sides=NARROW).validation_step(PAIR, 0), InvalidValue, "", "3 and 4"),
        (lambda: begin_with(ModelParallelStrategy()), InvalidValue, "", "FSDP2Strategy"),
        (lambda: module(relevance=nn.Linear(1, 1)), InvalidType, "relevance"),
        (lambda: optimizers_of(net(), updates=Updates(head_lr_factor=10)), InvalidValue, "head_lr_factor", ""),
        (lambda: optimizers_of(net(), updates=Updates(layer_decay=0.5)), InvalidValue, "layer_decay"),
        (lambda: optimizers_of(updates=Updates(loss_lr_factor=9)), InvalidValue, "loss_lr_factor"),
        (lambda: module(updates=Updates(freeze_backbone_epochs=1)), InvalidValue, "freeze_backbone_epochs"),
        (lambda: optimizers_of(updates=FACTORS, lr_scheduler=OneRate), InvalidValue, "lr_scheduler"),
        (lambda: optimizers_of(updates=FACTORS, optimizer=one_group), InvalidValue, "optimizer"),
        (lambda: loaded_again(nn.Sequential(nn.Linear(3, 2))), InvalidValue, "embedder", "Sequential"),
    ],
    "OtherCamera": [
        (lambda: fit_with(cameras=TEXTS, relevance=OtherCamera()), InvalidType, "cameras"),
        (lambda: fit(module(relevance=OtherCamera()), batches(1)), InvalidType, "batch"),
    ],
}
test_invalid_arguments_raise = refusal_test(TABLE)
