"""All tables of valid calls, and the public names that have none yet.

A table maps each name to its valid calls: usually the constructor and the main methods.
"""

from tests.awkward_values import (
    boxes,
    callbacks,
    datamodules,
    detection,
    losses,
    metrics,
    models,
    ranking,
    search,
    training,
)

TABLES = (
    boxes.CALLS,
    callbacks.CALLS,
    datamodules.CALLS,
    detection.CALLS,
    losses.CALLS,
    metrics.CALLS,
    models.CALLS,
    ranking.CALLS,
    search.CALLS,
    training.CALLS,
)
# The public names that are in no table yet, by package. A new public name belongs into a table.
NOT_COVERED = {
    "detection": ["COCOMetrics", "DetectionModule", "RankedRoIHeads", "TinyFasterRCNN"],
    "callbacks": ["DetectionPicture"],
    "datamodules": ["BoxDataModule", "DetectionDataModule", "GlyphScenes"],
}  # fmt: skip
