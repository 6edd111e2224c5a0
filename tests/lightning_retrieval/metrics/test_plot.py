"""The plot of a metric's results: bars of one result, lines of several."""

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics, RevisitedMetrics


def filled(cls=RetrievalMetrics, **settings):
    metrics = cls(ks=(1, 3), **settings)
    metrics.update(torch.randn(40, 4), torch.arange(40) % 8, torch.arange(40))
    return metrics


@pytest.mark.parametrize("cls", [RetrievalMetrics, RandomGalleryMetrics])
def test_bars_of_one_result(cls, tmp_path):
    metrics = filled(cls)
    figure, axes = metrics.plot()
    assert (isinstance(figure, Figure), isinstance(axes, Axes)) == (True, True)
    drawn = {text.get_text(): bar.get_height() for text, bar in zip(axes.get_xticklabels(), axes.patches, strict=True)}
    expected = {name: value.item() for name, value in metrics.compute().items() if name != "skipped_queries"}
    assert drawn == pytest.approx(expected)
    assert axes.get_title() == cls.__name__
    figure.savefig(tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000


def test_lines_of_several_results_on_given_axes():
    metrics = filled()
    first = metrics.compute()
    second = {name: value / 2 for name, value in first.items()}
    own = Figure().subplots()
    figure, axes = metrics.plot([first, second], own)
    assert axes is own
    assert figure is own.get_figure()
    lines = {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}
    assert lines["mAP"] == pytest.approx([first["mAP"].item(), first["mAP"].item() / 2])
    assert "skipped_queries" not in lines
    assert lines.keys() == first.keys() - {"skipped_queries"}


def test_setups_of_revisited_sets():
    metrics = RevisitedMetrics(easy={4: [0]}, hard={4: [2]}, junk={4: [1]}, ks=(1,))
    metrics.update(torch.randn(5, 2), torch.zeros(5).long(), torch.arange(5), torch.tensor([2, 2, 2, 2, 1]))
    _, axes = metrics.plot()
    names = [text.get_text() for text in axes.get_xticklabels()]
    assert names == ["mAP", "mAP/easy", "mP@1/easy", "mAP/medium", "mP@1/medium", "mAP/hard", "mP@1/hard"]


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("val", "ax", "error", "sentence"),
    [
        (0.5, None, TypeError, r"`val` must be what compute returned, or a list of that, got 0\.5\."),
        ([], None, TypeError, r"`val` must be what compute returned, or a list of that, got \[\]\."),
        ([{"mAP": 0.5}, {"R@1": 0.5}], None, ValueError, r"results with the same names, got \['mAP'\] and \['R@1'\]"),
        ({"mAP": 0.5}, "axes", TypeError, "`ax` must be an Axes of matplotlib, got str"),
    ],
)
def test_invalid_arguments(val, ax, error, sentence):
    with pytest.raises(error, match=f"^RetrievalMetrics: .*{sentence}"):
        RetrievalMetrics().plot(val, ax)
