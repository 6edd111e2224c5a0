"""All tables of valid calls, and the public names that have none yet.

A table maps each name to its valid calls: usually the constructor and the main methods.
"""

from tests.awkward_values import boxes, detection, losses, metrics, models, ranking

TABLES = (
    boxes.CALLS,
    detection.CALLS,
    losses.CALLS,
    metrics.CALLS,
    models.CALLS,
    ranking.CALLS,
)
# The public names that are in no table yet, by package. A new public name belongs into a table.
NOT_COVERED = {
    "detection": ["COCOMetrics", "DetectionModule", "RankedRoIHeads", "TinyFasterRCNN"],
    "training": ["CrossBatchMemory", "RetrievalModule", "chunked_backward", "largest_chunk_size"],
    "search": ["RetrievalIndex"],
    "callbacks": ["APMonitor", "DetectionPicture", "LearnWhitening", "PrecisionRecallCurve", "RetrievalEvaluation",
                  "RetrievalGallery", "RetrievalWandbLogger", "ScoreHistogram", "TrainingCurve"],
    "datamodules": ["BoxDataModule", "DetectionDataModule", "AllClassesSampler", "CUB200", "CategorySampler",
                    "DataReport", "GlobalBatchSampler", "GlyphDataset", "GlyphScenes", "Glyphs",
                    "IJBC", "INaturalist", "ImageDataModule", "ImageFolder", "ImageIndex",
                    "ImageSet", "ImageTable", "InShop", "LandmarksClean", "PKSampler", "RetrievalDataLoader",
                    "RetrievalDataModule", "RevisitedOxford", "RevisitedParis", "StanfordOnlineProducts", "VGGFace2",
                    "VehicleID", "item_generator", "reference_transform", "resume_position"],
}  # fmt: skip
