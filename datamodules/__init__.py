"""Data modules and data sets, the samplers of global batches, and the loader of training batches.

All public names are imported when one of them is first used, so that reading images needs no Lightning.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_retrieval.datamodules.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    from lightning_retrieval.datamodules.public import PUBLIC

    globals().update(PUBLIC, __all__=sorted(PUBLIC))
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    from lightning_retrieval.datamodules.public import PUBLIC

    return sorted({*globals(), *PUBLIC})
