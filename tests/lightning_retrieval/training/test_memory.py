"""The memory against a list of Python rows, losses over it against score matrices, and runs with it against a loop."""

import copy
import functools
import io
import itertools
import math
import warnings

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_metric_learning.losses import (
    ContrastiveLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
    NCALoss,
    ProxyAnchorLoss,
    ThresholdConsistentMarginLoss,
    TripletMarginLoss,
)
from pytorch_metric_learning.losses import (
    FastAPLoss as OtherFastAPLoss,
)
from torch import nn

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule
from lightning_retrieval.datamodules import RetrievalDataModule
from lightning_retrieval.losses import (
    BlackboxAPLoss,
    BlackboxRecallLoss,
    CalibrationLoss,
    FastAPLoss,
    HAPLoss,
    LogRankLoss,
    QuantizedAPLoss,
    RecallAtKLoss,
    ROADMAPLoss,
    SmoothAPLoss,
    SupAPLoss,
    WeightedSum,
)
from lightning_retrieval.losses.batch_loss import RankedBatch
from lightning_retrieval.models import GlyphNet
from lightning_retrieval.training import run_report
from tests.lightning_retrieval.training.small_training import ROWS, SGD, assert_same, fit, net
from tests.point_set import Points

DIM = 3
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Model:
    """The memory as a list: rows (id, label, embedding), newest first, each image once."""

    def __init__(self, size, start_step):
        self.size, self.start_step, self.steps, self.rows = size, start_step, 0, []

    def others(self, ids):
        return [row for row in self.rows if row[0] not in ids]

    def update(self, batch):
        if self.steps >= self.start_step:
            once = {}
            for row in batch:
                once.setdefault(row[0], row)
            self.rows = [*once.values(), *self.others(once)][: self.size]
        self.steps += 1


def as_rows(embeddings, labels, ids):
    return list(zip(ids.tolist(), labels.tolist(), embeddings.tolist(), strict=True))


