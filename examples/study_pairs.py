"""The experiments of `study.py` on losses of AP and of pairs, all tuned alike.

For each task, the first experiment tries the same number of settings of each loss on classes that are held out, with
one seed. The second compares the best setting of each on the test set, with seeds that were not used for any choice.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from study_experiments import BASE, Experiment, Finding, Setting

SCALES = (1.0, 20.0)  # of the loss: gradients are clipped to 1, the longer the more
CHOICE_SEED = 0
SEEDS = tuple(range(20, 25))
SWEEP_SEEDS = (0, 1, 2)
TEMPERATURES = (0.01, 0.02, 0.03, 0.05, 0.1)
WIDE_TAU = 0.05
WIDE_START = f"log rank, with tau {WIDE_TAU} for 20 % of the steps"
PER_CLASS = (2, 4, 8, 16)
POWERS = (0.0, 0.5, 1.0, 2.0)
RANK_POWERS = (-0.5, 0.5)  # a of ((1 + rn_i)^a - 1) / a
GAMMAS = (0.5, 0.2)  # weights of the present batch in moving averages
LIST_LENGTHS = (128, 512, 2_048)
RATE_FACTORS = (1, 2, 4)  # a batch that is longer may need a higher learning rate

Results = Mapping[str, Mapping[str, Any]]  # of the runs, by their keys


@dataclass(frozen=True)
class Arm:
    """A loss, and the one parameter of it that is tuned beside learning rate and scale: its default, and others."""

    loss: str
    parameter: str
    default: float
    others: Sequence[float]
    fixed: Mapping[str, float] = field(default_factory=dict)
    first_loss: str | None = None

    def tried(self, task: "Task", results: Results) -> dict[str, Setting]:
        """Return the settings that are tried on a task, by what distinguishes them.

        Learning rates and scales are tried first. Once all of them have results, the other values of the parameter
        are tried with the best learning rate and scale.
        """
        base = replace(task.base, loss=self.loss, first_loss=self.first_loss, held_out=True)
        tried = dict(self.vary(base, task.rates, SCALES, [self.default]))
        if all(setting.key(CHOICE_SEED) in results for setting in tried.values()):
            chosen = best(tried, results)
            tried |= self.vary(base, [chosen.lr], [chosen.loss_scale], self.others)
        return tried

    def vary(
        self, base: Setting, rates: Sequence[float], scales: Sequence[float], values: Sequence[float]
    ) -> Iterator[tuple[str, Setting]]:
        """Yield all combinations of learning rates, scales and values of the parameter."""
        for lr, scale, value in itertools.product(rates, scales, values):
            row = f"{self.parameter} {value:g}, scale {scale:g}, learning rate {lr:g}"
            yield row, replace(base, loss_args={**self.fixed, self.parameter: value}, lr=lr, loss_scale=scale)


SMOOTH_AP, MULTI_SIMILARITY, SUP_CON = "Smooth-AP", "multi-similarity", "supervised contrastive"
LOG_RANKS = tuple(f"log rank, lambda {lambda_}" for lambda_ in (0, 1, 3))
LOG_RANK = LOG_RANKS[1]
FIRST_PAIRS = "multi-similarity for 20 % of the steps, then Smooth-AP"
FIRST_PAIRS_LOG_RANK = "multi-similarity for 20 % of the steps, then log rank"
FIRST_LOG_RANK = "log rank for 20 % of the steps, then Smooth-AP"
ARMS = {
    SMOOTH_AP: Arm("SmoothAPLoss", "tau", 0.01, (0.02, 0.05)),
    "ROADMAP": Arm("ROADMAPLoss", "lambda_", 0.5, (0.2, 0.8)),
    "FastAP": Arm("FastAPLoss", "num_bins", 10, (5, 20)),
    LOG_RANKS[0]: Arm("LogRankLoss", "tau", 0.01, (0.005, 0.02), {"lambda_": 0.0}),
    LOG_RANKS[1]: Arm("LogRankLoss", "tau", 0.01, (0.005, 0.02), {"lambda_": 1.0}),
    LOG_RANKS[2]: Arm("LogRankLoss", "tau", 0.01, (0.005, 0.02), {"lambda_": 3.0}),
    MULTI_SIMILARITY: Arm("MultiSimilarityLoss", "alpha", 2.0, (1.0, 4.0)),
    SUP_CON: Arm("SupConLoss", "temperature", 0.1, (0.05, 0.2)),
    FIRST_PAIRS: Arm("SmoothAPLoss", "tau", 0.01, (0.02, 0.05), first_loss="MultiSimilarityLoss"),
    FIRST_PAIRS_LOG_RANK: Arm(
        "LogRankLoss", "tau", 0.01, (0.005, 0.02), {"lambda_": 1.0}, first_loss="MultiSimilarityLoss"
    ),
    FIRST_LOG_RANK: Arm("SmoothAPLoss", "tau", 0.01, (0.02, 0.05), first_loss="LogRankLoss"),
}


@dataclass(frozen=True)
class Task:
    """What is trained, the learning rates that are tried, and the seeds of the comparison."""

    title: str
    base: Setting
    rates: Sequence[float] = (0.001, 0.002, 0.004, 0.008)
    arms: Sequence[str] = tuple(ARMS)
    seeds: Sequence[int] = SEEDS


HEAD = replace(BASE, data="emoji", network="head", pooling="avg")
PHOTOGRAPHS = replace(HEAD, data="photographs", images=20_000)
LAST_STAGES = replace(BASE, data="emoji", network="last stages", freeze_batch_norm=True, images=6_400)
TASKS = {
    "glyphs": Task("random weights on Glyphs", BASE),
    "emoji": Task("random weights on emoji", replace(BASE, data="emoji")),
    "head": Task("a head on frozen features", HEAD),
    "fine_tuning": Task(
        "fine-tuning of the last two stages",
        LAST_STAGES,
        rates=(0.0001, 0.0002, 0.0005, 0.001),
        arms=(SMOOTH_AP, LOG_RANK, MULTI_SIMILARITY, SUP_CON, FIRST_PAIRS_LOG_RANK),
    ),
    "photographs": Task(
        "a head on photographs",
        PHOTOGRAPHS,
        rates=(0.0002, 0.0005, 0.001, 0.002),
        arms=(SMOOTH_AP, LOG_RANK, MULTI_SIMILARITY, SUP_CON),
    ),
}
TRAINED_CLASSES = ("head", "photographs")  # tasks that also ask for retrieval among trained classes
SWEPT = ("glyphs", "emoji", "head")  # tasks on which temperatures are tried


def best(tried: Mapping[str, Setting], results: Results) -> Setting:
    """Return the setting with the highest mAP of the held-out classes; runs without a result come last."""

    def value(setting: Setting) -> float:
        result = results.get(setting.key(CHOICE_SEED))
        if result is None:
            return -1.0
        return float(result["metrics"]["mAP"])

    return max(tried.values(), key=value)


def comparisons(arms: Sequence[str]) -> list[Finding]:
    """Return what is compared on each task, in the order of its importance."""
    found = []
    for log_rank in LOG_RANKS:
        found.append(Finding(f"{log_rank}, is above Smooth-AP", log_rank, SMOOTH_AP))
        for pairs in (MULTI_SIMILARITY, SUP_CON):
            found.append(Finding(f"{log_rank}, is as good as {pairs}", log_rank, pairs, "as good"))
            found.append(Finding(f"{log_rank}, is above {pairs}", log_rank, pairs))
    found.append(Finding("A start by pairs is above none for Smooth-AP", FIRST_PAIRS, SMOOTH_AP))
    found.append(Finding("A start by pairs is above none for log rank", FIRST_PAIRS_LOG_RANK, LOG_RANK))
    found.append(Finding("Log rank with lambda 1 is above a start by pairs", LOG_RANK, FIRST_PAIRS))
    found.append(Finding("A start by log rank is above none for Smooth-AP", FIRST_LOG_RANK, SMOOTH_AP))
    for start in (FIRST_PAIRS, FIRST_LOG_RANK):
        for pairs in (MULTI_SIMILARITY, SUP_CON):
            found.append(Finding(f"{start}, is as good as {pairs}", start, pairs, "as good"))
            found.append(Finding(f"{start}, is above {pairs}", start, pairs))
    found.append(Finding("Multi-similarity is above Smooth-AP", MULTI_SIMILARITY, SMOOTH_AP))
    found.append(Finding("ROADMAP is above Smooth-AP", "ROADMAP", SMOOTH_AP))
    found.append(Finding("FastAP is above Smooth-AP", "FastAP", SMOOTH_AP))
    for metric in ("mAP@R", "R@1"):
        for pairs in (MULTI_SIMILARITY, SUP_CON):
            found.append(Finding(f"{LOG_RANK}, is above {pairs}", LOG_RANK, pairs, metric=metric))
    return [finding for finding in found if finding.one in arms and finding.other in arms]


def leaders(title: str, task: str, chosen: Mapping[str, Setting]) -> Experiment:
    """Return the comparison of the best losses on a task with ten seeds."""
    claims = []
    for one in (LOG_RANK, FIRST_PAIRS_LOG_RANK):
        for pairs in (MULTI_SIMILARITY, SUP_CON):
            claims.append(Finding(f"{one}, is as good as {pairs}", one, pairs, "as good"))
            claims.append(Finding(f"{one}, is above {pairs}", one, pairs))
    claims.append(Finding("A start by pairs is above none for log rank", FIRST_PAIRS_LOG_RANK, LOG_RANK))
    for metric in ("mAP@R", "R@1"):
        for one in (LOG_RANK, FIRST_PAIRS_LOG_RANK):
            claims.append(Finding(f"{one}, is above {MULTI_SIMILARITY}", one, MULTI_SIMILARITY, metric=metric))
    rows = (LOG_RANK, FIRST_PAIRS_LOG_RANK, MULTI_SIMILARITY, SUP_CON)
    return Experiment(
        f"The best losses with ten seeds: {title}",
        "The seeds 20 to 29. The losses were chosen when the results of the first five seeds were known, which these "
        "results contain.",
        {"": {row: chosen[row] for row in rows}},
        claims,
        seeds=range(20, 30),
        chosen_by=f"choice_{task}",
    )


def among_trained(task: Task, name: str, chosen: Mapping[str, Setting]) -> Experiment:
    """Return the comparison of losses by other images of the classes on which they are trained."""
    rows = {}
    for arm in (SMOOTH_AP, LOG_RANK, MULTI_SIMILARITY, SUP_CON):
        rows[arm] = replace(chosen[arm], trained_classes=True)
    return Experiment(
        f"Among trained classes: {task.title}",
        "One image of each training class, drawn at random, is not trained on. It queries the images of all training "
        "classes that are. Each loss has the setting that was chosen above on classes without training, so nothing is "
        "tuned for this question.",
        {"": rows},
        comparisons(list(rows)),
        seeds=SEEDS,
        chosen_by=f"choice_{name}",
    )


def without_training() -> Experiment:
    """Return the evaluation of the pretrained network's features, without a head and without training."""
    rows = {}
    for name in TRAINED_CLASSES:
        features = replace(TASKS[name].base, dim=None, images=0)
        rows[f"{TASKS[name].title}, test classes"] = features
        rows[f"{TASKS[name].title}, trained classes"] = replace(features, trained_classes=True)
    return Experiment(
        "Without training",
        "The features of the pretrained network, which the heads of the sections above get.",
        {"": rows},
        [],
        seeds=(CHOICE_SEED,),
        plotted=False,
    )


