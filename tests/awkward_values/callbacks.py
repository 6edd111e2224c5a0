"""Valid calls of the callbacks and the logger."""

from lightning_retrieval import DatabaseAugmentation, QueryExpansion
from lightning_retrieval.callbacks import RetrievalEvaluation, RetrievalWandbLogger
from tests.awkward_values.calls import Call, constructor


def evaluation_settings():
    return {
        "ks": (1, 7),
        "map_ks": (5,),
        "map_divisor": "R",
        "extra_metrics": ("mINP",),
        "dims": (2, 4),
        "query_expansion": QueryExpansion(),
        "database_augmentation": DatabaseAugmentation(),
    }


def logger_settings():
    own = {"project": "products", "id": "a1", "offline": True, "artifact": False}
    return {"name": "smooth-ap", "save_dir": "logs", "prefix": "", **own}


WITH_ALL_SETTINGS = (
    *("APMonitor", "CheckpointOnInterrupt", "DetectionPicture", "EmbeddingWriter", "LearnWhitening", "MemoryMonitor"),
    *(
        "PrecisionRecallCurve",
        "ProxiesAtClassMeans",
        "ResumableCSVLogger",
        "PublishedResults",
        "RetrievalGallery",
        "RetrievalReport",
        "ScoreHistogram",
        "TrainingCurve",
    ),
)
CALLS = {
    **{name: [constructor(name)] for name in WITH_ALL_SETTINGS},
    "RetrievalEvaluation": [
        Call(
            "RetrievalEvaluation",
            RetrievalEvaluation,
            evaluation_settings,
            accepts=dict.fromkeys(("query_expansion", "database_augmentation"), ("a lambda", "a class")),
        )
    ],
    "RetrievalWandbLogger": [Call("RetrievalWandbLogger", RetrievalWandbLogger, logger_settings)],
}
