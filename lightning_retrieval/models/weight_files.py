"""Files of weights, also those that other programs wrote: their tensors, by the names of a network.

A training script writes the network inside of its own objects, so that the names of the tensors begin with those of
attributes (`module.encoder_q.`), or the tensors lie in an entry of the file (`teacher`), beside states of the optimizer
and the script's settings. Nothing of a file is run.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import first_line, first_of, short_repr
from lightning_retrieval.files import is_system_error
from lightning_retrieval.first_checks import check_weights_exist
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.paths import check_path

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
RUNNING_STATISTICS = ("running_mean", "running_var")
THIS_BACKBONE = "this backbone"  # its name in error messages
SHOWN_NAMES = 3  # number of names that an error message shows


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


def read_weights(path: str, keys: tuple[str, ...] = ("state_dict", "model")) -> dict[str, Tensor]:
    """The tensors of a file by name; nothing is unpickled that could run code.

    Args:
        path: path of the file.
        keys: entries of the file that may hold the tensors; each is looked for in the one before. If the file has none
            of them and no tensors, those of all entries are read, under the names of both.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is damaged, holds other objects than tensors, plain values and those of `SETTINGS`, or
            has no tensors, or quantised ones.
    """
    file = check_path("weights", path, owner="Embedder")
    check_weights_exist(file)
    try:
        if file.suffix == ".safetensors":
            content = load_safetensors().load_file(file)
        else:
            with torch.serialization.safe_globals(_STAND_INS):
                content = torch.load(file, map_location="cpu", weights_only=True)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # damaged files raise errors of many types
        if is_system_error(error):
            raise
        rule = "must be a file of safetensors or of torch.save with tensors only"
        raise InvalidValue(rule, argument="weights", got=f"{path} ({first_line(error)})") from None
    for key in keys:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = _tensors_by_name(content)
    if not tensors:  # without tensors, timm would download its own weights
        rule = "must be a file of tensors by name"
        got = f"{path}, which has none ({short_repr(content)})"
        raise InvalidValue(rule, argument="weights", got=got, cure="save the state_dict of the network")
    for name, value in tensors.items():
        if _is_quantized(value):
            rule = "must be a file whose tensors are not quantised"
            got = f"{path} with {value.dtype} ({name})"
            raise InvalidValue(rule, argument="weights", got=got, cure="take the weights before quantisation")
    return tensors


def load_safetensors() -> Any:
    """Import and return `safetensors.torch`.

    Raises:
        ModuleNotFoundError: if safetensors is not installed.
    """
    with optional_import("safetensors must be installed: pip install 'lightning-retrieval[hub]'.", "Embedder"):
        import safetensors.torch
    return safetensors.torch


def _is_quantized(values: Tensor) -> bool:
    """Whether values are numbers of eight bits or less, which mean nothing without their scales."""
    is_float8 = values.is_floating_point() and values.element_size() == 1
    return values.is_quantized or is_float8 or values.dtype == torch.int8


def _tensors_by_name(content: Any) -> dict[str, Tensor]:
    """The tensors of a dict or, if it has none, those of the dicts in it, under the names of both."""
    if not isinstance(content, Mapping):
        return {}
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


def load_local_file(path: str, backbone: nn.Module, *, optional: tuple[str, ...] = ()) -> None:
    """Load a local file of weights into a backbone.

    Args:
        path: path of a file of safetensors or of `torch.save`, see `tensors_of_network` for the names in it.
        backbone: the backbone; the file must hold each of its parameters and running statistics.
        optional: prefixes of names in the file that the backbone may lack, such as those of a classifier.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is damaged, or its names or shapes do not match the backbone.
    """
    names = backbone.state_dict().keys()
    tensors = read_weights(path)
    found = tensors_of_network(path, tensors, backbone)
    kept = {name: value for name, value in found.items() if not name.startswith(optional)}
    check_loaded(path, THIS_BACKBONE, backbone, names - kept.keys(), tensors)
    check_unknown(path, kept, kept.keys() - names)
    try:
        backbone.load_state_dict(kept, strict=False)
    except RuntimeError as error:
        raise other_weights(path, THIS_BACKBONE, error) from None


def tensors_of_network(path: str, tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """The tensors of a network in a file, by the network's own names.

    What the names begin with is removed, such as `module.encoder_q.`: that with which the most names of the network are
    in the file. Tensors whose names do not begin with it, such as those of a head or of an optimizer, are left out. The
    network may also be in a `Sequential` of its children, as in `Sequential(*list(resnet.children())[:-2])`, whose
    names are numbers.

    Args:
        path: path of the file, for the error message.
        tensors: the tensors of the file by name.
        network: the network.

    Raises:
        ValueError: if the file holds several such networks, none of which is the one that is evaluated.
    """
    own = list(network.state_dict())
    names = dict(zip(own, own))
    parameters = dict(network.named_parameters())  # averaged weights, as of a teacher, may lack counters of batches
    counts = _counts_of_prefixes(tensors, parameters)
    in_sequence = _names_in_sequence(network, own)
    needed = [other for other, name in in_sequence.items() if name in parameters]
    counts_in_sequence = _counts_of_prefixes(tensors, needed)
    if max(counts_in_sequence.values(), default=0) > max(counts.values(), default=0):
        names, counts = in_sequence, counts_in_sequence
    if not counts:
        return dict(tensors)
    prefix = _chosen(path, [prefix for prefix, count in counts.items() if count == max(counts.values())])
    inside = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return {names.get(name, name): value for name, value in inside.items()}


def _counts_of_prefixes(tensors: Iterable[str], names: Collection[str]) -> Counter[str]:
    """With how many names of a network each beginning of the names in a file continues."""
    counts = Counter[str]()
    for tensor in tensors:
        prefix, rest = "", tensor
        while rest:
            counts[prefix] += rest in names
            part, _, rest = rest.partition(".")
            prefix += f"{part}."
    return +counts


def _names_in_sequence(network: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The names of tensors in a `Sequential` of the network's children, each with the network's own name."""
    positions = {child: position for position, (child, _) in enumerate(network.named_children())}
    found = {}
    for name in names:
        child, _, rest = name.partition(".")
        if child in positions:
            found[f"{positions[child]}.{rest}"] = name
    return found


