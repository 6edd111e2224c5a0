"""The random state of each dataset item, a function of (seed, epoch, batch, position in the global batch).

The augmentation of an image therefore does not depend on the number of ranks or workers, nor on where a run was
interrupted.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.checks import check_tensor, is_integer
from lightning_retrieval.invalid import InvalidType, InvalidValue


def as_array(name: str, values: Any) -> NDArray[Any]:
    """Convert anything to an array; the caller checks dtype and shape.

    Args:
        name: name of the argument that holds the values.
        values: a tensor, an array, a sequence or anything else.

    Raises:
        ValueError: if rows are of unequal length, or a number is 2**63 or more.
        TypeError: if a tensor does not hold integers.
    """
    if isinstance(values, Tensor):
        check_tensor(name, values)
        if not is_integer(values):
            raise InvalidType("must be integers", argument=name, got=str(values.dtype).removeprefix("torch."))
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise InvalidValue("must be one integer for each image", argument=name, got="rows of unequal length") from None
    if array.dtype == np.uint64 and array.max(initial=0) >= 2**63:
        raise InvalidValue("must be below 2**63", argument=name, got=f"{array.max()} of uint64")
    return array


def all_different(values: NDArray[np.int64]) -> bool:
    """Whether no number occurs twice. Sorting is many times faster than `np.unique`, which fills a hash table."""
    ordered = np.sort(values)
    return bool((ordered[1:] != ordered[:-1]).all())


def augmentation_seeds(seed: int, epoch: int, batch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Hash (seed, epoch, batch, position) to a number from 0 to 2**63 - 1, for each position in the global batch.

    Source:
        Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014 (SplitMix64).
    """
    state = np.zeros(len(positions), dtype=np.uint64)
    for part in (seed % 2**64, epoch, batch, positions):
        state = (state ^ np.asarray(part).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)  # overflows on purpose
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    halved: NDArray[np.uint64] = state >> np.uint64(1)
    return halved.astype(np.int64)


def item_generator(index: int) -> torch.Generator | None:
    """Return the random generator for one dataset item, to be used in `dataset[index]`.

    Augmentation that uses this generator does not depend on the number of workers or processes, and a resumed run
    repeats the augmentation exactly.

    Args:
        index: the argument of `dataset[index]`. Indices from `RetrievalDataLoader` carry a seed. For a plain `int`,
            such as an index from an evaluation loader, the result is None; torch's functions then use the global
            generator.

    Example:
        >>> import torch
        >>> from lightning_retrieval.datamodules import PKSampler, RetrievalDataLoader, item_generator
        >>> class Noise(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):
        ...         return torch.rand((), generator=item_generator(index))
        >>> sampler = PKSampler([0, 0, 1, 1], classes_per_batch=2, samples_per_class=2)
        >>> first, again = (next(iter(RetrievalDataLoader(Noise(), sampler))) for _ in range(2))
        >>> bool((first == again).all()), item_generator(3) is None
        (True, True)

    Relations:
        `ImageSet` seeds the global generators in the same way while it calls the transform of an image.
    """
    if isinstance(index, SeededIndex):
        return torch.Generator().manual_seed(index.seed)
    return None


@contextmanager
def seeded_item(index: int) -> Iterator[None]:
    """Seed the global generators of torch, Python and NumPy within a context, if the index has a seed.

    On exit, the previous states are restored. All three generators are needed: the transforms of torchvision use the
    generator of torch, and the transforms of timm use the generators of Python and NumPy. A generator that a transform
    made itself is not seeded.

    Args:
        index: the argument of `dataset[index]`; for a plain `int`, nothing is seeded.
    """
    if not isinstance(index, SeededIndex):
        yield
        return
    generator = torch.default_generator  # torch.manual_seed would also seed GPUs, which is slow
    states = generator.get_state(), random.getstate(), np.random.get_state()
    generator.manual_seed(index.seed)
    random.seed(index.seed)
    np.random.seed(index.seed % 2**32)
    try:
        yield
    finally:
        generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


class SeededIndex(int):
    """A dataset index that carries the random seed of its item.

    A `SeededIndex` behaves like an `int`, so a dataset that ignores the seed works unchanged. The seed is lost in
    arithmetic (as in `ConcatDataset`), which returns a plain `int`, and in a `Subset`, which has its own indices.

    Args:
        value: the index.
        seed: the random seed, from 0 to 2**63 - 1.

    Example:
        >>> index = SeededIndex(3, seed=11)
        >>> "abcdef"[index], index == 3, index.seed
        ('d', True, 11)

    Relations:
        `RetrievalDataLoader` passes these indices to the dataset, and `item_generator` converts an index to a
        generator.
    """

    seed: int

    def __new__(cls, value: int, seed: int) -> "SeededIndex":
        index = super().__new__(cls, value)
        index.seed = seed
        return index

    def __reduce__(self) -> tuple[type["SeededIndex"], tuple[int, int]]:
        return SeededIndex, (int(self), self.seed)
