"""All tables of valid calls.

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
