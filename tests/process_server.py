"""What the server of processes imports before it forks them, so that none of them imports it again."""

import gc
import importlib
import pkgutil

import tests.fast_start
import tests.one_lightning  # noqa: F401 - before anything imports Lightning

OTHERS = ("faiss", "pytest", "pytorch_lightning", "pytorch_metric_learning.losses", "sklearn.metrics", "torchvision")
OF_TORCH = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor")
PACKAGES = ("lightning_retrieval", "lightning_retrieval.callbacks", "lightning_retrieval.datamodules")

for name in (*OTHERS, *OF_TORCH):
    importlib.import_module(name)
for package in PACKAGES:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
gc.collect()
gc.enable()
gc.freeze()  # so that the garbage collector of a forked process does not copy the memory of all that
