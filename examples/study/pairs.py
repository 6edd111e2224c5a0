"""The experiments of `run.py` on losses of AP and of pairs, all tuned alike.

For each task, the first experiment tries the same number of settings of each loss on classes that are held out, with
one seed. The second compares the best setting of each on the test set, with seeds that were not used for any choice.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiments import BASE, Experiment, Finding, Setting

SCALES = (1.0, 20.0)  # of the loss: gradients are clipped to 1, the longer the more
CHOICE_SEED = 0
SEEDS = tuple(range(20, 25))
SWEEP_SEEDS = (0, 1, 2)
TEMPERATURES = (0.01, 0.02, 0.03, 0.05, 0.1)
PER_CLASS = (2, 4, 8, 16)
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
    """Return what is compared on each task."""
    found = []
    for other in (SMOOTH_AP, MULTI_SIMILARITY, SUP_CON):
        found.append(Finding(f"{LOG_RANK}, is above {other}", LOG_RANK, other))
    found.append(Finding(f"{LOG_RANK}, is above {MULTI_SIMILARITY}", LOG_RANK, MULTI_SIMILARITY, metric="R@1"))
    found.append(Finding("A start by pairs is above none for Smooth-AP", FIRST_PAIRS, SMOOTH_AP))
    found.append(Finding("A start by pairs is above none for log rank", FIRST_PAIRS_LOG_RANK, LOG_RANK))
    for one in (MULTI_SIMILARITY, "ROADMAP", "FastAP"):
        found.append(Finding(f"{one} is above Smooth-AP", one, SMOOTH_AP))
    return [finding for finding in found if finding.one in arms and finding.other in arms]


def leaders(title: str, task: str, chosen: Mapping[str, Setting]) -> Experiment:
    """Return the comparison of the best losses on a task with ten seeds."""
    claims = []
    for metric in ("mAP", "R@1"):
        for one in (LOG_RANK, FIRST_PAIRS_LOG_RANK):
            claims.append(Finding(f"{one}, is above {MULTI_SIMILARITY}", one, MULTI_SIMILARITY, metric=metric))
    claims.append(Finding("A start by pairs is above none for log rank", FIRST_PAIRS_LOG_RANK, LOG_RANK))
    rows = (LOG_RANK, FIRST_PAIRS_LOG_RANK, MULTI_SIMILARITY, SUP_CON)
    return Experiment(
        f"The best losses with ten seeds: {title}",
        "The losses were chosen when the results of the first five seeds were known, which are among the ten.",
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
        "One image of each training class is not trained on, and queries those that are. The settings are those above, "
        "which were chosen on other classes.",
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
        "The features of the pretrained network that the heads get.",
        {"": rows},
        [],
        seeds=(CHOICE_SEED,),
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
    for loss, start in starts.items():
        curves[loss] = {tau: on_held_out(start, tau=tau) for tau in TEMPERATURES}
    return Experiment(
        f"Temperature: {title}",
        "Each loss with the learning rate and the scale that were chosen for it, and SupAP with those of Smooth-AP, on "
        "held-out classes.",
        curves,
        [],
        axis="tau",
        seeds=SWEEP_SEEDS,
        chosen_by=f"choice_{task}",
    )


def images_of_each_class(chosen: Mapping[str, Setting]) -> Experiment:
    """Return the sweep of K, with batches of the same size."""
    starts = {SMOOTH_AP: chosen[SMOOTH_AP], MULTI_SIMILARITY: chosen[MULTI_SIMILARITY]}
    for log_rank in LOG_RANKS:
        starts[log_rank] = replace(chosen[LOG_RANK], loss_args=ARMS[log_rank].fixed)
    curves: dict[str, dict[int, Setting]] = {}
    for name, start in starts.items():
        curves[name] = {}
        for number in PER_CLASS:
            setting = replace(start, per_class=number, classes=BASE.classes * BASE.per_class // number)
            curves[name][number] = on_held_out(setting)
    claims = []
    for number in PER_CLASS:
        claim = f"{number} images: log rank with lambda 1 is above {MULTI_SIMILARITY}"
        claims.append(Finding(claim, f"{LOG_RANK}, {number}", f"{MULTI_SIMILARITY}, {number}"))
    return Experiment(
        "Images of each class",
        "Batches of 128 images with 2 to 16 images of each class. Each loss has the setting that was chosen for 4 "
        "images; log rank has tau 0.01.",
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
            shown=False,
        ),
        "lists": Experiment(
            "Longer lists: a head on frozen features",
            "Batches of 128, 512 and 2,048 images, four of each class, and 160,000 images in all. Each loss and each "
            "length has its best learning rate.",
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
            shown=False,
        )
        experiments[f"pairs_{name}"] = Experiment(
            f"Losses: {task.title}",
            "On the test set.",
            {"": chosen},
            comparisons(task.arms),
            seeds=task.seeds,
            with_settings=True,
            chosen_by=f"choice_{name}",
        )
        if name in TRAINED_CLASSES:
            experiments[f"trained_{name}"] = among_trained(task, name, chosen)
        if name in SWEPT:
            experiments[f"leaders_{name}"] = leaders(task.title, name, chosen)
            experiments[f"temperature_{name}"] = temperatures(task.title, name, chosen)
        if name == "glyphs":
            experiments["log_rank_per_class"] = images_of_each_class(chosen)
        if name == "head":
            experiments |= long_lists(chosen, results)
    experiments["untrained"] = without_training()
    return experiments
