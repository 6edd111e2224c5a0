"""A logger for Weights & Biases with defaults for retrieval."""

import math
import netrc
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_retrieval.backend import (
    ModelCheckpoint,
    WandbLogger,
    rank_zero_experiment,
    rank_zero_only,
    rank_zero_warn,
)
from lightning_retrieval.callbacks.evaluation import is_count
from lightning_retrieval.checkpoints import is_checkpoint, saved_at
from lightning_retrieval.paths import check_path
from lightning_retrieval.training.restored_states import is_within

_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
_LOWER_IS_BETTER = ("decomposability_gap", "score_overlap")  # metrics of which lower values are better


def has_wandb_key() -> bool:
    """Return whether Weights & Biases would find an API key, without asking the user and without going online."""
    if os.environ.get("WANDB_API_KEY", "").strip() or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts: Sequence[str] = _HOSTS
    server = os.environ.get("WANDB_BASE_URL")
    if server:
        hosts = [urlsplit(server).netloc]
    return any(_has_password(path, hosts) for path in _netrc_files())


def _netrc_files() -> list[Path]:
    path = os.environ.get("NETRC")
    if path:
        return [Path(path)]
    return [Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()]


def _has_password(path: Path, hosts: Sequence[str]) -> bool:
    """Return whether a netrc file has a password for one of the hosts; False if it cannot be read."""
    try:
        entries = netrc.netrc(path)
        for host in hosts:
            login = entries.authenticators(host)
            if login is not None and login[2]:
                return True
    except (netrc.NetrcParseError, OSError, UnicodeError):
        return False
    return False


