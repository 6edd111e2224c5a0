"""The memory against a list of Python rows, losses over it against score matrices, and runs with it against a loop."""

import functools
import io
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.losses import MultiSimilarityLoss

from lightning_retrieval import CrossBatchMemory, RetrievalModule
from lightning_retrieval.losses import (
    FastAPLoss,
    RecallAtKLoss,
    ROADMAPLoss,
    Schedule,
    SmoothAPLoss,
    WeightedSum,
)
from tests.lightning_retrieval.training.small_training import ROWS, SGD, assert_same, fit, net

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


def rows_of(batch):
    """The references of a batch."""
    references = batch.lists.references
    return as_rows(batch.ref_emb, references.labels, references.ids)


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
        "auto": st.booleans(),
    }
)


def assert_remembers(memory, model, like):
    """Told by the references of a batch of no image: there are then only the rows remembered."""
    assert len(memory) == len(model.rows)
    assert (memory.steps, memory.started) == (model.steps, model.steps >= model.start_step)
    nothing = memory.references(*(part[:0] for part in like))
    assert rows_of(nothing) == model.rows


def begin_if_due(memory, model):
    """A memory with the start "auto" is told to begin at the start step."""
    if memory.start_step == "auto" and model.steps == model.start_step:
        memory.begin()


def step(memory, model, batch):
    """References of a batch, then the update, both compared."""
    embeddings, labels, ids = batch
    embeddings = embeddings.clone().requires_grad_()
    references = memory.references(embeddings, labels, ids)
    own = as_rows(embeddings, labels, ids)
    expected = own + model.others(ids.tolist())
    assert rows_of(references) == expected
    assert torch.equal(references.ids, ids)
    assert references.ref_emb.dtype == torch.promote_types(embeddings.dtype, torch.float32)
    if len(ids):
        references.ref_emb.sum().backward()
        assert embeddings.grad.tolist() == torch.ones_like(embeddings).tolist()  # each row stands there once
    memory.update(embeddings, labels, ids)
    model.update(own)
    begin_if_due(memory, model)
    assert_remembers(memory, model, batch)


@settings(max_examples=25, deadline=None)
@given(RUN, st.integers(0, 6), st.sampled_from([-3, 0, 4]))
def test_a_run_is_that_of_a_list_and_goes_on_from_its_state(run, after, change):
    """Through a file, into a memory as large, smaller (it takes the newest rows) or larger."""
    size, levels = run["size"], run["levels"]
    start_step = "auto" if run["auto"] else run["start_step"]
    memory, model = CrossBatchMemory(size, start_step), Model(size, run["start_step"])
    begin_if_due(memory, model)
    batches = [as_batch(rows[: 6 + min(change, 0)], levels, dtype) for rows, dtype in run["batches"]]
    for batch in batches[:after]:
        step(memory, model, batch)
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    if run["auto"] and memory.started:
        start_step = 100  # a memory that has begun goes on, whatever the start step
    again = CrossBatchMemory(size + change, start_step)
    again.update(*as_batch([(77, 7, (1, 2, 3))], levels, torch.float64))  # what it holds is replaced
    again.load_state_dict(torch.load(file, weights_only=True))
    model.size, model.rows = size + change, model.rows[: size + change]
    assert_remembers(again, model, batches[0])
    for batch in batches[after:]:
        step(again, model, batch)
    again.reset()
    assert (len(again), again.steps) == (0, 0)
    assert again.started == (again.start_step == 0)


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


def test_rows_are_copies():
    """A batch changed in place afterwards, as buffers of a loader are, changes nothing that is remembered."""
    memory, embeddings = CrossBatchMemory(8), torch.ones(2, 3)
    labels, ids = torch.tensor([5, 6]), torch.tensor([1, 2])
    memory.update(embeddings, labels, ids)
    for part in (embeddings, labels, ids):
        part.zero_()
    rows = memory.references(torch.zeros(0, 3), *[torch.zeros(0, dtype=torch.int64)] * 2)
    assert rows_of(rows) == [(1, 5, [1.0] * 3), (2, 6, [1.0] * 3)]


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


@pytest.mark.parametrize("make", [SmoothAPLoss, FastAPLoss, RecallAtKLoss])
def test_a_query_in_its_own_list_counts_alike_among_references(make):
    """Also where an image stands twice in the batch."""
    ((embeddings, labels, ids),) = batches(1)
    labels[-1], ids[-1] = labels[0], ids[0]
    loss = make(include_self=True)
    ranked = CrossBatchMemory(ROWS).references(embeddings, labels, ids)
    assert loss.of_batch(ranked).item() == pytest.approx(loss(embeddings, labels, ids=ids).item(), abs=1e-12)
    assert loss(embeddings, labels, ids=ids).item() != pytest.approx(make()(embeddings, labels, ids=ids).item())


