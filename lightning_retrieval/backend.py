"""Which of Lightning's two packages this process uses, and the names that the library takes from it.

Lightning is published twice: as `pytorch_lightning` with `lightning_fabric`, and as `lightning`, which holds copies of
both. A Trainer of one package does not accept a module, a data module or a callback of the other one, so the library
derives its classes from the package that the user's program uses. The package is chosen once, when a name that needs
Lightning is first imported:

1. the package that the environment variable `LIGHTNING_RETRIEVAL_BACKEND` names, `lightning` or `pytorch_lightning`;
2. if the program has imported only one of the packages, this package;
3. in a process that a process with this library has started, the package of the parent process;
4. otherwise `pytorch_lightning`, a requirement of this library.
"""

import os
import re
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.optional_packages import optional_import

VARIABLE = "LIGHTNING_RETRIEVAL_BACKEND"
PARENTS_CHOICE = "_LIGHTNING_RETRIEVAL_BACKEND_OF_PARENT"
# The modules of each package: that of the Trainer, and Fabric.
MODULES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
# The path of a class in either package, or of one that the package `lightning` has at its top, such as its Trainer.
_CLASS = re.compile(
    r"(pytorch_lightning|lightning\.pytorch|lightning_fabric|lightning\.fabric|lightning(?=\.[A-Z]\w*$))((\.\w+)*\.[A-Z]\w*)"
)
_TRAINER, _FABRIC = 0, 1
# The names that the library uses, with the module of the Trainer's package (or of Fabric, below) that defines them.
_OF_TRAINER = {
    "BaseFinetuning": "callbacks",
    "BatchSizeFinder": "callbacks",
    "CSVLogger": "loggers.csv_logs",
    "Checkpoint": "callbacks",
    "CombinedLoader": "utilities",
    "DDPStrategy": "strategies",
    "DeepSpeedStrategy": "strategies",
    "ExperimentWriter": "loggers.csv_logs",
    "LearningRateFinder": "callbacks",
    "LightningArgumentParser": "cli",
    "LightningCLI": "cli",
    "Logger": "loggers.logger",
    "ModelCheckpoint": "callbacks",
    "ModelParallelStrategy": "strategies",
    "ModelPruning": "callbacks",
    "OnExceptionCheckpoint": "callbacks",
    "ProgressBar": "callbacks",
    "SaveConfigCallback": "cli",
    "SingleDeviceStrategy": "strategies",
    "SingleDeviceXLAStrategy": "strategies.single_xla",
    "StochasticWeightAveraging": "callbacks",
    "TQDMProgressBar": "callbacks",
    "TensorBoardLogger": "loggers",
    "TrainerFn": "trainer.states",
    "TrainerStatus": "trainer.states",
    "WandbLogger": "loggers",
    "WeightAveraging": "callbacks",
    "XLAStrategy": "strategies.xla",
    "_WrappingCheckpointIO": "plugins.io.wrapper",
    "_default_map_location": "core.saving",
    "_given_hyperparameters_context": "core.mixins.hparams_mixin",
    "_restricted_classmethod": "utilities.model_helpers",
    "is_overridden": "utilities.model_helpers",
    "load_hparams_from_tags_csv": "core.saving",
    "migrate_checkpoint": "utilities.migration.utils",
    "move_data_to_device": "utilities",
    "rank_zero_info": "utilities",
    "rank_zero_only": "utilities",
    "rank_zero_warn": "utilities",
    "to_uncompiled": "utilities.compile",
}
_OF_FABRIC = {
    "CheckpointIO": "plugins.io.checkpoint_io",
    "Fabric": "fabric",
    "FabricDDPStrategy": "strategies.ddp",
    "MisconfigurationException": "utilities.exceptions",
    "TorchCheckpointIO": "plugins.io.torch_io",
    "_load": "utilities.cloud_io",
    "convert_tensors_to_scalars": "utilities.apply_func",
    "get_filesystem": "utilities.cloud_io",
    "rank_zero_experiment": "loggers.logger",
    "sized_len": "utilities.data",
}
_RENAMED = {"FabricDDPStrategy": "DDPStrategy"}  # the Trainer's package has another class of this name
_warned = False

