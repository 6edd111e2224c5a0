"""What the states in a checkpoint may make a run read, overwrite and delete.

A checkpoint holds the states of callbacks and loops, which Lightning restores as they are. Among them are paths: a
`ModelCheckpoint` deletes the paths that it finds in its state, and loggers upload them. States are data of the file, so

- a path that is to be deleted or written must be that of a checkpoint in the `dirpath` of the callback, as the user or
  the Trainer has set it;
- the best checkpoint of an earlier run may be elsewhere on this machine, because it is only read;
- all other paths are dropped, with one warning. No remote address is looked up for this.

Paths are compared after links and `..` have been resolved.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_retrieval.backend import Checkpoint, ModelCheckpoint, get_filesystem, migrate_checkpoint, rank_zero_warn
from lightning_retrieval.checkpoints import holds_checkpoint
from lightning_retrieval.checks import first_line, first_of, short_repr
from lightning_retrieval.files import leaves_root
from lightning_retrieval.invalid import InvalidValue

LOCAL_PROTOCOLS = ("file://", "local://", "file:", "local:")  # prefixes that fsspec removes from a local path
BEST = "best_model_path"
CHANGED = ("kth_best_model_path", "last_model_path")  # paths that a ModelCheckpoint may delete, besides BEST
SCORES = ("best_model_score", "current_score", "kth_value")
KEPT_BEST = "best_k_models"
OF_FOLDER = ("best_model_score", "kth_best_model_path", "kth_value", KEPT_BEST, "last_model_path")
# Optimizers of torch whose states have the shape of their parameter, or are single numbers: the states that each needs.
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
ELEMENTWISE = {
    torch.optim.ASGD: ("step", "eta", "mu", "ax"),
    torch.optim.Adadelta: ("step", "square_avg", "acc_delta"),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.Adam: MOMENTS,
    torch.optim.AdamW: MOMENTS,
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.NAdam: (*MOMENTS, "mu_product"),
    torch.optim.RAdam: MOMENTS,
    torch.optim.RMSprop: ("step", "square_avg"),
    torch.optim.Rprop: ("step", "prev", "step_size"),
    torch.optim.SGD: (),
}
# For a setting of such optimizers that is switched on, the state that they need in addition.
WITH_SETTING = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
COUNTERS = ("step", "eta", "mu", "mu_product")  # states of such optimizers that are single numbers
LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
MOST_STEPS = 2**53  # no run counts so far


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
        try:
            return local_folder.resolve() in local.resolve().parents
        except (OSError, RuntimeError, ValueError):  # a path with a loop of links, or with a null character
            return False
    start = str(folder).rstrip("/") + "/"
    if local is not None or local_folder is not None or not str(path).startswith(start):
        return False
    rest = str(path).removeprefix(start)
    return ".." not in rest.split("/") and "::" not in rest and "://" not in rest


def restrict_states(trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Check the states of loops in a checkpoint, and drop what states of callbacks may not name.

    This is a collective call: the first process decides for all, because only it may see the folders.

    Args:
        owner: prefix of warnings and error messages.
        trainer: the Trainer that loads the checkpoint.
        checkpoint: content of the checkpoint, which is changed in place.

    Returns:
        The checkpoint in the form of the installed release of Lightning, which moves paths of earlier releases from
        elsewhere in the file to the states of callbacks.

    Raises:
        ValueError: if the states are not those of callbacks and loops, a count is not one of a run, or the version is
            no version.
    """
    _check_readable(checkpoint)
    checkpoint = _migrated(checkpoint)
    if checkpoint.get("loops"):
        _check_loops(trainer, _states("loops", checkpoint["loops"]))
    if trainer.state.fn == "fit":
        _check_can_be_continued(trainer, checkpoint)
    for state in _list("optimizer_states", checkpoint.get("optimizer_states") or []):
        _check_optimizer(state)
    for state in _list("lr_schedulers", checkpoint.get("lr_schedulers") or []):
        _check_scheduler(state)
    if checkpoint.get("callbacks") is None:
        return checkpoint
    states = dict(_states("callbacks", checkpoint["callbacks"]))
    dropped: list[Any] = []
    for callback in trainer.callbacks:
        for key in {callback.state_key, callback._legacy_state_key}:
            if states.get(key):
                _check_callback(callback, states[key])
                states[key] = _restricted(callback, _states("callbacks", states[key]), dropped)
    checkpoint["callbacks"] = trainer.strategy.broadcast(states)
    if dropped:
        rank_zero_warn(
            f"{type(trainer.lightning_module).__name__}: the states of callbacks in the checkpoint name paths that "
            "are no checkpoints of this run, "
            f"{first_of(list(map(short_repr, dropped)), 3)}; they are ignored, and nothing there is read, "
            "written or deleted."
        )
    return checkpoint


