"""Each flag of a public class, method or function is True or False, or also None where its annotation says so.

The flags are found by their annotations. A string such as "False" would count as True without a word.
"""

import inspect
from types import NoneType
from typing import get_args

import pytest
import torch

from tests.test_contracts import ABSTRACT, PUBLIC, TABLE, make

# Arguments that functions and methods need besides their flags; those of a method of all classes by its name alone.
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


def constructor_flags(cls):
    """The flags of a class, also those that it passes on to a base class of this library."""
    found = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or not base.__module__.startswith("lightning_retrieval"):
            continue
        found = {**flags_of(base), **found}
        kinds = [parameter.kind for parameter in inspect.signature(base).parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return found


def cases():
    """(public name, method or None, flag, whether None is allowed) of every flag that can be passed."""
    found = []
    for name, thing in PUBLIC.items():
        if not isinstance(thing, type):
            found += [(name, None, flag, optional) for flag, optional in flags_of(thing).items()]
            continue
        if TABLE[name].without.get("make") == ABSTRACT:
            continue
        found += [(name, None, flag, optional) for flag, optional in constructor_flags(thing).items()]
        for method_name, method in inspect.getmembers(thing, callable):
            ours = str(getattr(method, "__module__", "")).startswith("lightning_retrieval")
            if ours and not method_name.startswith("_"):
                found += [(name, method_name, flag, optional) for flag, optional in flags_of(method).items()]
    return found


CASES = cases()


def call_with(name, method, flag, value):
    if method is not None:
        thing = PUBLIC[name]
        if not isinstance(inspect.getattr_static(thing, method), classmethod):
            thing = make(name)
        arguments = ARGUMENTS.get(f"{name}.{method}") or ARGUMENTS.get(method, {})
        return getattr(thing, method)(**arguments, **{flag: value})
    settings = ARGUMENTS.get(name) or TABLE[name].settings
    return PUBLIC[name](**{**settings, flag: value})


@pytest.mark.refusal
@pytest.mark.parametrize("value", ["False", 1])
@pytest.mark.parametrize(("name", "method", "flag", "optional"), CASES)
def test_a_flag_that_is_not_a_bool_raises(name, method, flag, optional, value):
    allowed = "True, False or None" if optional else "True or False"
    message = f"^{name}: `{flag}` must be {allowed}, got {value!r}[ .(]"
    with pytest.raises(TypeError, match=message) as error:
        call_with(name, method, flag, value)
    assert str(error.value).count(". ") == 0


@pytest.mark.refusal
@pytest.mark.parametrize(("name", "method", "flag"), [case[:3] for case in CASES if not case[3]])
def test_none_raises_where_it_is_not_allowed(name, method, flag):
    with pytest.raises(TypeError, match=f"^{name}: `{flag}` must be True or False, got None"):
        call_with(name, method, flag, None)


def test_all_flags_of_abstract_classes_are_among_those_of_their_subclasses():
    tested = {(name, flag) for name, method, flag, _ in CASES if method is None}
    for name, entry in TABLE.items():
        if entry.without.get("make") != ABSTRACT:
            continue
        for flag in constructor_flags(PUBLIC[name]):
            subclasses = [other for other, seen in tested if seen == flag and issubclass(PUBLIC[other], PUBLIC[name])]
            assert subclasses, (name, flag)


def test_the_flags_are_found():
    tested = {".".join(filter(None, (name, method, flag))) for name, method, flag, _ in CASES}
    assert {
        "SmoothAPLoss.include_self",
        "Embedder.normalize",
        "Embedder.train.mode",
        "Glyphs.augment",
        "ImageFolder.load_truncated",
        "ImageFolder.pin_memory",
        "RetrievalEvaluation.before_fit",
        "RetrievalIndex.load.mapped",
        "RetrievalMetrics.embeddings_on_cpu",
        "RetrievalWandbLogger.artifact",
    } <= tested
