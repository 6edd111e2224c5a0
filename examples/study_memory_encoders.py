"""The experiments of `study.py` on what gives a memory its rows: a slow encoder, and frozen BatchNorm layers."""

from dataclasses import replace

from study_experiments import BASE, FIVE_SEEDS, Experiment, Finding, Setting
from study_memory import (
    CHECKPOINT,
    DRIFT,
    EMOJI,
    EMOJI_ROWS,
    FROM_0,
    GLYPHS_ROWS,
    HELD_OUT_EMOJI,
    MEMORIES,
    NO_MEMORY,
    ONE_LIST,
    UNTRAINED_ROWS,
    memory_claims,
    sweep,
    train_on,
)

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
# Weight of the average's own values at each step; with 0 it is the network, in evaluation mode.
MOMENTA = (0.0, 0.9, 0.99)
BEGINS = 'glyphs, random weights, one list, start_step="auto"'
UNTRAINED = "glyphs, random weights"
# Without a memory, and with one list of what the network gave in training.
NETWORKS = {
    "glyphs": (GLYPHS_ROWS[NO_MEMORY], GLYPHS_ROWS[ONE_LIST]),
    "emoji": (EMOJI_ROWS[NO_MEMORY], EMOJI_ROWS[ONE_LIST]),
    UNTRAINED: (UNTRAINED_ROWS[NO_MEMORY], UNTRAINED_ROWS[FROM_0]),
}


def slow_encoder_rows() -> dict[str, Setting]:
    """Return the rows without a memory, and with what the network or its moving average gave for it."""
    rows = {}
    for name, (without, stored) in NETWORKS.items():
        rows[f"{name}, {NO_MEMORY}"] = without
        rows[f"{name}, {ONE_LIST}"] = stored
        for momentum in MOMENTA:
            rows[f"{name}, momentum {momentum}"] = replace(stored, slow_encoder=momentum)
    rows[BEGINS] = UNTRAINED_ROWS[f"{DRIFT} 0.01"]
    return rows


def slow_encoder_claims() -> list[Finding]:
    """Return what is asked about each average."""
    findings = []
    for name in NETWORKS:
        stored, network = f"{name}, {ONE_LIST}", f"{name}, momentum {MOMENTA[0]}"
        findings.append(Finding(f"Evaluation mode is better than the embeddings of training ({name})", network, stored))
        for momentum in MOMENTA[1:]:
            row = f"{name}, momentum {momentum}"
            findings.append(Finding(f"An average is better than the embeddings of training ({row})", row, stored))
            findings.append(Finding(f"An average is better than no memory ({row})", row, f"{name}, {NO_MEMORY}"))
    findings.append(Finding("A memory that begins by itself is better than none", BEGINS, f"{UNTRAINED}, {NO_MEMORY}"))
    for momentum in MOMENTA[1:]:
        row = f"{UNTRAINED}, momentum {momentum}"
        findings.append(Finding(f"An average is better than a memory that begins by itself ({row})", row, BEGINS))
    return findings


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
        findings += memory_claims(data, f"{data}, {ONE_LIST}", f"{data}, {NO_MEMORY}", f"{data}, {CHECKPOINT}")
    return findings


ENCODER_EXPERIMENTS = {
    "memory_slow_encoder": Experiment(
        "Slow encoder for the memory",
        "Does it help to remember what a moving average of the network gives for each batch (the momentum encoder of "
        "MoCo) instead of what the network gave in training? The average is in evaluation mode, which changes what "
        "BatchNorm layers give; the row with momentum 0 shows that alone. From random weights, training is that of "
        '"Begin of a memory from random weights", with a memory from step 0, or from a drift below 0.01 on.',
        {"": slow_encoder_rows()},
        slow_encoder_claims(),
        seeds=FIVE_SEEDS,
    ),
    "memory_frozen_learning_rate": Experiment(
        "Learning rate with frozen BatchNorm",
        "The learning rates from which those of the next table were chosen, as before: with one seed, by classes that "
        "are held out.",
        frozen_sweeps(),
        [],
        axis="learning rate",
        seeds=(0,),
    ),
    "memory_frozen": Experiment(
        "Memory with frozen BatchNorm",
        "The same networks are trained on with BatchNorm layers that are frozen (`Embedder(freeze_batch_norm=True)`), "
        "as is usual in fine-tuning.",
        {"": frozen_rows()},
        frozen_claims(),
        seeds=FIVE_SEEDS,
    ),
}
