"""The forms of a batch, its way from `training_step` to a formula, what stops a step, and what it reports."""

import sys
from pathlib import Path

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_retrieval import (
    CalibrationLoss,
    CrossBatchMemory,
    HAPLoss,
    RetrievalModule,
    ROADMAPLoss,
    SharedTags,
    SmoothAPLoss,
)
from lightning_retrieval.losses import roadmap, smooth_ap
from lightning_retrieval.losses.batch_loss import BatchLoss
from lightning_retrieval.training.run_report import step_traffic
from tests.lightning_retrieval.training.small_training import (
    ROWS,
    SGD,
    Gives,
    assert_same,
    batches,
    fit,
    net,
    warnings_with,
)

REPOSITORY = Path(__file__).parents[3]
PACKAGES = tuple(f"{REPOSITORY / name}/" for name in ("lightning_retrieval", "callbacks", "datamodules"))
MOST_FRAMES = 9
BATCH = (torch.randn(12, 6), torch.arange(12) // 3, torch.arange(12))


def frames_of_the_library():
    """Names of the library's functions on the stack, the innermost first."""
    names, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGES):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


@pytest.mark.parametrize(
    ("module", "name", "loss", "settings"),
    [
        (smooth_ap, "smooth_ap", SmoothAPLoss(), {"chunk_size": 5}),
        (smooth_ap, "smooth_ap", SmoothAPLoss(), {"memory": CrossBatchMemory(20)}),
        (roadmap, "calibration_sums", CalibrationLoss(), {}),
    ],
    ids=["chunks", "memory", "mean over pairs"],
)
def test_a_formula_is_at_most_nine_frames_from_the_training_step(module, name, loss, settings, monkeypatch):
    formula, stacks = getattr(module, name), []

    def recording(*args, **kwargs):
        stacks.append([name, *frames_of_the_library()])  # the formula itself, which this function stands for
        return formula(*args, **kwargs)

    monkeypatch.setattr(module, name, recording)
    fit(RetrievalModule(nn.Linear(6, 4), loss, **settings), [BATCH])
    in_training = [stack[: stack.index("training_step") + 1] for stack in stacks if "training_step" in stack]
    frames = max(in_training, key=len)
    assert len(frames) <= MOST_FRAMES, frames
    assert frames[-2:] == ["chunked_backward", "training_step"]


class FirstRow(BatchLoss):
    """A loss that does not look at all embeddings."""

    def of_batch(self, batch):
        return batch.embeddings[0].sum()


@pytest.mark.refusal
@pytest.mark.parametrize(("loss", "ids"), [(SmoothAPLoss(tau=0.1), True), (FirstRow(), False)])
def test_nan_embeddings_stop_training_before_the_weights_change(loss, ids):
    first, second = batches(2)
    second[0][[2, 5]] = torch.nan
    data = [(*batch, torch.arange(100, 100 + ROWS)) if ids else batch for batch in (first, second)]
    module, plain = (RetrievalModule(net(), loss, chunk_size=3, optimizer=SGD) for _ in range(2))
    which = r"ids \[102, 105\]" if ids else r"rows \[2, 5\]"
    sentence = rf"^RetrievalModule: .* NaN or inf in 2 of 10 rows at step 1 \(seen on rank 0\), the first for {which};"
    with pytest.raises(ValueError, match=sentence):
        fit(module, data)
    fit(plain, [first])
    assert_same(module, plain)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (Gives(value=float("nan")), r"the loss is nan at step 0\."),
        (Gives(shape=(2,)), r"`loss` must return a scalar, got tensor\(\[1\., 1\.\].*set its reduction"),
    ],
)
def test_losses_that_are_not_a_finite_scalar_raise(loss, sentence):
    module = RetrievalModule(net(), loss, optimizer=SGD)
    with pytest.raises(ValueError, match=rf"^RetrievalModule: {sentence}"):
        fit(module, batches())
    assert_same(module.embedder, net())


