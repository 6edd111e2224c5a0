"""The number of a file's format, and the arguments that moved since a format was written.

A checkpoint has the number of its format, and so has the config of a run; a file without a number has format 1. Only
files are converted. Constructors accept the present arguments alone.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from lightning_retrieval.checks import short_repr
from lightning_retrieval.invalid import InvalidValue

FORMAT = 2
FORMAT_KEY = "lightning_retrieval_format"  # key of a checkpoint
_LIBRARY = __name__.partition(".")[0]


class Moved(NamedTuple):
    """Where an argument of format 1 is now: an object that another argument accepts has it under a name.

    Args:
        argument: the present argument.
        name: the name in the object; empty if the present argument itself has the value.
        default: the default in format 1.
    """

    argument: str
    name: str
    default: Any = None

    def __str__(self) -> str:
        return f"{self.argument}.{self.name}".rstrip(".")


MOVED = {
    "gradient_clip_val": Moved("updates", "gradient_clip_val"),
    "gradient_clip_algorithm": Moved("updates", "gradient_clip_algorithm", "norm"),
    "head_lr_factor": Moved("updates", "head_lr_factor", 1.0),
    "layer_decay": Moved("updates", "layer_decay", 1.0),
    "freeze_backbone_epochs": Moved("updates", "freeze_backbone_epochs", 0),
    "memory_mode": Moved("memory", "mode", "one_list"),
    "memory_weight": Moved("memory", "weight"),
    "query_embedder": Moved("sides", "query_embedder"),
    "directions": Moved("sides", "directions", "queries"),
    "query_lr_factor": Moved("sides", "query_lr_factor", 1.0),
    "frozen_side": Moved("sides", "frozen_side"),
    "gather_dtype": Moved("gather", ""),
}


def format_of(checkpoint: Mapping[str, Any]) -> int:
    """The number of the format of a checkpoint.

    Args:
        checkpoint: content of the checkpoint.

    Raises:
        ValueError: if the format is unknown.
    """
    number = checkpoint.get(FORMAT_KEY, 1)
    if type(number) is not int or not 1 <= number <= FORMAT:
        rule = f"a checkpoint must have a format from 1 to {FORMAT}"
        cure = "update lightning-retrieval, which may read it in a later version"
        raise InvalidValue(rule, got=short_repr(number), cure=cure)
    return number


def moved_arguments(accepted: Collection[str]) -> dict[str, Moved]:
    """The arguments of format 1 that moved into another one, by the names that a constructor accepts now.

    An argument of a user's class stays where it is, even if it has the name of an argument that moved.
    """
    return {old: moved for old, moved in MOVED.items() if old not in accepted and moved.argument in accepted}


def upgraded(settings: Mapping[str, Any], accepted: Collection[str]) -> dict[str, Any]:
    """The arguments of a constructor in a file of format 1, as the constructor accepts them now.

    Arguments that are new, or that a file without a number has already in the present form, do not change.

    Args:
        settings: plain data by name.
        accepted: the names that the constructor accepts.

    Example:
        >>> upgraded({"seed": 1, "head_lr_factor": 1.0, "gather_dtype": "float16"}, ("seed", "updates", "gather"))
        {'seed': 1, 'gather': 'float16'}
    """
    present = dict(settings)
    values: dict[str, dict[str, Any]] = {}
    defaults: dict[str, dict[str, Any]] = {}
    for old, (argument, name, default) in moved_arguments(accepted).items():
        values.setdefault(argument, {})[name] = present.pop(old, default)
        defaults.setdefault(argument, {})[name] = default
    if "memory" in values and "memory" in present:
        present["memory"] = _with_mode(present["memory"], values["memory"], defaults["memory"])
    for argument, describe in (("updates", _updates), ("sides", _sides), ("gather", _gather)):
        if values.get(argument) != defaults.get(argument):
            present[argument] = describe(values[argument])
    return present


def _description(name: str, arguments: dict[str, Any] | None) -> dict[str, Any]:
    return {"class_path": f"{_LIBRARY}.{name}", "init_args": arguments}


def _with_mode(memory: Any, values: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """The description of a memory with its mode and weight. A memory of a user need not accept the defaults."""
    if not isinstance(memory, dict) or not isinstance(memory.get("init_args"), dict):
        return memory
    if values == defaults and not str(memory.get("class_path")).startswith(f"{_LIBRARY}."):
        return memory
    if values.get("weight") is None:
        values = {**values, "weight": 1.0}
    return {**memory, "init_args": {**values, **memory["init_args"]}}


def _updates(values: dict[str, Any]) -> dict[str, Any]:
    return _description("Updates", values)


def _gather(values: dict[str, Any]) -> Any:
    return values[""]


def _sides(values: dict[str, Any]) -> dict[str, Any]:
    """The description of two sides, without arguments if the network of queries cannot be rebuilt."""
    network = values.get("query_embedder")
    if network is None:
        return _description("TwoSides", {"directions": values.get("directions")})
    if isinstance(network, dict) and network.get("init_args", {}) is None:
        return _description("TwoNetworks", None)
    return _description("TwoNetworks", values)