def _chosen(path: str, prefixes: list[str]) -> str:
    """The prefix of the only network, or of the one of several that is evaluated; raises if there is no such one."""
    evaluated = [prefix for prefix in prefixes if any(part in prefix for part in EVALUATED)]
    if len(prefixes) > 1 and len(evaluated) != 1:
        rule = "must be a file with the weights of one network"
        got = f"{path}, which has those of {len(prefixes)}, whose names begin with {first_of(prefixes)}"
        raise InvalidValue(rule, argument="weights", got=got, cure="write the state_dict of one to a file of its own")
    return (evaluated or prefixes)[0]


def check_loaded(
    path: str, network: str, backbone: nn.Module, missing: Collection[str], tensors: Collection[str] = ()
) -> None:
    """Raise if a parameter or a running statistic of a backbone has not been loaded from a file or a hub.

    Args:
        path: path of the file, or what was loaded from the hub, for the error message.
        network: name of the backbone in error messages.
        backbone: the backbone, without a classifier.
        missing: names of the backbone's tensors that have not been loaded.
        tensors: names of the tensors in the file, for the message if none was loaded.
    """
    needed = [name for name, _ in backbone.named_parameters()]
    needed += [name for name, _ in backbone.named_buffers() if name.rpartition(".")[2] in RUNNING_STATISTICS]
    absent = [name for name in needed if name in missing]
    if absent:
        rule = f"must be a file with the weights of {network}"
        got = f"{path}, loaded {len(needed) - len(absent)} of {len(needed)} tensors"
        cure = f"it has no {first_of(absent, SHOWN_NAMES)}"
        if len(absent) == len(needed) and tensors:
            cure += f", but {first_of(list(tensors), SHOWN_NAMES)}"
        raise InvalidValue(rule, argument="weights", got=got, cure=cure)


def check_unknown(path: str, tensors: Mapping[str, Tensor], unknown: Collection[str]) -> None:
    """Raise if a file has parameters that a backbone lacks, which are those of a larger network.

    Args:
        path: path of the file.
        tensors: the tensors of the file by name.
        unknown: the names that the backbone lacks.
    """
    # Files of older releases of a model also hold buffers with indices. Today's models compute these indices.
    more = [name for name in tensors if name in unknown and tensors[name].is_floating_point()]
    if more:
        got = f"{path}, which has {len(more)} more tensors ({first_of(more, SHOWN_NAMES)})"
        raise InvalidValue(f"must be a file with the weights of {THIS_BACKBONE}", argument="weights", got=got)


def other_weights(path: str, network: str, error: Exception) -> ValueError:
    """The error for a file whose tensors do not match the names or shapes of a network.

    Args:
        path: path of the file.
        network: name of the network in error messages.
        error: the error of torch.
    """
    reason = " ".join(str(error).split())
    return InvalidValue(
        f"must be a file with the weights of {network}", argument="weights", got=f"{path} ({reason[:300]})"
    )
