"""Valid calls of the index."""

from pathlib import Path

import torch

from lightning_retrieval import MilvusStore, RetrievalIndex
from tests.awkward_values.calls import Call


def built():
    index = RetrievalIndex(dim=3)
    index.add(torch.eye(3), torch.tensor([5, 6, 7]), ["a.jpg", "b.jpg", "c.jpg"], columns={"stock": [1, 2, 3]})
    return index


def searching():
    return {"queries": torch.ones(2, 3), "k": 1, "where": "stock > 0", "group_by": "stock"}


def ids():
    return torch.tensor([5, 7])


def after(method):
    """A function that calls a method of an index and returns the index."""

    def call(**arguments):
        index = built()
        getattr(index, method)(**arguments)
        return index

    return call


def result_of(method):
    """A function that calls a method of an index and returns its result."""

    def call(**arguments):
        return getattr(built(), method)(**arguments)

    return call


def built_on_disk(**arguments):
    index = RetrievalIndex(300, "IVF1,Flat")
    index.build_on_disk(**arguments)
    return len(index)


def saved_index():
    if not Path("saved").exists():
        built().save("saved")
    return "saved"


def store():
    """An index in Milvus Lite, which the first call makes."""
    if not Path("saved.db").exists():
        made = MilvusStore.create("saved.db", "birds", 3, columns={"stock": "number"})
        made.add(torch.eye(3), columns={"stock": [1, 2, 3]})
        made.publish()
        made.close()
    return "saved.db"


def closed(function):
    """A function that returns an opened store, made to close it and to return its number of rows."""

    def call(**arguments):
        opened = function(**arguments)
        try:
            return len(opened)
        finally:
            opened.close()

    return call


def searched(**arguments):
    opened = MilvusStore(store(), "birds")
    try:
        return opened.search(**arguments)
    finally:
        opened.close()


CALLS = {
    "MilvusStore": [
        Call("MilvusStore", closed(MilvusStore), lambda: {"uri": store(), "name": "birds"}, signature=MilvusStore),
        Call(
            "MilvusStore",
            closed(MilvusStore.create),
            lambda: {
                "uri": store(),
                "name": "birds",
                "dim": 3,
                "factory": "Flat",
                "parameters": "",
                "about": {"checkpoint": "last.ckpt"},
                "columns": {"stock": "number"},
            },
            signature=MilvusStore.create,
        ),
        Call("MilvusStore", searched, searching, signature=MilvusStore.search),
    ],
    "RetrievalIndex": [
        Call(
            "RetrievalIndex",
            RetrievalIndex,
            lambda: {"dim": 3, "factory": "Flat", "parameters": "", "shards": 2, "about": {"checkpoint": "last.ckpt"}},
        ),
        Call(
            "RetrievalIndex",
            after("add"),
            lambda: {
                "embeddings": torch.ones(2, 3),
                "ids": torch.arange(2),
                "paths": ["d.jpg", "e.jpg"],
                "columns": {"stock": [4, 5]},
            },
            signature=RetrievalIndex.add,
            use=len,
        ),
        Call(
            "RetrievalIndex",
            result_of("search"),
            searching,
            signature=RetrievalIndex.search,
        ),
        Call(
            "RetrievalIndex",
            after("set_parameters"),
            lambda: {"parameters": ""},
            signature=RetrievalIndex.set_parameters,
        ),
        Call(
            "RetrievalIndex",
            built_on_disk,
            lambda: {
                "folder": "on-disk",
                "embeddings": torch.eye(300),
                "ids": torch.arange(300),
                "paths": ["d.jpg"] * 300,
                "columns": {"stock": list(range(300))},
                "rows_in_memory": 100_000,
                "launch": list,
            },
            signature=RetrievalIndex.build_on_disk,
        ),
        Call("RetrievalIndex", after("remove"), lambda: {"ids": ids()}, signature=RetrievalIndex.remove, use=len),
        Call("RetrievalIndex", result_of("paths"), lambda: {"ids": ids()}, signature=RetrievalIndex.paths),
        Call("RetrievalIndex", result_of("columns"), lambda: {"ids": ids()}, signature=RetrievalIndex.columns),
        Call("RetrievalIndex", after("save"), lambda: {"folder": "folder"}, signature=RetrievalIndex.save),
        Call(
            "RetrievalIndex",
            RetrievalIndex.load,
            lambda: {"folder": saved_index(), "mapped": False, "verify": True},
            use=len,
        ),
    ],
}