@pytest.mark.refusal
@pytest.mark.parametrize("step", [0, 1])
def test_a_learning_rate_is_no_cure_for_embeddings_that_are_not_finite_at_the_first_step(step):
    given = batches(2)
    given[step][0][3] = float("nan")
    with pytest.raises(ValueError, match=rf"embeddings must be finite, .* at step {step}") as raised:
        fit(RetrievalModule(net(), SmoothAPLoss(), optimizer=SGD), given)
    assert ("learning rate" in str(raised.value)) == (step > 0)


@pytest.mark.refusal
def test_labels_of_another_length_raise():
    images, labels = batches(1)[0]
    with pytest.raises(ValueError, match=r"one label for each image, got 9 labels for 10 images\."):
        fit(RetrievalModule(net(), SmoothAPLoss()), [(images, labels[:9])])


@pytest.mark.parametrize("form", ["pair", "list", "ids", "dict", "dict with ids"])
def test_forms_of_a_batch(form):
    """And the ids reach the loss: rows 0 and 1 are the same image, which is no positive of itself."""
    images, labels = batches(1)[0]
    labels[:4] = torch.tensor([0, 0, 0, 1])
    ids = torch.tensor([50, 50, *range(2, ROWS)])
    batch = {
        "pair": (images, labels),
        "list": [images, labels],
        "ids": (images, labels, ids),
        "dict": {"images": images, "labels": labels},
        "dict with ids": {"images": images, "labels": labels, "ids": ids},
    }[form]
    after = {}
    for given in (None, ids):
        after[given is None] = plain = net()
        SmoothAPLoss(tau=0.1)(plain(images), labels, ids=given).backward()
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD)
    fit(module, [batch])
    assert_same(module.embedder, after["ids" not in form])
    assert not torch.allclose(after[True][0].weight, after[False][0].weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_loss_ranks_rounded_embeddings_and_the_gradient_is_not_rounded(dtype):
    plain = net()
    optimizer = SGD(plain.parameters())
    for images, labels in batches():
        embeddings = plain(images)
        rounded = embeddings.detach().to(getattr(torch, dtype)).double().requires_grad_()
        SmoothAPLoss(tau=0.1)(rounded, labels).backward()
        optimizer.zero_grad()
        embeddings.backward(rounded.grad)
        optimizer.step()
    module = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD, gather=dtype)
    fit(module, batches())
    assert_same(module.embedder, plain)
    exact = RetrievalModule(net(), SmoothAPLoss(tau=0.1), chunk_size=3, optimizer=SGD)
    fit(exact, batches())
    assert not torch.allclose(next(exact.parameters()), next(plain.parameters()), rtol=0, atol=1e-6)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("batch", "came"),
    [
        ((1, 2, 3, 4), "4 items"),
        ((1,), "1 items"),
        ({"images": 1, "target": 2}, r"a dict with the keys \['images', 'target'\]"),
        (torch.zeros(2), "Tensor"),
    ],
)
def test_other_batches_raise(batch, came):
    with pytest.raises(TypeError, match=rf"^RetrievalModule: a batch must be .*, got {came}; override unpack_batch"):
        RetrievalModule(net(), SmoothAPLoss()).unpack_batch(batch)


CLASSES = torch.arange(24) // 6
INDEX = torch.arange(24)


def warnings_of_a_step(labels, ids, memory=None, **loader) -> list[str]:
    """What a first step says of its batch, from a loader that is not of this library."""
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)), labels, ids)
    module = RetrievalModule(nn.Linear(6, 4), SmoothAPLoss(), memory=memory)
    return warnings_with("first batch", fit, module, DataLoader(data, **{"batch_size": 24, **loader}), max_steps=1)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (INDEX % 6, "an image must have one label, but in the first batch the id 0 has the labels 0 and 1,"),
        (CLASSES, "in the first batch 24 of 24 images share their id with others"),
        (INDEX.clamp(min=1), "in the first batch 2 of 24 images share their id with others"),
    ],
)
def test_ids_that_repeat_warn_with_a_sampler_of_others(ids, expected):
    (message,) = warnings_of_a_step(CLASSES, ids)
    assert message.startswith(f"RetrievalModule: {expected}")
    assert "give each image a different id, such as its index" in message
    assert warnings_of_a_step(CLASSES, INDEX) == []


