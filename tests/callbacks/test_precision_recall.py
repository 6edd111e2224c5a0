"""PrecisionRecallCurve plots the mean precision at each recall."""

import numpy as np

from lightning_retrieval.callbacks import PrecisionRecallCurve, curves
from lightning_retrieval.metrics.curves import mean_precision
from tests.callbacks.figure_runs import colours_of, make_loader, make_module, make_trainer, metrics_of, record_figures

GREEN = (44, 160, 44)


def test_figure_shows_the_mean_precision(tmp_path, monkeypatch):
    figures, model = record_figures(monkeypatch, curves), make_module()
    (logged,) = make_trainer(tmp_path, PrecisionRecallCurve()).test(model, make_loader(2), verbose=False)
    (axes,) = figures[0].axes
    (line,) = axes.lines
    assert np.allclose(line.get_xdata(), np.arange(101) / 100)
    assert np.allclose(line.get_ydata(), mean_precision(metrics_of(model, 2)))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("recall", "precision, interpolated")
    assert axes.get_title() == f"test/mAP = {logged['test/mAP']:.3f}"
    assert GREEN in colours_of(tmp_path / "retrieval/precision-recall-test.png")
