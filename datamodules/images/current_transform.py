"""What an `ImageSet` does to its images, which may be decided later than the data set is made."""

from collections.abc import Callable
from typing import Any

from lightning_retrieval.models import Preparation
from lightning_retrieval.models.reduced_scale import Size

Transform = Callable[[Any], Any]


class CurrentTransform:
    """A transform that the data sets of a data module share, and that the module of a run may exchange.

    Args:
        preparation: what is done at first.
    """

    def __init__(self, preparation: Preparation) -> None:
        self.current: Transform = preparation
        self.background = preparation.background  # the colour that shows through transparent pixels

    @property
    def takes_pixels(self) -> bool:
        """Whether the current transform takes tensors of uint8 instead of PIL images."""
        return getattr(self.current, "takes_pixels", False)

    @property
    def least_size(self) -> Size | None:
        """Height and width at which the current transform lets JPEGs be decoded, None for the full scale."""
        return getattr(self.current, "least_size", None)

    @property
    def to_uint8(self) -> Transform | None:
        """The current transform before it normalises, None if it is one that cannot be divided."""
        return getattr(self.current, "to_uint8", None)

    def __call__(self, image: Any) -> Any:
        return self.current(image)

    def __repr__(self) -> str:
        return f"CurrentTransform({self.current!r})"
