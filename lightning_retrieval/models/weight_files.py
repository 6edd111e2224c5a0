"""Files of weights that other programs wrote: how a network is named in them, and what else they hold.

A training script writes the network inside of its own objects, so that the names of the tensors begin with those of
attributes (`module.encoder_q.`), or the tensors lie in an entry of the file (`teacher`), beside states of the optimizer
and the script's settings. Nothing of a file is run.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import first_of
from lightning_retrieval.invalid import InvalidValue

# Classes and functions of the settings and results that training scripts store beside the tensors, which are skipped.
SETTINGS = (
    "argparse.Namespace",
    "numpy.dtype",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
)
# Parts of names of the network that is evaluated, in files with two: DINO, MoCo, MoCo v3 and averaged weights.
EVALUATED = ("teacher.", "encoder_q.", "base_encoder.", "ema.")
DEPTH = 4  # of the entries that are searched for tensors


class _Skipped:
    """Stands for an object of a file; keeps nothing of it."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _stand_in(name: str) -> type[_Skipped]:
    """A class that stands for the one with this name."""
    module, _, own = name.rpartition(".")
    return type(own, (_Skipped,), {"__module__": module, "__qualname__": own})


_STAND_INS: list[Any] = list(map(_stand_in, SETTINGS))


def load_file(file: Path) -> Any:
    """The content of a file of `torch.save`, in which objects of `SETTINGS` mean nothing.

    Args:
        file: path of the file.

    Raises:
        UnpicklingError: if the file holds other objects than tensors, plain values and those of `SETTINGS`.
    """
    with torch.serialization.safe_globals(_STAND_INS):
        return torch.load(file, map_location="cpu", weights_only=True)


def tensors_by_name(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The tensors of a dict or, if it has none, those of the dicts in it, under the names of both.

    Args:
        content: the content of a file, or an entry of it.
    """
    direct = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    return direct or _tensors_below(content, "", set())


def _tensors_below(content: Mapping[Any, Any], prefix: str, visited: set[int]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if id(content) in visited or prefix.count(".") > DEPTH:
        return found
    visited.add(id(content))
    for name, value in content.items():
        if isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
        elif isinstance(value, Mapping):
            found |= _tensors_below(value, f"{prefix}{name}.", visited)
    return found


def tensors_of_network(path: str, tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor] | None:
    """The tensors of a network that a file holds under longer names, by the network's own names; None if it does not.

    Tensors with other names, such as those of a head or of an optimizer, are left out. The network may also be in a
    `Sequential` of its children, as in `Sequential(*list(resnet.children())[:-2])`, whose names are numbers.

    Args:
        path: path of the file, for the error message.
        tensors: the tensors of the file by name.
        network: the network, of which the file must have each parameter.

    Raises:
        ValueError: if the file holds several such networks, none of which is the one that is evaluated.
    """
    parameters = dict(network.named_parameters())
    own = list(network.state_dict())
    for names in (dict(zip(own, own)), _names_in_sequence(network, own)):
        needed = [other for other, name in names.items() if name in parameters]
        prefixes = _prefixes(tensors, needed)
        if prefixes:
            prefix = _chosen(path, prefixes)
            inside = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            return {names.get(name, name): value for name, value in inside.items()}
    return None


def _names_in_sequence(network: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The names of tensors in a `Sequential` of the network's children, each with the network's own name."""
    positions = {child: position for position, (child, _) in enumerate(network.named_children())}
    found = {}
    for name in names:
        child, _, rest = name.partition(".")
        if child in positions:
            found[f"{positions[child]}.{rest}"] = name
    return found


def _prefixes(tensors: Mapping[str, Tensor], needed: Collection[str]) -> list[str]:
    """What the names of the tensors begin with, if a name with each of the needed ends follows it."""
    first = next(iter(needed), "")
    found = []
    for name in tensors:
        prefix = name.removesuffix(first)
        is_first = first and f".{name}".endswith(f".{first}")
        if is_first and all(f"{prefix}{other}" in tensors for other in needed):
            found.append(prefix)
    return found


def _is_evaluated(prefix: str) -> bool:
    return any(part in prefix for part in EVALUATED)


def _chosen(path: str, prefixes: list[str]) -> str:
    """The prefix of the only network, or of the one of several that is evaluated; raises if there is no such one."""
    evaluated = list(filter(_is_evaluated, prefixes))
    if len(prefixes) > 1 and len(evaluated) != 1:
        rule = "must be a file with the weights of one network"
        got = f"{path}, which has those of {len(prefixes)}, whose names begin with {first_of(prefixes)}"
        raise InvalidValue(rule, argument="weights", got=got, cure="write the state_dict of one to a file of its own")
    return (evaluated or prefixes)[0]
