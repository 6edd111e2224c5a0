"""RetrievalModule on two processes with unequal shards (5 and 4 rows of 9) gives the results of one process.

tests/test_same_run.py has the same for chunks, memories and losses with parameters.
"""

import functools
import warnings
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_metric_learning.losses import ContrastiveLoss
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_retrieval import Embedder, NestedLoss, RetrievalModule, SmoothAPLoss, Updates
from lightning_retrieval.callbacks import RetrievalEvaluation, RetrievalGallery
from lightning_retrieval.datamodules import PKSampler, RetrievalDataModule
from lightning_retrieval.distributed import rank as index_of_process
from lightning_retrieval.losses import Schedule, WeightedSum
from tests.lightning_retrieval.training.small_training import LearnedTau, Log
from tests.point_set import Points
from tests.quiet_trainer import quiet_trainer

STEPS = 3
TRAINED = [
    "nested learned tau",
    "scheduled learned tau",
    "lora and layer decay in chunks",
    "frozen backbone in chunks",
    "layers of few images in chunks",
    "random loss",
]
# Batch norms see different shards on each rank, so only the agreement of the ranks can be tested.
ALL = [*TRAINED, "batch norm in chunks"]


def small_images(seed, size=27):
    return Points(seed, size, shape=(1, 2, 3), dtype=torch.float64)


class PointData(RetrievalDataModule):
    def __init__(self):
        super().__init__(classes_per_batch=3, samples_per_class=3, eval_batch_size=5, seed=1)

    train_set, val_set, test_set = small_images(1), small_images(2), small_images(3, 29)


class Buffers(pl.Callback):
    """Records the buffers in validation."""

    def __init__(self):
        self.found = []

    def on_validation_batch_end(self, trainer, module, *_):
        if not trainer.sanity_checking:
            self.found.append(flat(module.buffers()))


class OfFewImages(nn.Module):
    """A convolution whose channels are last, layers (of few images, never used, frozen), and a number in float32."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Conv2d(3, 4, (2, 3))).to(
            memory_format=torch.channels_last
        )
        self.of_few = nn.Linear(4, 4, bias=False)
        self.unused = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.double()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, images):
        x = self.convolutions(images).flatten(1)
        is_bright = images.amax((1, 2, 3)) > 2.2
        if is_bright.any():
            x = torch.where(is_bright[:, None], self.of_few(x), x)
        return self.scale * self.frozen(x) + x


class Random(nn.Module):
    """A loss that draws numbers."""

    def forward(self, embeddings, labels):
        return (embeddings * torch.rand_like(embeddings)).sum()


def flat(tensors) -> torch.Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(t.detach().double().flatten() for t in tensors)])


def make_module(name: str) -> RetrievalModule:
    torch.manual_seed(4)
    norm = [nn.BatchNorm2d(1)] if name.startswith("batch norm") else []
    embedder = nn.Sequential(*norm, nn.Flatten(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    if name.startswith("layers of few"):
        embedder = OfFewImages()
    loss, lora, settings = SmoothAPLoss(tau=0.1), None, {}
    if name == "random loss":
        loss = Random()
    if name.startswith("nested"):
        loss = NestedLoss(LearnedTau(), (1, 2, 4), weights=(0.5, 1.0, 2.0))
    if name.startswith("scheduled"):  # of three steps, two rank whole batches, and one divides the queries
        loss = WeightedSum(
            {
                "pairs": (Schedule([(0, 1), (0.5, 0)]), ContrastiveLoss()),
                "ap": (Schedule([(0, 0), (0.5, 1)]), LearnedTau()),
            }
        )
    if name.startswith("lora"):
        lora, settings = {"r": 2, "target_modules": ["1", "3"]}, {"updates": Updates(layer_decay=0.5)}
    if name.startswith("frozen"):
        settings = {"updates": Updates(freeze_backbone_epochs=1)}
    if settings:
        embedder = Embedder(embedder, 3, feature_dim=4, pooling="avg", lora=lora).double()
    adam = functools.partial(torch.optim.AdamW, lr=0.05)
    chunk_size = 2 if name.endswith("in chunks") else None
    return RetrievalModule(embedder, loss, chunk_size=chunk_size, optimizer=adam, **settings)


def make_trainer(world: int, folder: Path, *callbacks, **settings) -> pl.Trainer:
    return quiet_trainer(
        devices=world,
        strategy="auto" if world == 1 else "ddp",
        callbacks=list(callbacks),
        default_root_dir=folder,
        log_every_n_steps=1,
        **{"max_epochs": 1, **settings},
    )


# What each process runs, and returns.


def train(name: str, rank: int, world: int, folder: Path) -> dict:
    """A run in which each process but the first begins with other weights and buffers, which must not count."""
    module, log, buffers = make_module(name), Log(), Buffers()
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            value += rank
    make_trainer(world, folder, log, buffers, RetrievalEvaluation(ks=(1, 5))).fit(module, datamodule=PointData())
    return {
        "parameters": flat(module.parameters()),
        "learned": flat(torch.full_like(value, float(value.requires_grad)) for value in module.parameters()),
        "losses": log.losses,
        "buffers": buffers.found[0],
    }


class Around(RetrievalModule):
    """A user's subclass with work around the step."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class Automatic(RetrievalModule):
    """A user's subclass that lets Lightning back-propagate the loss of the rows of its process."""

    def training_step(self, batch, batch_idx):
        images, labels, _ = self.unpack_batch(batch)
        return self.loss(self(images), labels)


