"""Pretrained weights: skipped while a checkpoint is loaded, read from a local file, and errors of a hub."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import check_path, first_line, short_repr
from lightning_retrieval.optional_packages import optional_import

DEFAULT_WEIGHTS = "DEFAULT"
FILE_SUFFIXES = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".pth.tar")
# What wrappers write before the names of weights: DistributedDataParallel, torch.compile, and modules of training.
PREFIXES = ("module.", "_orig_mod.", "embedder.", "model.", "backbone.")
RUNNING_STATISTICS = ("running_mean", "running_var")
SHOWN_NAMES = 3  # in error messages
_rebuilding: ContextVar[bool] = ContextVar("rebuilding_from_a_file", default=False)
_skipped: ContextVar[bool] = ContextVar("pretrained_weights_skipped", default=False)


@contextmanager
def without_pretrained_weights() -> Iterator[None]:
    """Build backbones with random weights, whatever is asked for: those of a file replace them afterwards.

    The arguments of the backbones come from that file, so those that would fetch something or run code are invalid.
    """
    tokens = _rebuilding.set(True), _skipped.set(True)
    try:
        yield
    finally:
        _rebuilding.reset(tokens[0])
        _skipped.reset(tokens[1])


@contextmanager
def with_pretrained_weights() -> Iterator[None]:
    """Load pretrained weights also while a checkpoint is loaded, since it does not hold them."""
    token = _skipped.set(False)
    try:
        yield
    finally:
        _skipped.reset(token)


def are_skipped() -> bool:
    """Whether backbones are built with random weights."""
    return _skipped.get()


def is_rebuilding() -> bool:
    """Whether backbones are rebuilt from what a file says."""
    return _rebuilding.get()


def is_local_file(weights: str | None) -> bool:
    """Whether `weights` is the path of a file, which exists or ends like a file of weights."""
    if not isinstance(weights, str):
        return False
    return weights.endswith(FILE_SUFFIXES) or os.path.isfile(os.path.expanduser(weights))


def load_local_file(
    owner: str, path: str, backbone: nn.Module, *, optional: tuple[str, ...] = (), prefix: str = ""
) -> None:
    """Load a local file of weights into a backbone.

    Args:
        owner: prefix of error messages.
        path: a file of safetensors or of `torch.save`; its entries may be under `state_dict` or `model`.
        backbone: every parameter and running statistic must be in the file.
        optional: prefixes of names in the file that the backbone need not have, such as those of a classifier.
        prefix: removed from the names in the file, as `PREFIXES` are; files of a model with a classifier have it before
            each name of the backbone.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, or its names or shapes are not those of the backbone.
    """
    own = backbone.state_dict().keys()
    found = without_prefixes(read_weights(owner, path), own, (*PREFIXES, prefix))
    kept = {name: value for name, value in found.items() if not name.startswith(optional)}
    check_loaded(owner, path, "this backbone", backbone, [name for name in own if name not in kept])
    # Files of older releases hold buffers of indices that are computed today.
    unknown = [name for name, value in kept.items() if name not in own and value.is_floating_point()]
    if unknown:
        raise ValueError(
            f"{owner}: `weights` must be a file with the weights of this backbone, got {path}, which has "
            f"{len(unknown)} tensors more ({_shown(unknown)})."
        )
    try:
        backbone.load_state_dict(kept, strict=False)
    except RuntimeError as error:
        raise other_weights(owner, path, "this backbone", error) from None


def without_prefixes(
    tensors: Mapping[str, Tensor], own: Collection[str], prefixes: tuple[str, ...] = PREFIXES
) -> dict[str, Tensor]:
    """The tensors of a file without what wrappers of a network write before its names.

    What else is in a file with such a prefix, such as a head or a loss, is left out.

    Args:
        tensors: by their names in the file.
        own: the names of the network's tensors.
        prefixes: that are removed, in any order and number, unless the network has the name or names with them.
    """
    found = dict(tensors)
    while not any(name in own for name in found):
        for prefix in prefixes:
            inside = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
            if prefix and inside and not any(name.startswith(prefix) for name in own):
                break
        else:
            return found
        found = inside
    return found


def check_loaded(owner: str, path: str, network: str, backbone: nn.Module, missing: Collection[str]) -> None:
    """Raise if a parameter or a running statistic of a backbone has not been loaded from a file.

    Args:
        owner: prefix of error messages.
        path: of the file.
        network: what error messages call the backbone.
        backbone: without a classifier.
        missing: names of its tensors that have not been loaded.
    """
    needed = [name for name, _ in backbone.named_parameters()]
    needed += [name for name, _ in backbone.named_buffers() if name.rpartition(".")[2] in RUNNING_STATISTICS]
    absent = [name for name in needed if name in missing]
    if absent:
        raise ValueError(
            f"{owner}: `weights` must be a file with the weights of {network}, got {path}, loaded "
            f"{len(needed) - len(absent)} of {len(needed)} tensors; it has no {_shown(absent)}."
        )


def other_weights(owner: str, path: str, network: str, error: Exception) -> ValueError:
    """The error for a file whose tensors have other names or shapes than those of a network.

    Args:
        owner: prefix of error messages.
        path: of the file.
        network: what error messages call the network.
        error: of torch.
    """
    reason = " ".join(str(error).split())
    return ValueError(f"{owner}: `weights` must be a file with the weights of {network}, got {path} ({reason[:300]}).")


def _shown(names: list[str]) -> str:
    """The first of some names."""
    shown = ", ".join(names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        shown += ", ..."
    return shown


def read_weights(owner: str, path: str, keys: tuple[str, ...] = ("state_dict", "model")) -> dict[str, Tensor]:
    """The tensors of a file by their names; nothing is unpickled that could run code.

    Args:
        owner: prefix of error messages.
        path: of the file.
        keys: entries of the file that may hold the tensors, the first one that does.
    """
    file = check_path(owner, "weights", path)
    if not file.is_file():
        raise FileNotFoundError(f"{owner}: `weights` must be a file of weights, got {path}, which does not exist.")
    try:
        if file.suffix == ".safetensors":
            content = load_safetensors(owner).load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # damaged files raise errors of many kinds
        raise ValueError(
            f"{owner}: `weights` must be a file of safetensors or of torch.save with tensors only, got {path} "
            f"({type(error).__name__}: {first_line(error)})."
        ) from None
    for key in keys:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise ValueError(f"{owner}: `weights` must be a file of tensors by name, got {path} ({short_repr(content)}).")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:  # for which timm would fetch the weights of its hub
        found = ", ".join(sorted(map(str, content))[:SHOWN_NAMES])
        raise ValueError(
            f"{owner}: `weights` must be a file of tensors by name, got {path}, which has none, but the entries "
            f"{found}; save the state_dict of the network."
        )
    return tensors


def hub_error(owner: str, argument: str, what: str, error: Exception) -> ValueError:
    """The error for something that a hub did not give, with what to do offline.

    Args:
        owner: prefix of error messages.
        argument: that asked for it.
        what: that was asked for.
        error: of the hub.
    """
    return ValueError(
        f"{owner}: `{argument}` asks for {what}, which could not be loaded ({type(error).__name__}: "
        f"{first_line(error)}); offline, give the path of a local file or folder, or download it once with a network, "
        "after which it is read from the cache."
    )


def load_safetensors(owner: str) -> Any:
    """The module `safetensors.torch`.

    Raises:
        ModuleNotFoundError: if it is not installed.
    """
    with optional_import(f"{owner}: safetensors must be installed: pip install 'lightning-retrieval[hub]'."):
        import safetensors.torch
    return safetensors.torch