def test_images_that_another_sampler_draws_several_times_do_not_warn():
    few = torch.arange(24).clamp(min=1, max=21) // 7  # one class has 3 images, fewer than are drawn of it
    torch.manual_seed(0)
    for sampler in (RandomSampler(INDEX, replacement=True, num_samples=24), MPerClassSampler(few, 6, 24, 24)):
        drawn = list(sampler)
        assert len(set(drawn)) < len(drawn)
        torch.manual_seed(2)
        assert warnings_of_a_step(CLASSES, INDEX, sampler=sampler) == []


def test_a_first_batch_of_one_label_warns_without_a_memory():
    labels = torch.full((24,), 7)
    (message,) = warnings_of_a_step(labels, INDEX)
    assert message.startswith("RetrievalModule: all 24 images of the first batch have the label 7, so that no list has")
    assert warnings_of_a_step(labels, INDEX, memory=CrossBatchMemory(24, start_step=2)) == []


def test_lists_without_a_positive_are_counted(caplog):
    """A shuffled loader draws classes of one to three images; a loss of pairs learns from such lists, too.

    Few such lists are told of in the report of the first step only.
    """
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 3, 4])

    def warned(loss, batch, **settings):
        module = RetrievalModule(nn.Linear(6, 4), loss, **settings)
        return warnings_with("no relevant image", fit, module, DataLoader([batch], batch_size=None), max_steps=1)

    rows = torch.randn(8, 6)
    (message,) = warned(SmoothAPLoss(), (rows, labels))
    assert message.startswith(
        "RetrievalModule: 3 of 8 queries of the first batch have no relevant image in their list,"
    )
    assert "such a list teaches nothing; draw several images of each class, as RetrievalDataLoader(" in message
    same_image = torch.tensor([0, 1, 2, 3, 3, 5, 6, 7])
    (message,) = warned(SmoothAPLoss(include_self=True), (rows, labels, same_image))
    assert "5 of 8 queries" in message
    levels = torch.stack([labels, labels.clamp(min=2)], 1)
    (message,) = warned(HAPLoss(), (rows, levels))
    assert "2 of 8 queries" in message
    (message,) = warned(ROADMAPLoss(), (rows, labels))
    assert "3 of 8 queries" in message
    sides = {"queries": (rows[3:], labels[3:]), "candidates": (rows[:4], labels[:4])}
    (message,) = warned(SmoothAPLoss(), sides)
    assert "3 of 5 queries" in message
    tagged = {"images": rows, "labels": labels, "tags": torch.tensor([[7, 8, 8, 9, 9, 5, 4, 3]]).T}
    assert warned(SmoothAPLoss(), tagged, relevance=SharedTags()) == []
    assert warned(CalibrationLoss(pair_mean="all"), (rows, labels)) == []
    assert warned(ContrastiveLoss(), (rows, labels)) == []
    assert warned(SmoothAPLoss(), (rows[:5], labels[:5])) == []
    with caplog.at_level("INFO"):
        assert warned(SmoothAPLoss(), (rows[:6], labels[:6])) == []
    assert (
        "K = 1 to 3 images, lists of 5 images, where 1 of 6 queries have no relevant image in their list."
        in caplog.text
    )
    assert warned(SmoothAPLoss(), (rows, labels, torch.arange(8)), memory=CrossBatchMemory(8)) == []