class Recording(RetrievalModule):
    """Keeps the values of the loss that each step logs, in full precision."""

    def log(self, name, value, *args, **kwargs):
        if name == "train/loss":
            self.__dict__.setdefault("logged", []).append({})
        if name.startswith("train/loss"):
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


MODES = [{"mode": "one_list"}, {"mode": "one_list_detached"}, {"mode": "two_terms", "weight": 0.7}]
SMOOTH_AP = functools.partial(SmoothAPLoss, 0.1), 0, None
ROADMAP = functools.partial(ROADMAPLoss, 0.3), 2, 3
PAIRS = MultiSimilarityLoss, 2, 3


def plain_run(loss, data, size, start_step, mode, weight=1.0):
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

        if mode == "one_list":
            value = call(embeddings)
        elif mode == "one_list_detached" and number >= start_step:
            value = call(embeddings.detach())
        else:
            third_party = type(loss).__module__.startswith("pytorch_metric_learning")
            value = loss(embeddings, labels, **({} if third_party else {"ids": ids}))
        if isinstance(loss, WeightedSum):
            terms |= {f"train/loss/{name}": term.item() for name, term in loss.terms.items()}
        if mode == "two_terms" and number >= start_step:
            second = call(embeddings.detach())
            terms |= {"train/loss/batch": value.item(), "train/loss/memory": second.item()}
            value = value + weight * second
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


@pytest.mark.parametrize(
    ("make", "start_step", "chunk_size", "mode"),
    [
        *((*SMOOTH_AP, mode) for mode in MODES),
        *((*ROADMAP, mode) for mode in MODES[::2]),
        *((*PAIRS, mode) for mode in MODES[:2]),
        (*PAIRS, {"mode": "two_terms"}),
    ],
)
def test_steps_are_those_of_a_plain_loop(make, mode, start_step, chunk_size):
    """Each value and term logged, and the weights; without the memory they would be others."""
    plain, logged, remembered = plain_run(make(), batches(), 16, start_step, **mode)
    memory = CrossBatchMemory(16, start_step, **mode)
    module = Recording(net(), make(), chunk_size=chunk_size, optimizer=SGD, memory=memory)
    fit(module, batches())
    assert_same(module.embedder, plain)
    assert len(module.memory) == remembered >= 15
    for step, (values, expected) in enumerate(zip(module.logged, logged, strict=True)):
        assert values == pytest.approx(expected, rel=0, abs=1e-12)
        assert values.keys() == expected.keys()
        assert ("train/loss/memory" in values) == (mode["mode"] == "two_terms" and step >= start_step)
    without = Recording(net(), make(), chunk_size=chunk_size, optimizer=SGD)
    fit(without, batches())
    differs = [abs(a["train/loss"] - b["train/loss"]) > 1e-6 for a, b in zip(module.logged, without.logged)]
    # The first list with a memory holds the batch alone, which a second term counts twice.
    assert differs == [step >= start_step + (mode["mode"] != "two_terms") for step in range(4)]


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_terms_change_with_the_fraction_of_the_training(mode):
    terms = {
        "pairs": (Schedule([(0, 1), (0.5, 0)]), MultiSimilarityLoss()),
        "ap": (Schedule([(0, 0), (0.5, 1)]), SmoothAPLoss()),
    }
    module = Recording(net(), WeightedSum(terms), memory=CrossBatchMemory(16, **mode), optimizer=SGD)
    fit(module, batches(), max_epochs=2)
    found = [any(name.endswith("pairs") for name in values) for values in module.logged]
    assert found == [True] * 4 + [False] * 4


@pytest.mark.parametrize(("start_step", "is_said"), [(9, True), (3, True), (2, False)])
def test_a_memory_that_no_batch_of_the_run_ranks_is_reported(start_step, is_said, caplog):
    """Of four batches, the one with the index `start_step` is the first that is stored, and the next one ranks it."""
    module = RetrievalModule(net(), SmoothAPLoss(), memory=CrossBatchMemory(16, start_step), optimizer=SGD)
    with caplog.at_level("INFO"):
        fit(module, batches()[:2], max_epochs=2)
    assert ("never ranked in this run" in caplog.text) == is_said
