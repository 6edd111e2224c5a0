"""ScoreHistogram plots the densities of all pairs and logs their overlap."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_retrieval.callbacks import ScoreHistogram, curves
from tests.callbacks.figure_runs import labelled_points, make_loader, make_module, make_trainer, record_figures


def test_figure_shows_both_densities_and_their_overlap_is_logged(tmp_path, monkeypatch):
    figures, model = record_figures(monkeypatch, curves), make_module()
    (logged,) = make_trainer(tmp_path, ScoreHistogram(bins=10)).test(model, make_loader(2), verbose=False)
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["72 positive pairs", "480 negative pairs"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("cosine similarity", "density")
    with torch.no_grad():
        rows = nn.functional.normalize(model(labelled_points(2)[:][0]), dim=1)
    labels, others = labelled_points(2)[:][1], ~torch.eye(24, dtype=torch.bool)
    scores, shares = rows @ rows.T, []
    for steps, relevant in zip(axes.patches, (labels[:, None] == labels, labels[:, None] != labels)):
        values, edges, _ = steps.get_data()
        of_kind = scores[relevant & others].double().numpy()
        assert np.allclose(values, np.histogram(of_kind, edges, density=True)[0])
        assert len(edges) == 11
        assert axes.get_xlim() == (edges[0], edges[-1])
        shares.append(values * np.diff(edges))
    assert edges[0] <= scores[others].min() < edges[1]
    assert edges[-2] < scores[others].max() <= edges[-1]
    assert logged["test/score_overlap"] == pytest.approx(np.minimum(*shares).sum(), abs=1e-9)
    assert 0.05 < logged["test/score_overlap"] < 0.95
    assert axes.get_title() == f"test/score_overlap = {logged['test/score_overlap']:.3f}"
    assert (tmp_path / "retrieval/scores-test.png").exists()


@pytest.mark.refusal
def test_bins_must_be_at_least_2():
    with pytest.raises(ValueError, match=r"^ScoreHistogram: `bins` must be an integer >= 2, got 1\."):
        ScoreHistogram(bins=1)
