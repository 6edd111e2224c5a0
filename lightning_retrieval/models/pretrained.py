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
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from lightning_retrieval.checks import check_path, first_line, first_of, short_repr
from lightning_retrieval.compiled import without_wrappers
from lightning_retrieval.files import is_of_others, is_system_error, new_files, writing
from lightning_retrieval.first_checks import check_weights_exist
from lightning_retrieval.invalid import InvalidValue, MissingFile, Unreachable, owned_by
from lightning_retrieval.models.weight_files import load_file, tensors_by_name, tensors_of_network
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.plain_data import check_plain_data

Self = TypeVar("Self", bound="PretrainedModule")

DEFAULT_WEIGHTS = "DEFAULT"
# Prefixes that wrappers add to the names of weights: DistributedDataParallel, torch.compile, and training modules.
PREFIXES = ("module.", "_orig_mod.", "embedder.", "model.", "backbone.")
RUNNING_STATISTICS = ("running_mean", "running_var")
HUB_TIMEOUT = 10  # seconds after which the hub counts as unreachable
SHOWN_NAMES = 3  # number of names that an error message shows
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


def check_cached_of_hub(what: str, repository: str, filename: str | None) -> None:
    """Raise if weights on the Hugging Face hub would have to be downloaded, though they may not be.

    Older versions of timm and huggingface_hub ask the hub also if they are offline.

    Args:
        what: the weights, for the error message.
        repository: name on the hub, with the revision after an @ if it is not the newest one.
        filename: name of the file; None for one of the usual names.
    """
    if may_be_downloaded():
        return
    from huggingface_hub import try_to_load_from_cache

    name, _, revision = repository.partition("@")
    for file in (filename, "model.safetensors", "pytorch_model.bin"):
        if file and isinstance(try_to_load_from_cache(name, file, revision=revision or None), str):
            return
    raise hub_error("weights", what, FileNotFoundError("no file of them is in the cache of the hub"))


def are_skipped() -> bool:
    """Whether backbones currently get random weights or, on the meta device, none."""
    return _skipped.get() or torch.empty(0).is_meta


def is_rebuilding() -> bool:
    """Whether backbones are currently rebuilt with the arguments in a file."""
    return _rebuilding.get()


def load_local_file(path: str, backbone: nn.Module, *, optional: tuple[str, ...] = (), prefix: str = "") -> None:
    """Load a local file of weights into a backbone.

    Args:
        path: path of a file of safetensors or of `torch.save`, in which the names may be longer, as those of other
            programs are, see `tensors_of_network`.
        backbone: the backbone; the file must hold each of its parameters and running statistics.
        optional: prefixes of names in the file that the backbone may lack, such as those of a classifier.
        prefix: a prefix that is removed from the names in the file, like those in `PREFIXES`. Files of a model with a
            classifier may have this prefix before the names of the backbone.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is damaged, or its names or shapes do not match the backbone.
    """
    names = backbone.state_dict().keys()
    tensors = read_weights(path)
    found = without_prefixes(tensors, names, (*PREFIXES, prefix))
    if not names & found.keys():
        found = tensors_of_network(path, tensors, backbone) or found
    kept = {name: value for name, value in found.items() if not name.startswith(optional)}
    check_loaded(path, "this backbone", backbone, [name for name in names if name not in kept], tensors)
    # Files of older releases of a model also hold buffers with indices. Today's models compute these indices.
    unknown = [name for name, value in kept.items() if name not in names and value.is_floating_point()]
    if unknown:
        got = f"{path}, which has {len(unknown)} more tensors ({first_of(unknown, SHOWN_NAMES)})"
        raise InvalidValue("must be a file with the weights of this backbone", argument="weights", got=got)
    try:
        backbone.load_state_dict(kept, strict=False)
    except RuntimeError as error:
        raise other_weights(path, "this backbone", error) from None


def without_prefixes(
    tensors: Mapping[str, Tensor], names: Collection[str], prefixes: tuple[str, ...] = PREFIXES
) -> dict[str, Tensor]:
    """Remove the prefixes that wrappers of a network have added to the names of tensors.

    If a prefix is removed, tensors whose names do not begin with it, such as those of a head or a loss, are dropped.

    Args:
        tensors: maps names in the file to tensors.
        names: names of the network's tensors.
        prefixes: prefixes to remove, in any order and number, until the network has one of the names. A prefix is kept
            if names of the network begin with it.
    """
    found = dict(tensors)
    while not any(name in names for name in found):
        for prefix in prefixes:
            inside = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
            if prefix and inside and not any(name.startswith(prefix) for name in names):
                break
        else:
            return found
        found = inside
    return found


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


