"""DetectionModule: what it logs, Trainer flags, checkpoints, exact resume and two processes."""

import copy
import functools

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from lightning_retrieval.detection import COCOMetrics, DetectionAPLoss, DetectionModule, TinyFasterRCNN
from tests.lightning_retrieval.detection.scenes import SceneData, make_batch

STEPS, CUT = 7, 5  # of a run of several processes, and of its checkpoint, in the middle of the second epoch


def tiny():
    torch.manual_seed(0)
    return TinyFasterRCNN(2, width=4, image_size=64, rois_per_image=8, score_thresh=0.3)


def make_module(loss=None, **settings):
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    return DetectionModule(tiny(), loss, **{"optimizer": optimizer, "seed": 3, **settings})


def make_trainer(folder, **settings):
    defaults = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return pl.Trainer(default_root_dir=folder, **{**defaults, **quiet, **settings})


def make_data():
    return SceneData(batch_size=2, eval_batch_size=2, seed=5)


class Losses(pl.Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())


@pytest.mark.parametrize("loss", [None, DetectionAPLoss(batch_memory=2)])
def test_it_trains_and_logs_metrics(loss, tmp_path):
    module, data, losses = make_module(copy.deepcopy(loss)), make_data(), Losses()
    trainer = make_trainer(tmp_path, callbacks=[losses])
    before = copy.deepcopy(module.detector.state_dict())
    trainer.fit(module, datamodule=data)
    assert len(losses.values) == trainer.global_step == 8
    logged = trainer.logged_metrics
    parts = [value for name, value in logged.items() if name.startswith("train/loss_")]
    assert sum(parts).item() == pytest.approx(logged["train/loss"].item(), rel=1e-5)
    assert {"val/AP", "val/AP50"} <= logged.keys()
    weight = "roi_heads.box_predictor.cls_score.weight"
    assert not torch.equal(module.detector.state_dict()[weight], before[weight])
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    assert tested.keys() == {"test/AP", "test/AP50", "test/AP50/grey", "test/AP50/white"}
    assert tested["test/AP50"] == pytest.approx((tested["test/AP50/grey"] + tested["test/AP50/white"]) / 2)
    assert (module.loss is None) == (loss is None)
    predicted = trainer.predict(module, datamodule=data)
    metrics = COCOMetrics(2)
    metrics.update([found for batch in predicted for found in batch], [data.test_set[i][1] for i in range(5)])
    assert tested["test/AP"] == pytest.approx(metrics.compute()["AP"].item())


