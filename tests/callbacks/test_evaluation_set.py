"""An evaluation set accepts what evaluation steps should return, and names what they should not."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalMetrics
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.callbacks.evaluation_sets import EvaluationSet
from tests.callbacks.point_runs import KS, PointsModule, labelled_points, make_trainer


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("answer", "came"),
    [
        (None, "NoneType"),
        (torch.zeros(()), "Tensor"),
        ({"loss": torch.zeros(())}, r"the keys \['loss'\]"),
    ],
)
def test_steps_without_embeddings_and_labels_raise(answer, came):
    class Other(PointsModule):
        def validation_step(self, batch, batch_idx):
            return answer

    with pytest.raises(
        TypeError, match=rf"^RetrievalEvaluation: Other's validation .* ids, got {came}; the steps of Retr"
    ):
        make_trainer(RetrievalEvaluation(KS)).validate(Other(), verbose=False)


@pytest.mark.refusal
def test_roles_must_be_integers():
    evaluation_set = EvaluationSet("test/", DataLoader(labelled_points(3)), RetrievalMetrics(KS))
    message = r"the `roles` that Module's steps return must be a tensor of integers .*, got torch.float32"
    with pytest.raises(TypeError, match=message):
        evaluation_set.add("Module", {"embeddings": torch.ones(2, 3), "labels": torch.ones(2), "roles": torch.ones(2)})


def test_results_have_the_prefix_of_the_set():
    evaluation_set = EvaluationSet("val/small/", DataLoader(labelled_points(3)), RetrievalMetrics(KS))
    assert len(evaluation_set.dataset) == 23
    evaluation_set.metrics.update(torch.eye(3), torch.tensor([1, 1, 2]), torch.arange(3))
    assert {"val/small/mAP", "val/small/R@1"} <= evaluation_set.compute().keys()


def test_cameras_of_the_batches_reach_the_metric():
    """Batches that are dicts with cameras, as an ImageSet's are: `val/mAP` is that of lists without the same camera."""
    points, labels = labelled_points(2).tensors
    cameras = torch.arange(len(labels)) % 2
    items = []
    for row, point in enumerate(points):
        items.append({"images": point, "labels": labels[row], "ids": torch.tensor(row), "cameras": cameras[row]})
    module = PointsModule()
    loader = DataLoader(items, batch_size=5)
    (logged,) = make_trainer(RetrievalEvaluation(KS)).validate(module, loader, verbose=False)
    metrics, without = RetrievalMetrics(KS), RetrievalMetrics(KS)
    with torch.no_grad():
        embeddings = module.eval()(points)
    metrics.update(embeddings, labels, cameras=cameras)
    without.update(embeddings, labels)
    expected = {f"val/{name}": value.item() for name, value in metrics.compute().items()}
    assert logged == pytest.approx(expected, abs=1e-9)
    assert abs(logged["val/mAP"] - without.compute()["mAP"].item()) > 1e-3
