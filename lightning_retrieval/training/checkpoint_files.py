"""The content of checkpoints, and how a run with a sharded network reads and writes them.

- A checkpoint of adapters (LoRA) does not hold the pretrained weights, because they are loaded again from their source.
  The weights are left out only if an `Embedder` has `lora` and names its `weights`: random weights have no source.
- A checkpoint of a network that is sharded over the processes looks like a checkpoint of a single process: one file
  with full tensors, which the first process writes. Any number of processes, with or without `ModelParallelStrategy`,
  can continue from it. With `FSDP2Strategy(sharded_checkpoints=True)`, each process writes its shards, see
  `lightning_retrieval.checkpoints`. Lightning's own code would lose state that is neither a parameter nor a buffer,
  such as the rows of a memory; and if some parameters are frozen, it would assign the optimizer's state to the wrong
  parameters.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_retrieval.checkpoints import (
    INSTANTIATORS,
    check_checkpoint,
    check_checkpoint_exists,
    is_sharded_checkpoint,
    load_mapped,
    map_tensors,
    read_rest,
    read_shards,
    write_sharded_checkpoint,
)
from lightning_retrieval.checks import first_line
from lightning_retrieval.compiled import plain_state, without_wrappers
from lightning_retrieval.distributed import rank
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.models.adapted import FrozenEmbedder
from lightning_retrieval.models.embedder import Embedder
from lightning_retrieval.models.pretrained import without_pretrained_weights
from lightning_retrieval.models.retrieval_network import RetrievalNetwork
from lightning_retrieval.plain_data import arguments_of_file, check_format, class_path, describe
from lightning_retrieval.preparation.serialised import recorded_preparation
from lightning_retrieval.training.full_sharding import full_tensor, is_sharded, sharded_like

BASE_WEIGHTS = "base_weights"  # key of a checkpoint: the mean absolute value of each pretrained parameter
ADAPTER = ".lora_"  # part of the names of the parameters of adapters
MODULE = "lightning_retrieval.RetrievalModule"  # class path of the module whose networks `restored_network` reads
ONLY_TRAINED = ("loss.", "memory.")  # how the names of those states begin that a module has, but not its networks
# Keys of a checkpoint and names of attributes: the preparation of images in evaluation, and that of queries.
PREPARATIONS = ("preparation", "query_preparation")
LONGEST_PROBLEM = 200  # characters of torch's list of names in a message
STATES = ("state_dict", "current_model_state")  # `current_model_state` is written by Lightning's weight averaging


def load_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load the weights of a checkpoint into a module.

    Args:
        module: the module.
        state: its weights and buffers by name.
        strict: as for `load_state_dict`.

    Raises:
        ValueError: if the names or the shapes are those of another module.
    """
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        problem = " ".join(str(error).partition(":\n")[2].split()) or first_line(error)
        raise InvalidValue(
            "the checkpoint must have the weights of the model that it describes, which it has not "
            f"({problem[:LONGEST_PROBLEM]})",
            cure="take another checkpoint",
        ) from None


def rename_plainly_in(checkpoint: dict[str, Any]) -> None:
    """Remove what `torch.compile` adds to the names of weights from a checkpoint, which is changed in place."""
    for key in (*STATES, BASE_WEIGHTS):
        if key in checkpoint:
            checkpoint[key] = plain_state(checkpoint[key])