class ImageIds(pl.Callback):
    """The ids of the images of each training batch."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches.append([int(target["image_id"]) for target in batch[1]])


def test_checkpoints_rebuild_the_module_from_plain_values(tmp_path):
    module = make_module(DetectionAPLoss(weight=2.0, batch_memory=1), metrics=COCOMetrics(2))
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(module, datamodule=make_data())
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    loaded = DetectionModule.load_from_checkpoint(tmp_path / "m.ckpt", weights_only=True)
    assert loaded.loss.weight == 2.0
    assert loaded.metrics.classes == 2
    assert len(loaded.loss.map_loss.memory) == 1
    again = make_trainer(tmp_path, max_epochs=1)
    again.strategy.connect(loaded)
    again.save_checkpoint(tmp_path / "again.ckpt")
    twice_loaded = DetectionModule.load_from_checkpoint(tmp_path / "again.ckpt", weights_only=True)
    assert twice_loaded.hparams == module.hparams
    images, _ = make_batch(range(3))
    for one, other in zip(module.eval()(images), loaded.eval()(images)):
        assert torch.equal(one["boxes"], other["boxes"])


def continued(folder, change):
    """The weights of a fused run, and of one that continues from its checkpoint after `change` of the momentum."""
    settings = {"optimizer": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True)}
    path, weights = folder / "half.ckpt", []
    for epochs, resume in ((2, None), (1, None), (2, path)):
        module = make_module(**settings)
        module.detector.to(memory_format=torch.channels_last)
        trainer = make_trainer(folder, max_epochs=epochs)
        trainer.fit(module, datamodule=make_data(), ckpt_path=resume, weights_only=True)
        weights.append(weights_of(module.detector))
        if epochs == 1:
            trainer.save_checkpoint(path)
            content = torch.load(path, weights_only=True)
            for state in content["optimizer_states"][0]["state"].values():
                state["momentum_buffer"] = change(state["momentum_buffer"])
            torch.save(content, path)
    return weights[0], weights[2]


def test_a_fused_update_does_not_depend_on_the_order_of_memory_in_a_checkpoint(tmp_path):
    torch.testing.assert_close(*continued(tmp_path, torch.Tensor.contiguous), rtol=1e-4, atol=1e-6)


@pytest.mark.refusal
def test_a_state_of_another_shape_is_refused(tmp_path):
    """A fused update would write beyond its memory."""
    with pytest.raises(ValueError, match=r"^DetectionModule: .*'momentum_buffer'"):
        continued(tmp_path, lambda momentum: torch.ones(3))


class Fails(pl.Callback):
    """Ends the run in a validation."""

    def on_validation_start(self, trainer, module):
        if trainer.global_step == 8:
            raise RuntimeError("no more")


def test_a_resumed_run_makes_up_for_the_validation_that_it_lacks(tmp_path):
    """That of the last epoch, which can so be the best; a limit of steps is that of the user afterwards."""

    def saving():
        last = ModelCheckpoint(tmp_path, "last", every_n_train_steps=4, enable_version_counter=False)
        return [last, ModelCheckpoint(tmp_path / "best", "{step}", monitor="val/AP", mode="max", save_top_k=-1)]

    settings = {"enable_checkpointing": True, "max_epochs": -1, "max_steps": 8}
    failing = make_trainer(tmp_path, callbacks=[Fails(), *saving()], **settings)
    with pytest.raises(RuntimeError, match="no more"):
        failing.fit(make_module(), datamodule=make_data())
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step=4.ckpt"]
    with pytest.raises(RuntimeError, match="no more"):  # in the validation that it makes up for
        failing.fit(make_module(), datamodule=make_data(), ckpt_path=tmp_path / "last.ckpt")
    assert failing.max_steps == 8
    resumed = make_trainer(tmp_path, callbacks=saving(), **settings)
    resumed.fit(make_module(), datamodule=make_data(), ckpt_path=tmp_path / "last.ckpt")
    assert (resumed.global_step, resumed.max_steps) == (8, 8)
    assert (tmp_path / "best" / "step=8.ckpt").exists()


class FirstRegions:
    """The first positive and the first negative regions of each image, in place of random ones."""

    def __init__(self, positives, regions):
        self.positives, self.regions = positives, regions

    def __call__(self, matched):
        positives, negatives = [], []
        for labels in matched:
            positive = (labels >= 1).nonzero().flatten()[: self.positives]
            negative = (labels == 0).nonzero().flatten()[: self.regions - len(positive)]
            positives.append(torch.zeros_like(labels).index_fill_(0, positive, 1))
            negatives.append(torch.zeros_like(labels).index_fill_(0, negative, 1))
        return positives, negatives


class Deterministic(DetectionModule):
    """The regions depend on the image alone, and the layers before the classifier keep their running statistics."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.detector.roi_heads.fg_bg_sampler = FirstRegions(2, 8)
        self.detector.rpn.fg_bg_sampler = FirstRegions(2, 16)

    def training_step(self, batch, batch_idx):
        for layer in self.detector.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
        return super().training_step(batch, batch_idx)


