"""Argument checks for all packages. An error message is one sentence: owner, argument, rule, value and how to fix it.

`name` is the name of the argument. `owner` is the class or function whose argument it is, and the prefix of the
message. Without one, the error has no owner until a public function names itself, see `owned_by`.
"""

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence, Set
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_retrieval.files import is_allowed
from lightning_retrieval.invalid import InvalidType, InvalidValue

# With settings outside this range, a formula overflows or underflows in float32, so that a loss becomes NaN.
SMALLEST, LARGEST = 1e-12, 1e12
LARGEST_INTEGER = 2**63 - 1  # limit of int64
NO_NUMBERS = (bool, np.timedelta64)  # NumPy and Python count them among the integers
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, limits of common file systems

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def short_repr(value: Any) -> str:
    """A value as text for error messages: one line of at most 100 characters, even if its `repr` is longer or fails."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = object.__repr__(value)
    if len(text) > 100:
        return f"{text[:97]}..."
    return text


def first_line(error: Exception) -> str:
    """The first line of the message of an error, without a full stop; the name of its type if it has no message.

    The message of `torch.load` about an object in a file is long and advises to trust the file; of it, the line has the
    name of the object.
    """
    message = str(error).strip()
    if message.startswith("Weights only load failed"):
        named = re.search(r"GLOBAL ([\w.]+)", message)
        if named is not None:
            return f"it holds {named[1]}, which is neither a tensor nor a plain value"
        message = message.partition("WeightsUnpickler error:")[2].strip() or message
    lines = message.splitlines() or [type(error).__name__]
    return lines[0].rstrip(". ")


def first_of(values: Sequence[Any], most: int = 5) -> str:
    """The first of many values, as text for error messages."""
    shown = ", ".join(map(str, values[:most]))
    if len(values) > most:
        shown += ", ..."
    return shown


def _with_type(value: Any) -> str:
    """A value of the wrong type, as text for error messages."""
    return f"{short_repr(value)} ({type(value).__name__})"


def check_positive(name: str, value: Any, *, least: float = SMALLEST, most: float = LARGEST, owner: str = "") -> float:
    """Return `value`; raise unless it is a number > 0, from `least` to `most`."""
    if _is_number(value) and value <= 0:
        raise InvalidValue("must be a finite number > 0", owner, name, got=short_repr(value))
    return check_finite_number(name, value, least=least, most=most, rule=" > 0", owner=owner)


def check_not_negative(name: str, value: Any, *, most: float = LARGEST, owner: str = "") -> float:
    """Return `value`; raise unless it is a number >= 0, at most `most`."""
    if _is_number(value) and value < 0:
        raise InvalidValue("must be a finite number >= 0", owner, name, got=short_repr(value))
    return check_finite_number(name, value, least=0, most=most, owner=owner)


def check_finite_number(
    name: str, value: Any, *, least: float = -LARGEST, most: float = LARGEST, rule: str = "", owner: str = ""
) -> float:
    """Return `value`; raise unless it is a number from `least` to `most`. `rule` follows "a number" in messages."""
    if not _is_number(value):
        raise InvalidType(f"must be a number{rule}", owner, name, got=_with_type(value))
    if not _is_finite(value):
        raise InvalidValue(f"must be a finite number{rule}", owner, name, got=short_repr(value))
    if not least <= value <= most:
        raise InvalidValue(f"must be from {least:g} to {most:g}", owner, name, got=short_repr(value))
    plain: float = _plain(value)
    return plain


def _is_number(value: Any) -> bool:
    """Whether a value is a number of Python or NumPy. A bool is not a number."""
    return isinstance(value, Real) and not isinstance(value, NO_NUMBERS)


def _is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy. A bool is not an integer."""
    return isinstance(value, Integral) and not isinstance(value, NO_NUMBERS)


def _is_finite(value: Any) -> bool:
    """Whether a number is finite. Integers always are, but float() raises OverflowError for very large ones."""
    return isinstance(value, int) or math.isfinite(value)


def _plain(value: Any) -> Any:
    """Convert a number of NumPy to a Python number, because checkpoints cannot hold NumPy's types."""
    if isinstance(value, (int, float)):
        return value
    if _is_integer(value):
        return int(value)
    return float(value)


def check_integer(name: str, value: Any, least: int, most: int | None = LARGEST_INTEGER, *, owner: str = "") -> int:
    """Return `value`; raise unless it is an integer from `least` to `most`, or >= `least` if `most` is None."""
    if not _is_integer(value):
        raise InvalidType(f"must be an integer >= {least}", owner, name, got=_with_type(value))
    if value < least:
        raise InvalidValue(f"must be an integer >= {least}", owner, name, got=short_repr(value))
    if most is not None and value > most:
        raise InvalidValue(f"must be an integer from {least} to {most}", owner, name, got=short_repr(value))
    return int(value)  # a number of NumPy becomes one of Python, because checkpoints cannot hold NumPy's types


