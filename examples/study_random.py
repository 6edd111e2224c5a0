"""The experiments of `study.py` on training from random weights: losses of AP and of pairs, all tuned alike.

The first experiment tries the same number of settings of each loss on classes that are held out, with one seed. The
others compare the best setting of each on the test sets, with seeds that were not used for any choice.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from study_experiments import BASE, Experiment, Finding, Setting

RATES = (0.001, 0.002, 0.004, 0.008)
SCALES = (1.0, 20.0)  # of the loss: gradients are clipped to 1, the longer the more
CHOICE_SEED = 0
SEEDS = (20, 21, 22, 23, 24)
DATA_SETS = {"glyphs": "Glyphs", "emoji": "emoji"}
CHOICE = "random_choice"


@dataclass(frozen=True)
class Arm:
    """A loss, and the values of the one parameter of it that is tuned beside learning rate and scale."""

    loss: str
    parameter: str
    values: Sequence[float]
    fixed: Mapping[str, float] = field(default_factory=dict)
    first_loss: str | None = None

    def settings(self, data: str) -> dict[str, Setting]:
        """Return the settings that are tried on a data set, by what distinguishes them."""
        tried = {}
        for lr, value, scale in itertools.product(RATES, self.values, SCALES):
            arguments = {**self.fixed, self.parameter: value}
            setting = replace(BASE, loss=self.loss, loss_args=arguments, lr=lr, loss_scale=scale, data=data)
            row = f"{self.parameter} {value:g}, scale {scale:g}, learning rate {lr:g}"
            tried[row] = replace(setting, first_loss=self.first_loss, held_out=True)
        return tried


TAUS = (0.005, 0.01, 0.02)
SMOOTH_AP, MULTI_SIMILARITY, SUP_CON = "Smooth-AP", "multi-similarity", "supervised contrastive"
LOG_RANKS = tuple(f"log rank, lambda {lambda_}" for lambda_ in (0, 1, 3))
FIRST_PAIRS = "multi-similarity for 20 % of the steps, then Smooth-AP"
ARMS = {
    SMOOTH_AP: Arm("SmoothAPLoss", "tau", (0.01, 0.02, 0.05)),
    "ROADMAP": Arm("ROADMAPLoss", "lambda_", (0.2, 0.5, 0.8)),
    "FastAP": Arm("FastAPLoss", "num_bins", (5, 10, 20)),
    LOG_RANKS[0]: Arm("LogRankLoss", "tau", TAUS, {"lambda_": 0.0}),
    LOG_RANKS[1]: Arm("LogRankLoss", "tau", TAUS, {"lambda_": 1.0}),
    LOG_RANKS[2]: Arm("LogRankLoss", "tau", TAUS, {"lambda_": 3.0}),
    MULTI_SIMILARITY: Arm("MultiSimilarityLoss", "alpha", (1.0, 2.0, 4.0)),
    SUP_CON: Arm("SupConLoss", "temperature", (0.05, 0.1, 0.2)),
    FIRST_PAIRS: Arm("SmoothAPLoss", "tau", (0.01, 0.02, 0.05), first_loss="MultiSimilarityLoss"),
}


def best(tried: Mapping[str, Setting], results: Mapping[str, Mapping[str, Any]]) -> Setting:
    """Return the setting with the highest mAP of the held-out classes; runs without a result come last."""

    def value(setting: Setting) -> float:
        result = results.get(setting.key(CHOICE_SEED))
        if result is None:
            return -1.0
        return float(result["metrics"]["mAP"])

    return max(tried.values(), key=value)


def comparisons() -> list[Finding]:
    """Return what is compared on each data set, in the order of its importance."""
    found = []
    for log_rank in LOG_RANKS:
        found.append(Finding(f"{log_rank}, is above Smooth-AP", log_rank, SMOOTH_AP))
        for pairs in (MULTI_SIMILARITY, SUP_CON):
            found.append(Finding(f"{log_rank}, is as good as {pairs}", log_rank, pairs, "as good"))
            found.append(Finding(f"{log_rank}, is above {pairs}", log_rank, pairs))
    found.append(Finding("A start by pairs is above none", FIRST_PAIRS, SMOOTH_AP))
    found.append(Finding("Log rank with lambda 1 is above a start by pairs", LOG_RANKS[1], FIRST_PAIRS))
    found.append(Finding("Multi-similarity is above Smooth-AP", MULTI_SIMILARITY, SMOOTH_AP))
    found.append(Finding("ROADMAP is above Smooth-AP", "ROADMAP", SMOOTH_AP))
    found.append(Finding("FastAP is above Smooth-AP", "FastAP", SMOOTH_AP))
    for metric in ("mAP@R", "R@1"):
        found.append(
            Finding("Log rank with lambda 1 is above multi-similarity", LOG_RANKS[1], MULTI_SIMILARITY, metric=metric)
        )
    return found


def random_experiments(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Experiment]:
    """Return the experiments, of which all but the first follow from the results of the first."""
    tried, chosen = {}, {}
    for data, title in DATA_SETS.items():
        chosen[data] = {}
        for name, arm in ARMS.items():
            settings = arm.settings(data)
            tried[f"{title}, {name}"] = settings
            chosen[data][name] = replace(best(settings, results), held_out=False)
    experiments = {
        CHOICE: Experiment(
            "Settings of each loss",
            "What was tried: for each loss the same learning rates and scales, and as many values of one parameter "
            "of its own. The setting with the highest mAP of classes that are neither in training nor in the test "
            "set is the one of the next tables.",
            tried,
            [],
            seeds=(CHOICE_SEED,),
            plotted=False,
        )
    }
    for data, title in DATA_SETS.items():
        experiments[f"random_{data}"] = Experiment(
            f"Losses from random weights on {title}",
            f"Each loss with its best setting, on the test set of {title}.",
            {"": chosen[data]},
            comparisons(),
            seeds=SEEDS,
            chosen_by=CHOICE,
        )
    return experiments