def _check_readable(checkpoint: Any) -> None:
    """Raise unless Lightning can read the version and the progress of the loops in a checkpoint.

    Args:
        checkpoint: content of the checkpoint, with or without them.

    Raises:
        ValueError: if the version is no version, or a part of the progress is missing.
    """
    if not isinstance(checkpoint, Mapping):
        raise InvalidValue("a checkpoint must be a dict, as Lightning writes it", got=short_repr(checkpoint))
    version = checkpoint.get("pytorch-lightning_version", "0")
    try:
        Version(version)
    except (InvalidVersion, TypeError):
        rule = "a checkpoint must have a version such as '2.6.0' as pytorch-lightning_version"
        raise InvalidValue(rule, got=short_repr(version), cure="take another checkpoint") from None
    pending = [("loops", checkpoint.get("loops") or {})]
    while pending:
        name, value = pending.pop()
        is_progress = name.endswith("progress") and not name.endswith("optim_progress")
        if not isinstance(value, Mapping) or (is_progress and not {"total", "current"} <= value.keys()):
            rule = "a checkpoint must have dicts with the progress of its loops"
            got = f"{short_repr(value)} for {name}"
            raise InvalidValue(rule, got=got, cure="take another checkpoint, or load only the weights")
        if name == "loops" or name.endswith(("_loop", "progress")):
            pending += [(str(key), part) for key, part in value.items() if str(key).endswith(("_loop", "progress"))]


