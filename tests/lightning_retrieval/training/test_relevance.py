"""RetrievalModule with a rule of relevance: its steps, its memory and its report, in one process and in two.

The same steps in plain PyTorch, from score matrices whose masks are made pair by pair, are what to expect.
"""

import itertools

import pytest
import pytorch_lightning as pl
import torch
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize
from torch.utils.data import default_collate

from lightning_retrieval import (
    CrossBatchMemory,
    Embedder,
    RetrievalModule,
    SharedTags,
    SmoothAPLoss,
)
from lightning_retrieval.callbacks import APMonitor, RetrievalEvaluation
from lightning_retrieval.datamodules import PKSampler, RetrievalDataModule
from tests.lightning_retrieval.relevance_rules import RULES, NearInTime, masks_by_pairs, random_entries
from tests.lightning_retrieval.training.small_training import SGD, net
from tests.point_set import Points
from tests.quiet_trainer import quiet_trainer

STEPS, SIZE, WEIGHT = 6, 20, 0.5
MODES = (None, "one_list", "one_list_detached", "two_terms")
# Each rule without a memory and with one, and one rule with each kind of memory.
CASES = [*itertools.product(RULES, (None, "one_list")), *((next(iter(RULES)), mode) for mode in MODES[2:])]


class Scenes(Points):
    """Points with cameras, roles, tags and times."""

    def __init__(self, seed, **settings):
        super().__init__(seed, 27, dtype=torch.float64)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.entries = {**random_entries(len(self)), **settings}
        del self.entries["labels"]

    def __getitem__(self, index):
        return {**super().__getitem__(index), **{name: values[index] for name, values in self.entries.items()}}


class SceneData(RetrievalDataModule):
    """Three batches of nine scenes in an epoch."""

    train_set = val_set = test_set = Scenes(3)

    def __init__(self, train_set=train_set):
        super().__init__(classes_per_batch=3, samples_per_class=3, seed=1)
        self.train_set = train_set


class LossAndAP(pl.Callback):
    """Keeps what is logged of each step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, *_):
        self.steps.append({name: float(trainer.callback_metrics[f"train/{name}"]) for name in ("loss", "AP")})


def train(rank, world, cases):
    """The weights and the logged values of each case."""
    results = {}
    for rule, mode in cases:
        memory = None
        if mode is not None:
            weight = WEIGHT if mode == "two_terms" else 1.0
            memory = CrossBatchMemory(SIZE, start_step=1, mode=mode, weight=weight)
        module = RetrievalModule(
            net(), SmoothAPLoss(0.1), optimizer=SGD, chunk_size=2, relevance=RULES[rule].rule, memory=memory
        )
        seen = LossAndAP()
        trainer = quiet_trainer(
            devices=world,
            strategy="auto" if world == 1 else "ddp",
            max_steps=STEPS,
            limit_val_batches=0,
            log_every_n_steps=1,
            callbacks=[RetrievalEvaluation(), APMonitor(), seen],
        )
        trainer.fit(module, datamodule=SceneData())
        results[rule, mode] = torch.cat([value.detach().flatten() for value in module.parameters()]), seen.steps
    return results


def lists_of(rule, queries, references):
    """Scores, relevance and candidates of some rows; each argument is (embeddings, columns, ids)."""
    x, columns, ids = queries
    y, ref_columns, ref_ids = references
    relevant, candidate = masks_by_pairs(rule, columns, ref_columns)
    candidate = candidate & (ids[:, None] != ref_ids)
    return normalize(x) @ normalize(y).T, relevant & candidate, candidate


def mean_ap(scores, relevant, candidate):
    values = []
    for row, hits, listed in zip(scores.detach(), relevant, candidate):
        if hits.any():
            values.append(average_precision_score(hits[listed], row[listed]))
    return sum(values) / len(values)


def batches_of_run():
    dataset = SceneData().train_set
    sampler = PKSampler(dataset.labels, classes_per_batch=3, samples_per_class=3, seed=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows in sampler:
            yield default_collate([dataset[row] for row in rows])


def train_plainly(rule, mode):
    """The same as `train` in plain PyTorch; the memory is a list of rows, newest first."""
    network, loss, results, memory = net(), SmoothAPLoss(0.1), [], []
    optimizer = SGD(network.parameters())
    for step, batch in enumerate(batches_of_run()):
        x, columns, ids = network(batch["images"]), RULES[rule].rule.columns(batch["labels"], batch), batch["ids"]
        queries = x, columns, ids
        memory = [row for row in memory if row[2] not in ids]
        known = x if mode == "one_list" else x.detach()
        references = [torch.cat(parts) for parts in zip((known, columns, ids), *memory)]
        has_memory = mode is not None and step > 0
        first = lists_of(rule, queries, references if has_memory and mode != "two_terms" else queries)
        value = loss.from_scores(*first)
        if has_memory and mode == "two_terms":
            value = value + WEIGHT * loss.from_scores(*lists_of(rule, queries, references))
        if has_memory:
            memory = [*zip(x.detach()[:, None], columns[:, None], ids[:, None]), *memory][:SIZE]
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        results.append({"loss": value.item(), "AP": mean_ap(*first)})
    return torch.cat([value.detach().flatten() for value in network.parameters()]), results


def assert_same_run(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    for step, other in zip(found[1], expected[1], strict=True):
        assert step == pytest.approx(other, abs=1e-6)  # logged in float32


@pytest.mark.parametrize(("rule", "mode"), CASES)
def test_steps_are_those_of_plain_pytorch(rule, mode):
    found = train(0, 1, [(rule, mode)])
    assert_same_run(found[rule, mode], train_plainly(rule, mode))


@pytest.mark.slow
def test_two_processes_with_unequal_shares_do_the_same(run_processes):
    for found in run_processes(train, 2, CASES, backend=None, timeout=200):
        for case in CASES:
            assert_same_run(found[case], train_plainly(*case))


def test_the_first_batch_is_compared_with_the_labels_of_the_sampler():
    """Not with the columns of the rule; of a data set without classes, all labels may be the same."""
    data = SceneData()
    data.train_set.labels = data.train_set.labels.clone()
    loader = data.train_dataloader()
    data.train_set.labels[:] = 0
    module = RetrievalModule(net(), SmoothAPLoss(0.1), relevance=SharedTags())
    with pytest.raises(ValueError, match="label"):
        quiet_trainer(max_steps=1).fit(module, loader)


def loaded(module, path):
    """The module that is rebuilt from a checkpoint of this module."""
    run = quiet_trainer()
    run.strategy.connect(module)
    run.save_checkpoint(path)
    return RetrievalModule.load_from_checkpoint(path, weights_only=True)


@pytest.mark.refusal  # by the type checker
@pytest.mark.parametrize("rule", [SharedTags(3), NearInTime(7)], ids=repr)
def test_a_checkpoint_rebuilds_the_rule(rule, tmp_path):
    """Also a rule of one's own, whose module has been imported."""
    again = loaded(RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss(), relevance=rule), tmp_path / "m.ckpt")
    assert (repr(again.relevance), type(again.relevance)) == (repr(rule), type(rule))
