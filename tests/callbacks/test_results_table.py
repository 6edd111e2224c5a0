"""The table that is printed at the end."""

import pytest

from lightning_retrieval.callbacks.evaluation import results_table, worse_than_before


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


@pytest.mark.parametrize(
    ("backbone", "untrained", "trained", "named"),
    [
        (
            0.280,
            0.254,
            0.202,
            "the pooled features of its backbone: test/mAP is 0.2020, and was 0.2800; train for more",
        ),
        (0.180, 0.254, 0.202, "the untrained network: test/mAP is 0.2020, and was 0.2540; train for more epochs, try"),
        (0.180, 0.154, 0.202, None),
        (0.202, 0.20201, 0.202, None),  # as printed
        (float("nan"), 0.1, float("nan"), None),
    ],
)
def test_a_network_that_training_made_worse(backbone, untrained, trained, named):
    scores = {"backbone": backbone, "untrained": untrained, "trained": trained}
    columns = {
        title: {"test/skipped_queries": 0.0, "test/mAP": score, "test/R@1": 1.0} for title, score in scores.items()
    }
    columns["trained"]["test/R@1"] = 0.5
    sentence = worse_than_before(columns)
    if named is None:
        assert sentence is None
    else:
        assert sentence.startswith(f"The trained network is worse than {named}")
        assert sentence.endswith("or begin with pretrained weights if it did not.")
    assert worse_than_before({"trained": columns["trained"]}) is None


def test_each_set_counts_and_the_first_metric_where_there_is_no_map():
    before = {"test/a/mAP": 0.5, "test/b/mAP": 0.5}
    assert "test/b/mAP is 0.4000" in worse_than_before({"untrained": before, "trained": {**before, "test/b/mAP": 0.4}})
    assert "test/TAR is 0.1000" in worse_than_before({"untrained": {"test/TAR": 0.2}, "trained": {"test/TAR": 0.1}})
