"""The experiments of `run.py` that tune the main example, `glyphs.yaml`, on its validation set."""

from dataclasses import replace

from experiments import BASE, FIVE_SEEDS, Experiment, Finding, Setting

# What glyphs.yaml had before: 16 epochs of 38 batches of 384 images.
MAIN = replace(BASE, classes=96, images=16 * 38 * 384, width=32)
TUNED = replace(MAIN, width=24, lr=0.003, images=24 * 38 * 384)  # what glyphs.yaml had next
# What it had then: as many epochs as fit into the CPU time of the settings before.
TUNED_LOG_RANK = replace(TUNED, loss="LogRankLoss", width=16, lr=0.006, images=40 * 38 * 384)
HALF_LOG_RANK = replace(TUNED, loss="LogRankLoss", images=TUNED.images // 2, held_out=True)

LOG_RANK_ROWS: dict[str, Setting] = {
    "Smooth-AP": replace(TUNED, images=TUNED.images // 2, held_out=True),
    "log rank": HALF_LOG_RANK,
    "learning rate 0.006": replace(HALF_LOG_RANK, lr=0.006),
    "lambda 0": replace(HALF_LOG_RANK, loss_args={"lambda_": 0.0}),
    "lambda 3": replace(HALF_LOG_RANK, loss_args={"lambda_": 3.0}),
    "tau 0.02": replace(HALF_LOG_RANK, loss_args={"tau": 0.02}),
    "48 classes, as many images": replace(HALF_LOG_RANK, classes=48),
    "48 classes, as many images, learning rate 0.002": replace(HALF_LOG_RANK, classes=48, lr=0.002),
    "log rank for 20 % of the steps, then Smooth-AP with tau 0.05": replace(
        HALF_LOG_RANK, loss="SmoothAPLoss", loss_args={"tau": 0.05}, first_loss="LogRankLoss"
    ),
    "Smooth-AP with tau 0.05": replace(HALF_LOG_RANK, loss="SmoothAPLoss", loss_args={"tau": 0.05}),
    "width 16, 3 / 2 times as many images": replace(HALF_LOG_RANK, width=16, images=HALF_LOG_RANK.images * 3 // 2),
    "width 16, twice as many images": replace(HALF_LOG_RANK, width=16, images=HALF_LOG_RANK.images * 2),
    "width 16, twice as many images, learning rate 0.006": replace(
        HALF_LOG_RANK, width=16, images=HALF_LOG_RANK.images * 2, lr=0.006
    ),
}
HALF_TUNED = replace(TUNED_LOG_RANK, images=TUNED_LOG_RANK.images // 2, held_out=True)
CLIPPED = replace(HALF_TUNED, loss_scale=20.0)
NEGATIVES = {"tau": 0.01, "lambda_": 1.0, "c": 10.0}
WEIGHTED = replace(CLIPPED, loss="WeightedLogRankLoss", loss_args=NEGATIVES)

CLIPPED_ROWS: dict[str, Setting] = {
    "as before": HALF_TUNED,
    "clipped": CLIPPED,
    "clipped, learning rate 0.008": replace(CLIPPED, lr=0.008),
    "clipped, weight decay 0.05": replace(CLIPPED, weight_decay=0.05),
    "clipped, 256 dimensions": replace(CLIPPED, dim=256),
    "clipped, 64 classes of 6 images": replace(CLIPPED, classes=64, per_class=6),
    "clipped, 128 classes, as many images": replace(CLIPPED, classes=128),
    "clipped, negative weight 10": WEIGHTED,
    "clipped, negative weight 10, lambda 3": replace(WEIGHTED, loss_args={**NEGATIVES, "lambda_": 3.0}),
    "clipped, negative weight 10, 256 dimensions": replace(WEIGHTED, dim=256),
    "clipped, negative weight 10, 128 classes, as many images": replace(WEIGHTED, classes=128),
}
TUNING_EXPERIMENTS = {
    "tuning_log_rank": Experiment(
        "Log rank",
        "`GlyphNet(width=24)`, batches of 96 classes of 4 images, a learning rate of 0.003, and `LogRankLoss` with "
        "lambda 1 and tau 0.01, except where a row says something else.",
        {"": LOG_RANK_ROWS},
        [],
        seeds=(0,),
    ),
    "tuning_clipped": Experiment(
        "Clipping and negative weight",
        "`GlyphNet(width=16)` with a learning rate of 0.006. Clipped means that the loss is multiplied by 20 before "
        "gradients are clipped to a norm of 1; with AdamW this is the same as `gradient_clip_val=0.05`.",
        {"": CLIPPED_ROWS},
        [],
        seeds=(0, 1),
    ),
    "main_example": Experiment(
        "Earlier settings on the test set",
        "All steps, and the test set. The first settings have 16 epochs of Smooth-AP and a width of 32; the second "
        "have 24 epochs and a width of 24. The third have 40 epochs of log rank and a width of 16.",
        {"": {"first": MAIN, "Smooth-AP": TUNED, "log rank": TUNED_LOG_RANK}},
        [
            Finding("The second settings are better than the first", "Smooth-AP", "first"),
            Finding("The third settings are better than the second", "log rank", "Smooth-AP"),
        ],
        seeds=FIVE_SEEDS,
    ),
}