def as_batch(rows, levels, dtype):
    """Embeddings are eighths, so exact in every type."""
    embeddings = torch.tensor([row[2] for row in rows], dtype=torch.float64).reshape(len(rows), DIM) / 8
    labels = torch.tensor([row[1] for row in rows], dtype=torch.int64)
    labels = torch.stack([labels // 2**level for level in range(levels)], 1) if levels else labels
    return embeddings.to(dtype), labels, torch.tensor([row[0] for row in rows], dtype=torch.int64)


ROW = st.tuples(st.integers(-3, 9), st.integers(-2, 5), st.tuples(*[st.integers(-16, 16)] * DIM))
RUN = st.fixed_dictionaries(
    {
        "batches": st.lists(st.tuples(st.lists(ROW, max_size=6), st.sampled_from(DTYPES)), min_size=1, max_size=6),
        "size": st.integers(6, 12),
        "start_step": st.integers(0, 3),
        "levels": st.integers(0, 2),
    }
)


def assert_remembers(memory, model, like):
    """Told by the references of a batch of no image: there are then only the rows remembered."""
    assert len(memory) == len(model.rows)
    assert (memory.steps, memory.started) == (model.steps, model.steps >= model.start_step)
    nothing = memory.references(*(part[:0] for part in like))
    assert as_rows(nothing.ref_emb, nothing.ref_labels, nothing.ref_ids) == model.rows


def step(memory, model, batch):
    """References of a batch, then the update, both compared."""
    embeddings, labels, ids = batch
    embeddings = embeddings.clone().requires_grad_()
    references = memory.references(embeddings, labels, ids)
    own = as_rows(embeddings, labels, ids)
    expected = own + model.others(ids.tolist())
    assert as_rows(references.ref_emb, references.ref_labels, references.ref_ids) == expected
    assert references.ids is ids
    assert references.ref_emb.dtype == torch.promote_types(embeddings.dtype, torch.float32)
    if len(ids):
        references.ref_emb.sum().backward()
        assert embeddings.grad.tolist() == torch.ones_like(embeddings).tolist()  # each row stands there once
    memory.update(embeddings, labels, ids)
    model.update(own)
    assert_remembers(memory, model, batch)


@settings(max_examples=40, deadline=None)
@given(RUN)
def test_a_run_is_that_of_a_list(run):
    memory, model = CrossBatchMemory(run["size"], run["start_step"]), Model(run["size"], run["start_step"])
    for rows, dtype in run["batches"]:
        step(memory, model, as_batch(rows, run["levels"], dtype))
    memory.reset()
    assert (len(memory), memory.steps) == (0, 0)


@settings(max_examples=25, deadline=None)
@given(RUN, st.integers(0, 5), st.sampled_from([-3, 0, 4]))
def test_a_run_goes_on_from_its_state(run, after, change):
    """Through a file, into a memory as large, smaller (it takes the newest rows) or larger."""
    size, levels = run["size"], run["levels"]
    memory, model = CrossBatchMemory(size, run["start_step"]), Model(size, run["start_step"])
    batches = [as_batch(rows[: 6 + min(change, 0)], levels, torch.float64) for rows, _ in run["batches"]]
    for batch in batches[:after]:
        step(memory, model, batch)
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    again = CrossBatchMemory(size + change, run["start_step"])
    again.update(*as_batch([(77, 7, (1, 2, 3))], levels, torch.float64))  # what it holds is replaced
    again.load_state_dict(torch.load(file, weights_only=True))
    model.size, model.rows = size + change, model.rows[: size + change]
    assert_remembers(again, model, batches[0])
    for batch in batches[after:]:
        step(again, model, batch)


@settings(max_examples=25, deadline=None)
@given(RUN, st.integers(0, 5))
def test_a_memory_that_is_told_to_begin_is_that_with_this_start_step(run, after):
    """Also from a state in between, which a memory with any `start_step` continues."""
    memory, model = CrossBatchMemory(run["size"], "auto"), Model(run["size"], run["start_step"])
    for number, (rows, dtype) in enumerate(run["batches"]):
        batch = as_batch(rows, run["levels"], dtype)
        if number == run["start_step"]:
            memory.begin()
        assert memory.started == (number >= run["start_step"])
        memory.update(*batch)
        model.update(as_rows(*batch))
        nothing = memory.references(*(part[:0] for part in batch))
        assert as_rows(nothing.ref_emb, nothing.ref_labels, nothing.ref_ids) == model.rows
        if number == after:
            again = CrossBatchMemory(run["size"], 100 if memory.started else "auto")
            again.load_state_dict(memory.state_dict())
            memory = again
    memory.reset()
    assert not memory.started


def test_a_smaller_memory_takes_the_newest_rows():
    memory, smaller = CrossBatchMemory(9), CrossBatchMemory(4)
    for number in range(3):
        memory.update(torch.randn(3, 2), torch.arange(3), torch.arange(3) + 3 * number)
    smaller.load_state_dict(memory.state_dict())
    nothing = torch.zeros(0, 2), *[torch.zeros(0, dtype=torch.int64)] * 2
    ranked = smaller.references(*nothing)
    assert ranked.ref_ids.tolist() == [6, 7, 8, 3]
    assert torch.equal(ranked.ref_emb, memory.references(*nothing).ref_emb[:4])


def test_a_state_is_no_larger_than_its_rows_and_does_not_change_afterwards():
    memory = CrossBatchMemory(100)
    for number in range(3):
        memory.update(torch.randn(60, 200), torch.zeros(60, dtype=torch.int64), torch.arange(60) + 60 * number)
    state, file = memory.state_dict(), io.BytesIO()
    torch.save(state, file)
    assert 100 * 200 * 4 < file.tell() < 100 * 200 * 4 + 8000
    before = memory.references(torch.zeros(0, 200), *[torch.zeros(0, dtype=torch.int64)] * 2).ref_emb.clone()
    memory.update(torch.randn(60, 200), torch.zeros(60, dtype=torch.int64), torch.arange(60) + 60)
    again = CrossBatchMemory(100)
    again.load_state_dict(state)
    after = again.references(torch.zeros(0, 200), *[torch.zeros(0, dtype=torch.int64)] * 2).ref_emb
    assert torch.equal(after, before)


def test_it_is_state_but_no_buffer():
    """So that DDP does not send it around at each step."""
    memory = CrossBatchMemory(8, 2)
    memory.update(torch.randn(4, 3), torch.arange(4), torch.arange(4))
    assert list(memory.buffers()) == []
    assert list(memory.parameters()) == []
    assert set(memory.state_dict()) == {"_extra_state"}
    assert set(nn.Sequential(memory).state_dict()) == {"0._extra_state"}
    assert "size=8, start_step=2" in repr(memory)


def test_rows_are_copies():
    """A batch changed in place afterwards, as buffers of a loader are, changes nothing that is remembered."""
    memory, embeddings = CrossBatchMemory(8), torch.ones(2, 3)
    labels, ids = torch.tensor([5, 6]), torch.tensor([1, 2])
    memory.update(embeddings, labels, ids)
    for part in (embeddings, labels, ids):
        part.zero_()
    rows = memory.references(torch.zeros(0, 3), *[torch.zeros(0, dtype=torch.int64)] * 2)
    assert as_rows(rows.ref_emb, rows.ref_labels, rows.ref_ids) == [(1, 5, [1.0] * 3), (2, 6, [1.0] * 3)]


# --- invalid input


def batch_of(rows=3, dim=DIM, levels=0, first=0):
    labels = torch.arange(rows)
    labels = torch.stack([labels] * levels, 1) if levels else labels
    return torch.randn(rows, dim), labels, torch.arange(rows) + first


@pytest.mark.refusal
@pytest.mark.parametrize("call", ["references", "update"])
@pytest.mark.parametrize(
    ("error", "sentence", "batch"),
    [
        (ValueError, r"`size` must be at least that of a batch, got 5 for a batch of 6 rows; enlarge", batch_of(6)),
        (TypeError, r"`ids` must be given, .*, got None; let the batches hold \(images, labels, ids\)\.",
         (*batch_of()[:2], None)),
        (ValueError, r"`embeddings` must have the dimension of the stored ones, 3, got 4; .* call reset\(\)\.",
         batch_of(dim=4)),
        (ValueError, r"`labels` must have as many levels as the stored ones, shape \(4,\), got \(3, 2\); call reset",
         batch_of(levels=2)),
        (ValueError, r"`embeddings` must hold finite numbers only, got NaN or inf in 1 of 3 rows \(2\)",
         (torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, math.nan, 8.0]]), *batch_of()[1:])),
    ],
)  # fmt: skip
def test_invalid_batches_raise_and_nothing_changes(call, error, sentence, batch):
    memory = CrossBatchMemory(5)
    memory.update(*batch_of(4, first=40))
    rows, steps = [part.clone() for part in memory.state_dict()["_extra_state"]["rows"]], memory.steps
    with pytest.raises(error, match=f"^CrossBatchMemory: {sentence}"):
        getattr(memory, call)(*batch)
    after = memory.state_dict()["_extra_state"]
    assert after["steps"] == steps
    assert all(torch.equal(*pair) for pair in zip(after["rows"], rows, strict=True))


