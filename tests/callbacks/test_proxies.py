"""ProxiesAtClassMeans: proxies begin where scikit-learn finds the centroids, on any number of processes."""

import os
import warnings

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_metric_learning import losses as pml
from sklearn.neighbors import NearestCentroid
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

from lightning_retrieval import RetrievalModule, SmoothAPLoss, Updates
from lightning_retrieval.callbacks import ProxiesAtClassMeans
from lightning_retrieval.datamodules import RetrievalDataModule
from lightning_retrieval.datamodules.pairs import PairSet
from lightning_retrieval.losses import WeightedSum
from tests.point_set import Points
from tests.quiet_trainer import quiet_trainer

DIM, CLASSES = 5, 7
SIZES = {"embedding_size": DIM, "num_classes": CLASSES}
ONE = ("ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss")
IN_COLUMNS = {**dict.fromkeys(ONE, "W"), "P2SGradLoss": "weight"}  # the parameter with a proxy of each class
IN_ROWS = dict.fromkeys(("ProxyAnchorLoss", "ProxyNCALoss"), "proxies")
SEVERAL = {"SubCenterArcFaceLoss": "W", "SoftTripleLoss": "fc"}


class Data(RetrievalDataModule):
    """Batches of a training set."""

    def __init__(self, train_set):
        super().__init__(classes_per_batch=3, samples_per_class=2, seed=1)
        self.set = train_set

    @property
    def train_set(self):
        return self.set

    val_set = test_set = Points(3)


class Network(nn.Module):
    """Embeds points, with batch norm and, in training, dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3))
        self.head = nn.Linear(16, DIM)

    def forward(self, points):
        return self.head(self.layers(points))


class Start(pl.Callback):
    """Keeps the state of a module before the first step of a run."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not hasattr(self, "state"):
            self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}


def loss_of(name, **settings):
    torch.manual_seed(4)
    sizes = {**SIZES, **settings}
    if name == "P2SGradLoss":
        sizes["descriptors_dim"] = sizes.pop("embedding_size")
    return getattr(pml, name)(**sizes)


def fit(loss, points, *callbacks, network=None, **settings):
    """Train for two steps; returns the module, and its state before the first step."""
    start, module = Start(), RetrievalModule(network or Network(), loss, updates=Updates(loss_lr_factor=2))
    defaults = {"max_steps": 2, "limit_val_batches": 0, "logger": False, "enable_checkpointing": False}
    run = quiet_trainer(callbacks=[*callbacks, start], **{**defaults, **settings})
    run.fit(module, *([points] if isinstance(points, DataLoader) else []), datamodule=data_of(points))
    return module, start.state


def data_of(points):
    return None if isinstance(points, DataLoader) else Data(points)


def centroids(points, mode="train"):
    """Those of scikit-learn, normalised, for the embeddings of one batch that has all points."""
    network = Network()
    network.layers[3].p = 0
    with torch.no_grad():
        rows = normalize(getattr(network, mode)()(points.images))
    return normalize(torch.from_numpy(NearestCentroid().fit(rows, points.labels).centroids_))


def proxies_of(name, state):
    parameter = {**IN_COLUMNS, **IN_ROWS, **SEVERAL}[name]
    (proxies,) = (value for key, value in state.items() if key.endswith(f"loss.{parameter}"))
    return proxies if name in IN_ROWS else proxies.T


@pytest.mark.parametrize("name", [*IN_COLUMNS, *IN_ROWS])
def test_a_proxy_begins_at_the_centroid_of_its_class(name):
    """BatchNorm normalises as in training: the running statistics of a network with random weights fit no image."""
    points = Points(3)
    _, state = fit(loss_of(name), points, ProxiesAtClassMeans())
    torch.testing.assert_close(proxies_of(name, state), centroids(points), check_dtype=False)
    assert not torch.allclose(centroids(points), centroids(points, "eval"), atol=0.1)


@pytest.mark.parametrize(("name", "count"), [("SubCenterArcFaceLoss", 3), ("SoftTripleLoss", 10)])
def test_several_proxies_of_a_class_begin_around_its_centroid(name, count):
    points = Points(3)
    _, state = fit(loss_of(name), points, ProxiesAtClassMeans())
    proxies = proxies_of(name, state).reshape(CLASSES, count, DIM)
    scores = (proxies * centroids(points)[:, None]).sum(2)
    assert scores.min() > 0.99
    assert scores.max() < 1 - 1e-6
    assert torch.pdist(proxies[0]).min() > 1e-3
    torch.testing.assert_close(proxies.norm(dim=2), torch.ones(CLASSES, count))
    _, again = fit(loss_of(name), points, ProxiesAtClassMeans())
    assert torch.equal(proxies_of(name, again), proxies_of(name, state))


