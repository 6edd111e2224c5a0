"""Retrieval metrics of whole evaluation sets, logged under names that checkpoints and early stopping can monitor."""

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.backend import (
    CSVLogger,
    TensorBoardLogger,
    WandbLogger,
    pl,
    rank_zero_info,
    rank_zero_warn,
    sized_len,
)
from lightning_retrieval.callbacks.base import Callback
from lightning_retrieval.callbacks.before_training import (
    UntrainedNetwork,
    collect_test_set,
    has_backbone_to_evaluate,
)
from lightning_retrieval.callbacks.evaluation_sets import (
    EvaluationSet,
    MetricProvider,
    find_test_loaders,
    is_sharded,
    loader_list,
    set_prefixes,
    what_is_lost,
)
from lightning_retrieval.invalid import InvalidValue, reported_as
from lightning_retrieval.metrics import EmbeddingMetric, RandomGalleryMetrics, RetrievalMetrics
from lightning_retrieval.metrics.definitions import Divisor
from lightning_retrieval.metrics.retrieval import REVERSE
from lightning_retrieval.ranking.expansion import DatabaseAugmentation, QueryExpansion
from lightning_retrieval.ranking.relevance import Relevance, rule_of_evaluation
from lightning_retrieval.training.full_sharding import has_sharded_parameters


def is_count(name: str) -> bool:
    """Return whether a metric is a number of skipped queries. For such a number, higher is not better."""
    return "skipped_queries" in name.split("/")


def update_best(best: dict[str, float], results: Mapping[str, float]) -> None:
    """Replace the best value of each metric by the current value if this is higher; ignore NaN and counts."""
    for name, value in results.items():
        if math.isnan(value) or is_count(name):
            continue
        best[name] = max(value, best.get(name, value))


def log_best(trainer: pl.Trainer, best: Mapping[str, float]) -> None:
    """Log the best values as hyperparameters (CSV), metrics (TensorBoard) or summary (Weights & Biases)."""
    if not best:
        return
    named = {f"best/{name}": value for name, value in best.items()}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            score = getattr(trainer.checkpoint_callback, "best_model_score", None)
            values = dict(named)
            if score is not None:
                values["hp_metric"] = float(score)  # TensorBoard's table of hyperparameters has a column `hp_metric`
            logger.log_metrics(values, trainer.global_step)
        elif isinstance(logger, CSVLogger):
            logger.log_hyperparams({"best": dict(best)})
            logger.save()
        elif isinstance(logger, WandbLogger) and trainer.is_global_zero:
            logger.experiment.summary.update(named)


DEFAULT_KS = (1, 10, 100)  # of R@k, as far as they are at most the number of ranked images
_OF_DIMS = re.compile(r"/\d+d$")  # end of the name of a metric of the first dimensions

# The table of metrics that is printed at the end of an evaluation.

_COLUMN_WIDTH = 12
_INTERVAL, _INTERVAL_WIDTH = "95 % interval", 20
_DIGITS = 4
# Titles of the columns to the left of the trained network, and descriptions of the networks in these columns.
_BEFORE = {"backbone": "the pooled features of its backbone", "untrained": "the untrained network"}


def results_table(
    columns: Mapping[str, Mapping[str, float]], intervals: Mapping[str, tuple[float, float]] | None = None
) -> str:
    """Format metrics as a table with one row for each metric.

    Args:
        columns: maps the title of each column to its metrics. Only metrics of the last column are shown. Titles are
            shown only if there are several columns.
        intervals: the 95 % intervals of metrics of the last column; None for a table without intervals.
    """
    names = list(list(columns.values())[-1])
    width = max(map(len, names))
    titles = list(columns)
    if len(columns) == 1:
        titles = [""]
    lines = [" " * width + "".join(f"{title:>{_COLUMN_WIDTH}}" for title in titles)]
    if intervals:
        lines[0] += f"{_INTERVAL:>{_INTERVAL_WIDTH}}"
    for name in names:
        digits = _DIGITS
        if is_count(name):
            digits = 0
        line = f"{name:<{width}}"
        for values in columns.values():
            value = values.get(name, float("nan"))
            line += f"{value:>{_COLUMN_WIDTH}.{digits}f}"
        if intervals and name in intervals:
            low, high = intervals[name]
            interval = f"{low:.{_DIGITS}f} to {high:.{_DIGITS}f}"
            line += f"{interval:>{_INTERVAL_WIDTH}}"
        lines.append(line)
    if not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines)


