"""Finds the newest checkpoint of an earlier run, for `fit --ckpt_path last` and `--run_folder`.

Lightning looks for the last checkpoint in the folder of the run, but a logger gives each run a new, empty folder. So
the neighbouring folders are searched for runs whose saved config has the same model, data and seed. With
`--run_folder`, a run and its continuations share one folder.
"""

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_retrieval.callbacks.csv_logger import newest_checkpoint
from lightning_retrieval.checkpoints import checkpoints_in, saved_at
from lightning_retrieval.invalid import InvalidValue, MissingFile
from lightning_retrieval.plain_data import FORMAT

CONFIG = "config.yaml"
COMPARED = ("model", "data", "seed_everything")  # sections of a config that must be equal
FORMAT_LINE = f"lightning_retrieval format {FORMAT}"  # a comment at the start of the config of a run


def find_last_checkpoint(trainer: Any, config: str) -> Path | None:
    """Find the newest checkpoint of the earlier runs with the same model, data and seed.

    Args:
        trainer: the `pytorch_lightning.Trainer` of the new run, which has not begun.
        config: config of the new run, as YAML.

    Returns:
        Path of the checkpoint. The result is None for a first run: a `ModelCheckpoint` has a `dirpath` that holds no
            checkpoint, and no earlier run has the same model, data and seed. The result is also None if a `dirpath` is
            a remote address, because Lightning itself searches remote addresses.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
    """
    folder, runs = _runs(trainer)
    same = [run for run in runs if _is_same_config(run / CONFIG, config)]
    folders_of_callbacks = [
        callback.dirpath for callback in trainer.checkpoint_callbacks if getattr(callback, "dirpath", None)
    ]
    if any("://" in str(path) for path in folders_of_callbacks):
        return None
    checkpoints: list[Path] = []
    for path in [*map(Path, folders_of_callbacks), *(run / "checkpoints" for run in same)]:
        checkpoints += checkpoints_in(path)
    if checkpoints:
        return max(checkpoints, key=saved_at)
    is_first_run = bool(folders_of_callbacks) and not same
    if is_first_run:
        return None
    elsewhere = "".join(f", nor has {path}, the `dirpath` of a ModelCheckpoint" for path in folders_of_callbacks)
    raise MissingFile(
        f"`--ckpt_path last` must have a checkpoint of an earlier run of this config, but {folder} has {len(runs)} "
        f"runs, {len(same)} of them with the same model, data and seed, and none of these has a checkpoint{elsewhere}",
        cure="leave out the option to begin a new run, or give the path of a checkpoint",
    )


def find_checkpoint_of_run(trainer: Any, config: str) -> Path | None:
    """Find the newest checkpoint of the run in the folder `--run_folder`.

    Args:
        trainer: the `pytorch_lightning.Trainer`, before the run begins or continues.
        config: the present config, as YAML.

    Returns:
        Path of the checkpoint; None if the run is new or was killed before its first checkpoint.

    Raises:
        ValueError: if the folder holds a run of another model or other data, or only damaged checkpoints.
    """
    folder = Path(trainer.logger.log_dir)
    folders_of_callbacks = [
        callback.dirpath for callback in trainer.checkpoint_callbacks if getattr(callback, "dirpath", None)
    ]
    found = newest_checkpoint([folder / "checkpoints", *folders_of_callbacks])
    is_begun = found is not None and (folder / CONFIG).exists()
    if is_begun and not _is_same_config(folder / CONFIG, config):
        rule = "`--run_folder` must be the folder of a run of this model, data and seed, or one without a checkpoint"
        raise InvalidValue(rule, got=f"{folder}, whose {CONFIG} has others", cure="choose another folder")
    return found


def _runs(trainer: Any) -> tuple[Path, list[Path]]:
    """The folder that contains all runs, and the folder of each run; without a logger, both are the same folder."""
    logger = trainer.logger
    root = Path(trainer.default_root_dir)
    if logger is None:
        return root, [root]
    folder = Path(logger.save_dir or root) / str(logger.name)
    return folder, sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))


def _is_same_config(path: Path, config: str) -> bool:
    """Whether a saved config has the same model, data and seed."""
    try:
        if not path.is_file():  # reading a FIFO need never end
            return False
        saved = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return all(_section(saved, name) == _section(config, name) for name in COMPARED)


def check_format(config: str) -> None:
    """Raise if the config of a run has the number of another format.

    Args:
        config: the text of the config, or of any other one, which has no number.

    Raises:
        yaml.YAMLError: if the number is not `FORMAT`.
    """
    found = re.search(r"^# lightning_retrieval format (\d+)$", config, re.MULTILINE)
    if found is not None and found[0] != f"# {FORMAT_LINE}":
        raise yaml.YAMLError(f"it has the format {found[1]}, but this release of lightning-retrieval reads {FORMAT}")


def _section(config: str, name: str) -> list[str]:
    """The lines of one section of a config, which is indented YAML."""
    lines: list[str] = []
    inside = False
    for line in config.splitlines():
        if line[:1] not in ("", " "):
            inside = line.startswith(f"{name}:")
        if inside:
            lines.append(line)
    return lines