class RetrievalWandbLogger(WandbLogger):
    """Extends Lightning's `WandbLogger`: works offline without a key, and keeps best values and the best checkpoint.

    Args:
        name: name of the run; if None, Weights & Biases generates one.
        save_dir: the folder in which `PROJECT/ID`, the folder of the run, is created. It holds the checkpoints, the
            figures, the `config.yaml` of the command line, and `wandb/` with the files of Weights & Biases.
        project: the project of the run.
        id: id of the run; if None, it is the environment variable `WANDB_RUN_ID`, or a new one. Training with the same
            id and with `ckpt_path="last"` continues the run in the same folder.
        offline: whether to keep the run on this machine; `wandb sync` uploads it later. If None, the run is offline if
            the environment variable `WANDB_MODE` is not set and there is no API key for the server, which is
            `WANDB_BASE_URL`, if set. The key is either in the environment variable `WANDB_API_KEY`, or in `~/.netrc`,
            where `wandb login` writes the key.
        artifact: upload the best checkpoint of each `ModelCheckpoint`, if it is in the `dirpath` of the callback, as an
            artifact of the run, of type "model". The alias of the artifact is the monitored metric with its value, such
            as "val-mAP-0.7660". The artifact of the first `ModelCheckpoint` that monitors a metric also gets the alias
            "best"; without a monitored metric, the alias is "last".
        prefix: prefix of the names of all metrics.
        kwargs: further arguments of `WandbLogger` and of `wandb.init`, such as `tags`, `group` or `notes`.

    Raises:
        TypeError: if `offline` is not True, False or None, `artifact` is not True or False, or a name or path has the
            wrong type.

    Example:
        >>> from lightning_retrieval.callbacks import RetrievalWandbLogger
        >>> logger = RetrievalWandbLogger("smooth-ap", project="products", offline=True)
        >>> logger.name  # for pl.Trainer(logger=logger)
        'products'

    Relations:
        The summary of the run contains the highest and the last value of each metric of the evaluation sets, as
        `summary["val/mAP"]["max"]`, and the lowest training loss. `RetrievalEvaluation` logs the highest value of a
        run, including the time before it was resumed, as `summary["best/val/mAP"]`. `RetrievalModule` logs the config
        with data set, sampler and batch, and `RetrievalGallery` and the other figures log images. All of these also
        work with Lightning's other loggers.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path = ".",
        *,
        project: str = "lightning-retrieval",
        id: str | None = None,
        offline: bool | None = None,
        artifact: bool = True,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        check_path("save_dir", save_dir, owner="RetrievalWandbLogger")
        self.artifact = artifact
        if offline is None:
            offline = not os.environ.get("WANDB_MODE") and not has_wandb_key()
        run_id = id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        super().__init__(
            name=name, save_dir=save_dir, project=project, id=run_id, offline=offline, prefix=prefix, **kwargs
        )
        # Lightning gives `save_dir` to `wandb.init`, but saves checkpoints in the folder below.
        self._wandb_init["dir"] = os.path.join(save_dir, str(self.name), str(self.version))
        if self._wandb_init.get("anonymous") is None:  # newer versions of wandb warn of the setting, whatever it is
            self._wandb_init.pop("anonymous", None)
        self.offline = offline
        self.prefix = prefix
        self._checkpoints: dict[int, ModelCheckpoint] = {}
        self._uploaded: set[tuple[str, int]] = set()  # path and time of each uploaded checkpoint
        self._defined: set[str] = set()  # metrics whose summary is defined

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of Weights & Biases, which begins when this property is first read."""
        if self._experiment is None:  # the folder must exist before, or Weights & Biases does not find the Git commit
            os.makedirs(self._wandb_init["dir"], exist_ok=True)
        return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics; the first time, define which values of each metric the summary keeps."""
        for name in metrics.keys() - self._defined:
            self._define_summary(name)
            self._defined.add(name)
        super().log_metrics(metrics, step)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Remember the callback, so that its best checkpoint is uploaded at the end."""
        super().after_save_checkpoint(checkpoint_callback)
        self._checkpoints[id(checkpoint_callback)] = checkpoint_callback

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Upload the best checkpoints, even after an interrupted run."""
        super().finalize(status)
        # No public attribute of the base class says whether the run has begun; `experiment` would begin the run.
        if not self.artifact or self._experiment is None:
            return
        for checkpoint in self._checkpoints.values():
            path = Path(checkpoint.best_model_path)
            # A run that was resumed has the path from a file, which must not choose what is published.
            if not (is_within(path, checkpoint.dirpath) and is_checkpoint(path)):
                continue
            version = (str(path), saved_at(path))
            if version in self._uploaded:
                continue
            self._uploaded.add(version)
            try:
                self._upload(checkpoint, path)
            except Exception as error:  # a failed upload must not make a finished run fail
                rank_zero_warn(f"RetrievalWandbLogger: {path} could not be uploaded as an artifact: {error}")

    def _define_summary(self, name: str) -> None:
        stage = name.partition("/")[0]
        if stage not in ("val", "test") and not name.startswith("train/loss"):
            return
        best = "max"
        if stage == "train" or is_count(name) or name.rpartition("/")[2] in _LOWER_IS_BETTER:
            best = "min"
        full_name = name
        if self.prefix:
            full_name = f"{self.prefix}{self.LOGGER_JOIN_CHAR}{name}"
        # Patterns with * are not used: if two patterns match a name, it is not defined which pattern applies.
        self.experiment.define_metric(full_name, step_metric="trainer/global_step", summary=f"{best},last")

    def _upload(self, checkpoint: ModelCheckpoint, path: Path) -> None:
        import wandb

        aliases: list[str] = []
        metadata: dict[str, Any] = {"file": path.name}
        score = checkpoint.best_model_score
        if checkpoint.monitor is None or score is None:
            aliases.append("last")
        elif math.isfinite(score):
            aliases.append(re.sub(r"[^\w.@-]+", "-", f"{checkpoint.monitor}-{float(score):.4f}"))
            metadata[checkpoint.monitor] = float(score)
            # Only the first callback that monitors a metric uses the alias "best", as in Lightning.
            monitoring = [other for other in self._checkpoints.values() if other.monitor is not None]
            if checkpoint is monitoring[0]:
                aliases.append("best")
        artifact = wandb.Artifact(f"model-{self.experiment.id}", type="model", metadata=metadata)
        if path.is_dir():
            artifact.add_dir(str(path), name="model.ckpt")
        else:
            artifact.add_file(str(path), name="model.ckpt")
        self.experiment.log_artifact(artifact, aliases=aliases)
