"""What is read once within a context, and again outside of it."""

import gc
import weakref

import pytest
import torch

from lightning_retrieval.losses.lists import read_once, shared_reads


def reads(*keys):
    """Read with each of these pairs of tensors and settings; how often something was computed."""
    computed = []
    for tensors, settings in keys:
        read_once(tensors, settings, lambda: computed.append(1))
    return len(computed)


def test_the_same_tensors_and_settings_are_read_once():
    labels, ids = torch.zeros(2), torch.zeros(2)
    with shared_reads():
        assert reads(((labels, None), (True,)), ((labels, None), (True,))) == 1
        assert reads(((labels, ids), (True,)), ((labels, None), (False,)), ((labels.clone(), None), (True,))) == 3
        assert reads(((labels, None), (True,))) == 0


def test_every_context_reads_again():
    key = ((torch.zeros(2),), ())
    with shared_reads():
        reads(key)
        with shared_reads():
            assert reads(key, key) == 1
        assert reads(key) == 0
    assert reads(key, key) == 2
    with pytest.raises(RuntimeError), shared_reads():
        raise RuntimeError
    assert reads(key, key) == 2


def test_a_tensor_lives_as_long_as_what_was_read_from_it():
    """Another tensor could else get its identity, and its result."""
    labels = torch.zeros(2)
    reference = weakref.ref(labels)
    with shared_reads():
        read_once((labels,), (), lambda: 1)
        del labels
        gc.collect()
        assert reference() is not None
    gc.collect()
    assert reference() is None