def check_auto(name: str, value: Any, least: int, *, owner: str = "") -> Any:
    """Return `value`; raise unless it is an integer >= `least`, or `"auto"`."""
    if not isinstance(value, str):
        return check_integer(name, value, least=least, owner=owner)
    if value != "auto":
        raise InvalidType(f"must be an integer >= {least} or 'auto'", owner, name, got=short_repr(value))
    return value


def check_counts(name: str, values: Sequence[Any], *, may_be_empty: bool = False, owner: str = "") -> tuple[int, ...]:
    """Return a tuple; raise unless `values` is a sequence of integers >= 1, empty only if `may_be_empty`."""
    is_sequence = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
    if not is_sequence or not (values or may_be_empty):
        raise InvalidValue("must hold integers >= 1, such as (1, 10)", owner, name, got=short_repr(values))
    return tuple(check_integer(name, value, least=1, owner=owner) for value in values)


def check_choice(name: str, value: Any, choices: Sequence[Any], *, owner: str = "") -> Any:
    """Return the choice that equals `value`; raise if there is none. Here 0 is not False, and 1 is not True."""
    plain = value
    if _is_integer(value):
        plain = int(value)
    for choice in choices:
        is_same_kind = isinstance(plain, type(choice)) and isinstance(plain, bool) == isinstance(choice, bool)
        if is_same_kind and plain == choice:
            return choice
    listed = ", ".join(map(repr, choices))
    raise InvalidValue(f"must be one of {listed}", owner, name, got=short_repr(value))


def is_traced() -> bool:
    """Whether `torch.jit.trace` is recording; a check that depends on values would be a constant in the trace."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def check_bool(name: str, value: bool, *, owner: str = "") -> bool:
    """Return `value`; raise unless it is True or False."""
    if not isinstance(value, bool):
        raise InvalidType("must be True or False", owner, name, got=short_repr(value))
    return value


def check_flag(name: str, value: bool | None, *, owner: str = "") -> bool | None:
    """Return `value`; raise unless it is True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise InvalidType("must be True, False or None", owner, name, got=short_repr(value))
    return value


def check_callable(name: str, value: Any, *, may_be_none: bool = False, owner: str = "") -> Any:
    """Return `value`; raise unless it can be called; `may_be_none` also allows None."""
    if not callable(value) and not (may_be_none and value is None):
        raise InvalidType("must be callable", owner, name, got=_with_type(value))
    return value


def check_instance(name: str, value: Any, kind: type, *, owner: str = "") -> None:
    """Raise unless `value` is an instance of a class."""
    if not isinstance(value, kind):
        raise InvalidType(f"must be an instance of {kind.__name__}", owner, name, got=_with_type(value))


def check_string(name: str, value: str, *, owner: str = "") -> str:
    """Return `value`; raise unless it is a string."""
    if not isinstance(value, str):
        raise InvalidType("must be a string", owner, name, got=_with_type(value))
    return value


def check_strings(name: str, values: Any, *, owner: str = "") -> None:
    """Raise unless `values` is a sequence of strings. A single string is not accepted."""
    is_sequence = isinstance(values, Collection) and not isinstance(values, (str, bytes, Mapping, Set, Tensor))
    if not is_sequence or getattr(values, "ndim", 1) != 1:
        raise InvalidType("must be a sequence of strings", owner, name, got=f"one {type(values).__name__}")
    for value in values:
        if not isinstance(value, str):
            raise InvalidType("must hold strings only", owner, name, got=_with_type(value))