class OwnStep(RetrievalModule):
    """The same in manual optimization."""

    def training_step(self, batch, batch_idx):
        images, labels, _ = self.unpack_batch(batch)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(self(images), labels))
        self.optimizers().step()


OF_USERS = [Around, Automatic, OwnStep]


def train_of_users(kind, world: int, folder: Path) -> torch.Tensor:
    """The parameters after a run of a subclass."""
    torch.manual_seed(4)
    embedder = nn.Sequential(nn.Flatten(), nn.Linear(6, 4)).double()
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    module = kind(embedder, SmoothAPLoss(tau=0.1), optimizer=sgd, chunk_size=2 if kind is Around else None)
    module.automatic_optimization = kind is Automatic
    make_trainer(world, folder, limit_val_batches=0).fit(module, datamodule=PointData())
    return flat(module.parameters())


def wide(width: int) -> nn.Sequential:
    """A network whose gradients are more than what is summed at once."""
    torch.manual_seed(4)
    sizes = [(6, width), (width, width), (width, width), (width, 4)]
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))


def fit_wide(network: nn.Module, world: int, folder: Path) -> None:
    """A step in three chunks."""
    images = torch.randn(9, 6) + index_of_process()
    batch = images, torch.arange(9) // 3
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    module = RetrievalModule(network, SmoothAPLoss(), chunk_size=3, optimizer=sgd, gather=False)
    make_trainer(world, folder, max_steps=1, limit_val_batches=0).fit(module, DataLoader([batch], batch_size=None))


