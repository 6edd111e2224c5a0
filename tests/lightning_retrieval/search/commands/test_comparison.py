"""`adapt --compare` finds which loss trains the best head on a user's own embeddings, and says what is not shown."""

import importlib
import itertools
import re
import sys

import pytest
import torch

from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.search.commands import comparison
from lightning_retrieval.search.commands.comparison import InfoNCELoss, clustered_interval, compare_losses, t_quantile
from lightning_retrieval.search.embedding_folder import read_embeddings
from tests.lightning_retrieval.search.commands.glyph_commands import run
from tests.lightning_retrieval.search.commands.test_adapt import folder_of, points

SPLITS, CLASSES, TRAINED_OR_CHOSEN_ON = 3, 60, 36


@pytest.fixture(scope="module")
def checkpoint(glyphs):
    return glyphs[0] / "model.ckpt"


@pytest.fixture
def folder(checkpoint, tmp_path):
    """Embeddings whose ranking no head improves, so that training stops early."""
    return folder_of(tmp_path / "e", checkpoint, *points(noise=0.0, classes=CLASSES))


@pytest.fixture(scope="module")
def compared(checkpoint, tmp_path_factory):
    """Embeddings which a head can improve, and a comparison of a loss with itself."""
    folder = folder_of(tmp_path_factory.mktemp("compared") / "e", checkpoint, *points(1.0, CLASSES, per_class=4))
    return folder, compare_losses(folder, losses=LOSSES, seeds=(0, 1))


LOSSES = ("SmoothAPLoss", "lightning_retrieval.SmoothAPLoss")
OWN_LOSS = """
from lightning_retrieval import SmoothAPLoss


class OwnLoss(SmoothAPLoss):
    def query_losses(self, block):
        return {} * super().query_losses(block)
"""


@pytest.mark.slow
def test_heads_are_better_than_features_that_are_mostly_noise(compared):
    """The difference is that of the mAP of both rows, and zero is outside its interval."""
    folder, found = compared
    best, untrained = found.losses[0], found.untrained
    assert best.mean_ap == max(row.mean_ap for row in found.rows)
    assert untrained.difference == pytest.approx(untrained.mean_ap - best.mean_ap)
    assert untrained.interval[0] < untrained.difference < untrained.interval[1] < 0
    assert (found.classes, found.cells, found.wanted) == (CLASSES - TRAINED_OR_CHOSEN_ON, 2 * SPLITS, 2 * SPLITS)
    assert compare_losses(folder, losses=LOSSES, seeds=(0, 1)) == found  # also the measured seconds: nothing is trained


@pytest.mark.slow
def test_the_features_without_a_head_are_measured_on_the_test_parts(compared):
    """Their mAP is that of the tested classes alone, as another call of the metrics measures it."""
    stored = read_embeddings(compared[0])
    labels = torch.tensor(list(map(int, stored.labels)))
    values = []
    for split in range(SPLITS):
        shuffled = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(split))
        tested = torch.isin(labels, shuffled[TRAINED_OR_CHOSEN_ON:])
        metrics = RetrievalMetrics()
        metrics.update(torch.from_numpy(stored.embeddings)[tested], labels[tested], torch.arange(int(tested.sum())))
        values.append(metrics.compute()["mAP"].item())
    assert compared[1].untrained.mean_ap == pytest.approx(sum(values) / SPLITS)


@pytest.mark.slow
def test_a_loss_is_not_shown_to_differ_from_itself(compared):
    _, other = compared[1].rows[:2]
    assert (other.difference, other.interval) == (0, (0, 0))
    assert "not shown to be different" in compared[1].conclusion()


def test_heads_that_are_no_better_than_the_features_are_called_so(folder):
    assert "No head is shown to be better" in compare_losses(folder, losses=("SmoothAPLoss",), seeds=(0,)).conclusion()


