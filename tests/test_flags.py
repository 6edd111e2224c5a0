"""Each flag of a public method is True or False, or also None where its annotation says so.

The flags are found by their annotations. A string such as "False" would count as True without a word. The flags of
functions and of constructors are in the table of awkward values.
"""

import inspect
from types import NoneType
from typing import get_args

import pytest
import torch

from tests.test_contracts import ABSTRACT, PUBLIC, TABLE, make

# Arguments that methods need besides their flags; those of a method of all classes by its name alone.
ARGUMENTS = {
    "CrossBatchMemory.references": {
        "embeddings": torch.eye(2),
        "labels": torch.zeros(2).long(),
        "ids": torch.arange(2),
    },
    "Embedder.push_to_hub": {"repo_id": "me/birds"},
    "RetrievalDataLoader.check_first_batch": {"labels": torch.zeros(2).long(), "ids": None},
    "RetrievalIndex.load": {"folder": "birds.index"},
    "RetrievalModule.embed": {"images": torch.zeros(2, 8)},
    "RetrievalModule.embed_queries": {"inputs": torch.zeros(2, 8)},
    "load_from_checkpoint": {"checkpoint_path": "last.ckpt"},
}


def flags_of(function):
    """{name: whether None is allowed} of the parameters of a function that are annotated with bool."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        kinds = get_args(parameter.annotation) or (parameter.annotation,)
        if bool in kinds:
            found[parameter.name] = NoneType in kinds
    return found


def cases():
    """(public name, method, flag, whether None is allowed) of every flag that can be passed, once for each function."""
    found = {}
    for name, thing in PUBLIC.items():
        if not isinstance(thing, type) or TABLE[name].without.get("make") == ABSTRACT:
            continue
        for method_name, method in inspect.getmembers(thing, callable):
            ours = str(getattr(method, "__module__", "")).startswith("lightning_retrieval")
            if ours and not method_name.startswith("_"):
                function = getattr(method, "__func__", method)
                for flag, optional in flags_of(method).items():
                    found.setdefault((function, flag), (name, method_name, flag, optional))
    return list(found.values())


CASES = cases()


@pytest.mark.refusal
@pytest.mark.parametrize(("name", "method", "flag", "optional"), CASES)
def test_a_flag_that_is_not_a_bool_raises(name, method, flag, optional):
    thing = PUBLIC[name]
    if not isinstance(inspect.getattr_static(thing, method), classmethod):
        thing = make(name)
    arguments = ARGUMENTS.get(f"{name}.{method}") or ARGUMENTS.get(method, {})
    allowed, values = "True or False", ["False", 1, None]
    if optional:
        allowed, values = "True, False or None", ["False", 1]
    for value in values:
        with pytest.raises(TypeError, match=f"^{name}: `{flag}` must be {allowed}, got {value!r}[ .(]"):
            getattr(thing, method)(**arguments, **{flag: value})


@pytest.mark.refusal
def test_a_flag_that_the_table_of_awkward_values_omits():
    settings = {**TABLE["PyramidFasterRCNN"].settings, "pretrained": "False"}
    with pytest.raises(TypeError, match=r"^PyramidFasterRCNN: `pretrained` must be True or False, got 'False'"):
        PUBLIC["PyramidFasterRCNN"](**settings)


def test_the_flags_are_found():
    tested = {f"{name}.{method}.{flag}" for name, method, flag, _ in CASES}
    assert {"Embedder.train.mode", "RetrievalIndex.load.mapped", "RetrievalMetrics.sync.should_sync"} <= tested