def on_held_out(setting: Setting, **changes: Any) -> Setting:
    """Return a setting that is evaluated on held-out classes, with other arguments of its loss."""
    arguments = {**setting.loss_args, **changes}
    return replace(setting, loss_args=arguments, held_out=True)


def temperatures(title: str, task: str, chosen: Mapping[str, Setting]) -> Experiment:
    """Return the sweep of tau on a task. SupAP has the learning rate and the scale of Smooth-AP."""
    starts = {
        "Smooth-AP": chosen[SMOOTH_AP],
        "SupAP": replace(chosen[SMOOTH_AP], loss="SupAPLoss"),
        "log rank": chosen[LOG_RANK],
    }
    curves = {}
    claims = []
    for loss, start in starts.items():
        curves[loss] = {tau: on_held_out(start, tau=tau) for tau in TEMPERATURES}
        for tau in TEMPERATURES[1:]:
            claims.append(Finding(f"{loss}: {tau} is above 0.01", f"{loss}, {tau}", f"{loss}, 0.01"))
    # A tau that changes during training, as two terms whose weights are scheduled.
    wide = replace(chosen[LOG_RANK], first_loss="LogRankLoss", first_args={"tau": WIDE_TAU})
    curves[WIDE_START] = {tau: on_held_out(wide, tau=tau) for tau in TEMPERATURES[:2]}
    for tau in TEMPERATURES[:2]:
        claim = f"{WIDE_START}: {tau} is above {tau} throughout"
        claims.append(Finding(claim, f"{WIDE_START}, {tau}", f"log rank, {tau}"))
    return Experiment(
        f"Temperature: {title}",
        "Each tau with the learning rate and the scale that were chosen above, and SupAP with those of Smooth-AP, on "
        "the classes that are neither in training nor in the test set. The last rows change tau during training.",
        curves,
        claims,
        axis="tau",
        seeds=SWEEP_SEEDS,
        chosen_by=f"choice_{task}",
    )


