"""The experiments of `run.py` that compare losses, each with a learning rate of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments import BASE, FIVE_SEEDS, Experiment, Finding, Setting

PROXIES = {"num_classes": 3786, "embedding_size": BASE.dim}  # at least as many as either data set has classes
LEARNING_RATES = (0.001, 0.002, 0.004, 0.008)
# Further ones for the losses of which the best of these is at an end.
BEYOND = {
    "glyphs": {"SupAPLoss": (0.016,), "ProxyAnchorLoss": (0.0001, 0.0003)},
    "emoji": {"BlackboxRecallLoss": (0.0005,), "ProxyAnchorLoss": (0.0001, 0.0003)},
}
# The learning rates with the highest mAP in "Learning rate of each loss".
GLYPHS_RATES = {
    "SmoothAPLoss": 0.004,
    "FastAPLoss": 0.004,
    "QuantizedAPLoss": 0.004,
    "BlackboxAPLoss": 0.004,
    "SupAPLoss": 0.008,
    "ROADMAPLoss": 0.004,
    "BlackboxRecallLoss": 0.002,
    "RecallAtKLoss": 0.004,
    "ContrastiveLoss": 0.004,
    "TripletMarginLoss": 0.002,
    "MultiSimilarityLoss": 0.004,
    "ProxyAnchorLoss": 0.0003,
}
EMOJI_RATES = {
    "SmoothAPLoss": 0.002,
    "FastAPLoss": 0.002,
    "ROADMAPLoss": 0.002,
    "BlackboxRecallLoss": 0.001,
    "MultiSimilarityLoss": 0.002,
    "ProxyAnchorLoss": 0.0003,
}
LAMBDAS, MARGINS = (0.2, 0.8, 4.0), (0.0, 0.02, 0.1)


def with_loss(loss: str, **different: Any) -> Setting:
    """Return the setting with another loss, and with what else differs."""
    arguments: dict[str, Any] = {"loss": loss, **different}
    if loss == "ProxyAnchorLoss":
        arguments["loss_args"] = PROXIES
    return replace(BASE, **arguments)


def sweep(data: str, losses: Mapping[str, float]) -> dict[str, dict[float, Setting]]:
    """Return the runs that choose the learning rates of losses; they evaluate classes that are held out."""
    curves = {}
    for loss in losses:
        rates = sorted({*LEARNING_RATES, *BEYOND[data].get(loss, ())})
        curves[f"{data}, {loss}"] = {lr: with_loss(loss, data=data, lr=lr, held_out=True) for lr in rates}
    return curves


def side_by_side(data: str, losses: Mapping[str, float]) -> dict[str, Setting]:
    """Return the setting of each loss with its learning rate."""
    return {loss: with_loss(loss, data=data, lr=lr) for loss, lr in losses.items()}


def sweep_lambda(loss: str) -> dict[str, dict[float, Setting]]:
    """Return a black-box loss with each margin and lambda, on both data sets."""
    curves = {}
    for data in ("glyphs", "emoji"):
        for margin in MARGINS:
            settings = {}
            for lambda_ in LAMBDAS:
                arguments = {"lambda_": lambda_, "margin": margin}
                settings[lambda_] = replace(BASE, loss=loss, data=data, loss_args=arguments, held_out=True)
            curves[f"{data}, margin {margin}"] = settings
    return curves


def recall_rows() -> dict[str, Setting]:
    """Return RaMBO's recall on both data sets with its default lambda of 4, and with 0.8."""
    rows = {}
    for data in ("glyphs", "emoji"):
        rows[f"{data}, lambda 4"] = with_loss("BlackboxRecallLoss", data=data)
        rows[f"{data}, lambda 0.8"] = with_loss("BlackboxRecallLoss", data=data, loss_args={"lambda_": 0.8})
    return rows


