"""Settings of all tests of the index."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: k-means of a few rows waits for other threads longer than it computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