def _check_kinds(path: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise if tensors of a file are complex or quantised, which the parameters of a network are not."""
    complex_names = [name for name, value in tensors.items() if value.is_complex()]
    if complex_names:
        rule = "must be a file whose tensors are of real numbers"
        got = f"{path} with {tensors[complex_names[0]].dtype} ({first_of(complex_names, SHOWN_NAMES)})"
        raise InvalidValue(rule, argument="weights", got=got)
    quantized = list(filter(lambda name: _is_quantized(tensors[name]), tensors))
    if quantized:
        rule = "must be a file whose tensors are not quantised"
        got = f"{path} with {tensors[quantized[0]].dtype} ({first_of(quantized, SHOWN_NAMES)})"
        raise InvalidValue(rule, argument="weights", got=got, cure="take the weights before quantisation")


def read_weights(path: str, keys: tuple[str, ...] = ("state_dict", "model")) -> dict[str, Tensor]:
    """The tensors of a file by name; nothing is unpickled that could run code.

    Args:
        path: path of the file.
        keys: entries of the file that may hold the tensors; the first existing entry is used. If the file has none of
            them and no tensors, those of all entries are read, under the names of both.
    """
    file = check_path("weights", path, owner="Embedder")
    check_weights_exist(file)
    try:
        if file.suffix == ".safetensors":
            content = load_safetensors().load_file(file)
        else:
            content = load_file(file)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # damaged files raise errors of many types
        if is_system_error(error):
            raise
        rule = "must be a file of safetensors or of torch.save with tensors only"
        got = f"{path} ({type(error).__name__}: {first_line(error)})"
        cure = ""
        if isinstance(error, UnpicklingError):
            cure = "write the state_dict of the network alone to a file, with the program that it is from"
        raise InvalidValue(rule, argument="weights", got=got, cure=cure) from None
    for key in keys:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        rule = "must be a file of tensors by name"
        raise InvalidValue(rule, argument="weights", got=f"{path} ({short_repr(content)})")
    tensors = tensors_by_name(content)
    if not tensors:  # without tensors, timm would download its own weights
        found = ", ".join(sorted(map(str, content))[:SHOWN_NAMES])
        rule = "must be a file of tensors by name"
        got = f"{path}, which has none, but the entries {found}"
        raise InvalidValue(rule, argument="weights", got=got, cure="save the state_dict of the network")
    _check_kinds(path, tensors)
    return tensors


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


def _is_quantized(values: Tensor) -> bool:
    """Whether values are numbers of eight bits or less, which mean nothing without their scales."""
    is_float8 = values.is_floating_point() and values.element_size() == 1
    return values.is_quantized or is_float8 or values.dtype == torch.int8


def hub_error(argument: str, what: str, error: Exception) -> ValueError:
    """The error for a failed download from a hub, with advice for offline use.

    Args:
        argument: the argument that requested the download.
        what: a description of the requested data.
        error: the error of the hub.
    """
    cure = (
        "offline, give the path of a local file or folder, or download it once with a network, after which it is read "
        "from the cache"
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


def load_safetensors() -> Any:
    """Import and return `safetensors.torch`.

    Raises:
        ModuleNotFoundError: if safetensors is not installed.
    """
    with optional_import("safetensors must be installed: pip install 'lightning-retrieval[hub]'.", "Embedder"):
        import safetensors.torch
    return safetensors.torch


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
            ValueError: if the backbone was given as a module, which a file cannot describe, the folder is a file, or
                `config.json` in it is that of another program.
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
        if not path.is_dir() and any(map(Path.is_file, (path, *path.parents))):
            rule = "must be a folder"
            raise InvalidValue(rule, "Embedder", "folder", got=f"{path}, which is a file or is inside one")
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
        try:
            tensors, digest = _read_embedder(weights)
            if digest in (None, _digest_of(arguments)):  # earlier releases, and other programs, record no digest
                with without_pretrained_weights():
                    embedder = cls(**arguments)
                embedder.load_state_dict(tensors)
                return embedder.eval()
        except ModuleNotFoundError:
            raise
        except Exception as error:  # constructors and safetensors raise errors of many types
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
            ConnectionError: if the hub cannot be reached, or does not accept the files.
            ModuleNotFoundError: if huggingface_hub or safetensors is not installed.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            hub = load_hub()
            try:
                hub.create_repo(repo_id, private=private, exist_ok=True)
                commit = hub.upload_folder(repo_id=repo_id, folder_path=Path(folder), commit_message=message)
            except Exception as error:  # errors of the network or the hub, or an invalid name
                rule = f"the hub must be reachable and accept the model as {short_repr(repo_id)}"
                cure = "log in with `hf auth login`, or use save_pretrained without a network"
                raise Unreachable(rule, "Embedder", got=f"an error ({first_line(error)})", cure=cure) from None
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
    from safetensors import safe_open

    with safe_open(weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, (file.metadata() or {}).get(CONFIG_DIGEST)


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
