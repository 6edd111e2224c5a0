"""A picture of how a metric rose during training."""

from typing import Any

import pytorch_lightning as pl

from lightning_retrieval.callbacks.pictures import Picture, new_figure, publish
from lightning_retrieval.training.run_folder import run_folder


class TrainingCurve(pl.Callback):
    """Draws a logged metric, and the training loss, against the optimizer steps: `curve.png` in the run's log folder.

    The picture is written anew after each validation, and goes to every logger that takes images (TensorBoard, Weights
    & Biases). Its points are kept in the checkpoint, so that a resumed run goes on with the same curve.

    Args:
        metric: the name it is logged under.

    Raises:
        ValueError: if the metric is not logged when validation ends.

    Example:
        >>> from lightning_retrieval.callbacks import TrainingCurve
        >>> TrainingCurve("val/R@1").metric
        'val/R@1'
    """

    def __init__(self, metric: str = "val/mAP") -> None:
        self.metric = metric
        self.points: list[list[float]] = []  # (step, metric)
        self.losses: list[list[float]] = []  # (step, loss)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = trainer.callback_metrics.get("train/loss")
        if loss is not None:
            self.losses.append([trainer.global_step, float(loss)])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self.metric not in trainer.callback_metrics:
            raise ValueError(
                f"TrainingCurve: `metric` must be logged in validation, got {self.metric!r}; logged are "
                f"{sorted(trainer.callback_metrics)}."
            )
        self.points.append([trainer.global_step, float(trainer.callback_metrics[self.metric])])
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            publish(trainer, folder / "curve.png", "retrieval/curve", self._draw())

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points, "losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points, self.losses = state_dict["points"], state_dict["losses"]

    def _draw(self) -> Picture:
        figure = new_figure()
        axes = figure.subplots()
        axes.plot(*zip(*self.points), color="tab:green", marker="o", markersize=4, label=self.metric)
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel(self.metric, color="tab:green")
        axes.grid(alpha=0.3)
        if self.losses:
            loss_axes = axes.twinx()
            loss_axes.plot(*zip(*self.losses), color="tab:gray", linewidth=0.8, alpha=0.7)
            loss_axes.set_ylabel("train/loss", color="tab:gray")
            axes.set_zorder(loss_axes.get_zorder() + 1)
            axes.patch.set_visible(False)
        return figure
