"""A logger for Weights & Biases with defaults for retrieval."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_retrieval.backend import WandbLogger, rank_zero_experiment, rank_zero_only
from lightning_retrieval.callbacks.evaluation import is_count
from lightning_retrieval.paths import check_path

_LOWER_IS_BETTER = ("decomposability_gap", "score_overlap")  # metrics of which lower values are better


class RetrievalWandbLogger(WandbLogger):
    """Extends Lightning's `WandbLogger`: one folder for a run, and the best value of each metric in its summary.

    Args:
        name: name of the run; if None, Weights & Biases generates one.
        save_dir: the folder in which `PROJECT/ID`, the folder of the run, is created. It holds the checkpoints, the
            figures, the `config.yaml` of the command line, and `wandb/` with the files of Weights & Biases.
        project: the project of the run.
        id: id of the run; if None, it is the environment variable `WANDB_RUN_ID`, or a new one. Training with the same
            id and with `ckpt_path="last"` continues the run in the same folder.
        offline: whether to keep the run on this machine, for which no account is needed; `wandb sync` uploads it later.
        prefix: prefix of the names of all metrics.
        kwargs: further arguments of `WandbLogger` and of `wandb.init`, such as `log_model=True`, which uploads the best
            checkpoints when a run ends, `tags`, `group` or `notes`.

    Raises:
        ValueError: if `save_dir` is empty.

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
        offline: bool = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        save_dir = check_path("save_dir", save_dir, owner="RetrievalWandbLogger")
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