@pytest.mark.refusal
def test_a_checkpoint_of_another_network_raises():
    """At once where rows of one's own show it, else with the first batch."""
    other = CrossBatchMemory(5)
    other.update(*batch_of(dim=7))
    full, empty = CrossBatchMemory(5), CrossBatchMemory(5)
    full.update(*batch_of())
    sentence = r"^CrossBatchMemory: `embeddings` must have the dimension of the stored ones, 3, got 7; .*checkpoint"
    with pytest.raises(ValueError, match=sentence):
        full.load_state_dict(other.state_dict())
    assert len(full.references(*batch_of(2, first=9)).ref_ids) == 5
    empty.load_state_dict(other.state_dict())
    for call in (empty.references, empty.update):
        with pytest.raises(ValueError, match=r"^CrossBatchMemory: .* the stored ones, 7, got 3; .* from a checkpoint"):
            call(*batch_of())
    empty.reset()
    empty.update(*batch_of())
    assert len(empty) == 3


@pytest.mark.refusal
def test_a_checkpoint_with_rows_that_are_not_finite_raises_and_changes_nothing():
    memory, other = CrossBatchMemory(5), CrossBatchMemory(5)
    memory.update(*batch_of())
    other.update(*batch_of())
    damaged = other.state_dict()
    damaged["_extra_state"]["rows"][0][1, 0] = float("nan")
    sentence = r"^CrossBatchMemory: `state` must hold finite numbers only, got NaN or inf in 1 of 3 rows \(ids 1\)\.$"
    with pytest.raises(ValueError, match=sentence):
        memory.load_state_dict(damaged)
    assert memory.get_extra_state()["rows"][0].isfinite().all()


