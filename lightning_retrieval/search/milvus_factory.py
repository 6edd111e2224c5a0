"""The kind of an index of Milvus and the parameters of its searches, written as text."""

import re
from typing import Any

from lightning_retrieval.checks import check_string, short_repr
from lightning_retrieval.search.milvus_connection import OWNER

EXACT = "FLAT"
LITE_KINDS = ("FLAT", "HNSW", "HNSW_SQ", "IVF_FLAT", "IVF_SQ8", "AUTOINDEX")  # of Milvus Lite, which accepts any name
KINDS = (*LITE_KINDS, "IVF_PQ", "IVF_RABITQ", "HNSW_PQ", "HNSW_PRQ", "SCANN", "DISKANN", "GPU_CAGRA", "GPU_IVF_FLAT")
LARGEST = 999_999_999  # of a parameter; Milvus reads integers of 32 bits
EXAMPLES = "'Flat', 'HNSW,M=32,efConstruction=200' or 'IVF_FLAT,nlist=1024'"


def index_kind(factory: str, *, of_lite: bool = False) -> tuple[str, dict[str, Any]]:
    """The type of an index and the parameters that it is built with.

    Args:
        factory: the type, and assignments of numbers, with commas between them.
        of_lite: accept only types that Milvus Lite has.

    Raises:
        ValueError: if the text is something else, or there is no such type.
        TypeError: if it is not a string.
    """
    check_string(OWNER, "factory", factory)
    kind, _, assignments = factory.partition(",")
    kind = kind.strip().upper()
    values = _assignments(assignments)
    if kind not in KINDS or values is None:
        raise ValueError(
            f"{OWNER}: `factory` must be a type of index that Milvus has, and how it is built, such as {EXAMPLES}, got "
            f"{short_repr(factory)}."
        )
    if of_lite and kind not in LITE_KINDS:
        raise ValueError(
            f"{OWNER}: `factory` must be one that Milvus Lite has, {', '.join(LITE_KINDS)}, got {factory!r}; take "
            "one of these, or a server."
        )
    return kind, values


def search_parameters(parameters: str) -> dict[str, Any]:
    """The parameters of a search, such as `"ef=64"` for HNSW or `"nprobe=16"` for IVF_FLAT.

    Raises:
        ValueError: if the text does not consist of assignments of numbers.
        TypeError: if it is not a string.
    """
    check_string(OWNER, "parameters", parameters)
    values = _assignments(parameters)
    if values is None:
        raise ValueError(
            f"{OWNER}: `parameters` must be assignments of positive numbers, at most {LARGEST}, such as 'ef=64' or "
            f"'nprobe=16', got {short_repr(parameters)}."
        )
    return values


def _assignments(text: str) -> dict[str, Any] | None:
    """The numbers by name; None if the text holds anything else."""
    values: dict[str, Any] = {}
    if not text.strip():
        return values
    for assignment in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9.]+)\s*", assignment)
        if match is None:
            return None
        number = _parsed_number(match[2])
        if number is None or not 0 < number <= LARGEST:
            return None
        values[match[1]] = number
    return values


def _parsed_number(text: str) -> int | float | None:
    try:
        if text.isdecimal():
            return int(text)
        return float(text)
    except ValueError:  # several points, or more digits than Python reads
        return None