if TYPE_CHECKING:  # type checkers see the names of pytorch_lightning
    import lightning_fabric.strategies.ddp
    import pytorch_lightning
    from lightning_fabric.fabric import Fabric as Fabric
    from lightning_fabric.loggers.logger import rank_zero_experiment as rank_zero_experiment
    from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO as CheckpointIO
    from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO as TorchCheckpointIO
    from lightning_fabric.utilities.apply_func import convert_tensors_to_scalars as convert_tensors_to_scalars
    from lightning_fabric.utilities.cloud_io import _load as _load
    from lightning_fabric.utilities.cloud_io import get_filesystem as get_filesystem
    from lightning_fabric.utilities.data import sized_len as sized_len
    from lightning_fabric.utilities.exceptions import MisconfigurationException as MisconfigurationException
    from pytorch_lightning.callbacks import BaseFinetuning as BaseFinetuning
    from pytorch_lightning.callbacks import BatchSizeFinder as BatchSizeFinder
    from pytorch_lightning.callbacks import Checkpoint as Checkpoint
    from pytorch_lightning.callbacks import LearningRateFinder as LearningRateFinder
    from pytorch_lightning.callbacks import ModelCheckpoint as ModelCheckpoint
    from pytorch_lightning.callbacks import ModelPruning as ModelPruning
    from pytorch_lightning.callbacks import OnExceptionCheckpoint as OnExceptionCheckpoint
    from pytorch_lightning.callbacks import ProgressBar as ProgressBar
    from pytorch_lightning.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
    from pytorch_lightning.callbacks import TQDMProgressBar as TQDMProgressBar
    from pytorch_lightning.callbacks import WeightAveraging as WeightAveraging
    from pytorch_lightning.cli import LightningArgumentParser as LightningArgumentParser
    from pytorch_lightning.cli import LightningCLI as LightningCLI
    from pytorch_lightning.cli import SaveConfigCallback as SaveConfigCallback
    from pytorch_lightning.core.mixins.hparams_mixin import (
        _given_hyperparameters_context as _given_hyperparameters_context,
    )
    from pytorch_lightning.core.saving import _default_map_location as _default_map_location
    from pytorch_lightning.core.saving import load_hparams_from_tags_csv as load_hparams_from_tags_csv
    from pytorch_lightning.loggers import TensorBoardLogger as TensorBoardLogger
    from pytorch_lightning.loggers import WandbLogger as WandbLogger
    from pytorch_lightning.loggers.csv_logs import CSVLogger as CSVLogger
    from pytorch_lightning.loggers.csv_logs import ExperimentWriter as ExperimentWriter
    from pytorch_lightning.loggers.logger import Logger as Logger
    from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO as _WrappingCheckpointIO
    from pytorch_lightning.strategies import DDPStrategy as DDPStrategy
    from pytorch_lightning.strategies import DeepSpeedStrategy as DeepSpeedStrategy
    from pytorch_lightning.strategies import ModelParallelStrategy as ModelParallelStrategy
    from pytorch_lightning.strategies import SingleDeviceStrategy as SingleDeviceStrategy
    from pytorch_lightning.strategies.single_xla import SingleDeviceXLAStrategy as SingleDeviceXLAStrategy
    from pytorch_lightning.strategies.xla import XLAStrategy as XLAStrategy
    from pytorch_lightning.trainer.states import TrainerFn as TrainerFn
    from pytorch_lightning.trainer.states import TrainerStatus as TrainerStatus
    from pytorch_lightning.utilities import CombinedLoader as CombinedLoader
    from pytorch_lightning.utilities import move_data_to_device as move_data_to_device
    from pytorch_lightning.utilities import rank_zero_info as rank_zero_info
    from pytorch_lightning.utilities import rank_zero_only as rank_zero_only
    from pytorch_lightning.utilities import rank_zero_warn as rank_zero_warn
    from pytorch_lightning.utilities.compile import to_uncompiled as to_uncompiled
    from pytorch_lightning.utilities.migration.utils import migrate_checkpoint as migrate_checkpoint
    from pytorch_lightning.utilities.model_helpers import _restricted_classmethod as _restricted_classmethod
    from pytorch_lightning.utilities.model_helpers import is_overridden as is_overridden

    FabricDDPStrategy = lightning_fabric.strategies.ddp.DDPStrategy
    pl = pytorch_lightning
