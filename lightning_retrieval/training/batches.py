"""The forms of a batch of a DataLoader."""

from typing import Any

from torch import Tensor

Unpacked = tuple[Tensor, Tensor, Tensor | None]


def unpack(owner: str, batch: Any) -> Unpacked:
    """Images, labels, and ids or None, of `(images, labels)`, `(images, labels, ids)` or a dict with these keys.

    Args:
        owner: prefix of error messages.
        batch: what the DataLoader yields.

    Raises:
        TypeError: if the batch has another form.
    """
    if isinstance(batch, dict):
        if "images" in batch and "labels" in batch:
            return batch["images"], batch["labels"], batch.get("ids")
        came = f"a dict with the keys {sorted(map(str, batch))}"
    elif isinstance(batch, (tuple, list)):
        if len(batch) == 2:
            return batch[0], batch[1], None
        if len(batch) == 3:
            return batch[0], batch[1], batch[2]
        came = f"{len(batch)} items"
    else:
        came = type(batch).__name__
    raise TypeError(
        f"{owner}: a batch must be (images, labels), (images, labels, ids) or a dict with the keys images, labels and "
        f"optionally ids, got {came}; override unpack_batch for another form."
    )