# --- losses

LOSSES = {
    "smooth_ap": functools.partial(SmoothAPLoss, 0.1),
    "sup_ap": SupAPLoss,
    "hap": HAPLoss,
    "hap slopes": functools.partial(HAPLoss, 2.0, hrank_slopes=(25.0, 0.5, 10.0)),
    "fast_ap": functools.partial(FastAPLoss, 7),
    "quantized_ap": functools.partial(QuantizedAPLoss, 13),
    "quantized_ap simplified": functools.partial(QuantizedAPLoss, tie_aware="simplified"),
    "quantized_ap full": functools.partial(QuantizedAPLoss, 4, tie_aware="full"),
    "blackbox_ap": BlackboxAPLoss,
    "blackbox_recall": functools.partial(BlackboxRecallLoss, 4.0, 0.1, weighting="loglog"),
    "blackbox_recall all": functools.partial(BlackboxRecallLoss, pair_mean="all"),
    "calibration": CalibrationLoss,
    "calibration all": functools.partial(CalibrationLoss, pair_mean="all"),
    "calibration nonzero": functools.partial(CalibrationLoss, pair_mean="nonzero"),
    "recall_at_k": functools.partial(RecallAtKLoss, (1, 2, 30), tau_rank=0.05, tau_k=(1.0, 0.5, 2.0)),
    "log_rank": functools.partial(LogRankLoss, 0.1),
    "roadmap": functools.partial(ROADMAPLoss, 0.3),
    "weighted sum": lambda: WeightedSum({"ap": (0.5, SmoothAPLoss(0.1)), "far": (2.0, CalibrationLoss())}),
}


def drawn(rows, first, levels, seed, dim=4):
    """A batch in float64, in which the first image stands twice."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(6, (rows,), generator=generator)
    ids = torch.arange(first, first + rows)
    ids[-1], labels[-1] = ids[0], labels[0]
    labels = torch.stack([labels, labels // 2], 1) if levels else labels
    return torch.randn(rows, dim, generator=generator, dtype=torch.float64), labels, ids


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_rank_the_whole_list(name, detached):
    """From a matrix of scores made of lists: everything seen, each image once but for the batch's own rows."""
    loss, levels = LOSSES[name](), name.startswith("hap")
    memory, past = CrossBatchMemory(12), []
    for number in range(3):  # each has three images of the one before
        batch = drawn(7, 4 * number, levels, number)
        memory.update(*batch)
        once = {int(i): (int(i), x, y) for x, y, i in reversed(list(zip(*batch)))}
        past = [*(once[int(i)] for i in dict.fromkeys(batch[2].tolist())), *(r for r in past if r[0] not in once)][:12]
    embeddings, labels, ids = drawn(7, 10, levels, 9)

    leaf = embeddings.clone().requires_grad_()
    value = loss.of_batch(memory.references(leaf, labels, ids, detach=detached))
    value.backward()

    expected_leaf = embeddings.clone().requires_grad_()
    others = [row for row in past if row[0] not in ids.tolist()]
    assert 0 < len(others) < len(past)
    own = expected_leaf.detach() if detached else expected_leaf
    everything = torch.cat([own, torch.stack([row[1] for row in others])])
    ref_labels, ref_ids = [*labels, *(row[2] for row in others)], [*ids.tolist(), *(row[0] for row in others)]
    level = torch.tensor([[int((y == z).sum()) for z in ref_labels] for y in labels])
    candidate = torch.tensor([[i != j for j in ref_ids] for i in ids.tolist()])
    assert int((~candidate).sum()) == len(ids) + 2  # one's own copy, and the other of the image that stands twice
    scores = nn.functional.normalize(expected_leaf) @ nn.functional.normalize(everything).T
    expected = loss.from_scores(scores, level if levels else level > 0, candidate)
    expected.backward()

    assert value.item() == pytest.approx(expected.item(), rel=0, abs=1e-12)
    torch.testing.assert_close(leaf.grad, expected_leaf.grad, rtol=0, atol=1e-12)
    assert leaf.grad.any() or "recall all" in name


