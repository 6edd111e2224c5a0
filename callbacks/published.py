"""Prints the results of a paper beside those of a run that repeats its experiment."""

import math
from typing import Any

from lightning_retrieval.backend import pl
from lightning_retrieval.callbacks.base import Callback
from lightning_retrieval.callbacks.evaluation import results_table, update_best

NOTE = "(the published results are those of this source, also if the settings of the run were changed)"


class PublishedResults(Callback):
    """Prints published results beside those of the run, when training ends and after each validation or test.

    After training, the table has the best and the last value of each metric over all validations of the run, also over
    those before it was resumed. Papers often report the best value on the test set. A metric that the run has not
    logged is shown as `nan`. The published values are the ones that are passed, whatever the settings of the run are: a
    run with other settings than those of `source` needs other `results`. The table says so.

    Args:
        source: where the results were published, such as `"Smooth-AP (ECCV 2020), Table 2"`.
        results: the published value of each metric by its name without the stage, such as `R@1`, `small/R@5` and
            `mAP/hard`. Values are fractions if the run logs fractions.

    Example:
        >>> from lightning_retrieval.callbacks import PublishedResults, RetrievalEvaluation
        >>> published = PublishedResults("Smooth-AP (ECCV 2020), Table 2", {"R@1": 0.801, "R@10": 0.915})
        >>> callbacks = [RetrievalEvaluation(ks=(1, 10)), published]

    Relations:
        `RetrievalEvaluation` and `DetectionModule` log the metrics of the run. Pass this callback after
        `RetrievalEvaluation`, so that its table is the last one.
    """

    def __init__(self, source: str, results: dict[str, float]) -> None:
        self.source = source
        self.results = results
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}  # the results of the last validation or test

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict.get("best", {}))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":  # a resumed run loads its best values later
            self.best = {}
        self.last = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._read(trainer, "val")
        if trainer.state.fn == "fit":
            update_best(self.best, self.last)
        else:
            self._print(trainer, {"run": self.last})

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read(trainer, "test")
        self._print(trainer, {"run": self.last})

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.last:
            self._print(trainer, {"best": self.best, "last": self.last})

    def _read(self, trainer: pl.Trainer, stage: str) -> None:
        """Read the published metrics among those that were logged for a stage."""
        logged = trainer.callback_metrics
        self.last = {name: float(logged.get(f"{stage}/{name}", math.nan)) for name in self.results}

    def _print(self, trainer: pl.Trainer, columns: dict[str, dict[str, float]]) -> None:
        if trainer.is_global_zero and self.results:
            table = results_table({"published": self.results, **columns})
            print(f"\n{self.source}\n{NOTE}\n{table}\n", end="", flush=True)
