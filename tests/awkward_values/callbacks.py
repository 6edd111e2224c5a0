"""Valid calls of the callbacks and the logger."""

from lightning_retrieval import DatabaseAugmentation, QueryExpansion
from lightning_retrieval.callbacks import (
    APMonitor,
    CheckpointOnInterrupt,
    DetectionPicture,
    EmbeddingWriter,
    LearnWhitening,
    MemoryMonitor,
    PrecisionRecallCurve,
    ResumableCSVLogger,
    RetrievalEvaluation,
    RetrievalGallery,
    RetrievalWandbLogger,
    ScoreHistogram,
    TrainingCurve,
)
from tests.awkward_values.calls import Call

CALLS = {
    "APMonitor": [Call("APMonitor", APMonitor)],
    "DetectionPicture": [Call("DetectionPicture", DetectionPicture, lambda: {"images": 4, "detections": 2})],
    "EmbeddingWriter": [
        Call(
            "EmbeddingWriter",
            EmbeddingWriter,
            lambda: {"output": "e", "file_format": "npy", "shard_size": 7, "dtype": "float16"},
        )
    ],
    "LearnWhitening": [Call("LearnWhitening", LearnWhitening, lambda: {"images": 50})],
    "CheckpointOnInterrupt": [Call("CheckpointOnInterrupt", CheckpointOnInterrupt, lambda: {"option": "--resume"})],
    "MemoryMonitor": [Call("MemoryMonitor", MemoryMonitor, lambda: {"probe": 8, "start_drift": 0.1})],
    "PrecisionRecallCurve": [Call("PrecisionRecallCurve", PrecisionRecallCurve, lambda: {"every_n_epochs": 2})],
    "ResumableCSVLogger": [Call("ResumableCSVLogger", ResumableCSVLogger, lambda: {"folder": "runs/a", "prefix": ""})],
    "RetrievalEvaluation": [
        Call(
            "RetrievalEvaluation",
            RetrievalEvaluation,
            lambda: {
                "ks": (1, 7),
                "before_fit": True,
                "map_ks": (5,),
                "map_divisor": "R",
                "extra_metrics": ("mINP",),
                "dims": (2, 4),
                "query_expansion": QueryExpansion(),
                "database_augmentation": DatabaseAugmentation(),
                "embeddings_on_cpu": False,
            },
            accepts=dict.fromkeys(("query_expansion", "database_augmentation"), ("a lambda", "a class")),
        )
    ],
    "RetrievalGallery": [
        Call(
            "RetrievalGallery",
            RetrievalGallery,
            lambda: {"queries": 3, "k": 5, "every_n_epochs": 2, "order": "hardest"},
        )
    ],
    "RetrievalWandbLogger": [
        Call(
            "RetrievalWandbLogger",
            RetrievalWandbLogger,
            lambda: {
                "name": "smooth-ap",
                "save_dir": "logs",
                "project": "products",
                "id": "a1",
                "offline": True,
                "artifact": False,
                "prefix": "",
            },
        )
    ],
    "ScoreHistogram": [Call("ScoreHistogram", ScoreHistogram, lambda: {"bins": 50, "every_n_epochs": 2})],
    "TrainingCurve": [Call("TrainingCurve", TrainingCurve, lambda: {"metric": "val/R@1"})],
}