def test_batch_norm_that_is_frozen_normalises_by_its_statistics():
    class Frozen(Network):
        def train(self, mode=True):
            super().train(mode)
            self.layers[1].eval()
            return self

    points = Points(3)
    _, state = fit(loss_of("ArcFaceLoss"), points, ProxiesAtClassMeans(), network=Frozen().train())
    torch.testing.assert_close(proxies_of("ArcFaceLoss", state), centroids(points, "eval"), check_dtype=False)


class NoisyPoints(Points):
    """Points with noise from three global generators."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        noise = torch.randn(6) + float(np.random.randn())
        return {**item, "images": item["images"] + 0.1 * noise}


def test_nothing_but_the_proxies_changes():
    """A run whose loss has the same proxies from the beginning ends with the same weights and buffers."""
    ends, proxies = [], None
    for callbacks in ([ProxiesAtClassMeans()], []):
        pl.seed_everything(7)
        loss = loss_of("ProxyAnchorLoss")
        if proxies is not None:
            loss.proxies.data.copy_(proxies)
        module, state = fit(loss, NoisyPoints(3), *callbacks)
        proxies = state["loss.loss.proxies"]
        ends.append(torch.cat([value.double().flatten() for value in module.state_dict().values()]))
    assert torch.equal(*ends)


class Wrapped(nn.Module):
    """A loss that calls another one."""

    def __init__(self, loss):
        super().__init__()
        self.inner = loss

    def forward(self, embeddings, labels):
        return self.inner(embeddings, labels)


class Renamed(pml.ArcFaceLoss):
    """A loss derived from one of pytorch-metric-learning."""


@pytest.mark.parametrize("wrap", [Wrapped, lambda loss: WeightedSum({"a": (1.0, SmoothAPLoss()), "b": (2.0, loss)})])
def test_all_losses_with_proxies_in_a_loss_begin(wrap):
    points, inner = Points(3), pml.MultipleLosses([loss_of("CosFaceLoss"), Renamed(CLASSES, DIM)])
    _, state = fit(wrap(inner), points, ProxiesAtClassMeans())
    found = [value for name, value in state.items() if name.endswith(".W")]
    assert len(found) == 2
    for proxies in found:
        torch.testing.assert_close(proxies.T, centroids(points), check_dtype=False)


class OfUser(nn.Module):
    """A loss of a user, whose proxies have labels of any size."""

    def __init__(self, labels):
        super().__init__()
        self.labels, self.proxies = labels, nn.Parameter(torch.zeros(len(labels), DIM))

    def forward(self, embeddings, labels):
        proxies = self.proxies[torch.searchsorted(self.labels, labels)]
        return 1 - nn.functional.cosine_similarity(embeddings, proxies).mean()

    def begin_at(self, means, labels):
        self.proxies.copy_(means[torch.searchsorted(labels, self.labels)])


def test_a_loss_of_a_user_gets_means_and_labels():
    points = Points(3)
    points.labels = 1_000_003 * points.labels - 5
    _, state = fit(OfUser(points.labels.unique()), points, ProxiesAtClassMeans())
    torch.testing.assert_close(state["loss.loss.proxies"], centroids(points), check_dtype=False)


@pytest.mark.parametrize("saving", [{"every_n_train_steps": 1}, {"save_on_train_epoch_end": True}], ids=list)
def test_a_resumed_run_keeps_its_proxies(tmp_path, saving):
    """Within an epoch, where training goes on, and at its end, where the next one begins."""
    loss, keep = loss_of("ArcFaceLoss"), ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **saving)
    fit(loss, Points(3), ProxiesAtClassMeans(), keep, max_steps=-1, max_epochs=1, enable_checkpointing=True)
    checkpoint, start = min(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns), Start()
    resumed = RetrievalModule(Network(), loss_of("ArcFaceLoss"), updates=Updates(loss_lr_factor=2))
    run = quiet_trainer(max_epochs=2, limit_val_batches=0, logger=False, callbacks=[ProxiesAtClassMeans(), start])
    run.fit(resumed, datamodule=Data(Points(3)), ckpt_path=checkpoint)
    saved = torch.load(checkpoint, weights_only=True)
    assert run.global_step > saved["global_step"] > 0
    assert torch.equal(start.state["loss.loss.W"], saved["state_dict"]["loss.loss.W"])


def test_a_limit_draws_as_many_images_of_each_class():
    drawn = []

    class Watched(Points):
        def __getitem__(self, index):
            drawn.append(int(self.labels[index]))
            return super().__getitem__(index)

    points = Watched(3, 26)  # six classes of four, and one of two
    fit(loss_of("ArcFaceLoss"), points, max_steps=1)
    of_training = len(drawn)
    fit(loss_of("ArcFaceLoss"), points, ProxiesAtClassMeans(images_per_class=3), max_steps=1)
    assert len(drawn) == 2 * of_training + 6 * 3 + 2
    assert np.bincount(drawn[of_training:-of_training]).tolist() == [3] * 6 + [2]


def test_loaders_without_a_data_module():
    points = Points(3)
    loader = DataLoader([points[index] for index in range(len(points))], batch_size=9)
    _, state = fit(loss_of("ArcFaceLoss"), loader, ProxiesAtClassMeans())
    torch.testing.assert_close(proxies_of("ArcFaceLoss", state), centroids(points), check_dtype=False)


class Begun(SmoothAPLoss):
    """A loss that keeps what it begins at."""

    def begin_at(self, means, labels):
        self.means = means


def test_candidates_of_a_loader_with_two_sides_and_no_data_module():
    pairs, module = PairSet(Points(4), Points(3)), RetrievalModule(Network(), Begun())
    loader = DataLoader(pairs, batch_sampler=[[0, 4, 8, 27, 28, 32, 36]], collate_fn=pairs.collate)
    quiet_trainer(callbacks=[ProxiesAtClassMeans()], max_steps=1, logger=False).fit(module, loader)
    torch.testing.assert_close(module.loss.means, centroids(Points(3)), check_dtype=False)


class Labelled(Points):
    """Points whose data set tells their labels in another form."""

    def __init__(self, labels_of_all):
        super().__init__(3)
        self.own, self.labels = self.labels, labels_of_all(self.labels)

    def __len__(self):
        return len(self.own)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": self.own[index], "ids": torch.tensor(index)}


@pytest.mark.parametrize(
    "labels_of_all",
    [
        lambda labels: labels.numpy().astype(">i8"),
        lambda labels: labels.to(torch.uint16),
        lambda labels: [(label, 0) for label in labels.tolist()],
    ],
    ids=["big-endian", "uint16", "levels"],
)
def test_labels_of_a_data_set_may_be_any_integers(labels_of_all):
    points = Labelled(labels_of_all)
    _, state = fit(loss_of("ArcFaceLoss"), DataLoader(points, batch_size=9), ProxiesAtClassMeans(images_per_class=4))
    torch.testing.assert_close(proxies_of("ArcFaceLoss", state), centroids(Points(3)), check_dtype=False)


def test_labels_of_a_data_set_that_are_texts_do_not_count():
    loader = DataLoader(Labelled(lambda labels: [f"class {label}" for label in labels]), batch_size=9)
    _, state = fit(loss_of("ArcFaceLoss"), loader, ProxiesAtClassMeans())
    torch.testing.assert_close(proxies_of("ArcFaceLoss", state), centroids(Points(3)), check_dtype=False)


def test_images_of_the_fit_count_and_not_those_of_an_earlier_call():
    points, start = Points(3), Start()
    run = quiet_trainer(callbacks=[ProxiesAtClassMeans(), start], max_steps=1, logger=False, enable_checkpointing=False)
    module = RetrievalModule(Network(), loss_of("ArcFaceLoss"))
    run.validate(module, datamodule=Data(Points(4)), verbose=False)
    run.fit(module, DataLoader(points, batch_size=9))
    torch.testing.assert_close(proxies_of("ArcFaceLoss", start.state), centroids(points), check_dtype=False)


def test_a_class_without_images_keeps_its_proxies_with_a_warning():
    name, points = "SubCenterArcFaceLoss", Points(3)
    points.labels[points.labels == 2] = 8
    with pytest.warns(UserWarning, match="2 of 9 classes have no training image"):
        _, state = fit(loss_of(name, num_classes=9), points, ProxiesAtClassMeans())
    before = proxies_of(name, {"loss.W": loss_of(name, num_classes=9).W})
    kept = [2 * 3, 2 * 3 + 1, 2 * 3 + 2, 7 * 3, 7 * 3 + 1, 7 * 3 + 2]
    changed = (proxies_of(name, state) != before).any(1).nonzero()[:, 0].tolist()
    assert changed == [number for number in range(27) if number not in kept]


MANY = 137  # images, which two processes embed in unequal parts


def begin_on_rank(rank, world_size):
    """The proxies and the network at the start of a run of several processes."""
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
    points = Points(3, MANY)
    loss = WeightedSum({"proxies": (1.0, loss_of("SoftTripleLoss", num_classes=35)), "ap": (1.0, SmoothAPLoss())})
    strategy = {"devices": world_size, "strategy": "ddp" if world_size > 1 else "auto"}
    return fit(loss, points, ProxiesAtClassMeans(images_per_class=4), **strategy)[1]


@pytest.mark.slow
def test_processes_begin_at_the_same_means_as_one(run_processes):
    (alone,), states = (run_processes(begin_on_rank, world_size, backend=None) for world_size in (1, 2))
    assert all(torch.equal(states[0][name], states[1][name]) for name in alone)
    for name, value in alone.items():
        torch.testing.assert_close(states[0][name], value, rtol=0, atol=1e-6)
