"""A figure of a metric and the training loss over the optimizer steps."""

from typing import Any

import pytorch_lightning as pl

from lightning_retrieval.callbacks.figures import Drawing, new_figure, save_and_log
from lightning_retrieval.checks import check_string
from lightning_retrieval.training.run_folder import run_folder


class TrainingCurve(pl.Callback):
    """Plots a logged metric and the training loss against the optimizer steps: `curve.png` in the run's log folder.

    The figure is written anew after each validation, and is sent to every logger that accepts images (TensorBoard,
    Weights & Biases). The checkpoint contains its points, so a resumed run continues the same curve.

    Args:
        metric: the name under which the metric is logged.

    Raises:
        ValueError: if the metric is not logged when a validation ends.
        TypeError: if `metric` is not a string.

    Example:
        >>> from lightning_retrieval.callbacks import TrainingCurve
        >>> TrainingCurve("val/R@1").metric
        'val/R@1'
    """

    def __init__(self, metric: str = "val/mAP") -> None:
        self.metric = check_string("TrainingCurve", "metric", metric)
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
                f"TrainingCurve: `metric` must be logged in validation, got {self.metric!r}; logged metrics are "
                f"{sorted(trainer.callback_metrics)}."
            )
        self.points.append([trainer.global_step, float(trainer.callback_metrics[self.metric])])
        folder = run_folder(trainer)  # all processes must call it
        if trainer.is_global_zero:
            save_and_log(trainer, folder / "curve.png", "retrieval/curve", self._draw())

    def state_dict(self) -> dict[str, Any]:
        return {"points": self.points, "losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.points = state_dict["points"]
        self.losses = state_dict["losses"]

    def _draw(self) -> Drawing:
        figure = new_figure()
        axes = figure.subplots()
        steps, values = zip(*self.points)
        axes.plot(steps, values, color="tab:green", marker="o", markersize=4, label=self.metric)
        axes.set_xlabel("optimizer steps")
        axes.set_ylabel(self.metric, color="tab:green")
        axes.grid(alpha=0.3)
        if self.losses:
            loss_axes = axes.twinx()
            loss_steps, losses = zip(*self.losses)
            loss_axes.plot(loss_steps, losses, color="tab:gray", linewidth=0.8, alpha=0.7)
            loss_axes.set_ylabel("train/loss", color="tab:gray")
            # The metric is drawn above the loss.
            axes.set_zorder(loss_axes.get_zorder() + 1)
            axes.patch.set_visible(False)
        return figure