def summary_of(before: Mapping[str, Mapping[str, float]]) -> str:
    """The mAP of each network in one line: "1 of 2, the untrained network: test/mAP 0.0919; 2 of 2, ...".

    Args:
        before: maps `"backbone"` and `"untrained"`, or one of them, to metrics.
    """
    parts = []
    for number, (title, results) in enumerate(before.items(), 1):
        values = ", ".join(f"{name} {results[name]:.{_DIGITS}f}" for name in _leading_metrics(results))
        parts.append(f"{number} of {len(before)}, {_BEFORE[title]}: {values}")
    return "; ".join(parts)


def worse_than_before(columns: Mapping[str, Mapping[str, float]]) -> str | None:
    """Return a warning with advice if training has made a network worse; None if it has not.

    Args:
        columns: the argument of `results_table`: optionally `"backbone"` and `"untrained"`, then the trained network.
    """
    advice = "train for more epochs, try another learning rate, or begin with pretrained weights if it did not"
    trained = list(columns.values())[-1]
    for name in _leading_metrics(trained):
        after = round(trained[name], _DIGITS)
        for title, meaning in _BEFORE.items():
            before = round(columns.get(title, {}).get(name, float("nan")), _DIGITS)
            if after < before:
                return (
                    f"The trained network is worse than {meaning}: {name} is {after:.{_DIGITS}f}, and was "
                    f"{before:.{_DIGITS}f}; {advice}."
                )
    return None


def _leading_metrics(results: Mapping[str, float]) -> list[str]:
    """Return the name of the mAP of each set; if no set has mAP, the name of the first metric that is not a count."""
    leading = [name for name in results if name.rpartition("/")[2] == "mAP"]
    return leading or [name for name in results if not is_count(name)][:1]


def log_without_sync(pl_module: pl.LightningModule, values: Mapping[str, Tensor]) -> None:
    """Log values that are equal on all processes, without averaging, which would cause rounding errors."""
    for name in values:
        # With several processes, Lightning would issue a warning that recommends sync_dist=True.
        warnings.filterwarnings("ignore", rf".*self\.log\('{re.escape(name)}', \.\.\., sync_dist=True")
    pl_module.log_dict(values, rank_zero_only=False, sync_dist=False)


