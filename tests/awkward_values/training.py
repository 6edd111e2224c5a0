"""Valid calls of the training module, chunked backward and the memory."""

import functools
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_retrieval import (
    CrossBatchMemory,
    Embedder,
    FSDP2Strategy,
    OtherCamera,
    PCAWhitening,
    RetrievalModule,
    SmoothAPLoss,
    TwoNetworks,
    TwoSides,
    Updates,
    chunked_backward,
    largest_chunk_size,
)
from lightning_retrieval.checkpoints import torch_writes_shards
from tests.awkward_values.calls import Call

# Inputs that a network may take, but not this one.
NOT_FOR_LINEAR = ("a float8 tensor", "a complex tensor", "a bool tensor")


def linear():
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes longer than all the rest
    return nn.Linear(3, 2)


def inputs():
    return torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 1.0]])


def batch():
    return {"embeddings": inputs(), "labels": torch.tensor([0, 0, 1]), "ids": torch.arange(3)}


def updated(**arguments):
    memory = CrossBatchMemory(size=4)
    memory.update(**arguments)
    return memory.get_extra_state()


def restored(**arguments):
    memory = CrossBatchMemory(size=4)
    memory.set_extra_state(**arguments)
    return memory.get_extra_state()


def references(**arguments):
    return CrossBatchMemory(size=4).references(**arguments).ref_emb


def module(**settings):
    return RetrievalModule(linear(), SmoothAPLoss(), **settings)


def checkpoint():
    if not Path("last.ckpt").exists():
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=0)
        trainer.strategy.connect(RetrievalModule(Embedder("glyph_net", 2), SmoothAPLoss()))
        trainer.save_checkpoint("last.ckpt")
    return "last.ckpt"


def embedded(**arguments):
    return module().eval().embed(**arguments)


CALLS = {
    "chunked_backward": [
        Call(
            "chunked_backward",
            chunked_backward,
            lambda: {
                "embed": linear(),
                "inputs": inputs(),
                "loss": torch.Tensor.sum,
                "chunk_size": 2,
                "backward": torch.Tensor.backward,
                "keep_graphs": 1,
                "least_chunks": 1,
                "last_backward": nullcontext,
            },
            use=torch.Tensor.dim,
            raises={
                "embed": ("a class",),
                "inputs": NOT_FOR_LINEAR,
                "loss": ("a class",),
                "last_backward": ("a lambda", "a class"),
            },
        )
    ],
    "largest_chunk_size": [
        Call(
            "largest_chunk_size",
            largest_chunk_size,
            lambda: {"embed": linear(), "inputs": inputs(), "reserve": 8, "keep_graphs": 1},
            raises={"embed": ("a class",), "inputs": NOT_FOR_LINEAR},
        )
    ],
    "CrossBatchMemory": [
        Call("CrossBatchMemory", CrossBatchMemory, lambda: {"size": 4, "start_step": 0}),
        Call(
            "CrossBatchMemory",
            CrossBatchMemory,
            lambda: {"size": 4, "start_step": "auto", "mode": "two_terms", "weight": 0.5},
        ),
        Call(
            "CrossBatchMemory",
            references,
            lambda: {**batch(), "detach": False, "relevance": None},
            signature=CrossBatchMemory.references,
        ),
        Call("CrossBatchMemory", updated, batch, signature=CrossBatchMemory.update, use=lambda state: state["rows"]),
        Call(
            "CrossBatchMemory",
            restored,
            lambda: {"state": updated(**batch())},
            signature=CrossBatchMemory.set_extra_state,
        ),
    ],
    "FSDP2Strategy": [
        Call(
            "FSDP2Strategy",
            FSDP2Strategy,
            lambda: {
                "shard_size": 2,
                "sharded_checkpoints": torch_writes_shards(),
                "timeout": timedelta(minutes=1),
            },
            without={} if torch_writes_shards() else {"sharded_checkpoints": "needs torch 2.9"},
        ),
    ],
    "TwoSides": [Call("TwoSides", TwoSides, lambda: {"directions": "both"})],
    "TwoNetworks": [
        Call(
            "TwoNetworks",
            TwoNetworks,
            lambda: {
                "query_embedder": linear(),
                "directions": "both",
                "query_lr_factor": 2.0,
                "frozen_side": "queries",
            },
        )
    ],
    "Updates": [
        Call(
            "Updates",
            Updates,
            lambda: {
                "gradient_clip_val": 1.0,
                "gradient_clip_algorithm": "value",
                "head_lr_factor": 10.0,
                "layer_decay": 0.5,
                "freeze_backbone_epochs": 1,
                "loss_lr_factor": 10.0,
            },
        )
    ],
    "RetrievalModule": [
        Call(
            "RetrievalModule",
            RetrievalModule,
            lambda: {
                "embedder": linear(),
                "loss": SmoothAPLoss(),
                "chunk_size": 2,
                "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
                "lr_scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1),
                "lr_scheduler_monitor": "val/mAP",
                "updates": Updates(),
                "seed": 3,
                "memory": CrossBatchMemory(8, mode="two_terms"),
                "relevance": OtherCamera(),
                "sides": TwoNetworks(linear(), directions="both"),
                "gather": "float16",
                "eval_scales": (1.0, 0.5),
                "whitening": PCAWhitening(),
            },
        ),
        Call(
            "RetrievalModule",
            embedded,
            lambda: {"images": inputs(), "whiten": True},
            signature=RetrievalModule.embed,
            use=torch.Tensor.dim,
            raises={"images": (*NOT_FOR_LINEAR, "a scalar tensor")},
        ),
        Call(
            "RetrievalModule",
            # Without Lightning's wrapper, which walks through the whole stack at each call.
            functools.partial(RetrievalModule.load_from_checkpoint.__wrapped__, RetrievalModule),
            lambda: {
                "checkpoint_path": checkpoint(),
                "map_location": "cpu",
                "hparams_file": None,
                "strict": True,
                "weights_only": True,
            },
            signature=RetrievalModule.load_from_checkpoint,
            raises={"map_location": ("a class",), "checkpoint_path": ("a file",)},  # which the error names
        ),
    ],
}