def events_of_a_step(world: int, folder: Path) -> list[str]:
    """In their order: each pass of gradients that reaches the first layer, and each large sum that starts."""
    events, real = [], dist.all_reduce

    def watched(tensor, *args, **kwargs):
        if tensor.numel() > 10**6:
            events.append("sum")
        return real(tensor, *args, **kwargs)

    network = wide(2000)
    network[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", watched)
        fit_wide(network, world, folder)
    return events


class Twice(nn.Module):
    """Two reentrant checkpoints that share a layer, whose gradient then comes in two parts."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, _, self.last = wide(2600)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, self.first(x) if x.shape[1] == 6 else x, use_reentrant=True)
        return self.last(x)


def error_of_two_parts(world: int, folder: Path) -> str:
    with pytest.raises(ValueError, match="in two parts") as raised:
        fit_wide(Twice(), world, folder)
    return str(raised.value)


def evaluate(world: int, folder: Path) -> dict:
    """The tables and the best checkpoint of a run with a gallery."""
    evaluation = RetrievalEvaluation(ks=(1, 5), before_fit=True)
    best = ModelCheckpoint(monitor="val/mAP", mode="max")
    callbacks = [evaluation, RetrievalGallery(queries=3, k=4), best]
    logger = CSVLogger(folder, "logs", version=0)
    trainer = make_trainer(world, folder, *callbacks, enable_checkpointing=True, logger=logger)
    trainer.fit(make_module("plain"), datamodule=PointData())
    return {"tables": evaluation.results, "best": float(best.best_model_score)}


def validate(world: int, folder: Path) -> dict:
    """The metrics of a set whose batches have ids, and of the same set without."""
    points = PointData.val_set
    found = {}
    for form, dataset in {"ids": points, "pairs": TensorDataset(points.images, points.labels)}.items():
        trainer = make_trainer(world, folder, RetrievalEvaluation(ks=(1, 5)))
        loader = DataLoader(dataset, batch_size=5)
        found[form] = trainer.validate(make_module("plain"), loader, verbose=False)
    return found


def train_with_nan(world: int, folder: Path) -> dict:
    """The error of a run with an image of NaN in the first batch, in the shard of rank 1, and the parameters then.

    Also the parameters after another run of the same Trainer, without that image.
    """
    loader = PointData().train_dataloader()
    sampler = PKSampler(loader.dataset.labels, classes_per_batch=3, samples_per_class=3, seed=1)
    last_of_first_batch = next(iter(sampler))[-1]
    image = loader.dataset.images[last_of_first_batch].clone()
    loader.dataset.images[last_of_first_batch] = torch.nan
    module, trainer = make_module("plain"), make_trainer(world, folder)
    with pytest.raises(ValueError, match="NaN") as raised:
        trainer.fit(module, loader)
    parameters = flat(module.parameters())
    loader.dataset.images[last_of_first_batch] = image
    trainer.fit(module, loader)
    return {"message": str(raised.value), "parameters": parameters, "afterwards": flat(module.parameters())}


def in_each_process(rank: int, world: int, folder: Path) -> dict:
    warnings.simplefilter("ignore")
    found = {
        "trained": {name: train(name, rank, world, folder) for name in ALL},
        "evaluated": evaluate(world, folder),
        "validated": validate(world, folder),
        "nan": train_with_nan(world, folder),
        "users": {kind.__name__: train_of_users(kind, world, folder) for kind in OF_USERS},
        "folder": folder,
    }
    if world > 1:
        found["events"] = events_of_a_step(world, folder)
        found["two parts"] = error_of_two_parts(world, folder)
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The results of one process."""
    return in_each_process(0, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(run_processes, tmp_path_factory):
    """The results of both of two processes."""
    return run_processes(in_each_process, 2, tmp_path_factory.mktemp("two"), backend=None, timeout=200)


@pytest.mark.parametrize("name", ALL)
def test_parameters_and_losses_are_those_of_one_process(one, two, name):
    expected, first, second = (results["trained"][name] for results in (one, *two))
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["losses"] == second["losses"]
    changes = (expected["parameters"] - flat(make_module(name).parameters())).abs()
    learned = expected["learned"].bool()
    if not name.startswith("layers of few"):
        assert changes[learned].min() > 1e-6  # all of them
    assert not changes[~learned].any()  # those of a backbone that is frozen
    assert len(first["losses"]) == STEPS
    if name in TRAINED:
        atol = 1e-6 if name.startswith("layers of few") else 1e-10  # of numbers in float32
        torch.testing.assert_close(first["parameters"], expected["parameters"], rtol=0, atol=atol)
        assert first["losses"] == pytest.approx(expected["losses"], abs=1e-6)


def test_a_step_of_a_subclass_is_that_of_one_process(one, two):
    first, second = (of_rank["users"]["Around"] for of_rank in two)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, one["users"]["Around"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["Automatic", "OwnStep"])
def test_gradients_of_a_subclass_with_a_step_of_its_own_are_averaged(two, kind):
    """As Lightning does: each process has the loss of its own rows, the first five or the last four."""
    torch.manual_seed(4)
    embedder = nn.Sequential(nn.Flatten(), nn.Linear(6, 4)).double()
    optimizer = torch.optim.SGD(embedder.parameters(), lr=0.5)
    for batch in PointData().train_dataloader():
        images, labels = batch["images"], batch["labels"]
        losses = [SmoothAPLoss(tau=0.1)(embedder(images[rows]), labels[rows]) for rows in (slice(5), slice(5, None))]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    for of_rank in two:
        torch.testing.assert_close(of_rank["users"][kind], flat(embedder.parameters()), rtol=0, atol=1e-10)


def test_validation_runs_with_the_same_buffers_on_both_ranks(two):
    first, second = (rank["trained"]["batch norm in chunks"]["buffers"] for rank in two)
    assert len(first) == 3  # running mean, running variance, batches seen
    assert first.abs().min() > 0
    assert torch.equal(first, second)


def test_metrics_are_those_of_one_process(one, two):
    """To the last bit, of 27 and 29 images: the sampler repeats one of them."""
    expected, expected_tables = one["validated"], one["evaluated"]["tables"]
    assert {"val", "untrained"} <= set(expected_tables)
    assert 0 < expected["ids"][0]["val/mAP"] < 1
    assert expected["ids"] == expected["pairs"]
    assert one["evaluated"]["best"] == pytest.approx(expected_tables["val"]["val/mAP"])
    for rank in two:
        assert rank["validated"] == expected
        assert rank["evaluated"] == one["evaluated"]


def test_the_gallery_is_that_of_one_process(one, two):
    (expected,) = one["folder"].rglob("*.png")
    (found,) = two[0]["folder"].rglob("*.png")
    assert found.read_bytes() == expected.read_bytes()


def test_gradients_are_summed_while_the_last_backward_pass_runs(two):
    """Several machines need it, since a sum takes as long as the pass; no result of a run shows it, only the order."""
    for rank in two:
        *passes, last = rank["events"]
        assert passes[:2] == ["first layer"] * 2
        assert set(passes[2:]) == {"sum"}
        assert last == "first layer"


@pytest.mark.refusal
def test_a_gradient_in_two_parts_raises_in_both_processes(two):
    assert two[0]["two parts"] == two[1]["two parts"]


def test_nan_on_one_rank_stops_both(one, two):
    for rank in (one, *two):
        assert "1 of 9 rows" in rank["nan"]["message"]
    for rank in two:
        assert torch.equal(rank["nan"]["parameters"], flat(make_module("plain").parameters()))
        torch.testing.assert_close(rank["nan"]["afterwards"], one["nan"]["afterwards"], rtol=0, atol=1e-10)