class OwnNorm(RetrievalModule):
    """With a BatchNorm that learns, or that always evaluates."""

    def __init__(self, evaluated, chunk_size):
        super().__init__(net(), SmoothAPLoss(), chunk_size=chunk_size)
        self.evaluated = evaluated
        self.norm = nn.BatchNorm1d(4).double()
        self.train()

    def train(self, mode=True):
        super().train(mode)
        self.norm.train(mode and not self.evaluated)
        return self

    def forward(self, images):
        return self.norm(self.embedder(images))


def test_batch_norm_in_chunks_warns_once_and_names_the_cure():
    data = [(images[:9], labels[:9]) for images, labels in batches()]
    (message,) = warnings_with("BatchNorm", fit, OwnNorm(False, 3), data)
    assert message.startswith("OwnNorm: BatchNorm sees 3 images at a time, not the batch of 9, so")
    assert "freeze_batch_norm=True of Embedder" in message
    for evaluated, chunk_size in ((True, 3), (False, 9), (False, None)):
        assert warnings_with("BatchNorm", fit, OwnNorm(evaluated, chunk_size), data) == []


@pytest.mark.parametrize(
    ("start_step", "mode", "reported"),
    [
        (None, None, ""),
        (0, "one_list", " and up to 16 of the memory"),
        (0, "one_list_detached", " and up to 16 of the memory, all without a gradient"),
        (3, "two_terms", " and up to 16 of the memory in a second term, from step 4 on"),
    ],
)
def test_a_fit_reports_once_what_its_lists_are(start_step, mode, reported, caplog):
    labels, ids = torch.tensor([7, 7, 7, 1, 1, 1, 5, 5, 5, 5]), torch.arange(ROWS)
    settings = {}
    if mode is not None:
        settings = {"memory": CrossBatchMemory(16, start_step, mode=mode)}
    module = RetrievalModule(net(), SmoothAPLoss(), **settings)
    for _ in range(2):
        with caplog.at_level("INFO"):
            fit(module, [(images, labels, ids) for images, _ in batches(2)])
    reports = [record.getMessage() for record in caplog.records if "RetrievalModule" in record.getMessage()]
    expected = f"RetrievalModule: batches of P = 3 classes with K = 3 to 4 images, lists of 9 images{reported}."
    assert reports == [expected] * 2


def test_traffic_by_hand():
    """Four processes with 8 rows each of 5 numbers, 100 parameters, single precision; each sends to three others."""
    gathered = 3 * 8 * (5 * 4 + 16)  # its own rows, labels and ids
    exchanged = 3 * 8 * 5 * 4  # the gradients of the others' rows
    reduced = 2 * 3 * 100 / 4 * 4  # a ring: a quarter of the sum at a time, first added up, then passed on
    assert step_traffic(32, 5, 100, 4) == {"gather": gathered, "exchange": exchanged, "all-reduce": reduced}
    assert step_traffic(32, 5, 100, 4, local_queries=False)["exchange"] == 0
    assert list(step_traffic(32, 5, 100, 4, gather=False).values()) == [0, 0, reduced]
    assert step_traffic(32, 5, 100, 4, gathered_bytes=2)["gather"] == gathered - 3 * 8 * 5 * 2
    divided = step_traffic(32, 5, 100, 4, weights=700)  # seven passes of a network that gathers all its parameters
    slices = {"weights": 3 * 700 / 4 * 4, "reduce-scatter": 3 * 100 / 4 * 4}
    assert divided == {"gather": gathered, "exchange": exchanged, **slices}
    copied = step_traffic(32, 5, 100, 4, weights=700, copies=2)  # two processes for each copy of the network
    slices = {"weights": 700 / 2 * 4, "reduce-scatter": 100 / 2 * 4, "all-reduce": 2 * 100 / 2 / 2 * 4}
    assert copied == {"gather": gathered, "exchange": exchanged, **slices}
    assert sum(step_traffic(32, 5, 100, 1, weights=700).values()) == 0
    assert sum(step_traffic(32, 5, 100, 1).values()) == 0