@pytest.mark.parametrize("name", LOSSES)
def test_without_a_past_it_is_the_loss_of_the_batch(name):
    embeddings, labels, ids = drawn(8, 0, name.startswith("hap"), 1)
    results = []
    for references in (False, True):
        leaf = embeddings.clone().requires_grad_()
        ranked = RankedBatch(leaf, labels, ids=ids)
        if references:
            ranked = CrossBatchMemory(8).references(leaf, labels, ids)
        value = LOSSES[name]().of_batch(ranked)
        value.backward()
        results.append((value.detach(), leaf.grad))
    for of_batch, with_memory in zip(*results, strict=True):
        torch.testing.assert_close(with_memory, of_batch, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [SmoothAPLoss, FastAPLoss, RecallAtKLoss])
def test_a_query_in_its_own_list_counts_alike_among_references(make):
    embeddings, labels, ids = drawn(8, 0, False, 1)
    loss = make(include_self=True)
    ranked = CrossBatchMemory(8).references(embeddings, labels, ids)
    assert loss.of_batch(ranked).item() == pytest.approx(loss(embeddings, labels, ids=ids).item(), abs=1e-12)
    assert loss(embeddings, labels, ids=ids).item() != pytest.approx(make()(embeddings, labels, ids=ids).item())


# --- RetrievalModule


def batches(steps=4):
    """Five images in common with the batch before, with whatever embeddings they have by then."""
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(ROWS, 6, generator=generator, dtype=torch.float64),
            torch.arange(5 * number, 5 * number + ROWS) % 4,
            torch.arange(5 * number, 5 * number + ROWS),
        )
        for number in range(steps)
    ]


class Recording(RetrievalModule):
    """Keeps what is logged, of each step, in full precision."""

    def log(self, name, value, *args, **kwargs):
        if name == "train/loss":
            self.__dict__.setdefault("logged", []).append({})
        if name != "train/images_per_second":
            self.logged[-1][name] = value.item()
        super().log(name, value, *args, **kwargs)


def ranked(loss, embeddings, labels, ids, ref_emb, ref_labels, ref_ids):
    """A loss's call with references, also of pytorch-metric-learning's."""
    if not type(loss).__module__.startswith("pytorch_metric_learning"):
        return loss(embeddings, labels, ref_emb, ref_labels, ids=ids, ref_ids=ref_ids)
    pairs = [(q, r) for q, r in itertools.product(range(len(ids)), range(len(ref_ids))) if ids[q] != ref_ids[r]]
    positive = [(q, r) for q, r in pairs if labels[q] == ref_labels[r]]
    negative = [(q, r) for q, r in pairs if labels[q] != ref_labels[r]]
    return loss(embeddings, labels, (*torch.tensor(positive).T, *torch.tensor(negative).T), ref_emb, ref_labels)


MODES = [
    {"memory_mode": "one_list"},
    {"memory_mode": "one_list_detached"},
    {"memory_mode": "two_terms"},
    {"memory_mode": "two_terms", "memory_weight": 0.7},
]


