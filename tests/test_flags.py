"""Each flag of a method is True or False, or also None where its annotation says so.

The flags are found by their annotations. A string such as "False" would count as True without a word. Those of
constructors and functions are in the table of tests/awkward_values; only those that it skips are here.
"""

import inspect
from types import NoneType
from typing import get_args

import pytest
import torch

from tests.test_awkward_values import CALLS
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
    """(public name, method, flag, whether None is allowed) of every method that the library defines, once."""
    found = {}
    for name, thing in PUBLIC.items():
        if not isinstance(thing, type) or TABLE[name].without.get("make") == ABSTRACT:
            continue
        for method_name, method in inspect.getmembers(thing, callable):
            ours = str(getattr(method, "__module__", "")).startswith("lightning_retrieval")
            if ours and not method_name.startswith("_"):
                for flag, optional in flags_of(method).items():
                    found.setdefault((method.__qualname__, flag), (name, method_name, flag, optional))
    return list(found.values())


def skipped():
    """(public name, flag) of the flags of constructors that the table of awkward values skips."""
    calls = [(name, call) for name, of_name in CALLS.items() for call in of_name if call.signed is PUBLIC.get(name)]
    return [(name, flag) for name, call in calls for flag in flags_of(call.signed) if flag in call.without]


def assert_refused(call, name, flag, optional):
    allowed = "True, False or None" if optional else "True or False"
    for value in ("False", 1) if optional else ("False", 1, None):
        with pytest.raises(TypeError, match=f"^{name}: `{flag}` must be {allowed}, got {value!r}[ .(]"):
            call(**{flag: value})


@pytest.mark.refusal
@pytest.mark.parametrize(("name", "method", "flag", "optional"), cases())
def test_a_flag_of_a_method_that_is_not_a_bool_raises(name, method, flag, optional):
    thing = PUBLIC[name]
    if not isinstance(inspect.getattr_static(thing, method), classmethod):
        thing = make(name)
    arguments = ARGUMENTS.get(f"{name}.{method}") or ARGUMENTS.get(method, {})
    assert_refused(lambda **given: getattr(thing, method)(**arguments, **given), name, flag, optional)


@pytest.mark.refusal
@pytest.mark.parametrize(("name", "flag"), skipped())
def test_a_flag_of_a_constructor_that_is_not_a_bool_raises(name, flag):
    settings = TABLE[name].settings
    assert_refused(lambda **given: PUBLIC[name](**{**settings, **given}), name, flag, optional=False)
