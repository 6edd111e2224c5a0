"""Weights & Biases as retrieval is tracked with it."""

import math
import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn

from lightning_retrieval.checks import check_flag

# What is better where it is lower, of all that the library logs of evaluation sets.
_LOWER_IS_BETTER = ("skipped_queries", "decomposability_gap", "score_overlap")
_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


class RetrievalWandbLogger(WandbLogger):
    """Lightning's `WandbLogger`, offline where there is no key, with the best of each metric and the best checkpoint.

    Args:
        name: of the run; Weights & Biases makes one up where None.
        save_dir: the folder that `wandb/` with the run's files is written to.
        project: that the run belongs to.
        id: of the run. A run begun again with the same id, and with `ckpt_path="last"`, goes on in the same run and the
            same folder of checkpoints.
        offline: keep the run on this machine, to be sent by `wandb sync`; where None, if there is no key (environment
            variable `WANDB_API_KEY`, or `~/.netrc` as `wandb login` writes it, for `WANDB_BASE_URL` where that is set)
            and `WANDB_MODE` is not set.
        artifact: keep the best checkpoint of each `ModelCheckpoint` as an artifact of the run, of the type "model".
            Its alias is the metric that has chosen it with its value, such as "val-mAP-0.7660"; that of the first which
            looks at a metric is "best" too, and that of one which looks at none "last".
        kwargs: others of `WandbLogger` and of `wandb.init`, such as `tags`, `group` or `notes`.

    Raises:
        TypeError: if `offline` is not True, False or None.

    Example:
        >>> from lightning_retrieval.callbacks import RetrievalWandbLogger
        >>> logger = RetrievalWandbLogger("smooth-ap", project="products", offline=True)
        >>> logger.name  # for pl.Trainer(logger=logger)
        'products'

    Relations:
        The summary of the run has the highest, and the last, value of each metric of evaluation sets, as
        `summary["val/mAP"]["max"]`, and the lowest training loss; over all parts of a run that was resumed
        `RetrievalEvaluation` keeps the highest as `summary["best/val/mAP"]`. The configuration comes from
        `RetrievalModule`, with data set, sampler and batch; pictures from `RetrievalGallery` and its neighbours; all of
        these also reach other loggers of Lightning.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path = ".",
        project: str = "lightning-retrieval",
        id: str | None = None,
        offline: bool | None = None,
        artifact: bool = True,
        **kwargs: Any,
    ) -> None:
        check_flag("RetrievalWandbLogger", "offline", offline)
        if offline is None:
            offline = not os.environ.get("WANDB_MODE") and not _has_key()
        super().__init__(name=name, save_dir=save_dir, project=project, id=id, offline=offline, **kwargs)
        self.artifact = artifact
        self._checkpoints: dict[int, ModelCheckpoint] = {}
        self._kept: set[tuple[str, float]] = set()
        self._summarised: set[str] = set()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """As `WandbLogger`, and say of each metric which value the summary keeps besides the last."""
        for name in metrics.keys() - self._summarised:
            stage, _, rest = name.partition("/")
            lower = stage == "train" or rest.rpartition("/")[2] in _LOWER_IS_BETTER
            if stage in ("val", "test") or name.startswith("train/loss"):  # by full names: of two patterns any may win
                name_there = f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}" if self._prefix else name
                summary = "min,last" if lower else "max,last"
                self.experiment.define_metric(name_there, step_metric="trainer/global_step", summary=summary)
            self._summarised.add(name)
        super().log_metrics(metrics, step)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Remember whose best checkpoint is to be kept."""
        super().after_save_checkpoint(checkpoint_callback)
        self._checkpoints[id(checkpoint_callback)] = checkpoint_callback

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Keep the best checkpoints, also of a run that was interrupted."""
        super().finalize(status)
        for checkpoint in self._checkpoints.values() if self.artifact and self._experiment is not None else ():
            path = Path(checkpoint.best_model_path)
            version = (str(path), path.stat().st_mtime) if path.is_file() else None
            if version is not None and version not in self._kept:
                self._kept.add(version)
                try:
                    self._keep(checkpoint, path)
                except Exception as error:  # a run's end is no place to fail
                    rank_zero_warn(f"RetrievalWandbLogger: {path} could not be kept as an artifact: {error}")

    def _keep(self, checkpoint: ModelCheckpoint, path: Path) -> None:
        import wandb

        aliases: list[str] = []
        metadata: dict[str, Any] = {"file": path.name}
        score = checkpoint.best_model_score
        if checkpoint.monitor is None or score is None:
            aliases.append("last")
        elif math.isfinite(score):
            aliases.append(re.sub(r"[^\w.@-]+", "-", f"{checkpoint.monitor}-{float(score):.4f}"))
            metadata[checkpoint.monitor] = float(score)
            # Of several that look at a metric the first, by which Lightning's "best" goes too.
            if checkpoint is next(other for other in self._checkpoints.values() if other.monitor is not None):
                aliases.append("best")
        artifact = wandb.Artifact(f"model-{self.experiment.id}", type="model", metadata=metadata)
        artifact.add_file(str(path), name="model.ckpt")
        self.experiment.log_artifact(artifact, aliases=aliases)


def _has_key() -> bool:
    """Whether Weights & Biases would find a key, without asking for one or going online."""
    if os.environ.get("WANDB_API_KEY", "").strip() or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = os.environ.get("WANDB_BASE_URL")
    hosts = (urlsplit(server).netloc,) if server else _HOSTS
    given = os.environ.get("NETRC")
    for path in [Path(given)] if given else [Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()]:
        try:
            entries = [netrc.netrc(path).authenticators(host) for host in hosts]
        except (netrc.NetrcParseError, OSError, UnicodeError):
            continue
        if any(entry is not None and entry[2] for entry in entries):
            return True
    return False