def check_sequence(name: str, value: Any, *, owner: str = "") -> None:
    """Raise unless `value` is a sequence, such as a list. A string is not accepted."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InvalidType("must be a list", owner, name, got=_with_type(value))


def check_mapping(name: str, value: Any, *, owner: str = "") -> None:
    """Raise unless `value` is a mapping, such as a dict."""
    if not isinstance(value, Mapping):
        raise InvalidType("must be a dict", owner, name, got=_with_type(value))


def check_path(name: str, value: str | os.PathLike[str], *, owner: str = "") -> Path:
    """Return the path, with `~` replaced by the home folder; raise unless it is a non-empty string or path."""
    if not isinstance(value, (str, os.PathLike)):
        raise InvalidType("must be a string or a path", owner, name, got=_with_type(value))
    text = os.fspath(value)
    if not text or "\0" in text:
        raise InvalidValue("must be the path of a file or a folder", owner, name, got=repr(text))
    _check_lengths(name, os.fsdecode(text), owner=owner)
    if not is_allowed(Path(os.fsdecode(text))):
        raise InvalidValue(
            'must be without the characters < > : " | ? * and without names of devices, such as CON, AUX and NUL',
            owner,
            name,
            got=repr(text),
            cure="Windows has no such files",
        )
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InvalidValue(
            "must not begin with ~, because the home folder is not known", owner, name, got=repr(text)
        ) from None


def _check_lengths(name: str, path: str, *, owner: str = "") -> None:
    """Raise now if the path is too long for a file system, instead of in the middle of the work."""
    longest = max((len(part.encode(errors="replace")) for part in Path(path).parts), default=0)
    length = len(path.encode(errors="replace"))
    if longest > LONGEST_NAME or length > LONGEST_PATH:
        raise InvalidValue(
            f"must have names of at most {LONGEST_NAME} bytes, and {LONGEST_PATH} in all",
            owner,
            name,
            got=f"{short_repr(path)}, whose longest name has {longest}",
            cure="give a shorter one",
        )


def check_tensor(name: str, value: Any, *, owner: str = "") -> None:
    """Raise unless `value` is a dense tensor with numbers (not on the meta device). The numbers are not read."""
    if isinstance(value, np.ndarray):
        check_unmasked(name, value, owner=owner)
        check_byte_order(name, value, owner=owner)
        cure = ""
        if value.dtype.kind in "biuf":
            cure = "torch.from_numpy converts it"
        raise InvalidType("must be a tensor", owner, name, got=f"a NumPy array of {value.dtype}", cure=cure)
    if not isinstance(value, Tensor):
        raise InvalidType("must be a tensor", owner, name, got=type(value).__name__)
    if value.is_nested:
        cure = "call torch.nested.to_padded_tensor, or give rows of one length"
        raise InvalidType("must be a dense tensor", owner, name, got="a nested tensor", cure=cure)
    if value.layout is not torch.strided:
        raise InvalidType(
            "must be a dense tensor", owner, name, got=f"the layout {value.layout}", cure="call to_dense()"
        )
    if value.device.type == "meta":
        raise InvalidValue("must hold numbers", owner, name, got="a tensor on the device meta, which has none")


def check_unmasked(name: str, value: Any, *, owner: str = "") -> None:
    """Raise if an array has masked values, which would otherwise be taken as they are below the mask."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):  # torch.compile traces only the first
        cure = "leave these rows out, or give the values with array.filled(...)"
        raise InvalidValue("must have no masked values", owner, name, got="a masked NumPy array", cure=cure)


def check_byte_order(name: str, value: Any, *, owner: str = "") -> None:
    """Raise if an array has another byte order than the machine, such as that of FITS files; torch does not take it."""
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        raise InvalidType(
            "must have the byte order of this machine",
            owner,
            name,
            got=f"a NumPy array of {value.dtype.str}",
            cure="array.astype(array.dtype.newbyteorder('=')) converts it",
        )


def check_no_transform(*, owner: str = "", **values: Any) -> None:
    """Raise if one of some tensors is inside of a function transform of `torch.func`, where numbers cannot be read."""
    if torch.compiler.is_compiling():  # which cannot trace the question
        return
    for name, value in values.items():
        if isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise InvalidType(
                "must not be inside of torch.func (grad, vmap, jacrev), because checks and blocks read numbers",
                owner,
                name,
                got="such a tensor",
                cure="call the function for each batch, and torch.autograd.grad for its gradient",
            )


def check_float(name: str, value: Any, *, may_be_meta: bool = False, owner: str = "") -> None:
    """Raise unless `value` is a dense tensor of float16, bfloat16, float32 or float64.

    With `may_be_meta`, the tensor may be on the device meta, on which shapes are computed without numbers.
    """
    is_meta = isinstance(value, Tensor) and value.device.type == "meta"
    if not (is_meta and may_be_meta):
        check_tensor(name, value, owner=owner)
    if not value.is_floating_point():
        raise InvalidType("must be floating point", owner, name, got=str(value.dtype))
    if value.dtype not in FLOAT_TYPES:
        listed = ", ".join(map(str, FLOAT_TYPES))
        raise InvalidType(f"must have one of the dtypes {listed}", owner, name, got=str(value.dtype))


def check_normalized(images: Any, *, may_be_meta: bool = False, owner: str = "") -> None:
    """Raise unless images are a tensor that `check_float` accepts; those of uint8 have not been normalised."""
    if isinstance(images, Tensor) and images.dtype == torch.uint8:
        cure = "normalise them, as `Preparation.normalize` does"
        raise InvalidType("must be floating point", owner, "images", got="torch.uint8", cure=cure)
    check_float("images", images, may_be_meta=may_be_meta, owner=owner)