def means_over_sets(stage: str, values: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The means over the queries of all sets of a stage, named `val/mAP` and so on; empty if there is one set.

    Args:
        stage: `val` or `test`.
        values: for each set, the values of its queries by the name of their mean. Means that a set lacks are omitted.
    """
    if len(values) == 1:
        return {}
    means = {}
    for name in values[0]:
        if all(name in of_set for of_set in values):
            means[f"{stage}/{name}"] = torch.cat([of_set[name] for of_set in values]).nanmean()
    return means


def rule_of_module(pl_module: pl.LightningModule) -> Relevance | None:
    """Return the rule of relevance that the metrics of a module need, or None."""
    relevance = getattr(pl_module, "relevance", None)
    if isinstance(relevance, Relevance):
        return rule_of_evaluation(relevance)
    return None


class RetrievalEvaluation(Callback):
    """Computes `RetrievalMetrics` over each validation and test set, and logs `val/mAP`, `test/R@1` and so on.

    The module's `validation_step` and `test_step` return a dict with `embeddings`, `labels` and, if the batches have
    them, `ids`, `roles`, `instances` and `cameras`. A role is 1 for a query, 2 for a gallery image, and 3 for both. The
    embeddings of the images of one instance are averaged. Images with the label and the camera of a query are not in
    the list of this query.

    All processes compute and log the same values, so `ModelCheckpoint(monitor="val/mAP", mode="max")` and early
    stopping work. Several evaluation sets are logged as `val/0/mAP` and `val/1/mAP`, or with the names of a dict of
    data loaders, as `val/small/mAP`; `val/mAP` is then the mean over the queries of all sets. The sanity check is
    skipped, because it covers only a few batches.

    If the data set has two sides (its attribute `two_sided` is True, as that of the sets of `Pairs`), the queries are
    also ranked for each candidate, and logged as `val/reverse/mAP` and so on.

    A data set with another evaluation protocol has a method `metrics(ks, **settings)` that returns another
    `EmbeddingMetric`, as `lightning_retrieval.callbacks.evaluation_sets.MetricProvider` declares.

    Relevance follows the `relevance` of the module. `OtherCamera` and `GalleryOnly` are the rules by which cameras and
    roles are evaluated in any case. For any other rule, the metrics get the rule, and the steps return the columns that
    it reads as `labels`.

    Args:
        ks: the k of R@k, each >= 1; if None, those of 1, 10 and 100 that are at most the number of ranked images.
        before_fit: whether to evaluate the test set with the untrained model, too, and log the results as `test/...` at
            step 0. The pooled features of the backbone of an `Embedder` are evaluated in the same pass, without the new
            head, and logged as `backbone/test/...`; these results show the quality of the pretrained weights alone.
            The evaluation follows the first epoch, with a copy of the weights from before it, so that a run begins with
            training; for a network that is sharded over processes, it comes first. The table of a test after training
            compares the backbone, the untrained and the trained network, with a warning if training has made the
            network worse. A resumed run skips this evaluation.
        map_ks: the k of mAP@k, each >= 1; empty for no mAP@k. Data sets with another metric ignore `map_ks`,
            `map_divisor`, `extra_metrics` and `dims`.
        map_divisor: the divisor of mAP@k: `"min(k, R)"`, `"hits"` or `"R"`, see `RetrievalMetrics`.
        extra_metrics: names of metrics to log as well, such as `"mINP"`, `"precision@10"`, `"recall@10"`, `"MRR@10"`
            and `"NDCG@10"`, see `RetrievalMetrics`.
        dims: ascending numbers of dimensions, for models trained with `NestedLoss`. For each number d, the metrics are
            also computed from the first d dimensions of the embeddings, and logged as `val/mAP/64d` and so on.
        query_expansion: the expansion of the queries before ranking, such as `QueryExpansion(alpha=2, k=10)`; None for
            no expansion.
        database_augmentation: the augmentation of the gallery before the query expansion, such as
            `DatabaseAugmentation()`; None for no augmentation.
        embeddings_on_cpu: whether to keep the embeddings in main memory, and move them to the device block by block for
            ranking.

    Raises:
        ValueError: if a k is below 1, `map_divisor` or a name of `extra_metrics` is unknown, `dims` does not ascend, or
            `before_fit` is set without a test set; in an evaluation, if one of `dims` is larger than the dimension of
            the embeddings.
        TypeError: in an evaluation, if the module's step does not return `embeddings` and `labels`.

    Example:
        >>> import pytorch_lightning as pl
        >>> from lightning_retrieval.callbacks import RetrievalEvaluation
        >>> trainer = pl.Trainer(callbacks=[RetrievalEvaluation(ks=(1, 10))], logger=False, enable_checkpointing=False)

    Cost:
        Each of W processes keeps the embeddings of its images and, while metrics are computed, a copy of 1 / W of all
        embeddings, see `RetrievalMetrics`. `QueryExpansion` and `DatabaseAugmentation` need another such copy, and k
        neighbours of each row. With an expansion or augmentation of your own, each process gathers all embeddings.
        `before_fit` keeps the trained parameters twice more in main memory, until the first epoch has been evaluated.

    Relations:
        `RetrievalGallery` draws the evaluation sets that this callback collects, and `RetrievalReport` reports what is
        wrong in them. The table that is printed after a test has the intervals of `RetrievalMetrics.intervals`. The
        highest value of each metric of a training run is logged as `best/val/mAP` and so on: to `hparams.yaml` by
        `CSVLogger`, as a scalar by `TensorBoardLogger`, and to the summary of the run by `WandbLogger`.
    """

    def __init__(
        self,
        ks: Sequence[int] | None = None,
        *,
        before_fit: bool = False,
        map_ks: Sequence[int] = (),
        map_divisor: Divisor = "min(k, R)",
        extra_metrics: Sequence[str] = (),
        dims: Sequence[int] = (),
        query_expansion: QueryExpansion | None = None,
        database_augmentation: DatabaseAugmentation | None = None,
        embeddings_on_cpu: bool = False,
    ) -> None:
        self.before_fit = before_fit
        given: dict[str, Any] = {"map_divisor": map_divisor, "extra_metrics": extra_metrics, "dims": dims}
        with reported_as(type(self).__name__):  # invalid settings raise now, and not in the first evaluation
            metrics = RetrievalMetrics(DEFAULT_KS if ks is None else ks, map_ks, **given)
        self.ks = None if ks is None else metrics.ks
        self.map_ks = metrics.map_ks
        self.map_divisor = metrics.map_divisor
        self.extra_metrics = metrics.extra_metrics
        self.dims = metrics.dims
        self.query_expansion = query_expansion
        self.database_augmentation = database_augmentation
        self.embeddings_on_cpu = embeddings_on_cpu
        self.sets: list[EvaluationSet] = []  # these hold embeddings only during an evaluation
        # The results of the last evaluation, for "val", "test", "untrained" and "backbone".
        self.results: dict[str, dict[str, float]] = {}
        self.best: dict[str, float] = {}
        self._untrained: UntrainedNetwork | None = None  # from the start of a run to the end of its first epoch

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.best = {}  # a resumed run loads its best values later

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.before_fit:
            return
        if trainer.global_step > 0:
            rank_zero_info(
                f"RetrievalEvaluation: the run goes on from step {trainer.global_step}, so the untrained network is "
                "not evaluated; begin a new run to compare with it."
            )
            return
        loaders = find_test_loaders(trainer, pl_module)
        if has_sharded_parameters(pl_module):  # whose weights cannot be replaced for an evaluation
            self._evaluate_untrained(trainer, pl_module, loaders)
        else:
            self._untrained = UntrainedNetwork(pl_module, loaders)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._untrained is None:
            return
        with self._untrained.restored():
            self._evaluate_untrained(trainer, pl_module, self._untrained.loaders)
        self._untrained = None

    def _evaluate_untrained(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loaders: Any) -> None:
        """Evaluate the untrained network and, if it has a new head, its backbone, and log both at step 0."""
        before: dict[str, dict[str, float]] = {"untrained": {}}
        of_queries: dict[str, list[dict[str, Tensor]]] = {"untrained": [], "backbone": []}
        if has_backbone_to_evaluate(pl_module):
            before = {"backbone": {}, **before}
        for prefix, loader in zip(set_prefixes("test", loaders), loader_list(loaders)):
            sets = {}
            for name in before:
                dims = self.dims if name == "untrained" else ()
                # Without a sharded sampler, each process evaluates the full set.
                metrics = self._create_metrics(loader, is_sharded(loader), dims, rule_of_module(pl_module))
                sets[name] = EvaluationSet(prefix, loader, metrics.to(pl_module.device))
            collect_test_set(trainer, pl_module, sets["untrained"], sets.get("backbone"))
            _warn_if_incomplete("test", loader, math.inf)
            for name, evaluation_set in sets.items():
                values = self._values_of(evaluation_set, trainer)
                before[name] |= {of_metric: float(value) for of_metric, value in values.items()}
                of_queries[name].append(evaluation_set.values_of_means(values))
        for name, results in before.items():
            of_all_sets = means_over_sets("test", of_queries[name])
            results |= {of_metric: float(value) for of_metric, value in of_all_sets.items()}
        self.results |= before
        rank_zero_info(f"RetrievalEvaluation: before training, {summary_of(before)}.")
        logged = dict(before["untrained"])
        logged |= {f"backbone/{name}": value for name, value in before.get("backbone", {}).items()}
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=0)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        log_best(trainer, self.best)
        self._print(trainer, "val")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._untrained = None
        self.sets = []
        log_best(trainer, self.best)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict.get("best", {}))

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._create_sets("val", trainer.val_dataloaders, pl_module)

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._create_sets("test", trainer.test_dataloaders, pl_module)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.sets[dataloader_idx].add(type(pl_module).__name__, outputs)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._log_results("val", pl_module, trainer.num_val_batches)
        if trainer.state.fn == "fit":
            update_best(self.best, self.results["val"])

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log_results("test", pl_module, trainer.num_test_batches)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.sets = []  # free the embeddings, which no callback needs any more
        if trainer.state.fn == "validate":
            self._print(trainer, "val")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        intervals: dict[str, tuple[float, float]] = {}
        for evaluation_set in self.sets:
            intervals |= evaluation_set.intervals()
        self.sets = []
        self._print(trainer, "test", intervals)

    def _create_sets(self, stage: str, loaders: Any, pl_module: pl.LightningModule) -> None:
        self.sets = []
        for prefix, loader in zip(set_prefixes(stage, loaders), loader_list(loaders)):
            metrics = self._create_metrics(loader, True, self.dims, rule_of_module(pl_module))
            self.sets.append(EvaluationSet(prefix, loader, metrics.to(pl_module.device)))

    def _create_metrics(
        self, loader: Any, sync_on_compute: bool, dims: Sequence[int], relevance: Relevance | None
    ) -> EmbeddingMetric:
        """Create the metric that the data set provides if it is a `MetricProvider`, else `RetrievalMetrics`."""
        ks = self.ks or DEFAULT_KS
        settings: dict[str, Any] = {
            "query_expansion": self.query_expansion,
            "database_augmentation": self.database_augmentation,
            "embeddings_on_cpu": self.embeddings_on_cpu,
            "sync_on_compute": sync_on_compute,
        }
        if relevance is not None:
            settings["relevance"] = relevance
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, MetricProvider):
            return dataset.metrics(ks, **settings)
        settings["reverse"] = getattr(dataset, "two_sided", False)
        settings |= {"map_divisor": self.map_divisor, "extra_metrics": self.extra_metrics, "dims": dims}
        return RetrievalMetrics(ks, self.map_ks, **settings)

    def _values_of(self, evaluation_set: EvaluationSet, trainer: pl.Trainer) -> dict[str, Tensor]:
        """The metrics of a set, without the R@k of a default k that is above the number of ranked images.

        What a callback monitors is kept, also as the mean over all sets, because it would stop the run without it.
        """
        values, metrics = evaluation_set.compute(), evaluation_set.metrics
        if not isinstance(metrics, RetrievalMetrics) or not self._has_default_ks(metrics):
            return values
        stage, monitored = evaluation_set.prefix.partition("/")[0], _monitored_by(trainer)
        for prefix, images in _ranked_images(evaluation_set.prefix, metrics).items():
            large = [k for k in DEFAULT_KS if k > max(images, 1) and f"{stage}/R@{k}" not in monitored]
            left_out = {f"{prefix}R@{k}" for k in large} - monitored
            values = {name: value for name, value in values.items() if _OF_DIMS.sub("", name) not in left_out}
        return values

    def _has_default_ks(self, metrics: EmbeddingMetric) -> bool:
        """Whether neither the user nor the data set has given the k of R@k."""
        return self.ks is None and getattr(metrics, "ks", None) == DEFAULT_KS

    def _log_results(self, stage: str, pl_module: pl.LightningModule, batches: Sequence[float]) -> None:
        for evaluation_set, number in zip(self.sets, batches):
            _warn_if_incomplete(stage, evaluation_set.loader, number)
        results: dict[str, Tensor] = {}
        for evaluation_set in self.sets:
            results.update(self._values_of(evaluation_set, pl_module.trainer))
            _warn_of_one_label(evaluation_set)
        results |= means_over_sets(stage, [of_set.values_of_means(results) for of_set in self.sets])
        self.results[stage] = {name: float(value) for name, value in results.items()}
        log_without_sync(pl_module, results)

    def _print(
        self, trainer: pl.Trainer, stage: str, intervals: Mapping[str, tuple[float, float]] | None = None
    ) -> None:
        if not trainer.is_global_zero or stage not in self.results:
            return
        columns: dict[str, dict[str, float]] = {}
        if stage == "test":
            columns |= {name: self.results[name] for name in _BEFORE if name in self.results}
        columns["trained"] = self.results[stage]
        # With the last line break: in a notebook, Rich's progress bar would print an unfinished line again and again.
        print(f"\n{results_table(columns, intervals)}\n", end="", flush=True)
        warning = worse_than_before(columns)
        if warning is not None:
            print(f"\n{warning}\n", end="", flush=True)


def _warn_if_incomplete(stage: str, loader: Any, batches: float) -> None:
    """Warn if images of an evaluation set are not evaluated.

    Args:
        stage: `val` or `test`.
        loader: the loader of the set.
        batches: the number of its batches that are evaluated.
    """
    covered, number = what_is_lost(loader), sized_len(loader)
    if number is not None and batches < number:
        covered = f"{batches} of {number} batches (limit_{stage}_batches)"
    if covered is not None:
        rank_zero_warn(
            f"RetrievalEvaluation: {stage} metrics cover {covered}: the gallery is incomplete, so their values are too "
            "high."
        )


def _monitored_by(trainer: pl.Trainer) -> set[str]:
    """The names of the metrics that callbacks of a Trainer monitor."""
    monitored = set()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = getattr(callback, "monitor", None)
        if isinstance(name, str):
            monitored.add(name)
    return monitored


def _ranked_images(prefix: str, metrics: RetrievalMetrics) -> dict[str, int]:
    """The number of images in the longest list of each direction, by the prefix of its metrics."""
    ranked = {prefix: metrics.ranked_images}
    if metrics.reverse:
        ranked[f"{prefix}{REVERSE}"] = metrics.ranked_queries
    return ranked


def _warn_of_one_label(evaluation_set: EvaluationSet) -> None:
    metrics = evaluation_set.metrics
    if isinstance(metrics, RetrievalMetrics) and metrics.has_one_label and metrics.ranked_images > 0:
        rank_zero_warn(
            f"RetrievalEvaluation: all images of the set of {evaluation_set.prefix}mAP have the same label, so each "
            "list holds relevant images only and the metrics are 1 whatever the embeddings are; check the labels."
        )


def find_evaluation(trainer: pl.Trainer) -> RetrievalEvaluation:
    """Return the Trainer's `RetrievalEvaluation`, or raise a `ValueError` if there is none."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RetrievalEvaluation):
            return callback
    raise InvalidValue(
        "the Trainer must have the callback RetrievalEvaluation, whose evaluation sets are used, but it has none",
        cure="pass both callbacks",
    )


def is_ranked_by_label(metrics: EmbeddingMetric) -> bool:
    """Return whether each query is ranked against the full gallery, by label or by the rule of the module."""
    return isinstance(metrics, RetrievalMetrics) and not isinstance(metrics, RandomGalleryMetrics)


def sets_ranked_by_label(callback: Callback, trainer: pl.Trainer, warned: set[str]) -> Iterator[EvaluationSet]:
    """Yield the evaluation sets that are ranked by label or by the module's rule; for each other set, warn once.

    Args:
        callback: the callback that uses the sets, which the warning names.
        trainer: a trainer with a `RetrievalEvaluation`.
        warned: prefixes of the sets for which a warning was issued. The function adds further prefixes.
    """
    name = type(callback).__name__
    for evaluation_set in find_evaluation(trainer).sets:
        prefix, metrics = evaluation_set.prefix, evaluation_set.metrics
        if is_ranked_by_label(metrics):
            yield evaluation_set
        elif prefix not in warned:
            warned.add(prefix)
            rank_zero_warn(
                f"{name}: only evaluation sets that are evaluated by RetrievalMetrics are supported; "
                f"{prefix}, evaluated by {type(metrics).__name__}, is skipped."
            )
