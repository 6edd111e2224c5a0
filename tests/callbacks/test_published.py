"""PublishedResults prints published results beside those of the run, in each stage and after a resumed training."""

import pytest

from lightning_retrieval.callbacks import PublishedResults, RetrievalEvaluation
from tests.callbacks.point_runs import KS, PointsModule, make_trainer

SOURCE = "Table 7 of a paper"
PUBLISHED = {"R@1": 0.913, "mAP": 0.25, "R@77": 0.99}


def printed_table(capsys):
    """{first word of each line after the source, or the title line: the other words}."""
    _, found, table = capsys.readouterr().out.rpartition(f"\n{SOURCE}\n")
    assert found
    _, table = table.split("\n", 1)
    titles, *rows = [line.split() for line in table.splitlines() if line.split()]
    return titles, {name: list(map(float, values)) for name, *values in rows[: len(PUBLISHED)]}


def rounded(value):
    return pytest.approx(value, abs=5.1e-5, nan_ok=True)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_ends_with_the_published_and_the_run_s_results(stage, capsys):
    trainer = make_trainer(RetrievalEvaluation(KS), PublishedResults(SOURCE, PUBLISHED))
    (results,) = getattr(trainer, stage)(PointsModule(), verbose=False)
    titles, rows = printed_table(capsys)
    assert titles == ["published", "run"]
    prefix = {"validate": "val", "test": "test"}[stage]
    nan = float("nan")
    assert rows == {name: rounded([value, results.get(f"{prefix}/{name}", nan)]) for name, value in PUBLISHED.items()}


def test_training_ends_with_the_best_and_the_last_results_also_of_a_resumed_run(capsys, tmp_path):
    first = make_trainer(RetrievalEvaluation(KS), PublishedResults(SOURCE, PUBLISHED), max_epochs=2)
    first.fit(PointsModule(lr=3.0))
    first.save_checkpoint(tmp_path / "first.ckpt")
    capsys.readouterr()
    evaluation = RetrievalEvaluation(KS)
    resumed = make_trainer(evaluation, PublishedResults(SOURCE, PUBLISHED), max_epochs=6)
    resumed.fit(PointsModule(lr=3.0), ckpt_path=tmp_path / "first.ckpt", weights_only=True)
    titles, rows = printed_table(capsys)
    assert titles == ["published", "best", "last"]
    last = {name: float(value) for name, value in resumed.callback_metrics.items()}
    for name in ("R@1", "mAP"):
        assert rows[name] == rounded([PUBLISHED[name], evaluation.best[f"val/{name}"], last[f"val/{name}"]])
    assert evaluation.best["val/mAP"] > last["val/mAP"]  # so that best and last differ
