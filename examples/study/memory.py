"""The experiments of `run.py` with a memory of past batches: networks that are trained already, and small batches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments import BASE, FIVE_SEEDS, RECALL, Experiment, Finding, Setting

EMOJI = replace(BASE, data="emoji", images=160_000)
HELD_OUT_EMOJI = replace(EMOJI, held_out=True)
LEARNING_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
# Further ones for the rows of which the best of these is at an end.
BEYOND = {
    "glyphs, no memory": (2e-3, 4e-3),
    "glyphs, two terms": (2e-3, 4e-3),
    "emoji, no memory": (1e-5,),
    "ROADMAPLoss, no memory": (2e-3, 4e-3),
    "BlackboxRecallLoss, no memory": (1e-5,),
    "FastAPLoss, no memory": (2e-3, 4e-3),
    "ContrastiveLoss, no memory": (2e-3, 4e-3),
    "ContrastiveLoss, two terms": (2e-3, 4e-3),
}
# The rows of the tables. A memory has 512 images, unless a row says something else.
CHECKPOINT, NO_MEMORY, BATCH_128 = "checkpoint", "no memory", "no memory, batch of 128"
ONE_LIST, DETACHED, TWO_TERMS = "one list", "one list, detached", "two terms"
HALF_WAY = "one list, from half-way"
MEMORIES: dict[str, dict[str, Any]] = {
    NO_MEMORY: {},
    ONE_LIST: {"memory": 512},
    TWO_TERMS: {"memory": 512, "memory_mode": "two_terms"},
}
FROM_0, DRIFT = "one list, from step 0", "drift below"
# The learning rates with the highest mAP in "Learning rate with a memory".
GLYPHS_RATES = {NO_MEMORY: 1e-3, ONE_LIST: 3e-4, TWO_TERMS: 1e-3}
EMOJI_RATES = {NO_MEMORY: 1e-5, ONE_LIST: 1e-4, TWO_TERMS: 1e-4}


def train_on(start: Setting, lr: float, **different: Any) -> Setting:
    """Return the setting that trains the network of another one for 1,200 steps of 32 images."""
    arguments: dict[str, Any] = {"classes": 8, "images": 38_400, "lr": lr, **different}
    return replace(start, start=start, **arguments)


def learning_rates(row: str, beyond: Mapping[str, Sequence[float]] = BEYOND) -> list[float]:
    """Return the learning rates that are tried for a row."""
    return sorted({*LEARNING_RATES, *beyond.get(row, ())})


def sweep(
    start: Setting,
    memories: Iterable[str] = MEMORIES,
    beyond: Mapping[str, Sequence[float]] = BEYOND,
    **different: Any,
) -> dict[str, dict[float, Setting]]:
    """Return the runs that choose a learning rate, which evaluate classes that are held out of training."""
    curves = {}
    for name in memories:
        row, arguments = f"{start.data}, {name}", {**MEMORIES[name], **different}
        curves[row] = {lr: train_on(start, lr, held_out=True, **arguments) for lr in learning_rates(row, beyond)}
    return curves


def with_and_without(start: Setting, rates: Mapping[str, float]) -> dict[str, Setting]:
    """Return the rows that both data sets have: the network at the start, and training with and without a memory."""
    rows = {CHECKPOINT: replace(start, start=start, images=0)}
    for name, memory in MEMORIES.items():
        rows[name] = train_on(start, rates[name], **memory)
    rows[BATCH_128] = replace(rows[NO_MEMORY], classes=32, lr=2 * rates[NO_MEMORY])
    return rows


def begins(memory: Setting, drifts: Sequence[float]) -> dict[str, Setting]:
    """Return the rows of a memory that begins as soon as the drift is below each of some numbers."""
    return {f"{DRIFT} {drift}": replace(memory, memory_start=drift) for drift in drifts}


def claims(rows: Iterable[str]) -> list[Finding]:
    """Return what is asked about each row with a memory, and about the memory of one list."""
    findings = []
    for row in rows:
        if row in (ONE_LIST, DETACHED, TWO_TERMS):
            findings.append(Finding(f"A memory ({row}) is better than none", row, NO_MEMORY))
        if row in (DETACHED, TWO_TERMS):
            findings.append(Finding(f"One list is better than {row}", ONE_LIST, row))
    findings += [
        Finding("Training on without a memory is better than the checkpoint", NO_MEMORY, CHECKPOINT),
        Finding("A batch of 128 is better than one of 32 with a memory", BATCH_128, ONE_LIST),
    ]
    return findings


def begin_claims(rows: Iterable[str]) -> list[Finding]:
    """Return what is asked about each row whose memory begins by itself."""
    findings = []
    for row in rows:
        if DRIFT not in row:
            continue
        findings.append(Finding(f"A memory is better than none ({row})", row, NO_MEMORY))
        if row.endswith("0.01"):
            findings.append(Finding(f"It is better than one from step 0 ({row})", row, FROM_0))
    return findings


GLYPHS_ROWS = with_and_without(BASE, GLYPHS_RATES)
GLYPHS_ROWS[DETACHED] = replace(GLYPHS_ROWS[ONE_LIST], memory_mode="one_list_detached")
SIZE_ROWS = {}
for row in (ONE_LIST, DETACHED, TWO_TERMS):
    SIZE_ROWS[f"{row}, 512"] = GLYPHS_ROWS[row]
    SIZE_ROWS[f"{row}, 4,096"] = replace(GLYPHS_ROWS[row], memory=4096)
EMOJI_ROWS = with_and_without(EMOJI, EMOJI_RATES)
SMALL_BATCH = replace(BASE, classes=8, lr=1e-3)
SMALL_BATCH_MEMORY = replace(SMALL_BATCH, memory=512)
UNTRAINED_ROWS = {
    NO_MEMORY: SMALL_BATCH,
    FROM_0: SMALL_BATCH_MEMORY,
    HALF_WAY: replace(SMALL_BATCH_MEMORY, memory_start=624),
    **begins(SMALL_BATCH_MEMORY, (0.3, 0.1, 0.03, 0.01)),
}
TRAINED_ROWS = {
    NO_MEMORY: GLYPHS_ROWS[NO_MEMORY],
    FROM_0: GLYPHS_ROWS[ONE_LIST],
    **begins(GLYPHS_ROWS[ONE_LIST], (0.1, 0.03, 0.01)),
}
SMOOTH_AP = f"SmoothAPLoss, {NO_MEMORY}"
# The memory of each loss, two terms for the contrastive loss as in XBM, and the learning rates with the highest mAP in
# "Learning rate of other losses with a memory": without a memory, and with it.
OTHER_LOSSES = {
    "ROADMAPLoss": (ONE_LIST, 2e-3, 3e-4),
    "BlackboxRecallLoss": (ONE_LIST, 3e-5, 1e-4),
    "FastAPLoss": (ONE_LIST, 1e-3, 3e-4),
    "ContrastiveLoss": (TWO_TERMS, 2e-3, 1e-3),
}


def sweeps_of_other_losses() -> dict[str, dict[float, Setting]]:
    """Return the runs that choose the learning rates of other losses, which train the same network on."""
    curves = {}
    for loss, (memory, *_) in OTHER_LOSSES.items():
        for name in (NO_MEMORY, memory):
            row = f"{loss}, {name}"
            settings = {lr: train_on(BASE, lr, loss=loss, held_out=True) for lr in learning_rates(row)}
            curves[row] = {lr: replace(setting, **MEMORIES[name]) for lr, setting in settings.items()}
    return curves


def other_rows() -> dict[str, Setting]:
    """Return the rows of the other losses, with and without a memory, and those of Smooth-AP from the table before."""
    rows = {CHECKPOINT: GLYPHS_ROWS[CHECKPOINT], SMOOTH_AP: GLYPHS_ROWS[NO_MEMORY]}
    for loss, (memory, lr_without, lr_with) in OTHER_LOSSES.items():
        rows[f"{loss}, {NO_MEMORY}"] = train_on(BASE, lr_without, loss=loss)
        with_memory = train_on(BASE, lr_with, loss=loss, **MEMORIES[memory])
        rows[f"{loss}, {memory}"] = with_memory
    return rows


def other_claims() -> list[Finding]:
    """Return what is asked about each of the other losses."""
    findings = []
    for loss, (memory, *_) in OTHER_LOSSES.items():
        row = f"{loss}, {memory}"
        findings.append(Finding(f"A memory is better than none ({loss})", row, f"{loss}, {NO_MEMORY}"))
    for loss in OTHER_LOSSES:
        row = f"{loss}, {NO_MEMORY}"
        findings.append(Finding(f"{loss} is better than Smooth-AP, without a memory", row, SMOOTH_AP))
    return findings


# The learning rates with the highest mAP in "Learning rate with frozen BatchNorm".
FROZEN_RATES = {
    "glyphs": {NO_MEMORY: 1e-3, ONE_LIST: 3e-5},
    "emoji": {NO_MEMORY: 3e-6, ONE_LIST: 3e-5},
}
# Further learning rates, where the best of those of all rows is at an end.
FROZEN_BEYOND = {
    "glyphs, no memory": (2e-3, 4e-3),
    "glyphs, one list": (1e-5,),
    "emoji, no memory": (3e-6, 1e-5),
    "emoji, one list": (1e-5,),
}


def frozen_sweeps() -> dict[str, dict[float, Setting]]:
    """Return the runs that choose the learning rates with frozen BatchNorm layers."""
    curves = {}
    for start in (BASE, HELD_OUT_EMOJI):
        curves |= sweep(start, (NO_MEMORY, ONE_LIST), FROZEN_BEYOND, freeze_batch_norm=True)
    return curves


def frozen_rows() -> dict[str, Setting]:
    """Return the rows with frozen BatchNorm layers, and those of the checkpoint from the tables before."""
    rows = {}
    for start, trained in ((BASE, GLYPHS_ROWS), (EMOJI, EMOJI_ROWS)):
        rows[f"{start.data}, {CHECKPOINT}"] = trained[CHECKPOINT]
        for memory in (NO_MEMORY, ONE_LIST):
            setting = train_on(start, FROZEN_RATES[start.data][memory], freeze_batch_norm=True, **MEMORIES[memory])
            rows[f"{start.data}, {memory}"] = setting
    return rows


def frozen_claims() -> list[Finding]:
    """Return what is asked about the memory with frozen BatchNorm layers."""
    findings = []
    for data in ("glyphs", "emoji"):
        claim = f"A memory is better than none ({data})"
        findings.append(Finding(claim, f"{data}, {ONE_LIST}", f"{data}, {NO_MEMORY}"))
    return findings


MEMORY_EXPERIMENTS = {
    "memory_from_scratch": Experiment(
        "Memory from the first step",
        "RaMBO's recall on Glyphs, from random weights, with batches of 128. The network changes too fast for a "
        "memory, even if the memory begins after half of the steps.",
        {
            "": {
                NO_MEMORY: RECALL,
                ONE_LIST: replace(RECALL, memory=512),
                HALF_WAY: replace(RECALL, memory=512, memory_start=156),
            }
        },
        [
            Finding("A memory is better than none", ONE_LIST, NO_MEMORY),
            Finding("A memory that begins half-way is better than none", HALF_WAY, NO_MEMORY),
        ],
    ),
    "memory_learning_rate": Experiment(
        "Learning rate with a memory",
        "The learning rates from which those of the other tables were chosen: the one with the highest mAP of the "
        "training classes that were held out, with one seed.",
        {**sweep(BASE), **sweep(HELD_OUT_EMOJI)},
        [],
        seeds=(0,),
        shown=False,
    ),
    "memory_begin_untrained": Experiment(
        "Begin of a memory from random weights",
        '1,250 batches of 32 with a learning rate of 0.001. With `start_step="auto"`, the memory begins as soon as '
        "the drift, which `MemoryMonitor(start_drift=...)` measures, is below a number. The last column has a step "
        "for each seed.",
        {"": UNTRAINED_ROWS},
        begin_claims(UNTRAINED_ROWS),
    ),
    "memory_begin_trained": Experiment(
        "Begin of a memory from a trained network",
        "Such a network changes so little that a memory may begin at step 0: waiting only shortens its use.",
        {"": TRAINED_ROWS},
        begin_claims(TRAINED_ROWS),
    ),
    "memory_glyphs": Experiment(
        "Memory on Glyphs",
        "The checkpoint is the network with which each of the other runs starts.",
        {"": GLYPHS_ROWS},
        claims(GLYPHS_ROWS),
        seeds=FIVE_SEEDS,
    ),
    "memory_emoji": Experiment(
        "Memory on emoji",
        "The same with images of colour.",
        {"": EMOJI_ROWS},
        claims(EMOJI_ROWS),
        seeds=FIVE_SEEDS,
    ),
    "memory_size": Experiment(
        "Size of the memory",
        "Eight times as many images, on Glyphs, which are up to 128 steps old.",
        {"": SIZE_ROWS},
        [
            Finding(f"A larger memory is better ({row})", f"{row}, 4,096", f"{row}, 512")
            for row in (ONE_LIST, DETACHED, TWO_TERMS)
        ],
        seeds=FIVE_SEEDS,
    ),
    "memory_other_learning_rate": Experiment(
        "Learning rate of other losses with a memory",
        "The learning rates from which those of the next table were chosen, as before: with one seed, by classes that "
        "are held out.",
        sweeps_of_other_losses(),
        [],
        seeds=(0,),
        shown=False,
    ),
    "memory_other_losses": Experiment(
        "Memory with other losses",
        "Each loss trains the same network, the checkpoint, further. The memory has one list, or for the contrastive "
        "loss two terms, as in XBM.",
        {"": other_rows()},
        other_claims(),
        seeds=FIVE_SEEDS,
    ),
    "memory_frozen_learning_rate": Experiment(
        "Learning rate with frozen BatchNorm",
        "The learning rates from which those of the next table were chosen, as before: with one seed, by classes that "
        "are held out.",
        frozen_sweeps(),
        [],
        seeds=(0,),
        shown=False,
    ),
    "memory_frozen": Experiment(
        "Memory with frozen BatchNorm",
        "The same with frozen BatchNorm layers (`Embedder(freeze_batch_norm=True)`), as is usual in fine-tuning.",
        {"": frozen_rows()},
        frozen_claims(),
        seeds=FIVE_SEEDS,
    ),
}