else:

    def __getattr__(name: str) -> Any:
        if name == "pl":
            value: Any = _module(_TRAINER)
        elif name in _OF_TRAINER:
            value = getattr(_module(_TRAINER, _OF_TRAINER[name]), name)
        elif name in _OF_FABRIC:
            value = getattr(_module(_FABRIC, _OF_FABRIC[name]), _RENAMED.get(name, name))
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def _choose() -> str:
    """The package that this process uses."""
    named = os.environ.get(VARIABLE)
    if named:
        if named not in MODULES:
            rule = f"{VARIABLE} must be lightning or pytorch_lightning"
            raise InvalidValue(rule, got=repr(named), cure="change or unset it")
        return named
    # A folder of the user's may have the name `lightning`, so its submodule counts.
    imported = [package for package, modules in MODULES.items() if modules[_TRAINER] in sys.modules]
    if len(imported) == 1:
        return imported[0]
    of_parent = os.environ.get(PARENTS_CHOICE)
    if of_parent in MODULES:
        return of_parent
    return "pytorch_lightning"


PACKAGE = _choose()
os.environ[PARENTS_CHOICE] = PACKAGE  # for data-loader workers and other processes that this process starts


def _module(kind: int, submodule: str = "") -> Any:
    """A module of the package that this process uses."""
    path = MODULES[PACKAGE][kind]
    with optional_import(f"{VARIABLE} is {PACKAGE}, which must be installed: pip install {PACKAGE}."):
        return import_module(f"{path}.{submodule}".rstrip("."))


def warn_of_other_package() -> None:
    """Warn, once in a process, if the program has imported the package that this process does not use.

    The constructors of modules and data modules call this function: a Trainer of the other package would say that they
    are no modules or data modules, before any method of theirs is called.
    """
    global _warned
    (other,) = MODULES.keys() - {PACKAGE}
    is_imported = MODULES[other][_TRAINER] in sys.modules
    if _warned or os.environ.get(VARIABLE) or not is_imported:
        return
    _warned = True
    warnings.warn(
        f"lightning_retrieval: its classes are those of {MODULES[PACKAGE][_TRAINER]}, but {MODULES[other][_TRAINER]} "
        f"has been imported, too, and a Trainer of it does not accept them; import {MODULES[other][_TRAINER]} before "
        f"lightning_retrieval, or set the environment variable {VARIABLE} to the package that you use.",
        stacklevel=2,
    )


def module_names() -> tuple[str, ...]:
    """The names of the modules of both packages, which are also the names of their loggers."""
    return (*MODULES["lightning"], *MODULES["pytorch_lightning"])


def of_this_backend(value: Any) -> Any:
    """A value of a config in which Lightning's classes are named as in the package that this process uses.

    Args:
        value: lists and dicts of any depth. A string is replaced if it is the path of a class in either package.

    Example:
        >>> from lightning_retrieval import backend
        >>> backend.PACKAGE
        'pytorch_lightning'
        >>> backend.of_this_backend({"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"})
        {'class_path': 'pytorch_lightning.callbacks.ModelCheckpoint'}
    """
    if isinstance(value, dict):
        return {key: of_this_backend(item) for key, item in value.items()}
    if isinstance(value, list):
        return [of_this_backend(item) for item in value]
    if not isinstance(value, str):
        return value
    found = _CLASS.fullmatch(value)
    if found is None:
        return value
    kind = _TRAINER
    if "fabric" in found[1] or value == "lightning.Fabric":
        kind = _FABRIC
    return MODULES[PACKAGE][kind] + found[2]