def fit(folder, world_size, steps, resume=None):
    """Weights, memory, losses and metrics of a run.

    The validation set has an odd number of images, and the weights are in float64, so that rounding does not grow.
    """
    settings = {"max_epochs": -1, "max_steps": steps, "precision": "64-true", "enable_checkpointing": True}
    if world_size > 1:
        settings |= {"devices": world_size, "strategy": "ddp"}
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    scheduler = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    schedule = {"lr_scheduler": scheduler, "lr_scheduler_interval": "step"}
    module = Deterministic(tiny(), DetectionAPLoss(batch_memory=2), optimizer=optimizer, seed=3, **schedule)
    losses = Losses()
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=CUT, save_top_k=-1)
    trainer = make_trainer(folder, callbacks=[losses, keep], **settings)
    trainer.fit(module, datamodule=make_data(), ckpt_path=resume, weights_only=True)
    memory = [past for past, _ in module.loss.map_loss.memory]
    (tested,) = trainer.test(module, datamodule=make_data(), verbose=False)
    return {"weights": weights_of(module.detector), "memory": memory, "losses": losses.values, "metrics": tested}


def weights_of(detector):
    return torch.cat([parameter.detach().flatten() for parameter in detector.parameters()])


def fit_with_unequal_batches(folder, world_size):
    """Weights, regions in the memory and images of each batch, of three images on two processes."""
    flags = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    seen, module = ImageIds(), make_module(DetectionAPLoss(batch_memory=2))
    trainer = make_trainer(folder, callbacks=[seen], devices=world_size, strategy="ddp", **flags)
    trainer.fit(module, datamodule=SceneData(batch_size=3, eval_batch_size=2, seed=5))
    memory = [past for past, _ in module.loss.map_loss.memory]
    return weights_of(module.detector), memory, [len(ids) for ids in seen.batches]


def fit_in_each_process(rank, world_size, folder):
    whole = fit(folder, world_size, STEPS)
    return whole, fit(folder, world_size, STEPS, folder / f"step={CUT}.ckpt"), fit_with_unequal_batches(folder, 2)


@pytest.fixture(scope="module")
def of_two_processes(run_processes, tmp_path_factory):
    """Pairs of what each process has: of a whole run, of a resumed one, and of one with unequal batches."""
    folder = tmp_path_factory.mktemp("runs")
    return list(zip(*run_processes(fit_in_each_process, 2, folder, backend=None, timeout=300)))


def assert_equal_ends(one, other):
    assert torch.equal(one["weights"], other["weights"])
    assert len(one["memory"]) == len(other["memory"]) == 2
    assert all(map(torch.equal, one["memory"], other["memory"]))
    assert one["metrics"] == other["metrics"]


@pytest.mark.slow
def test_two_processes_train_as_one_and_resume_to_the_same_weights(of_two_processes, tmp_path):
    """Lists and memory are those of the global batch: with those of a process, the weights would differ."""
    alone = fit(tmp_path, 1, STEPS)
    (first, second), (resumed, second_resumed), _ = of_two_processes
    assert_equal_ends(first, second)
    assert_equal_ends(first, resumed)
    assert_equal_ends(second, second_resumed)
    assert resumed["losses"] == first["losses"][CUT:]
    assert [len(past) for past in first["memory"]] == [16, 16]  # two images of eight regions, one on each process
    assert (alone["weights"] - weights_of(tiny()).double()).abs().max() > 1e-4  # it has learned
    torch.testing.assert_close(first["weights"], alone["weights"], rtol=0, atol=1e-9)
    for past, of_one in zip(first["memory"], alone["memory"]):
        torch.testing.assert_close(past.sort(0).values, of_one.sort(0).values, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_processes_with_unequal_batches_keep_the_same_weights_and_memory(of_two_processes):
    (first, memory, images), (second, other_memory, other_images) = of_two_processes[2]
    assert (images, other_images) == ([2] * 4, [1] * 4)
    assert torch.equal(first, second)
    assert [len(past) for past in memory] == [24, 24]  # three images of eight regions
    assert all(map(torch.equal, memory, other_memory))
    assert (first - weights_of(tiny())).abs().max() > 1e-4  # it has learned