def plain_run(loss, data, size, start_step, memory_mode, memory_weight=1.0):
    """The steps in plain PyTorch, with the past in a dict: the newest image last."""
    plain, logged, past = net(), [], {}
    optimizer = SGD(plain.parameters())
    for number, (images, labels, ids) in enumerate(data):
        embeddings, terms = plain(images), {}
        others = [row for image, row in reversed(past.items()) if image not in ids.tolist()]
        remembered = (
            [torch.stack(column) for column in zip(*others)] if others else [x[:0] for x in (embeddings, labels, ids)]
        )

        def call(own, embeddings=embeddings, labels=labels, ids=ids, remembered=remembered):
            return ranked(loss, embeddings, labels, ids, *map(torch.cat, zip((own, labels, ids), remembered)))

        if memory_mode == "one_list":
            value = call(embeddings)
        elif memory_mode == "one_list_detached" and number >= start_step:
            value = call(embeddings.detach())
        else:
            third_party = type(loss).__module__.startswith("pytorch_metric_learning")
            value = loss(embeddings, labels, **({} if third_party else {"ids": ids}))
        if isinstance(loss, WeightedSum):
            terms |= {f"train/loss/{name}": term.item() for name, term in loss.terms.items()}
        if memory_mode == "two_terms" and number >= start_step:
            second = call(embeddings.detach())
            terms |= {"train/loss/batch": value.item(), "train/loss/memory": second.item()}
            value = value + memory_weight * second
        logged.append({"train/loss": value.item(), **terms})
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if number >= start_step:
            for row in reversed(list(zip(embeddings.detach(), labels, ids))):
                past.pop(int(row[2]), None)
                past[int(row[2])] = row
            past = dict(list(past.items())[-size:])
    return plain, logged, len(past)


