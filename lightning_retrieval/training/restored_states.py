"""Which files the states in a checkpoint may make a run read, write and delete: only its own checkpoints.

A run that is continued restores the state of each `ModelCheckpoint`. The state has the paths of earlier checkpoints:
the callback deletes some of them, loggers upload them, and `ckpt_path="best"` loads one. A file must not choose what is
deleted, uploaded or loaded, so

- `keep_own_paths` keeps the folder of each checkpoint callback, and drops the paths of its state that are elsewhere;
- `VerifiedCheckpoints.remove_checkpoint` deletes nothing else, whoever asks for it.

Paths are compared after links and `..` have been resolved. No remote address is looked up for this.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_retrieval.backend import Checkpoint, ModelCheckpoint, get_filesystem, migrate_checkpoint, rank_zero_warn
from lightning_retrieval.checkpoints import holds_checkpoint
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue

BEST = "best_model_path"
OF_FOLDER = ("best_model_score", "kth_best_model_path", "kth_value", "best_k_models", "last_model_path")
LOCAL_PROTOCOLS = ("file://", "local://", "file:", "local:")  # prefixes that fsspec removes from a local path


def keep_own_paths(trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Drop the paths in the states of `ModelCheckpoint` callbacks that are not those of the run.

    Args:
        trainer: the Trainer that loads the checkpoint.
        checkpoint: content of the checkpoint, which is changed in place.

    Returns:
        The checkpoint in the form of the installed release of Lightning, which moves paths of its early releases from
        elsewhere in the file to the states of callbacks.
    """
    migrated: dict[str, Any] = migrate_checkpoint(checkpoint)[0]
    states = migrated.get("callbacks") or {}
    for callback in trainer.callbacks:
        if isinstance(callback, Checkpoint):
            for key in {callback.state_key, callback._legacy_state_key} & states.keys():
                states[key] = _with_own_paths(callback, states[key])
    return migrated


def _with_own_paths(callback: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a callback with the callback's own folder, and with no path of another one.

    The best checkpoint of an earlier run may be in another folder of this machine, because it is only read.
    """
    named = [state.get("kth_best_model_path"), state.get("last_model_path"), *state.get("best_k_models", ())]
    foreign = [path for path in named if path and not is_checkpoint_of(callback, path)]
    replaced = set(OF_FOLDER if foreign else ())
    for name, value in state.items():
        is_best = name == BEST and _is_local_checkpoint(value)
        if isinstance(value, str) and name != "dirpath" and _is_elsewhere(callback, value) and not is_best:
            replaced.add(name)
            foreign.append(value)
    if foreign:
        rank_zero_warn(
            f"{type(callback).__name__}: the checkpoint names files that are no checkpoints of this run, such as "
            f"{foreign[0]!r}: its own are in {getattr(callback, 'dirpath', None)}; they are ignored."
        )
    own = {name: getattr(callback, name, "") for name in replaced & state.keys()}
    if hasattr(callback, "dirpath"):  # a subclass may restore the folder that it writes to
        own["dirpath"] = callback.dirpath
    return {**state, **own}


def _is_elsewhere(callback: Any, value: str) -> bool:
    """Whether a text is a path or an address outside of the `dirpath` of a callback."""
    folder = getattr(callback, "dirpath", None)
    is_path = leaves_root(value) or "://" in value or "::" in value or value.startswith(("~", *LOCAL_PROTOCOLS))
    return is_path and not (folder and is_within(value, folder))


def is_checkpoint_of(callback: Any, path: Any) -> bool:
    """Whether a path is that of a checkpoint in the `dirpath` of a callback, judged by its name."""
    folder = getattr(callback, "dirpath", None)
    suffix = getattr(callback, "FILE_EXTENSION", ModelCheckpoint.FILE_EXTENSION)
    return bool(folder) and str(path).endswith(suffix) and is_within(path, folder)


def _is_local_checkpoint(path: Any) -> bool:
    """Whether a path is that of a checkpoint on this machine, not one that only fsspec would resolve."""
    return local_path(path) == Path(path) and holds_checkpoint(Path(path))


def local_path(path: Any) -> Path | None:
    """The path of this machine's file system that fsspec would use; None for an address of another file system."""
    text = str(path)
    for prefix in LOCAL_PROTOCOLS:
        if text.startswith(prefix):
            text = text.removeprefix(prefix)
            break
    if "::" in text or "://" in text:
        return None
    return Path(os.path.expanduser(text))


def is_within(path: Any, folder: Any) -> bool:
    """Whether a path is below a folder, both local or both remote; nothing remote is looked up."""
    local, local_folder = local_path(path), local_path(folder)
    if local is not None and local_folder is not None:
        return local_folder.resolve() in local.resolve().parents
    start = str(folder).rstrip("/") + "/"
    if local is not None or local_folder is not None or not str(path).startswith(start):
        return False
    rest = str(path).removeprefix(start)
    return ".." not in rest.split("/") and "::" not in rest and "://" not in rest


def is_file_or_checkpoint(path: Any) -> bool:
    """Whether a path or address is that of a file, a link or a sharded checkpoint, not that of any other folder."""
    local = local_path(path)
    if local is None:
        return not get_filesystem(path).isdir(str(path))
    return local.is_symlink() or not local.is_dir() or holds_checkpoint(local)


def check_links(callbacks: Sequence[Any]) -> None:
    """Raise if `ModelCheckpoint(save_last="link")` would delete a folder that is no checkpoint, to put a link there.

    Args:
        callbacks: the callbacks of a run that has begun.

    Raises:
        ValueError: if there is such a folder.
    """
    for callback in callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.save_last != "link":
            continue
        path = Path(callback.format_checkpoint_name({}, callback.CHECKPOINT_NAME_LAST))
        if not callback._enable_version_counter and not is_file_or_checkpoint(path):
            raise InvalidValue(
                f"ModelCheckpoint(save_last='link') replaces {path} by a link, but that is a folder and no checkpoint",
                cure="move it, or choose another `dirpath`",
            )