def _migrated(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint in the form of the installed release of Lightning."""
    try:
        migrated: dict[str, Any] = migrate_checkpoint(checkpoint)[0]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        rule = "the checkpoint must have the states that its release of Lightning wrote"
        got = f"others ({type(error).__name__}: {first_line(error)})"
        raise InvalidValue(rule, got=got, cure="take another checkpoint") from None
    return migrated


def _states(name: str, value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        rule = f"the checkpoint must have states by name in `{name}`"
        raise InvalidValue(rule, got=short_repr(value), cure="take another checkpoint")
    return value


def _check_can_be_continued(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    """Raise if a checkpoint has only weights, so that no run can continue from it."""
    needed = ["lr_schedulers"]
    if trainer.strategy.lightning_restore_optimizer:
        needed.append("optimizer_states")
    for name in needed:
        if name not in checkpoint:
            rule = "a run can only continue from the checkpoint of a run"
            cure = "begin a new run with the module that `load_from_checkpoint` returns"
            raise InvalidValue(rule, got=f"one without {name}, such as one of the weights only", cure=cure)


def _list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        rule = f"the checkpoint must have a list as `{name}`"
        raise InvalidValue(rule, got=short_repr(value), cure="take another checkpoint")
    return value


def _check_optimizer(state: Any) -> None:
    """Raise unless `Optimizer.load_state_dict` can read the state of an optimizer."""
    parts = _states("optimizer_states", state)
    if parts and parts.keys().isdisjoint(("state", "param_groups")):
        return  # of an optimizer with a form of its own
    for group in _list("optimizer_states.param_groups", parts.get("param_groups")):
        settings = _states("optimizer_states.param_groups", group)
        for number in _list("optimizer_states.param_groups.params", settings.get("params")):
            if not isinstance(number, (int, str)):
                raise _not_a_number("optimizer_states.param_groups.params", number)
    of_parameters = _states("optimizer_states.state", parts.get("state"))
    for name, one in of_parameters.items():
        _states(f"optimizer_states.state.{name}", one)
    counts_steps = any("step" in one for one in of_parameters.values())
    for one in filter(None, of_parameters.values()):
        step = one.get("step")
        is_count = isinstance(step, (int, float)) or (isinstance(step, Tensor) and _is_score(step))
        if counts_steps and not (is_count and 0 <= step <= MOST_STEPS):
            raise _not_a_number("optimizer_states.state.step", step)


def _check_loops(trainer: Any, loops: Mapping[Any, Any]) -> None:
    """Raise unless the states of the Trainer's loops are those of a run."""
    needed = f"{trainer.state.fn}_loop"  # the only one that Lightning restores; early releases have no others
    for name in LOOPS:
        if name in loops or name == needed:
            _check_progress(name, loops.get(name), getattr(trainer, name).state_dict())


def _check_progress(name: str, state: Any, current: Mapping[str, Any]) -> None:
    """Raise unless the counts in the state of a loop are numbers that a run can reach.

    Args:
        name: name of the state.
        state: the state, or a part of it.
        current: the same of this run, whose values are of the right kinds.
    """
    state = _states(name, state)
    is_progress = "progress" in name  # otherwise an earlier release may have had other parts
    if is_progress and state.keys() != current.keys():
        rule = f"the checkpoint must have {', '.join(current)} in {name}"
        raise InvalidValue(rule, got=short_repr(list(state)), cure="take another checkpoint")
    for key in state.keys() & current.keys():
        value, like = state[key], current[key]
        if isinstance(like, dict):
            _check_progress(f"{name}.{key}", value, like)
        elif not _is_number_like(like, value):
            raise _not_a_number(f"{name}.{key}", value)


def _check_scheduler(state: Any) -> None:
    """Raise if the state of a scheduler, whose values become attributes, would replace a method or count too far."""
    state = _states("lr_schedulers", state)
    for name in state:
        if name == "optimizer" or callable(getattr(LRScheduler, str(name), None)):
            rule = "the checkpoint must have the settings of schedulers in `lr_schedulers`"
            got = f"{name!r}, which is a part of each scheduler"
            raise InvalidValue(rule, got=got, cure="take another checkpoint")
    if not isinstance(state.get("last_epoch", 0), int):
        raise _not_a_number("lr_schedulers.last_epoch", state["last_epoch"])
    for name, value in state.items():
        if isinstance(value, int) and abs(value) > MOST_STEPS:
            raise _not_a_number(f"lr_schedulers.{name}", value)


def _check_callback(callback: Any, state: Any) -> None:
    """Raise if numbers in the state of one of Lightning's callbacks are of another kind than in its present state."""
    is_of_lightning = type(callback).__module__.startswith(Checkpoint.__module__.partition(".")[0])
    if not is_of_lightning or isinstance(callback, Checkpoint):
        return
    pending = [(type(callback).__name__, _states("callbacks", state), callback.state_dict())]
    while pending:
        name, found, current = pending.pop()
        for key in found.keys() & current.keys():
            value, like, full_name = found[key], current[key], f"{name}.{key}"
            if type(like) is int:  # such as a time before the start
                like = float(like)
            if isinstance(like, dict):
                pending.append((full_name, _states(full_name, value), like))
            elif not _is_number_like(like, value):
                raise _not_a_number(full_name, value)


def _is_number_like(like: Any, value: Any) -> bool:
    """Whether a value is a number of the kind of another value; True if the other value is no number."""
    if isinstance(like, Tensor):
        return _is_score(value)
    if type(like) is int:
        return type(value) is int and 0 <= value <= MOST_STEPS
    if type(like) is float:
        return isinstance(value, (int, float)) and 0 <= value <= MOST_STEPS
    return type(like) is type(value) or not isinstance(like, bool)


def _not_a_number(name: str, value: Any) -> ValueError:
    return InvalidValue(
        f"the checkpoint must have a number that a run can reach as {name}",
        got=short_repr(value),
        cure="take another checkpoint",
    )


def check_optimizer_states(optimizers: Sequence[Optimizer]) -> None:
    """Raise, before training begins, if settings are no numbers or the state of a parameter has another shape.

    Args:
        optimizers: the optimizers of a run, after its checkpoint, if any, has been loaded.

    Raises:
        ValueError: if there is such a setting or state. States are compared if the optimizer is in `ELEMENTWISE`.
    """
    for optimizer in optimizers:
        needed = ELEMENTWISE.get(type(optimizer))
        for group in optimizer.param_groups:
            _check_settings(optimizer, group)
            if needed is not None:
                further = [state for setting, state in WITH_SETTING.items() if group.get(setting)]
                for parameter in group["params"]:
                    _check_state(parameter, optimizer.state.get(parameter), (*needed, *further))
        if needed is not None and not all(isinstance(key, Tensor) for key in optimizer.state):
            rule = "the checkpoint must have states of the parameters of the optimizer in `optimizer_states`"
            raise InvalidValue(rule, got="others too", cure="take another checkpoint")


def _check_settings(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Raise if a setting of a group of parameters is missing or of another kind than its default value."""
    for name, default in optimizer.defaults.items():
        is_missing = type(optimizer) in ELEMENTWISE and name not in group
        if is_missing or not _is_setting_like(default, group.get(name, default)):
            raise _not_a_number(f"optimizer_states.param_groups.{name}", group.get(name))


def _is_setting_like(default: Any, value: Any) -> bool:
    """Whether a setting of an optimizer is of the kind of its default value: a bool, a number or a tuple of numbers."""
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, (int, float)):
        return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)
    if isinstance(default, tuple):
        is_tuple = isinstance(value, (tuple, list)) and len(value) == len(default)
        return is_tuple and all(map(_is_setting_like, default, value))
    return True


def _check_state(parameter: Tensor, state: Mapping[str, Any] | None, needed: Sequence[str]) -> None:
    """Raise if an optimizer's state of a parameter lacks a tensor, or has one of another shape with many elements."""
    if not state:  # the parameter was not trained yet
        return
    for name in {*needed, *state}:
        value = state.get(name)
        is_allowed = isinstance(value, Tensor) or (name in COUNTERS and isinstance(value, (int, float)))
        if not is_allowed and (name in needed or value is not None):
            rule = f"the checkpoint must have a tensor for each parameter as the state {name!r} of its optimizer"
            raise InvalidValue(rule, got=short_repr(value), cure="take another checkpoint")
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape:
            raise InvalidValue(
                f"the state {name!r} of the optimizer in the checkpoint must have the shape of its parameter, "
                f"{tuple(parameter.shape)}",
                got=tuple(value.shape),
                cure="take another checkpoint",
            )


def _restricted(callback: Any, state: dict[Any, Any], dropped: list[Any]) -> dict[Any, Any]:
    """The state of a callback without the paths that it may not name.

    Args:
        callback: the callback.
        state: its state in the checkpoint.
        dropped: list to which the dropped paths are added.
    """
    if not isinstance(callback, Checkpoint) and BEST not in state:
        return state
    own_folder = getattr(callback, "dirpath", None)
    folder = state.get("dirpath", own_folder)  # of an earlier run, whose paths are not restored below
    suffix = getattr(callback, "FILE_EXTENSION", ModelCheckpoint.FILE_EXTENSION)
    restricted, known = dict(state), len(dropped)
    if isinstance(callback, ModelCheckpoint):
        restricted = {BEST: callback.best_model_path, "best_model_score": callback.best_model_score, **state}
    for name, value in state.items():
        if name in CHANGED:
            restricted[name] = _path_or_empty(value, _is_checkpoint_in(value, folder, suffix), dropped)
        elif name == BEST:
            may_be_named = _is_checkpoint_in(value, own_folder, suffix) or _is_readable(value)
            restricted[name] = _path_or_empty(value, may_be_named, dropped)
        elif name == KEPT_BEST:
            restricted[name] = _kept_best(value, folder, suffix, dropped)
        elif name in SCORES:
            if not _is_score(value):
                restricted[name] = getattr(callback, name, None)
        elif name not in ("dirpath", "monitor"):
            restricted[name] = _without_paths(value, own_folder, dropped)
    if folder != own_folder:
        _keep_folder(callback, restricted, dropped)
    elif isinstance(callback, ModelCheckpoint):
        _make_consistent(callback, restricted, changed=len(dropped) > known)
    return restricted


def _path_or_empty(path: Any, may_be_named: bool, dropped: list[Any]) -> str:
    """A path from a file, or an empty string, with which Lightning says that there is none."""
    if not path:
        return ""
    if not may_be_named:
        dropped.append(path)
        return ""
    return str(path)


def _keep_folder(callback: Any, state: dict[Any, Any], dropped: list[Any]) -> None:
    """Keep the callback's own `dirpath` and its own paths there, if the state is that of a run in another folder.

    `ModelCheckpoint` compares the two folders and warns if they differ. A subclass may take that of the state.
    """
    for name in {*OF_FOLDER} & state.keys():
        state[name] = getattr(callback, name, None)
    if getattr(type(callback), "load_state_dict", None) is not ModelCheckpoint.load_state_dict:
        dropped.append(state["dirpath"])
        state["dirpath"] = getattr(callback, "dirpath", None)


def _is_readable(path: Any) -> bool:
    """Whether a path from a file is that of a checkpoint on this machine."""
    is_plain = isinstance(path, str) and local_path(path) == Path(path)  # not one that only fsspec would resolve
    return is_plain and holds_checkpoint(Path(path))


def _is_checkpoint_in(path: Any, folder: Any, suffix: str) -> bool:
    """Whether a path from a file is that of a checkpoint in a folder, which may have been deleted already."""
    if not isinstance(path, str) or not path.endswith(suffix) or folder is None or not is_within(path, folder):
        return False
    return local_path(path) is None or is_file_or_checkpoint(path)


def _kept_best(value: Any, folder: Any, suffix: str, dropped: list[Any]) -> dict[str, Any]:
    """The scores of the best checkpoints by path, without those that may not be deleted."""
    kept: dict[str, Any] = {}
    if not isinstance(value, dict):
        return kept
    for path, score in value.items():
        if _is_score(score) and score is not None and _is_checkpoint_in(path, folder, suffix):
            kept[path] = score
        else:
            dropped.append(path)
    return kept


def _is_score(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_meta
    return value is None or isinstance(value, (int, float))


def _without_paths(value: Any, folder: Any, dropped: list[Any]) -> Any:
    """A value of a subclass without the absolute paths and addresses that are not in the folder of the callback."""
    if isinstance(value, dict):
        names = [key for key in value if not _is_foreign(key, folder, dropped)]
        return {key: _without_paths(value[key], folder, dropped) for key in names}
    if type(value) in (list, tuple, set):
        items = [item for item in value if not _is_foreign(item, folder, dropped)]
        return type(value)(_without_paths(item, folder, dropped) for item in items)
    if _is_foreign(value, folder, dropped):
        return ""
    return value


def _is_foreign(value: Any, folder: Any, dropped: list[Any]) -> bool:
    """Whether a value is a path outside of a folder; if so, it is added to the dropped paths."""
    if not isinstance(value, str) or value == str(folder):
        return False
    is_address = "://" in value or "::" in value or value.startswith(("~", *LOCAL_PROTOCOLS))
    is_path = is_address or leaves_root(value)
    if not is_path or (folder is not None and is_within(value, folder)):
        return False
    dropped.append(value)
    return True


def _make_consistent(callback: Any, state: dict[Any, Any], *, changed: bool) -> None:
    """Choose the best and the worst of the kept checkpoints again, if the paths of the state are no longer theirs."""
    kept, most = state.get(KEPT_BEST, {}), max(callback.save_top_k, 1)
    worst_is_known = len(kept) < most or state.get("kth_best_model_path") in kept
    if worst_is_known and not changed:
        return
    best, worst = min, max
    if callback.mode == "max":
        best, worst = max, min
    state.update({"kth_best_model_path": "", "kth_value": callback.kth_value})
    if len(kept) >= most:
        state["kth_best_model_path"] = _first_by(worst, kept)
        state["kth_value"] = kept[state["kth_best_model_path"]]
    if not state.get(BEST):
        state["best_model_score"] = None
        if kept:
            state[BEST] = _first_by(best, kept)
            state["best_model_score"] = kept[state[BEST]]


def _first_by(choose: Any, scores: Mapping[str, Any]) -> str:
    chosen: str = choose(scores, key=lambda path: float(scores[path]))
    return chosen


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
        if (
            not isinstance(callback, ModelCheckpoint)
            or callback.save_last != "link"
            or callback._enable_version_counter
        ):
            continue
        path = Path(callback.format_checkpoint_name({}, callback.CHECKPOINT_NAME_LAST))
        if not is_file_or_checkpoint(path):
            raise InvalidValue(
                f"ModelCheckpoint(save_last='link') replaces {path} by a link, but that is a folder and no checkpoint",
                cure="move it, or choose another `dirpath`",
            )