def test_few_classes_do_not_tell(checkpoint, tmp_path, capsys):
    folder = folder_of(tmp_path / "e", checkpoint, *points(noise=0.0, classes=40, per_class=3))
    page = tmp_path / "c.html"
    code, out, _ = run(capsys, "adapt", "--embeddings", folder, "--compare", "--losses=log rank", "--html", page)
    assert code == 0
    assert "Too few classes to tell" in out
    assert "Too few classes to tell" in page.read_text()
    assert page.read_text().count("<svg") == 2


def test_a_comparison_goes_on_after_an_interrupt(folder, capsys, monkeypatch):
    """What is there is printed, and no head is trained twice."""
    trained = []
    train = comparison.train_head

    def interrupted(*args, **settings):
        trained.append(settings)
        if len(trained) == 5:
            raise KeyboardInterrupt
        return train(*args, **settings)

    monkeypatch.setattr(comparison, "train_head", interrupted)
    args = ["adapt", "--embeddings", folder, "--compare", "--losses=log rank"]
    code, out, err = run(capsys, *args)
    assert code == 130
    assert "2 of 9" in out
    assert "continues" in err
    code, out, _ = run(capsys, *args)
    assert (code, len(trained)) == (0, 5 + 11)
    assert "9 of 9" in out


def test_a_loss_is_measured_anew_after_its_code_has_changed(checkpoint, tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "e", checkpoint, *points(noise=1.0, classes=12, per_class=4))
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for sign in ("1", "-1"):
        (tmp_path / "own_loss.py").write_text(OWN_LOSS.format(sign))
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, "own_loss", raising=False)
        importlib.import_module("own_loss")
        found.append(compare_losses(folder, losses=["own_loss.OwnLoss"], seeds=(0,)).losses[0].mean_ap)
    assert found[0] != found[1]


def test_info_nce_equals_that_of_pytorch_metric_learning():
    pml = pytest.importorskip("pytorch_metric_learning.losses")
    embeddings = torch.nn.functional.normalize(torch.randn(24, 8, generator=torch.Generator().manual_seed(0)))
    for temperature, labels in itertools.product((0.05, 0.2), (torch.arange(24) // 3, torch.arange(24))):
        expected = pml.NTXentLoss(temperature=temperature)(embeddings, labels)
        torch.testing.assert_close(InfoNCELoss(temperature)(embeddings, labels), expected)


def test_quantiles_of_student():
    published = {2: 4.303, 3: 3.182, 5: 2.571, 8: 2.306, 20: 2.086, 200: 1.972}
    assert {freedom: t_quantile(freedom, 0.975) for freedom in published} == pytest.approx(published, rel=0.001)
    of_five_losses_and_few_heads = {1: 63.657, 2: 9.925, 3: 5.841}
    found = {freedom: t_quantile(freedom, 0.995) for freedom in of_five_losses_and_few_heads}
    assert found == pytest.approx(of_five_losses_and_few_heads, rel=0.001)


def test_intervals_cover_zero_as_often_as_they_say():
    """For differences that depend on the class and on the head, unlike those that an ordinary interval is for."""
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        effects = torch.randn(9, 1, generator=generator) + 2 * torch.randn(1, 24, generator=generator)
        low, high = clustered_interval(effects + torch.randn(9, 24, generator=generator), torch.full((9, 24), 1 / 216))
        covered += low <= 0 <= high
    assert 0.93 <= covered / 400 <= 0.99


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"losses": ()}, "losses"),
        ({"losses": ("os.system",)}, "os.system"),
        ({"losses": ("FastAPLos",)}, "FastAPLos"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (0, 0)}, "seeds"),
    ],
)
def test_invalid_arguments(folder, settings, argument):
    with pytest.raises(InvalidValue, match=re.escape(argument)):
        compare_losses(folder, **settings)


def test_a_damaged_file_of_results(folder):
    (folder / "comparison.jsonl").write_text('["a", [0.5]]\n')
    with pytest.raises(InvalidValue, match=r"comparison\.jsonl is damaged"):
        compare_losses(folder, losses=("log rank",))