LOSS_EXPERIMENTS = {
    "loss_learning_rate": Experiment(
        "Learning rate of each loss",
        "The learning rates from which those of the next tables were chosen, as said above.",
        {**sweep("glyphs", GLYPHS_RATES), **sweep("emoji", EMOJI_RATES)},
        [],
        seeds=(0,),
        shown=False,
    ),
    "losses": Experiment(
        "Losses side by side",
        "On Glyphs, from random weights. The network of the last row is not trained.",
        {"": {**side_by_side("glyphs", GLYPHS_RATES), "untrained": Setting(images=0)}},
        [
            Finding(
                "FastAP is above contrastive (SOP, R@1 76.4 and 42.0 in RaMBO's Table 2, with other networks)",
                "FastAPLoss",
                "ContrastiveLoss",
            ),
            Finding(
                "FastAP is above triplets (SOP, R@1 76.4 and 42.1 in RaMBO's Table 2, with other networks)",
                "FastAPLoss",
                "TripletMarginLoss",
            ),
            Finding(
                "RaMBO's recall is above FastAP (SOP, R@1 77.8 with log and 76.4 in RaMBO's Table 2)",
                "BlackboxRecallLoss",
                "FastAPLoss",
                metric="R@1",
            ),
            Finding("Smooth-AP is above FastAP (SOP, R@1 80.1 and 76.4)", "SmoothAPLoss", "FastAPLoss"),
            Finding(
                "Smooth-AP is above RaMBO's recall (SOP, R@1 80.1 and 77.8 with log)",
                "SmoothAPLoss",
                "BlackboxRecallLoss",
                metric="R@1",
            ),
            Finding("ROADMAP is above earlier forms of AP (abstract)", "ROADMAPLoss", "SmoothAPLoss"),
            Finding("SupAP alone is above Smooth-AP (ROADMAP*)", "SupAPLoss", "SmoothAPLoss"),
            Finding("Recall@k is above Smooth-AP (Patel et al.*)", "RecallAtKLoss", "SmoothAPLoss", metric="R@1"),
            Finding("Multi-similarity is above Smooth-AP", "MultiSimilarityLoss", "SmoothAPLoss"),
            Finding("Proxy-Anchor is above Smooth-AP", "ProxyAnchorLoss", "SmoothAPLoss"),
        ],
        seeds=FIVE_SEEDS,
    ),
    "losses_emoji": Experiment(
        "Losses side by side on emoji",
        "The same for six of them, with images of colour, in classes of three or four.",
        {"": side_by_side("emoji", EMOJI_RATES)},
        [
            Finding("Smooth-AP is above FastAP", "SmoothAPLoss", "FastAPLoss"),
            Finding("Smooth-AP is above RaMBO's recall", "SmoothAPLoss", "BlackboxRecallLoss", metric="R@1"),
            Finding("ROADMAP is above Smooth-AP", "ROADMAPLoss", "SmoothAPLoss"),
            Finding("Multi-similarity is above Smooth-AP", "MultiSimilarityLoss", "SmoothAPLoss"),
            Finding("Proxy-Anchor is above Smooth-AP", "ProxyAnchorLoss", "SmoothAPLoss"),
        ],
        seeds=FIVE_SEEDS,
    ),
    "recall_lambda": Experiment(
        "Lambda and margin of RaMBO's recall",
        "Lambda is the length of the interpolation, on ranks divided by the length of the list. The classes of the "
        "evaluation are those of the learning rates.",
        sweep_lambda("BlackboxRecallLoss"),
        [],
        seeds=(0,),
        shown=False,
    ),
    "recall_shorter": Experiment(
        "A shorter interpolation for RaMBO's recall",
        "Lambda is the length of the interpolation. 0.8 and a margin of 0.02 had the highest mAP of nine settings on "
        "classes that were held out, on both data sets; 4 is the default. For `BlackboxAPLoss`, lambda 4 was the best.",
        {"": recall_rows()},
        [
            Finding(f"0.8 is better than 4 on {data}", f"{data}, lambda 0.8", f"{data}, lambda 4")
            for data in ("glyphs", "emoji")
        ],
        seeds=FIVE_SEEDS,
    ),
    "ap_lambda": Experiment(
        "Lambda and margin of RaMBO's AP",
        "The same for `BlackboxAPLoss`.",
        sweep_lambda("BlackboxAPLoss"),
        [],
        seeds=(0,),
        shown=False,
    ),
}
