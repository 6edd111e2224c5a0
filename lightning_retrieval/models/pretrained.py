"""Pretrained weights: skipped while a checkpoint is loaded, read from a local file, and errors of a hub."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import check_path, first_line, short_repr
from lightning_retrieval.optional_packages import optional_import

DEFAULT_WEIGHTS = "DEFAULT"
FILE_SUFFIXES = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".pth.tar")
_skipped: ContextVar[bool] = ContextVar("pretrained_weights_skipped", default=False)


@contextmanager
def without_pretrained_weights() -> Iterator[None]:
    """Build backbones with random weights, whatever is asked for: those of a checkpoint replace them afterwards."""
    token = _skipped.set(True)
    try:
        yield
    finally:
        _skipped.reset(token)


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
        backbone: every parameter and buffer must be in the file.
        optional: prefixes of names in the file that the backbone need not have, such as those of a classifier.
        prefix: removed from the names in the file; files of a model with a classifier have it before each name of the
            backbone.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, or its names or shapes are not those of the backbone.
    """
    found = {name.removeprefix(prefix): value for name, value in read_weights(owner, path).items()}
    kept = {name: value for name, value in found.items() if not name.startswith(optional)}
    try:
        backbone.load_state_dict(kept)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{owner}: `weights` must be a file with the weights of this backbone, got {path} ({reason[:300]})."
        ) from None


def read_weights(owner: str, path: str) -> dict[str, Tensor]:
    """The tensors of a file by their names; nothing is unpickled that could run code.

    Args:
        owner: prefix of error messages.
        path: of the file.
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
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise ValueError(f"{owner}: `weights` must be a file of tensors by name, got {path} ({short_repr(content)}).")
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


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