def above_the_first(rows: Iterable[str], name: str) -> list[Finding]:
    """Return the claims that each row is above the first one, which has another name in them, in mAP and in R@1."""
    first, *others = rows
    return [
        Finding(f"{row}, is above {name}", row, first, metric=metric) for metric in ("mAP", "R@1") for row in others
    ]


def weights_of_positives(title: str, task: str, chosen: Mapping[str, Setting]) -> Experiment:
    """Return the comparison of weights on the positives of log rank."""
    start = replace(chosen[LOG_RANK], loss="WeightedLogRankLoss")
    rows = {}
    for p in POWERS:
        rows[f"log rank, p {p:g}"] = replace(start, loss_args={**start.loss_args, "p": p})
    return Experiment(
        f"Weights of positives: {title}",
        "Log rank whose k-th best positive has a weight in proportion to k^-p, with the settings that were chosen "
        "above for log rank, which has p 0. The seeds are 40 to 44, which no other experiment has; the comparisons and "
        "what they decide were [written down before the runs](candidates.md#weights-alone).",
        {"": rows},
        above_the_first(rows, "p 0"),
        seeds=range(40, 45),
        chosen_by=f"choice_{task}",
    )


def weights_of_ranks(title: str, task: str, chosen: Mapping[str, Setting]) -> Experiment:
    """Return the comparison of log rank with powers of ranks, and with moving averages of ranks."""
    arguments = chosen[LOG_RANK].loss_args
    rows = {LOG_RANK: replace(chosen[LOG_RANK], loss="WeightedLogRankLoss")}
    for a in RANK_POWERS:
        rows[f"log rank, a {a:g}"] = replace(rows[LOG_RANK], loss_args={**arguments, "a": a})
    for gamma in GAMMAS:
        row = f"log rank, moving averages, gamma {gamma:g}"
        rows[row] = replace(rows[LOG_RANK], loss="MovingRankLoss", loss_args={**arguments, "gamma": gamma})
    return Experiment(
        f"Weights of ranks: {title}",
        "Log rank with ((1 + rn_i)^a - 1) / a in place of log(1 + rn_i), and with moving averages of ranks over the "
        "batches in its gradient; all with the settings that were chosen above for log rank. The seeds are 55 to 59, "
        "which no other experiment has; the comparisons and what they decide were [written down before the "
        "runs](candidates.md#weights-of-ranks).",
        {"": rows},
        above_the_first(rows, "log rank"),
        seeds=range(55, 60),
        chosen_by=f"choice_{task}",
    )


