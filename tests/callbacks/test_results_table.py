"""The table that is printed at the end."""

from lightning_retrieval.callbacks.results_table import results_table


def test_one_column_has_no_title():
    table = results_table({"trained": {"test/mAP": 0.25, "test/skipped_queries": 3.0}})
    assert table.splitlines() == [
        "test/mAP                  0.2500",
        "test/skipped_queries           3",
    ]


def test_metrics_are_those_of_the_last_column():
    table = results_table({"untrained": {"test/mAP": 0.25}, "trained": {"test/mAP": 0.5, "test/R@1": 1.0}})
    assert table.splitlines() == [
        "           untrained     trained",
        "test/mAP      0.2500      0.5000",
        "test/R@1         nan      1.0000",
    ]
