"""The number of the format of hyperparameters, which a checkpoint and the config of a run record."""

from collections.abc import Mapping
from typing import Any

from lightning_retrieval.checks import short_repr
from lightning_retrieval.invalid import InvalidValue

FORMAT = 1
FORMAT_KEY = "lightning_retrieval_format"  # key of a checkpoint


def check_format(checkpoint: Mapping[str, Any]) -> None:
    """Raise if a checkpoint has the number of another format. One whose module did not write a number is accepted.

    Args:
        checkpoint: content of the checkpoint.

    Raises:
        ValueError: if the number is not `FORMAT`.
    """
    number = checkpoint.get(FORMAT_KEY, FORMAT)
    if number != FORMAT:
        rule = f"a checkpoint must have the format {FORMAT}, which this release of lightning-retrieval reads"
        raise InvalidValue(rule, got=short_repr(number))