@pytest.mark.parametrize(("start_step", "chunk_size"), [(0, None), (2, 3)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [functools.partial(SmoothAPLoss, 0.1), functools.partial(ROADMAPLoss, 0.3)])
def test_steps_are_those_of_a_plain_loop(make, mode, start_step, chunk_size):
    """Each value and term logged, and the weights; without the memory they would be others."""
    plain, logged, remembered = plain_run(make(), batches(), 16, start_step, **mode)
    memory = CrossBatchMemory(16, start_step)
    module = Recording(net(), make(), chunk_size=chunk_size, optimizer=SGD, memory=memory, **mode)
    fit(module, batches())
    assert_same(module.embedder, plain)
    assert len(module.memory) == remembered == (16 if start_step == 0 else 15)
    for step, (values, expected) in enumerate(zip(module.logged, logged, strict=True)):
        assert values == pytest.approx(expected, rel=0, abs=1e-12)
        assert values.keys() == expected.keys()
        assert ("train/loss/memory" in values) == (mode["memory_mode"] == "two_terms" and step >= start_step)
    without = Recording(net(), make(), chunk_size=chunk_size, optimizer=SGD)
    fit(without, batches())
    differs = [abs(a["train/loss"] - b["train/loss"]) > 1e-6 for a, b in zip(module.logged, without.logged)]
    # The first list with a memory holds the batch alone, which a second term counts twice.
    assert differs == [step >= start_step + (mode["memory_mode"] != "two_terms") for step in range(4)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [ContrastiveLoss, MultiSimilarityLoss, TripletMarginLoss])
def test_losses_of_pytorch_metric_learning(make, mode):
    plain, logged, _ = plain_run(make(), batches(), 16, 1, **mode)
    module = Recording(net(), make(), chunk_size=3, optimizer=SGD, memory=CrossBatchMemory(16, 1), **mode)
    fit(module, batches())
    assert_same(module.embedder, plain)
    assert [values["train/loss"] for values in module.logged] == pytest.approx(
        [v["train/loss"] for v in logged], abs=1e-12
    )


class PointData(RetrievalDataModule):
    train_set = val_set = test_set = Points(3, 26, dtype=torch.float64)


@pytest.mark.parametrize("mode", [MODES[0], MODES[1], MODES[3]])
def test_a_run_goes_on_from_the_middle(tmp_path, mode):
    """The weights of a run that never stopped, with its memory; without what it remembered, others."""

    def run(path=None, **kwargs):
        module = Recording(
            net(dropout=0.3),
            SmoothAPLoss(tau=0.1),
            chunk_size=4,
            optimizer=functools.partial(torch.optim.AdamW, lr=0.02),
            seed=2,
            memory=CrossBatchMemory(15, 1),
            **mode,
        )
        trainer = pl.Trainer(
            max_epochs=2, accelerator="cpu", devices=1, logger=False, limit_val_batches=0,
            enable_progress_bar=False, enable_model_summary=False, **kwargs,
        )  # fmt: skip
        data = PointData(classes_per_batch=3, samples_per_class=3, seed=1)
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
        return module

    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(callbacks=[save])
    assert len(whole.logged) == 6
    for steps in (1, 2, 4):
        path = tmp_path / f"step={steps}.ckpt"
        part = run(path, enable_checkpointing=False)
        assert part.logged == whole.logged[steps:]
        assert all(map(torch.equal, part.parameters(), whole.parameters()))
        for rows, expected in zip(*(m.memory.state_dict()["_extra_state"]["rows"] for m in (part, whole)), strict=True):
            assert torch.equal(rows, expected)
    checkpoint = torch.load(path, weights_only=True)
    assert len(checkpoint["state_dict"]["memory._extra_state"]["rows"][0]) == 15
    checkpoint["state_dict"]["memory._extra_state"]["rows"] = None
    torch.save(checkpoint, tmp_path / "forgot.ckpt")
    forgot = run(tmp_path / "forgot.ckpt", enable_checkpointing=False)
    assert not torch.equal(forgot.embedder[0].weight, whole.embedder[0].weight)


@pytest.mark.refusal  # by the type checker: the checkpoint hands the constructor descriptions of objects
def test_a_checkpoint_rebuilds_the_module_with_its_memory(tmp_path):
    loss = WeightedSum({"ap": (1.0, SmoothAPLoss(0.1)), "far": (0.5, CalibrationLoss())})
    module = RetrievalModule(nn.Linear(6, 4).double(), loss, memory=CrossBatchMemory(13, 1), **MODES[3])
    fit(module, batches()).save_checkpoint(tmp_path / "m.ckpt")
    again = RetrievalModule.load_from_checkpoint(
        tmp_path / "m.ckpt", weights_only=True, embedder=nn.Linear(6, 4).double()
    )
    assert (again.memory.size, again.memory.start_step) == (13, 1)
    assert (again.memory_mode, again.memory_weight) == ("two_terms", 0.7)
    assert (again.memory.steps, len(again.memory)) == (4, 13)
    own, rows = (m.memory.state_dict()["_extra_state"]["rows"] for m in (module, again))
    assert all(map(torch.equal, own, rows))
    assert again.hparams["memory"]["init_args"] == {"size": 13, "start_step": 1}


# --- RetrievalModule: errors and the report


def no_ids():
    return [batch[:2] for batch in batches()]


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("error", "sentence", "data", "size"),
    [
        (TypeError, r"`ids` must be given, .* let the batches hold \(images, labels, ids\)\.", no_ids(), 16),
        (ValueError, r"`size` must be at least that of a batch, got 9 for a batch of 10 rows", batches(), 9),
    ],
)
def test_batches_raise_before_a_step(error, sentence, data, size):
    memory = CrossBatchMemory(size, 2)
    module = RetrievalModule(net(), SmoothAPLoss(0.1), optimizer=SGD, memory=memory)
    with pytest.raises(error, match=f"^CrossBatchMemory: {sentence}"):
        fit(module, data)
    assert_same(module.embedder, net())
    assert (len(module.memory), module.memory.steps) == (0, 0)


@pytest.mark.refusal
def test_settings_of_the_memory_that_do_not_fit_each_other():
    settings = {"memory": CrossBatchMemory(8), "memory_mode": "two_terms"}
    with pytest.raises(ValueError, match=r"^RetrievalModule: `memory_mode` 'two_terms' was given without `memory`;"):
        RetrievalModule(net(), SmoothAPLoss(), memory_mode="two_terms")
    with pytest.raises(ValueError, match=r"^RetrievalModule: `memory_mode` must be one of 'one_list', .*, got 'xbm'"):
        RetrievalModule(net(), SmoothAPLoss(), memory=CrossBatchMemory(8), memory_mode="xbm")
    for mode in ("one_list", "one_list_detached"):
        with pytest.raises(ValueError, match=rf"^RetrievalModule: `memory_weight` must be None unless .* for '{mode}'"):
            RetrievalModule(net(), SmoothAPLoss(), **settings | {"memory_mode": mode}, memory_weight=1.0)


