from lightning_retrieval.training.run_report import step_traffic


def test_traffic_by_hand():
    """Four processes with 8 rows each of 5 numbers, 100 parameters, single precision; each sends to three others."""
    gathered = 3 * 8 * (5 * 4 + 16)  # its own rows, labels and ids
    exchanged = 3 * 8 * 5 * 4  # the gradients of the others' rows
    reduced = 2 * 3 * 100 / 4 * 4  # a ring: a quarter of the sum at a time, first added up, then passed on
    assert step_traffic(32, 5, 100, 4) == {"gather": gathered, "exchange": exchanged, "all-reduce": reduced}
    assert step_traffic(32, 5, 100, 4, local_queries=False)["exchange"] == 0
    assert list(step_traffic(32, 5, 100, 4, gather=False).values()) == [0, 0, reduced]
    divided = step_traffic(32, 5, 100, 4, weights=700)  # seven passes of a network that gathers all its parameters
    slices = {"weights": 3 * 700 / 4 * 4, "reduce-scatter": 3 * 100 / 4 * 4}
    assert divided == {"gather": gathered, "exchange": exchanged, **slices}
    assert sum(step_traffic(32, 5, 100, 1, weights=700).values()) == 0
    assert sum(step_traffic(32, 5, 100, 1).values()) == 0
