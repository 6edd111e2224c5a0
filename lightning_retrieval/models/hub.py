"""Save an embedder to a folder, load it from a folder or from the Hugging Face hub, and push it there.

    FOLDER/config.json        the constructor's arguments, and the preparation of images
    FOLDER/model.safetensors  the weights

Both are plain data: loading runs no code of the file. Nothing but `push_to_hub` and a name that is no folder needs a
network.
"""

import copy
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_retrieval.checks import check_bool, check_path, check_string, first_line, short_repr
from lightning_retrieval.models.pretrained import load_safetensors, without_pretrained_weights
from lightning_retrieval.optional_packages import optional_import
from lightning_retrieval.plain_data import check_plain_data

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT, VERSION = "lightning-retrieval embedder", 1
OWNER = "Embedder"  # prefix of error messages
Self = TypeVar("Self", bound="PretrainedModule")


class PretrainedModule(nn.Module):
    """What an `Embedder` does with files: `save_pretrained`, `from_pretrained` and `push_to_hub`."""

    backbone: nn.Module

    def init_args(self) -> dict[str, Any] | None:
        """The constructor's arguments as plain values, or None if there are others."""
        raise NotImplementedError

    def merge_lora(self: Self) -> Self:
        """Add adapters to the weights."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the embedder to a folder: its arguments and the preparation of images as JSON, its weights beside them.

        Adapters (LoRA) are merged into the weights.

        Args:
            folder: created if it does not exist; `config.json` and `model.safetensors` in it are replaced.

        Raises:
            ValueError: if the backbone was given as a module, which a file cannot hold.
            ModuleNotFoundError: if safetensors is not installed.
        """
        merged = copy.deepcopy(self).merge_lora()
        arguments = merged.init_args()
        if arguments is None:
            raise ValueError(
                "Embedder: `backbone` must be a name, so that save_pretrained can write how to build it, got a module "
                f"({type(self.backbone).__name__}); save its state_dict instead."
            )
        save_model(OWNER, folder, arguments, merged)

    @classmethod
    def from_pretrained(cls: type[Self], name: str | Path, *, revision: str | None = None) -> Self:
        """The embedder that `save_pretrained` wrote, in eval mode. No other weights are downloaded.

        Args:
            name: a folder, which needs no network, or `user/name` on the Hugging Face hub.
            revision: branch, tag or commit on the hub; if None, the newest.

        Raises:
            FileNotFoundError: if a file is missing, or the hub cannot be reached or has no such model.
            ValueError: if a file is damaged, is not that of an embedder, or sets what a file may not set.
            ModuleNotFoundError: if safetensors, or for a name on the hub huggingface_hub, is not installed.
        """
        config, weights = find_files(OWNER, name, revision)
        arguments = read_config(OWNER, config)
        check_plain_data(OWNER, "init_args", arguments)
        if arguments.get("lora") is not None:  # adapters need weights of elsewhere; save_pretrained merges them
            raise ValueError(f"{OWNER}: {config} must not have `lora`, got {short_repr(arguments['lora'])}.")
        try:
            with without_pretrained_weights():
                embedder = cls(**arguments)
        except TypeError as error:
            raise ValueError(
                f"{OWNER}: {config} must hold arguments that this release of lightning-retrieval knows, got others "
                f"({first_line(error)})."
            ) from None
        load_weights(OWNER, weights, embedder)
        return embedder.eval()

    def push_to_hub(self, repo_id: str, *, private: bool = False, message: str = "Add the embedder") -> str:
        """Write the embedder to a repository of the Hugging Face hub, as `save_pretrained` does to a folder.

        Args:
            repo_id: `user/name`; created if it does not exist.
            private: whether a new repository is private.
            message: of the commit.

        Returns:
            The address of the commit.

        Raises:
            ConnectionError: if the hub cannot be reached, or does not accept it.
            ModuleNotFoundError: if huggingface_hub or safetensors is not installed.
        """
        check_bool(OWNER, "private", private)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(OWNER, Path(folder), repo_id, private, message)


def load_hub(owner: str) -> Any:
    """The module `huggingface_hub`.

    Raises:
        ModuleNotFoundError: if it is not installed.
    """
    with optional_import(
        f"{owner}: huggingface_hub must be installed: pip install 'lightning-retrieval[hub]'; or give a folder."
    ):
        import huggingface_hub
    return huggingface_hub