OTHERS = [
    NCALoss(), OtherFastAPLoss(), ProxyAnchorLoss(3, 4), LiftedStructureLoss(), ThresholdConsistentMarginLoss(),
    nn.CrossEntropyLoss(),
]  # fmt: skip


@pytest.mark.refusal
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("loss", OTHERS, ids=lambda loss: type(loss).__name__)
def test_losses_that_cannot_rank_references_raise_by_name(loss, wrapped):
    if wrapped:
        inner = WeightedSum({"fine": (1.0, TripletMarginLoss()), "other": (1.0, loss)})
        loss, name = WeightedSum({"ap": (1.0, SmoothAPLoss()), "inner": (1.0, inner)}), type(loss).__name__
    else:
        name = type(loss).__name__
    sentence = (
        rf"^RetrievalModule: with a `memory` the loss must rank references .*, which {name} cannot do; use a loss of "
        "this library, or one of pytorch-metric-learning's AngularLoss, .*, TupletMarginLoss"
    )
    with pytest.raises(TypeError, match=sentence):
        RetrievalModule(net(), loss, memory=CrossBatchMemory(8))
    RetrievalModule(net(), loss)


def from_scratch():
    return Embedder("glyph_net", 8)


def loaded():
    embedder = from_scratch()
    embedder.load_state_dict(from_scratch().state_dict())
    return embedder


def loaded_backbone():
    embedder = from_scratch()
    embedder.backbone.load_state_dict(from_scratch().backbone.state_dict())
    return copy.deepcopy(embedder)


def own_backbone():
    return Embedder(GlyphNet(), 8)


@pytest.mark.parametrize(
    ("make", "start_step", "warns"),
    [
        (from_scratch, 0, True),
        (from_scratch, 1, False),
        (loaded, 0, False),
        (loaded_backbone, 0, False),
        (own_backbone, 0, False),
    ],
)
def test_a_memory_from_step_0_of_random_weights_is_warned_of_once(make, start_step, warns, recwarn):
    warnings.filterwarnings("always", "RetrievalModule: the memory begins")
    module = RetrievalModule(make(), SmoothAPLoss(), memory=CrossBatchMemory(16, start_step))
    data = [(torch.rand(8, 1, 32, 32), torch.arange(8) // 2, torch.arange(8)) for _ in range(3)]
    for _ in range(2):
        fit(module, data)
    sentences = [str(warning.message) for warning in recwarn]
    assert sum("the memory begins at step 0 of a network with random weights" in text for text in sentences) == warns


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({}, ""),
        ({"memory": CrossBatchMemory(16)}, " and up to 16 of the memory"),
        (
            {"memory": CrossBatchMemory(16), "memory_mode": "one_list_detached"},
            " and up to 16 of the memory, all without a gradient",
        ),
        (
            {"memory": CrossBatchMemory(16, 3), "memory_mode": "two_terms"},
            " and up to 16 of the memory in a second term, from step 3 on",
        ),
    ],
    ids=["none", "longer", "detached", "term"],
)
def test_a_fit_reports_once_what_its_lists_are(settings, reported, monkeypatch):
    sentences = []
    monkeypatch.setattr(run_report, "rank_zero_info", sentences.append)
    module = RetrievalModule(net(), SmoothAPLoss(0.1), optimizer=SGD, **settings)
    expected = f"RetrievalModule: batches of P = 4 classes with K = 2 to 3 images, lists of 9 images{reported}."
    for times in (1, 2):
        fit(module, batches(2))
        assert sentences == [expected] * times
    fit(module, [(images[:8], labels[:8], ids[:8]) for images, labels, ids in batches(1)])
    assert sentences[-1] == expected.replace("2 to 3", "2").replace("lists of 9", "lists of 7")