def check_maps(name: str, value: Any, *, owner: str = "") -> None:
    """Raise unless `value` is a floating-point tensor (N, C, H, W). The meta device is allowed, for finding shapes."""
    check_float(name, value, may_be_meta=True, owner=owner)
    if value.ndim != 4:
        raise InvalidValue("must have shape (N, C, H, W)", owner, name, got=str(tuple(value.shape)))


def check_device(name: str, value: Any, device: torch.device | None, of: str, *, owner: str = "") -> None:
    """Raise if `value` is a tensor and not on `device`, the device of the argument `of`; None allows any device."""
    if device is not None and isinstance(value, Tensor) and value.device != device:
        raise InvalidValue(
            f"must be on the device of `{of}`, {device}", owner, name, got=str(value.device), cure="move it there"
        )


def check_matrix(name: str, embeddings: Tensor, *, finite: bool = False, owner: str = "") -> None:
    """Raise unless `embeddings` is a floating-point matrix (rows, D) with D > 0.

    With `finite`, its numbers are read, and NaN and infinities are invalid.
    """
    check_float(name, embeddings, owner=owner)
    if embeddings.ndim != 2 or embeddings.shape[1] == 0:
        raise InvalidValue("must have shape (rows, D) with D > 0", owner, name, got=str(tuple(embeddings.shape)))
    if finite:
        check_finite(name, embeddings, owner=owner)


def has_finite_sum(values: Tensor) -> Tensor:
    """Whether the sum of values is finite, as a bool tensor, in less time than it takes to look at each value.

    If it is, all values are finite. If it is not, `check_finite` finds out whether a value is not.
    """
    return values.sum(dtype=torch.promote_types(values.dtype, torch.float32)).isfinite()


def check_finite(name: str, values: Tensor, ids: Tensor | None = None, *, owner: str = "") -> None:
    """Raise if there are NaN or infinities; the message lists the first such rows, by id if `ids` are given."""
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(
        values
    ):  # `vmap` has no numbers that can be read
        check_no_transform(**{name: values}, owner=owner)
    finite = torch.isfinite(values)
    if bool(finite.all()):
        return
    invalid = (~finite).reshape(len(values), -1).any(1).nonzero()[:, 0]
    what = ""
    if ids is not None:
        what, invalid = "ids ", ids[invalid]
    raise InvalidValue(
        "must hold finite numbers only",
        owner,
        name,
        got=f"NaN or inf in {len(invalid)} of {len(values)} rows ({what}{first_of(invalid.tolist())})",
    )


UNSIGNED_TYPES = (torch.uint16, torch.uint32, torch.uint64)  # torch computes little with these


def as_int64(name: str, values: Any, *, owner: str = "") -> Any:
    """Return a tensor of one of `UNSIGNED_TYPES` as int64, and anything else unchanged.

    Raises:
        ValueError: if a number is 2**63 or more, which int64 cannot hold.
    """
    if not isinstance(values, Tensor) or values.dtype not in UNSIGNED_TYPES or values.device.type == "meta":
        return values
    converted = values.long()
    if values.dtype == torch.uint64 and bool((converted < 0).any()):
        raise InvalidValue("must be below 2**63", owner, name, got=f"{max(values.flatten().tolist())} of torch.uint64")
    return converted


CURE_OF_ONE_HOT = "give one-hot labels as labels.argmax(1), and multi-hot labels as tags with the rule SharedTags"


def is_integer(values: Any) -> bool:
    """Whether a value is a tensor with an integer dtype; bool does not count."""
    if not isinstance(values, Tensor):
        return False
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def check_integers(
    name: str,
    values: Any,
    rows: int,
    of: str,
    *,
    device: torch.device | None = None,
    levels: bool = False,
    owner: str = "",
) -> None:
    """Raise unless `values` holds one integer for each of the `rows` rows of the argument `of`.

    `device` is the device of the argument `of`. If it is given, `values` must be on the same device. With `levels`,
    each row may have several integers: labels, finest level first.
    """
    check_device(name, values, device, of, owner=owner)
    if isinstance(values, (tuple, list)) and values and isinstance(values[0], str):
        raise InvalidType(
            "must be integers",
            owner,
            name,
            got=f"texts such as {short_repr(values[0])}",
            cure="number them in the data set, with the same number for the same text",
        )
    check_tensor(name, values, owner=owner)
    cure = ""
    if levels and values.ndim == 2 and values.shape[1] > 0:
        if values.shape[1] > 1:
            cure = CURE_OF_ONE_HOT
        values = values[:, 0]
    if not is_integer(values):
        raise InvalidType("must be integers", owner, name, got=str(values.dtype), cure=cure)
    if values.shape != (rows,):
        raise InvalidValue(
            f"must have shape ({rows},), one for each row of `{of}`", owner, name, got=str(tuple(values.shape))
        )