def save_model(owner: str, folder: Any, init_args: Mapping[str, Any], module: nn.Module) -> None:
    """Write the two files of a model, each in one atomic step, with the permissions of any new file.

    Args:
        owner: prefix of error messages.
        folder: created if it does not exist.
        init_args: plain values.
        module: its parameters and buffers are written.

    Raises:
        ValueError: if the folder is a file.
    """
    safetensors = load_safetensors(owner)
    path = check_path(owner, "folder", folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{owner}: `folder` must be a folder, got {path}, which is a file or is inside one.") from None
    tensors: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        tensors[name] = value.detach().cpu().contiguous().clone()  # safetensors refuses tensors that share a storage
    config = {"format": FORMAT, "version": VERSION, "init_args": dict(init_args)}
    # `safetensors.torch.save_file` makes files that nobody else may read.
    _replace(path / WEIGHTS, safetensors.save(tensors, metadata={"format": "pt"}))
    _replace(path / CONFIG, (json.dumps(config, indent=1) + "\n").encode())


def find_files(owner: str, name: Any, revision: str | None) -> tuple[Path, Path]:
    """The two files of a model in a local folder, or in the cache of the hub, which downloads them at the first use.

    Args:
        owner: prefix of error messages.
        name: a folder, or `user/name` on the hub.
        revision: branch, tag or commit on the hub.

    Raises:
        FileNotFoundError: if the folder lacks a file, or the hub cannot be reached or has no such model.
    """
    folder = Path(check_path(owner, "name", name))
    if folder.is_dir():
        for file in (CONFIG, WEIGHTS):
            if not (folder / file).is_file():
                raise FileNotFoundError(f"{owner}: {folder} must hold {CONFIG} and {WEIGHTS}, but {file} is missing.")
        return folder / CONFIG, folder / WEIGHTS
    hub = load_hub(owner)
    try:
        config = hub.hf_hub_download(str(name), CONFIG, revision=revision)
        weights = hub.hf_hub_download(str(name), WEIGHTS, revision=revision)
    except Exception as error:  # of the network, of the hub, or of a name that cannot be one
        raise FileNotFoundError(
            f"{owner}: `name` must be a folder that save_pretrained wrote, or a model on the hub that can be reached, "
            f"got {str(name)!r} ({first_line(error)}); without a network, give a folder."
        ) from None
    return Path(config), Path(weights)


def read_config(owner: str, path: Path) -> dict[str, Any]:
    """The constructor's arguments in a config file.

    Raises:
        ValueError: if it is not the config of an embedder that this release can read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and (content.get("format"), content.get("version")) == (FORMAT, VERSION):
        arguments = content.get("init_args")
        if isinstance(arguments, dict):
            return arguments
    raise ValueError(
        f"{owner}: {path} must be the config of an Embedder (version {VERSION}), which save_pretrained writes, got "
        "something else."
    )


def load_weights(owner: str, path: Path, module: nn.Module) -> None:
    """Read the weights of a model from a file of safetensors.

    Raises:
        ValueError: if the file is damaged, or its weights are those of another model.
    """
    safetensors = load_safetensors(owner)
    try:
        module.load_state_dict(safetensors.load_file(path))
    except Exception as error:  # safetensors has an error of its own
        raise ValueError(
            f"{owner}: {path} must hold the weights of its config's model ({first_line(error)})."
        ) from None


def push_folder(owner: str, folder: Path, repo_id: str, private: bool, message: str) -> str:
    """Upload a folder to the hub; the address of the commit.

    Raises:
        ConnectionError: if the hub cannot be reached, or does not accept it.
    """
    check_string(owner, "repo_id", repo_id)
    hub = load_hub(owner)
    try:
        hub.create_repo(repo_id, private=private, exist_ok=True)
        commit = hub.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
    except Exception as error:  # of the network, of the hub, or of a name that cannot be one
        raise ConnectionError(
            f"{owner}: the hub must be reachable and accept the model as {short_repr(repo_id)}, got an error "
            f"({first_line(error)}); log in with `hf auth login`, or use save_pretrained without a network."
        ) from None
    return str(commit)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