def images_of_each_class(chosen: Mapping[str, Setting]) -> Experiment:
    """Return the sweep of K, with batches of the same size."""
    starts = {SMOOTH_AP: chosen[SMOOTH_AP], MULTI_SIMILARITY: chosen[MULTI_SIMILARITY]}
    for log_rank in LOG_RANKS:
        starts[log_rank] = replace(chosen[LOG_RANK], loss_args=ARMS[log_rank].fixed)
    curves = {}
    for name, start in starts.items():
        curves[name] = {}
        for number in PER_CLASS:
            setting = replace(start, per_class=number, classes=BASE.classes * BASE.per_class // number)
            curves[name][number] = on_held_out(setting)
    claims = []
    for number in PER_CLASS:
        for other in (LOG_RANKS[0], LOG_RANKS[2], MULTI_SIMILARITY, SMOOTH_AP):
            claim = f"{number} images: log rank with lambda 1 is above {other}"
            claims.append(Finding(claim, f"{LOG_RANK}, {number}", f"{other}, {number}"))
    return Experiment(
        "Images of each class",
        "Batches of 128 images with 2 to 16 images of each class. Each loss has the setting that was chosen above for "
        "4 images; log rank has tau 0.01, and the learning rate and the scale that were chosen for lambda 1.",
        curves,
        claims,
        axis="images of each class",
        seeds=SWEEP_SEEDS,
        chosen_by="choice_glyphs",
    )


def long_lists(chosen: Mapping[str, Setting], results: Results) -> dict[str, Experiment]:
    """Return the learning rates that are tried for each length of the lists, and the comparison with the best."""
    tried: dict[str, dict[str, Setting]] = {}
    curves: dict[str, dict[int, Setting]] = {}
    for loss in (LOG_RANK, MULTI_SIMILARITY):
        curves[loss] = {}
        for length in LIST_LENGTHS:
            start = replace(chosen[loss], classes=length // BASE.per_class, images=160_000, held_out=True)
            rates = [start.lr * factor for factor in RATE_FACTORS]
            settings = {f"learning rate {rate:g}": replace(start, lr=rate) for rate in rates}
            tried[f"{loss}, batches of {length}"] = settings
            curves[loss][length] = replace(best(settings, results), held_out=False)
    claims = []
    for length in LIST_LENGTHS:
        for metric in ("mAP", "R@1"):
            one, other = f"{LOG_RANK}, {length}", f"{MULTI_SIMILARITY}, {length}"
            claims.append(Finding(f"{one}, is above {MULTI_SIMILARITY}", one, other, metric=metric))
    for loss in curves:
        for length in LIST_LENGTHS[1:]:
            claim = f"{loss}: batches of {length} are above batches of 128"
            claims.append(Finding(claim, f"{loss}, {length}", f"{loss}, 128"))
    return {
        "choice_lists": Experiment(
            "Learning rates for longer lists: a head on frozen features",
            "Batches of 128, 512 and 2,048 images, four of each class, and 160,000 images in all. Each loss has the "
            "scale and the parameter that were chosen above.",
            tried,
            [],
            seeds=(CHOICE_SEED,),
            chosen_by="choice_head",
            plotted=False,
        ),
        "lists": Experiment(
            "Longer lists: a head on frozen features",
            "Each loss and each length of the lists with its best learning rate, on the test set.",
            curves,
            claims,
            axis="images of a batch",
            seeds=SEEDS,
            chosen_by="choice_lists",
        ),
    }


def pair_experiments(results: Results) -> dict[str, Experiment]:
    """Return the experiments: for each task the settings that are tried, and the comparison that follows from them."""
    experiments = {}
    for name, task in TASKS.items():
        tried, chosen = {}, {}
        for arm in task.arms:
            settings = ARMS[arm].tried(task, results)
            tried[arm] = settings
            chosen[arm] = replace(best(settings, results), held_out=False)
        experiments[f"choice_{name}"] = Experiment(
            f"Settings of each loss: {task.title}",
            "What was tried on classes that are neither in training nor in the test set. The setting of each loss with "
            "the highest mAP is the one of the next table.",
            tried,
            [],
            seeds=(CHOICE_SEED,),
            plotted=False,
        )
        if name in SWEPT:
            experiments[f"temperature_{name}"] = temperatures(task.title, name, chosen)
        experiments[f"pairs_{name}"] = Experiment(
            f"Losses: {task.title}",
            "Each loss with its best setting, on the test set.",
            {"": chosen},
            comparisons(task.arms),
            seeds=task.seeds,
            chosen_by=f"choice_{name}",
        )
        experiments[f"weights_{name}"] = weights_of_positives(task.title, name, chosen)
        experiments[f"ranks_{name}"] = weights_of_ranks(task.title, name, chosen)
        if name in TRAINED_CLASSES:
            experiments[f"trained_{name}"] = among_trained(task, name, chosen)
        if name in SWEPT:
            experiments[f"leaders_{name}"] = leaders(task.title, name, chosen)
        if name == "glyphs":
            experiments["log_rank_per_class"] = images_of_each_class(chosen)
        if name == "head":
            experiments |= long_lists(chosen, results)
    experiments["untrained"] = without_training()
    return experiments
