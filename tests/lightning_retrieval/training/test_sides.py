"""RetrievalModule with queries and candidates takes the steps of a plain loop, in chunks and in several processes."""

import copy
import functools
import itertools
import weakref

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import yaml
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins import DoublePrecision
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_metric_learning.losses import MultiSimilarityLoss
from sklearn.metrics import average_precision_score
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_retrieval import (
    CrossBatchMemory,
    HAPLoss,
    NestedLoss,
    OtherCamera,
    RetrievalModule,
    ROADMAPLoss,
    SmoothAPLoss,
    TwoNetworks,
    TwoSides,
    Updates,
    WeightedSum,
)
from lightning_retrieval.callbacks import APMonitor, RetrievalEvaluation
from lightning_retrieval.losses import Schedule
from lightning_retrieval.losses.batch_loss import BatchLoss
from tests.lightning_retrieval.training.small_training import SGD, Log, assert_same, fit, net
from tests.quiet_trainer import quiet_trainer

QUERIES, CANDIDATES = 6, 10  # rows of a batch, of which the sizes of chunks are 4 + 2 and 4 + 4 + 2, for example
ADAM = functools.partial(torch.optim.AdamW, lr=0.01)


def query_net(dropout=0.0):
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4)).double()


def pairs(steps=3, dtype=torch.float64):
    """Batches whose sides use the same ids for other things. A third of the candidates comes back in the next batch."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for step in range(steps):
        candidates, queries = torch.arange(CANDIDATES) + 6 * step, torch.arange(QUERIES) + 6 * step
        batches.append(
            {
                "queries": (torch.randn(QUERIES, 5, generator=generator, dtype=dtype), queries % 4, queries),
                "candidates": (
                    torch.randn(CANDIDATES, 6, generator=generator, dtype=dtype),
                    candidates % 3,
                    candidates,
                ),
            }
        )
    return batches


def with_references(loss, embeddings, labels, ref_emb, ref_labels):
    """A loss's call with references, also of pytorch-metric-learning's."""
    if not type(loss).__module__.startswith("pytorch_metric_learning"):
        return loss(embeddings, labels, ref_emb, ref_labels)
    same = [[bool(a == b) for b in ref_labels] for a in labels]
    positive = [(q, r) for q, r in itertools.product(range(len(labels)), range(len(ref_labels))) if same[q][r]]
    negative = [(q, r) for q, r in itertools.product(range(len(labels)), range(len(ref_labels))) if not same[q][r]]
    return loss(embeddings, labels, (*torch.tensor(positive).T, *torch.tensor(negative).T), ref_emb, ref_labels)


def plain_run(loss, data, directions="queries", mode=None, size=16, networks=None, optimizer=SGD):
    """The steps in plain PyTorch with one graph, and a dict of past candidates, of which the newest is the last."""
    queries, candidates = networks or (query_net(), net())
    unique = dict.fromkeys([*candidates.parameters(), *queries.parameters(), *loss.parameters()])
    steps, past, values = optimizer([parameter for parameter in unique if parameter.requires_grad]), {}, []
    for batch in data:
        (texts, text_labels, _), (images, labels, ids) = batch["queries"], batch["candidates"]
        q, c = queries(texts), candidates(images)
        stored = [row for image, row in reversed(past.items()) if image not in ids.tolist()]
        ranked, ranked_labels = c.detach() if mode in ("one_list_detached", "two_terms") else c, labels
        if mode and stored:
            ranked = torch.cat([ranked, torch.stack([row[0] for row in stored])])
            ranked_labels = torch.cat([labels, torch.stack([row[1] for row in stored])])
        if mode in ("one_list", "one_list_detached"):
            value = with_references(loss, q, text_labels, ranked, ranked_labels)
        else:
            value = with_references(loss, q, text_labels, c, labels)
        if mode == "two_terms":
            value = value + 0.7 * with_references(loss, q, text_labels, ranked, ranked_labels)
        if directions == "both":
            value = (value + with_references(loss, c, labels, q, text_labels)) / 2
        steps.zero_grad()
        value.backward()
        steps.step()
        values.append(value.item())
        for row in reversed(list(zip(c.detach(), labels, ids.tolist()))):
            past.pop(row[2], None)
            past[row[2]] = row
        past = dict(list(past.items())[-size:])
    return queries, candidates, values


def module_of(loss, directions="queries", mode=None, networks=None, optimizer=SGD, of_sides=None, **settings):
    queries, candidates = networks or (query_net(), net())
    if mode:
        settings["memory"] = CrossBatchMemory(16, mode=mode, weight=0.7 if mode == "two_terms" else 1.0)
    sides = TwoSides(directions=directions)
    if queries is not candidates:
        sides = TwoNetworks(queries, directions=directions, **(of_sides or {}))
    return RetrievalModule(candidates, loss, sides=sides, optimizer=optimizer, **settings)


LOSSES = {
    "smooth-ap": lambda: SmoothAPLoss(tau=0.1),
    "class balanced": lambda: SmoothAPLoss(tau=0.1, class_balanced=True, include_self=True),
    "sum": lambda: ROADMAPLoss(0.3),
    "third-party": lambda: MultiSimilarityLoss(),
    "nested": lambda: NestedLoss(SmoothAPLoss(tau=0.1), (2, 4)),
    "levels": lambda: HAPLoss(),
}
CHUNKS = [(None, 1), (3, 1), (4, 9), ("auto", 1), ({"queries": 2, "candidates": 4}, 4)]
MODES = [None, "one_list", "two_terms", "one_list_detached"]
LEARN = [case for case in itertools.product(["queries", "both"], MODES) if case != ("queries", "one_list_detached")]
# Each loss with and without a memory; each direction and each mode with one loss.
STEPS = [(name, *case) for name in LOSSES for case in LEARN if name == "smooth-ap" or case in (LEARN[0], LEARN[4])]


def chunks_of(name):
    """All of them for one loss; the others show that the loss is told the rows of both sides."""
    return CHUNKS if name == "smooth-ap" else CHUNKS[-1:]


@functools.cache
def expected(name, directions, mode):
    return plain_run(LOSSES[name](), data_for(name), directions, mode)


def data_for(name):
    data = pairs()
    for batch in data if name == "levels" else []:
        for side, (inputs, labels, ids) in batch.items():
            batch[side] = (inputs, torch.stack([labels, labels // 2], 1), ids)
    return data


@pytest.mark.parametrize(("name", "directions", "mode"), STEPS)
def test_steps_are_those_of_one_graph(name, directions, mode):
    """Whatever the chunks; another direction or memory gives other weights."""
    queries, candidates, values = expected(name, directions, mode)
    for chunk_size, keep_graphs in chunks_of(name):
        log = Log()
        module = module_of(LOSSES[name](), directions, mode, chunk_size=chunk_size, keep_graphs=keep_graphs)
        fit(module, data_for(name), callbacks=[log])
        assert_same(module.query_embedder, queries)
        assert_same(module.embedder, candidates)
        assert log.losses == pytest.approx(values, abs=1e-6)  # logged in float32
    for of_loss, *other in STEPS:
        if of_loss == name and other != [directions, mode]:
            assert not torch.allclose(expected(name, *other)[0][0].weight, queries[0].weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_are_the_same_bit_for_bit_however_many_graphs_are_kept(precision):
    """With dropout on both sides."""
    found = []
    for keep_graphs in (1, 9):
        networks = query_net(0.5).float(), net(0.5).float()
        module = module_of(SmoothAPLoss(), "both", networks=networks, chunk_size=3, keep_graphs=keep_graphs, seed=3)
        fit(module, pairs(dtype=torch.float32), precision=precision)
        found.append(module)
    assert all(map(torch.equal, found[0].parameters(), found[1].parameters()))
    assert not torch.equal(found[0].embedder[0].weight, net().float()[0].weight)


class Graphs(RetrievalModule):
    """Counts the graphs that exist at once, of which each forward pass with a graph makes one."""

    most = 0

    def watched(self, embed, inputs):
        if not torch.is_grad_enabled():
            return embed(inputs)
        graph = object()

        def pack(tensor):
            saved = Saved(tensor, graph)
            alive.add(saved)
            self.most = max(self.most, len({other.graph for other in alive}))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            return embed(inputs)

    def forward(self, images):
        return self.watched(super().forward, images)

    def forward_queries(self, inputs):
        return self.watched(self.query_embedder, inputs)


class Saved:
    """A tensor that a graph has saved."""

    def __init__(self, tensor, graph):
        self.tensor, self.graph = tensor, graph


alive = weakref.WeakSet()


@pytest.mark.parametrize(
    ("chunk_size", "keep_graphs", "most"),
    [
        (None, 1, 2),  # both sides, embedded once
        (4, 1, 1),
        (4, 4, 4),  # all candidates, and one of the two chunks of queries
        (4, 9, 5),
        ({"queries": None, "candidates": 4}, 1, 2),
    ],
)
def test_graphs_alive_at_once(chunk_size, keep_graphs, most):
    settings = {"chunk_size": chunk_size, "keep_graphs": keep_graphs, "optimizer": SGD}
    module = Graphs(net(), SmoothAPLoss(tau=0.1), sides=TwoNetworks(query_net(), directions="both"), **settings)
    fit(module, pairs(2))
    assert module.most == most
    assert not alive


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_one_network_adds_the_gradients_of_both_sides(chunk_size):
    """Its running statistics see the queries, then the candidates, once each; the plain network sees whole sides."""
    data = pairs()
    for batch in data:
        batch["queries"] = (torch.cat([batch["queries"][0], batch["queries"][0][:, :1]], 1), *batch["queries"][1:])
    norm = nn.BatchNorm1d(4, affine=False).double()
    shared = nn.Sequential(*net(), norm)
    if chunk_size:
        norm.eval()
    module = module_of(SmoothAPLoss(tau=0.1), "both", networks=(shared, shared), chunk_size=chunk_size)
    plain = copy.deepcopy(shared)
    plain_run(SmoothAPLoss(tau=0.1), data, "both", networks=(plain, plain))
    fit(module, data)
    assert_same(module.embedder, plain)
    assert not torch.equal(plain[0].weight, net()[0].weight)
    torch.testing.assert_close(norm.running_var, plain[-1].running_var)
    assert int(norm.num_batches_tracked) == (0 if chunk_size else 6)


class Candidates(BatchLoss):
    """A loss that ignores the queries."""

    def compute(self, batch):
        return batch.ref_emb.square().mean()


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_side_that_the_loss_ignores_does_not_learn(chunk_size):
    module = module_of(Candidates(), chunk_size=chunk_size)
    fit(module, pairs())
    assert_same(module.query_embedder, query_net())
    assert not torch.equal(module.embedder[0].weight, net()[0].weight)


# --- A side that is not trained


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("side", ["queries", "candidates"])
def test_a_frozen_side_is_embedded_in_evaluation_mode(side, chunk_size):
    """So its embeddings stay those of an index; the other side learns as beside constant embeddings."""
    networks = {"queries": query_net(), "candidates": net()}
    torch.manual_seed(9)
    networks[side] = frozen = nn.Sequential(*networks[side], nn.Dropout(0.5), nn.BatchNorm1d(4)).double()
    before, plain = copy.deepcopy(frozen.state_dict()), copy.deepcopy(networks)
    plain[side].eval().requires_grad_(False)
    plain_run(SmoothAPLoss(tau=0.1), pairs(), "both", networks=plain.values())
    settings = {"networks": networks.values(), "chunk_size": chunk_size, "of_sides": {"frozen_side": side}}
    fit(module_of(SmoothAPLoss(tau=0.1), "both", **settings), pairs())
    for name, network in networks.items():
        assert_same(network, plain[name])
    assert frozen[-1].training
    for name, value in frozen.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("frozen_side", "chunk_size"), [("candidates", None), (None, {"queries": None, "candidates": 4})], ids=str
)
def test_queries_keep_a_graph_with_batch_norm_while_candidates_are_embedded(frozen_side, chunk_size):
    """The running statistics of the queries, which their graph has saved, count as unchanged."""
    queries = nn.Sequential(*query_net(), nn.BatchNorm1d(4)).double()
    candidates = net()
    plain_queries, plain_candidates = copy.deepcopy(queries), copy.deepcopy(candidates)
    plain_candidates.requires_grad_(frozen_side is None)
    plain_run(SmoothAPLoss(tau=0.1), pairs(), networks=(plain_queries, plain_candidates))
    sides = TwoNetworks(queries, frozen_side=frozen_side)
    module = RetrievalModule(candidates, SmoothAPLoss(tau=0.1), sides=sides, optimizer=SGD, chunk_size=chunk_size)
    fit(module, pairs())
    assert_same(queries, plain_queries)
    assert_same(candidates, plain_candidates)
    assert int(queries[-1].num_batches_tracked) == 3


class QueryNet(nn.Module):
    """A network that a checkpoint can describe."""

    def __init__(self):
        super().__init__()
        self.net = query_net()

    def forward(self, inputs):
        return self.net(inputs)


@pytest.mark.refusal  # by the type checker
@pytest.mark.parametrize("by_argument", [True, False])
def test_a_frozen_side_stays_frozen_when_a_checkpoint_is_loaded(by_argument, tmp_path):
    sides = TwoNetworks(QueryNet(), frozen_side="candidates" if by_argument else None)
    candidates = net().requires_grad_(by_argument)
    module = RetrievalModule(candidates, SmoothAPLoss(tau=0.1), sides=sides, optimizer=SGD)
    fit(module, pairs()).save_checkpoint(tmp_path / "frozen.ckpt")
    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "frozen.ckpt", embedder=net())
    fit(loaded, pairs())
    assert torch.equal(loaded.embedder[0].weight, net()[0].weight)
    assert not torch.allclose(loaded.query_embedder.net[0].weight, module.query_embedder.net[0].weight)


@pytest.mark.refusal  # by the type checker
def test_networks_that_a_checkpoint_cannot_describe_are_given_again(tmp_path):
    module = module_of(SmoothAPLoss(tau=0.1))
    fit(module, pairs()).save_checkpoint(tmp_path / "m.ckpt")
    sides = TwoNetworks(query_net(), directions="both")
    loaded = RetrievalModule.load_from_checkpoint(tmp_path / "m.ckpt", embedder=net(), sides=sides)
    assert loaded.sides.directions == "both"
    assert_same(loaded.query_embedder, module.query_embedder)


class Tied(RetrievalModule):
    """A subclass that embeds candidates with a layer besides `embedder`."""

    def __init__(self, embedder, loss, **settings):
        super().__init__(embedder, loss, **settings)
        torch.manual_seed(4)
        self.extra = nn.Linear(4, 4).double()

    def forward(self, images):
        return self.extra(super().forward(images))


def test_a_frozen_network_with_a_trained_layer_behind_it():
    module = Tied(net(), SmoothAPLoss(tau=0.1), sides=TwoNetworks(query_net(), frozen_side="candidates"), optimizer=SGD)
    plain = nn.Sequential(net().requires_grad_(False), copy.deepcopy(module.extra))
    queries, _, _ = plain_run(SmoothAPLoss(tau=0.1), pairs(), networks=(query_net(), plain))
    fit(module, pairs())
    assert_same(module.extra, plain[1])
    assert_same(module.query_embedder, queries)


# --- What raises, and what is logged


def test_nan_of_one_side_stops_the_run_before_the_weights_change():
    (batch,) = pairs(1)
    batch["candidates"][0][2] = torch.nan
    module = module_of(SmoothAPLoss(), "both")
    with pytest.raises(ValueError, match="of the candidates"):
        fit(module, [batch])
    assert_same(module.embedder, net())


def test_evaluation_returns_the_rows_of_both_sides():
    """Queries have the role 1 and candidates 2, and their ids do not collide."""
    module, (batch,) = module_of(SmoothAPLoss()), pairs(1)
    (texts, text_labels, text_ids), (images, labels, ids) = batch["queries"], batch["candidates"]
    expected = {
        "embeddings": torch.cat([module.query_embedder(texts), module.embedder(images)]),
        "labels": torch.cat([text_labels, labels]),
        "ids": torch.cat([2 * text_ids, 2 * ids + 1]),
        "roles": torch.tensor([1] * QUERIES + [2] * CANDIDATES),
    }
    for step in (module.validation_step, module.test_step, module.predict_step):
        both, candidates = step(batch, 0), step({"candidates": batch["candidates"]}, 0)
        assert both.keys() == candidates.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(both[name], values)
            assert torch.equal(candidates[name], values[QUERIES:])


def test_each_direction_and_its_terms_are_logged():
    losses = SmoothAPLoss(tau=0.1), MultiSimilarityLoss()
    module = module_of(WeightedSum({"ap": (1.0, losses[0]), "pairs": (0.5, losses[1])}), "both")
    (batch,) = pairs(1)
    (texts, text_labels, _), (images, labels, _) = batch["queries"], batch["candidates"]
    with torch.no_grad():
        q, c = module.query_embedder(texts), module.embedder(images)
    forward = [with_references(loss, q, text_labels, c, labels).item() for loss in losses]
    reverse = [with_references(loss, c, labels, q, text_labels).item() for loss in losses]
    values = fit(module, [batch]).callback_metrics
    expected = {
        "forward": forward[0] + forward[1] / 2,
        "forward/ap": forward[0],
        "forward/pairs": forward[1],
        "reverse": reverse[0] + reverse[1] / 2,
        "reverse/ap": reverse[0],
        "reverse/pairs": reverse[1],
    }
    logged = {name.removeprefix("train/loss/"): float(value) for name, value in values.items() if "loss/" in name}
    assert logged == pytest.approx(expected)
    assert float(values["train/loss"]) == pytest.approx((expected["forward"] + expected["reverse"]) / 2)


def test_the_sizes_of_both_sides_are_logged(tmp_path):
    memory = CrossBatchMemory(50, start_step=9)
    module = module_of(SmoothAPLoss(), "both", chunk_size={"queries": 2, "candidates": None}, memory=memory)
    fit(module, pairs(), logger=CSVLogger(tmp_path, "", 0))
    settings = yaml.safe_load((tmp_path / "version_0" / "hparams.yaml").read_text())["batch"]
    sizes = {"images": 16, "queries": 6, "candidates": 10, "classes": 3, "list_length": 60, "processes": 1}
    assert settings == {**sizes, "chunk_size": {"queries": 2, "candidates": 10}}


def test_the_monitor_follows_the_first_direction():
    """`train/AP` is the mean over the queries that have a positive."""
    module = module_of(SmoothAPLoss(tau=0.1), "both")
    (batch,) = pairs(1)
    (texts, text_labels, _), (images, labels, _) = batch["queries"], batch["candidates"]
    with torch.no_grad():
        scores = F.normalize(module.query_embedder(texts)) @ F.normalize(module.embedder(images)).T
    relevant = text_labels[:, None] == labels
    values = [average_precision_score(row, of) for row, of in zip(relevant, scores) if row.any()]
    run = fit(module, [batch], callbacks=[RetrievalEvaluation(), APMonitor()])
    assert float(run.callback_metrics["train/AP"]) == pytest.approx(sum(values) / len(values))
    assert 0 < len(values) < QUERIES


def test_a_run_is_resumed_bit_by_bit(tmp_path):
    """With dropout on both sides, a memory and Adam's moments."""

    settings = {"mode": "one_list", "optimizer": ADAM, "chunk_size": 3, "of_sides": {"query_lr_factor": 2.0}}

    def run(epochs, checkpoint=None):
        module = module_of(SmoothAPLoss(tau=0.1), "both", networks=(query_net(0.3), net(0.3)), **settings)
        trainer = quiet_trainer(max_epochs=epochs)
        trainer.fit(module, DataLoader(pairs(), batch_size=None), ckpt_path=checkpoint, weights_only=True)
        return module, trainer

    whole, _ = run(2)
    _, half = run(1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = run(2, tmp_path / "half.ckpt")
    for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert len(resumed.memory) == len(whole.memory) > CANDIDATES


# --- Several processes, of which the second has fewer queries and more candidates

FIRST = {"queries": 5, "candidates": 3}  # rows of the first of two processes
RUNS = {
    "memory": {"memory": CrossBatchMemory(16), "chunk_size": {"queries": 2, "candidates": 3}},
    "sum": {"loss": ROADMAPLoss(0.3), "chunk_size": 2, "keep_graphs": 3, "updates": Updates(gradient_clip_val=0.1)},
    "third-party": {"loss": MultiSimilarityLoss(), "sides": TwoNetworks(query_net())},
    "scheduled": {
        "loss": WeightedSum(
            {
                "pairs": (Schedule([(0, 1), (0.5, 0)]), MultiSimilarityLoss()),
                "ap": (Schedule([(0, 0), (0.5, 1)]), HAPLoss()),
            }
        )
    },
    "frozen": {
        "sides": TwoNetworks(query_net(), directions="both", frozen_side="candidates"),
        "memory": CrossBatchMemory(16, mode="two_terms"),
    },
    "one network": {"sides": TwoSides(directions="both"), "chunk_size": 2},
    "rule": {"relevance": OtherCamera(), "sides": TwoNetworks(query_net())},
}
APART = "each process by itself"
UNEQUAL = "unequal shards"
SHARDED = ["memory", "sum", "frozen", "one network"]


class Shares(IterableDataset):
    """Each process's rows of the batches, equally many if `equal`; the whole batches for one process."""

    def __init__(self, name, world, equal):
        self.name, self.world, self.equal = name, world, equal

    def __iter__(self):
        for batch in pairs():
            shares = {}
            for side, columns in batch.items():
                rows = slice(None)
                if self.world > 1:
                    rows = [slice(FIRST[side]), slice(FIRST[side], None)][dist.get_rank()]
                if self.equal:
                    rows = share_of(dist.get_rank(), side)
                shares[side] = self.form(side, *(column[rows] for column in columns))
            yield shares

    def form(self, side, inputs, labels, ids):
        if self.name == "one network" and side == "queries":
            inputs = torch.cat([inputs, inputs[:, :1]], 1)
        if self.name == "empty" and side == "candidates" and dist.get_rank() == 1:
            return inputs[:0], labels[:0], ids[:0]
        if self.name == "rule":
            return {"images": inputs, "labels": labels, "ids": ids, "cameras": ids % 2}
        return inputs, labels, ids


def share_of(rank, side):
    """The rows of a process without gathering or with a sharded network: all processes must have as many."""
    size = {"queries": 3, "candidates": 5}[side]
    return slice(rank * size, (rank + 1) * size)


def run_of(name, world, sharded=False):
    sides = TwoNetworks(query_net(), directions="both")
    settings = {"loss": SmoothAPLoss(tau=0.1), "sides": sides, "optimizer": ADAM}
    settings["gather"] = name != APART
    module = RetrievalModule(net(), **copy.deepcopy({**settings, **RUNS.get(name, {})}))
    strategy, plugins = "auto", None
    if world > 1:
        strategy = "ddp"
    if sharded:
        strategy, plugins = ModelParallelStrategy(world, 1, save_distributed_checkpoint=False), [DoublePrecision()]
    log = Log()
    trainer = quiet_trainer(max_steps=3, devices=world, strategy=strategy, plugins=plugins, callbacks=[log, Whole()])
    trainer.fit(
        module, DataLoader(Shares(name, world, name == APART or (sharded and name != UNEQUAL)), batch_size=None)
    )
    assert module.is_sharded == sharded
    return {"weights": module.whole, "losses": log.losses, "memory": module.memory and len(module.memory)}


class Whole(pl.Callback):
    """Keeps the full weights at the end of a run."""

    def on_train_end(self, trainer, module):
        module.is_sharded = any(isinstance(parameter, DTensor) for parameter in module.embedder.parameters())
        module.whole = []
        for parameter in module.parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            module.whole.append(full.detach().clone())


def message_of(name, world, sharded=False):
    with pytest.raises(ValueError, match="RetrievalModule: ") as raised:
        run_of(name, world, sharded)
    return str(raised.value)


def in_each_process(rank, world):
    found = {name: run_of(name, world) for name in [*RUNS, APART]}
    found |= {f"sharded {name}": run_of(name, world, sharded=True) for name in SHARDED}
    return {**found, "empty": message_of("empty", world), UNEQUAL: message_of(UNEQUAL, world, sharded=True)}


@pytest.fixture(scope="module")
def two(run_processes):
    return run_processes(in_each_process, 2, backend=None, timeout=200)


@pytest.mark.parametrize("name", [*RUNS, *(f"sharded {name}" for name in SHARDED)])
def test_two_processes_train_as_one(name, two):
    wanted = run_of(name.removeprefix("sharded "), 1)
    for found in two:
        torch.testing.assert_close(found[name]["weights"], wanted["weights"], rtol=0, atol=1e-12)
        assert found[name]["losses"] == pytest.approx(wanted["losses"], abs=1e-6)
        assert found[name]["memory"] == wanted["memory"]


def test_without_gathering_the_loss_is_the_mean_of_the_processes(two):
    queries, candidates = query_net(), net()
    optimizer = ADAM([*candidates.parameters(), *queries.parameters()])
    loss = SmoothAPLoss(tau=0.1)
    for batch in pairs():
        parts = []
        for rank in range(2):
            (texts, text_labels, _), (images, labels, _) = (
                [column[share_of(rank, side)] for column in columns] for side, columns in batch.items()
            )
            q, c = queries(texts), candidates(images)
            parts += [loss(q, text_labels, c, labels), loss(c, labels, q, text_labels)]
        optimizer.zero_grad()
        torch.stack(parts).mean().backward()
        optimizer.step()
    wanted = [*candidates.parameters(), *queries.parameters()]
    for found in two:
        torch.testing.assert_close(found[APART]["weights"], [w.detach() for w in wanted], rtol=0, atol=1e-12)


def test_a_side_that_is_empty_in_one_process_raises_in_all(two):
    for found in two:
        assert "at least one row" in found["empty"]


def test_a_sharded_network_refuses_unequal_shards_in_all_processes(two):
    """The processes embed each chunk together, so that one of them would wait forever."""
    for found in two:
        assert "equally many rows" in found[UNEQUAL]