def remove_base_weights(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Remove the pretrained weights of adapters from a checkpoint.

    Args:
        module: the module that the checkpoint was made from.
        checkpoint: content of the checkpoint, which is changed in place.
    """
    names = _base_names(module)
    if not names:
        return
    checkpoint[BASE_WEIGHTS] = _fingerprints(module, names)
    for key in STATES:
        if key in checkpoint:
            checkpoint[key] = {name: value for name, value in checkpoint[key].items() if name not in names}


def add_base_weights(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Add the pretrained weights to a checkpoint of adapters, from the module that will load it.

    Args:
        module: the module, with its pretrained weights.
        checkpoint: content of the checkpoint, which is changed in place.

    Raises:
        ValueError: if the adapters were trained with another backbone or with other pretrained weights.
    """
    if BASE_WEIGHTS not in checkpoint:
        return
    names = checkpoint[BASE_WEIGHTS]
    found = module.state_dict()
    missing = [name for name in names if name not in found]
    if missing:
        raise InvalidValue(
            f"the checkpoint is one of adapters for another backbone: its weights have {missing[0]}, which this "
            "module does not have",
        )
    for name, value in _fingerprints(module, list(names)).items():
        if abs(value - names[name]) > 0.01 * abs(names[name]):
            rule = "the checkpoint must be loaded with the pretrained weights that its adapters were trained with"
            got = f"others (the mean absolute value of {name} is {value:.4g}, and was {names[name]:.4g})"
            raise InvalidValue(rule, got=got)
    for key in STATES:
        if key in checkpoint:
            checkpoint[key] = {**{name: found[name] for name in names}, **checkpoint[key]}


def _base_names(module: nn.Module) -> list[str]:
    """Names of the frozen parameters of backbones with adapters, if their pretrained weights can be loaded again."""
    names = []
    for path, part in module.named_modules():
        if not isinstance(part, Embedder) or part.lora is None or part.weights is None:
            continue
        prefix = ".".join(filter(None, (path, "backbone")))
        for name, value in part.backbone.named_parameters(prefix):
            if not value.requires_grad and ADAPTER not in name:  # adapters are frozen too if only a head is trained
                names.append(name)
    return names


def _fingerprints(module: nn.Module, names: list[str]) -> dict[str, float]:
    """The mean absolute value of each named parameter."""
    found: dict[str, Tensor] = dict(module.named_parameters())
    with torch.no_grad():
        means = [full_tensor(found[name]).abs().float().mean().cpu() for name in names]
    return dict(zip(names, map(float, means)))


def network_digest(module: Any) -> str:
    """SHA-256 of everything that the embedding of a candidate depends on, except the preparation of images.

    Modules with the same digest give the same embeddings, such as a module and one that was trained with the first
    one's `FrozenEmbedder`. Where pretrained weights came from, a name or a file, does not matter.

    Args:
        module: a `RetrievalModule`.

    Cost:
        All weights of the network are read once.
    """
    embedder, parts = module.embedder, {"whitening": module.whitening}
    if isinstance(embedder, FrozenEmbedder):
        embedder = embedder.embedder
    parts["embedder"] = embedder
    described: dict[str, Any] = {name: describe(part) for name, part in parts.items()}
    if isinstance(embedder, Embedder) and described["embedder"]["init_args"] is not None:
        described["embedder"]["init_args"]["weights"] = None
    described["scales"] = [list(module.eval_scales), module.eval_scales_pooling]
    described["forward"] = [_defining_class(module, name) for name in ("forward", "embed")]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name, part in parts.items():
        state = {}
        if part is not None:
            state = part.state_dict()
        for key, value in sorted(state.items()):
            digest.update(f"{name} {key} {getattr(value, 'dtype', None)} {getattr(value, 'shape', value)}".encode())
            if isinstance(value, Tensor):
                digest.update(full_tensor(value).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _defining_class(module: Any, method: str) -> str:
    """The class that defines a method of a module."""
    if isinstance(module, RetrievalNetwork):
        return MODULE
    for cls in type(module).__mro__:
        if method in vars(cls):
            return class_path(cls)
    return ""


@owned_by("RetrievalModule")
def restored_network(checkpoint: Any) -> RetrievalNetwork | None:
    """The networks of a checkpoint of `RetrievalModule`; None for any other file, such as one of a subclass.

    What only training needs is not built.

    Args:
        checkpoint: content of the checkpoint, as read by `torch.load`.

    Raises:
        ValueError: as for `restored_module`.
        TypeError: as for `restored_module`.
    """
    settings = _settings_of_module(checkpoint)
    if settings is None:
        return None
    rename_plainly_in(checkpoint)
    check_format(checkpoint)
    used = arguments_of_file(RetrievalNetwork, settings)
    with without_pretrained_weights():  # they would be downloaded, only to be replaced
        network = RetrievalNetwork(**used)
    add_base_weights(network, checkpoint)
    load_preparations(network, checkpoint)
    state = copy.copy(checkpoint["state_dict"])  # copies also `_metadata`
    for name in checkpoint["state_dict"]:
        if name.startswith(ONLY_TRAINED):
            del state[name]
    load_weights(network, state)
    return network


def _settings_of_module(checkpoint: Any) -> dict[str, Any] | None:
    """The hyperparameters of a checkpoint of `RetrievalModule`; None for any other file."""
    if not isinstance(checkpoint, dict) or checkpoint.get("hparams_name") not in (None, "", "kwargs"):
        return None
    saved, state = checkpoint.get("hyper_parameters"), checkpoint.get("state_dict")
    if not isinstance(saved, dict) or not isinstance(state, dict):
        return None
    settings = dict(saved)
    cls, instantiator = settings.pop("_class_path", MODULE), settings.pop("_instantiator", None)
    if cls != MODULE or instantiator not in (None, *INSTANTIATORS):
        return None
    return settings


def load_preparations(module: Any, checkpoint: Mapping[str, Any]) -> None:
    """Give a module the preparations of images that a checkpoint records, after checking them.

    Args:
        module: the module, or its networks.
        checkpoint: content of the checkpoint.
    """
    for name in PREPARATIONS:
        preparation = checkpoint.get(name)
        if preparation is not None:
            recorded_preparation(preparation)
        setattr(module, name, preparation)


class ShardedRunCheckpoints:
    """Replaces the checkpoint methods of a `ModelParallelStrategy`.

    Args:
        strategy: the `ModelParallelStrategy` of a Trainer.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.writes_shards = getattr(strategy, "sharded_checkpoints", False)

    def install(self) -> None:
        """Replace the strategy's methods by those of this object."""
        self.strategy.lightning_module_state_dict = self.module_state
        self.strategy.optimizer_state = self.optimizer_state
        self.strategy.load_checkpoint = self.load_checkpoint
        self.strategy.save_checkpoint = self.save_checkpoint

    def module_state(self) -> Any:
        """The state of the module for a checkpoint, see `_state`."""
        return self._state(self.strategy.lightning_module)

    def optimizer_state(self, optimizer: Any) -> Any:
        """The state of an optimizer for a checkpoint, see `_state`."""
        return self._state(optimizer)

    def _state(self, part: Any) -> Any:
        """The state of a part of the run; its tensors are full on the first process, unless shards are written."""
        state = part.state_dict()
        if not self.writes_shards:
            state = map_tensors(state, _full_on_first)
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: the shards of each process, or one file of the first process.

        Args:
            checkpoint: the checkpoint, with this process's shards or with full tensors.
            filepath: path of the checkpoint.
            storage_options: options of the strategy's `CheckpointIO`, which does not write shards.
        """
        if self.writes_shards:
            with owned_by(type(self.strategy.lightning_module).__name__):
                write_sharded_checkpoint(Path(filepath), checkpoint)
        elif rank() == 0:
            self.strategy.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, and give each process its shards of the weights and of the optimizers' states.

        Args:
            checkpoint_path: path of the checkpoint, which every process must be able to read.
            weights_only: as for `torch.load`.

        Raises:
            ValueError: if the checkpoint is damaged, or the path is a folder of another kind.
        """
        path = Path(checkpoint_path)
        module = without_wrappers(self.strategy.lightning_module)
        with owned_by(type(module).__name__):
            check_checkpoint_exists("ckpt_path", path)
            check_checkpoint(path)
            if is_sharded_checkpoint(path):
                checkpoint: dict[str, Any] = self._read_shards(path, weights_only)
            else:
                checkpoint = load_mapped(path, weights_only=weights_only)
            if module._trainer is not None:
                from lightning_retrieval.training.restored_states import keep_own_paths  # needs Lightning

                checkpoint = keep_own_paths(module.trainer, checkpoint)
            rename_plainly_in(checkpoint)
            module.unfilled -= checkpoint["state_dict"].keys()
            add_base_weights(module, checkpoint)
            current = module.state_dict()
            local = {name: sharded_like(current.get(name), value) for name, value in checkpoint["state_dict"].items()}
            module.load_state_dict(local, strict=module.strict_loading)
            for optimizer, saved in zip(self.strategy.optimizers, checkpoint.get("optimizer_states", ())):
                self._load_optimizer(optimizer, saved)
            return checkpoint

    def _read_shards(self, path: Path, weights_only: bool | None) -> Any:
        """The content of a sharded checkpoint; each process reads only its shards."""
        rest = read_rest(path, weights_only=weights_only)
        alike: dict[str, Any] = {
            f"state_dict/{name}": value for name, value in self.strategy.lightning_module.state_dict().items()
        }
        for index, (optimizer, saved) in enumerate(zip(self.strategy.optimizers, rest.get("optimizer_states", ()))):
            for number, parameter in _parameters_by_number(optimizer, saved):
                for name in saved["state"].get(number, ()):
                    alike[f"optimizer_states/{index}/state/{number}/{name}"] = parameter

        def allocate(name: str, tensor: Tensor) -> Any:
            """A tensor that is sharded like the parameter of this run."""
            like: Any = alike.get(name)
            if is_sharded(like) and like.shape == tensor.shape:
                return torch.empty_like(like, dtype=tensor.dtype)
            return torch.empty_like(tensor, device="cpu")

        return read_shards(path, rest, allocate)

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Load the state of an optimizer."""
        state = dict(saved["state"])
        for number, parameter in _parameters_by_number(optimizer, saved):
            if number in state:
                state[number] = self._sharded_state(state[number], parameter)
        optimizer.load_state_dict({**saved, "state": state})

    def _sharded_state(self, state: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
        """The state of one parameter; tensors of the parameter's shape are sharded like the parameter."""
        sharded = dict(state)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                sharded[name] = sharded_like(parameter, value)
        return sharded


def _parameters_by_number(optimizer: Optimizer, saved: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """The parameters of an optimizer with their numbers in its saved state: in the order of the groups."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return zip(numbers, parameters)


def _full_on_first(_: str, tensor: Any) -> Any:
    """In place of a sharded tensor, the full tensor on the first process, and an empty one on all others."""
    if not is_sharded(tensor):
        return tensor
    full = full_tensor(tensor)
    if rank() > 0:
        return full.new_empty(0)
    return full.cpu()
