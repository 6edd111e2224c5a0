"""The base class of the callbacks."""

from typing import Any

from lightning_retrieval.backend import pl, warn_of_other_package


class Callback(pl.Callback):
    """A callback that warns if the program uses the other package of Lightning, whose Trainer does not know it."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        warn_of_other_package()
        return super().__new__(cls)
