"""The random state of each dataset item, a function of (seed, epoch, batch, position in the global batch).

The augmentation of an image therefore does not depend on the number of ranks or workers, nor on where a run was
interrupted.
"""

import functools
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import PurePath
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_retrieval.checks import check_tensor, is_integer
from lightning_retrieval.invalid import InvalidType, InvalidValue
from lightning_retrieval.preparation.serialised import AlbumentationsTransform

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
# What holds no generator, or seeds it itself, or cannot be seeded.
_VALUES = (str, bytes, int, float, NoneType, Tensor, np.ndarray, PurePath, ModuleType)
_WITHOUT = (*_VALUES, AlbumentationsTransform, random.SystemRandom)
# Packages whose functions draw from the global generators or from attributes of their objects.
_LIBRARIES = ("torch", "torchvision", "timm", "albumentations", "numpy", "PIL", "cv2", "lightning_retrieval")
_MOST_PARTS = 10_000  # number of objects in which generators are looked for


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
def seeded_item(index: int, generators: Sequence[Any] = ()) -> Iterator[None]:
    """Seed the global generators of torch, Python and NumPy within a context, if the index has a seed.

    On exit, the previous states are restored. All three generators are needed: the transforms of torchvision use the
    generator of torch, and the transforms of timm use the generators of Python and NumPy.

    Args:
        index: the argument of `dataset[index]`; for a plain `int`, nothing is seeded.
        generators: further generators that are seeded, see `own_generators`. Each gets a seed of its own.
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
        with ExitStack() as stack:
            for number, own in enumerate(generators, 1):
                stack.callback(_seeded(own, (index.seed + number) % 2**63))
            yield
    finally:
        generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def own_generators(transform: Any) -> list[Any]:
    """Find the generators of random numbers that a transform draws from besides the global ones.

    A generator is found in an attribute of the transform or of its class, a list, a tuple, a dict, a partial function,
    a default argument, or a variable that a function reads from outside. The order is the same in all processes.
    Objects with a method `set_random_seed`, such as the transforms of albumentations, stand for their generators.

    Args:
        transform: a function.
    """
    found: list[Any] = []
    seen: set[int] = set()
    pending = deque([transform])
    while pending and len(seen) < _MOST_PARTS:
        part = pending.popleft()
        if isinstance(part, _WITHOUT) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, GENERATORS) or callable(getattr(type(part), "set_random_seed", None)):
            found.append(part)
        else:
            pending.extend(_parts(part))
    return found


def _parts(part: Any) -> Iterable[Any]:
    """The objects that an object directly consists of or reads."""
    if isinstance(part, dict):
        return part.values()
    if isinstance(part, (list, tuple)):
        return part
    if isinstance(part, functools.partial):
        return part.func, *part.args, *part.keywords.values()
    if isinstance(part, MethodType):
        return part.__self__, part.__func__
    if isinstance(part, FunctionType):
        return _parts_of_function(part)
    parts = list(getattr(part, "__dict__", {}).values())
    owner = part if isinstance(part, type) else type(part)
    for cls in owner.__mro__:
        if not _is_of_library(cls):
            parts += vars(cls).values()
    return parts


def _parts_of_function(function: FunctionType) -> Iterable[Any]:
    """The default arguments of a function, and the variables that it reads from outside."""
    if _is_of_library(function):
        return ()
    try:
        outside = inspect.getclosurevars(function)
    except ValueError:  # a variable has no value yet
        return function.__defaults__ or ()
    return *(function.__defaults__ or ()), *outside.nonlocals.values(), *outside.globals.values()


def _is_of_library(part: Any) -> bool:
    """Whether a class or a function belongs to a package that draws from no generator of its own."""
    return str(part.__module__).partition(".")[0] in (*_LIBRARIES, "builtins")


def _seeded(generator: Any, seed: int) -> Callable[[], Any]:
    """Seed what `own_generators` has found; return a function that restores the state of a generator."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        before = bits.state
        bits.state = type(bits)(seed).state
        return functools.partial(setattr, bits, "state", before)
    if isinstance(generator, random.Random):
        restore: Callable[[], Any] = functools.partial(generator.setstate, generator.getstate())
        generator.seed(seed)
    elif isinstance(generator, torch.Generator):
        restore = functools.partial(generator.set_state, generator.get_state())
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.RandomState):
        restore = functools.partial(generator.set_state, generator.get_state())
        generator.seed(seed % 2**32)
    else:
        generator.set_random_seed(seed % 2**32)
        return lambda: None
    return restore


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
