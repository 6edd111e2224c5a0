"""What `study.py` compares: settings, what the papers found about them, and how that is told from what shows here."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

SAME, NOT_SAME = "same direction", "not the same direction"
NO_DIFFERENCE = "no difference beyond the spread of seeds"
ROUNDING = 1e-4  # of a metric, below which two runs are equal: a near tie that falls the other way


@dataclass(frozen=True)
class Setting:
    """All that a run follows from but its seed; the defaults are what every experiment starts from."""

    loss: str = "SmoothAPLoss"  # with the papers' parameters, which are the library's defaults,
    loss_args: Mapping[str, Any] = field(default_factory=dict)  # but for these
    classes: int = 32  # of a batch
    per_class: int = 4  # images of each
    sampler: Literal["pk", "category", "whole classes"] = "pk"
    memory: int = 0  # images of past batches that are ranked too
    memory_start: int = 0  # the step from which they are
    chunk_size: int | None = None
    freeze_batch_norm: bool = False
    precision: Literal["32-true", "64-true"] = "32-true"
    images: int = 40_000  # seen in training, whatever the batch; 0: the untrained network
    lr: float = 0.002
    width: int = 16  # channels of the network's first layer
    dim: int = 128
    test_batches: int | None = None  # of 512 images; the whole test set where None

    def key(self, seed: int) -> str:
        text = json.dumps({**asdict(self), "seed": seed}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Finding:
    """What a paper found, as a claim about two rows of a table.

    One is `"better"` than the other, `"no worse"`, or `"equal"` to it: seed by seed, up to rounding.
    """

    paper: str
    one: str
    other: str
    claim: Literal["better", "no worse", "equal"] = "better"
    metric: str = "mAP"

    def verdict(self, one: Sequence[float], other: Sequence[float]) -> str:
        """Whether the seeds' values say the same. Only ranges that do not overlap are told apart."""
        if self.claim == "equal":
            return SAME if all(abs(a - b) <= ROUNDING for a, b in zip(one, other)) else NOT_SAME
        if max(one) < min(other):
            return NOT_SAME
        return SAME if self.claim == "no worse" or min(one) > max(other) else NO_DIFFERENCE


@dataclass(frozen=True)
class Experiment:
    """Settings to compare: the curves of a plot, each with a setting for each x, a number (with `axis`) or a name."""

    title: str
    about: str
    curves: Mapping[str, Mapping[Any, Setting]]
    findings: Sequence[Finding]
    axis: str | None = None
    metric: str = "mAP"  # that is plotted

    @property
    def rows(self) -> dict[str, Setting]:
        """The settings under the names that the table and the findings give them."""
        return {
            f"{curve}, {x}" if curve else str(x): setting
            for curve, settings in self.curves.items()
            for x, setting in settings.items()
        }


def vary(start: Setting, argument: str, values: Sequence[Any], default: Any) -> dict[Any, Setting]:
    """The setting with each value of an argument of its loss; the default is the setting itself, which runs once."""
    return {x: start if x == default else replace(start, loss_args={argument: x}) for x in values}


BASE, FAST_AP, AP_Q = Setting(), Setting(loss="FastAPLoss"), Setting(loss="QuantizedAPLoss")
RECALL = Setting(loss="BlackboxRecallLoss")
WHOLE_CLASSES = replace(AP_Q, sampler="whole classes")
EXACT = Setting(freeze_batch_norm=True, precision="64-true", images=12_800)
AP_LOSSES = ("SmoothAPLoss", "FastAPLoss", "QuantizedAPLoss", "BlackboxAPLoss", "SupAPLoss", "ROADMAPLoss")
RECALL_LOSSES = ("BlackboxRecallLoss", "RecallAtKLoss")
THEIRS = ("ContrastiveLoss", "TripletMarginLoss")  # of pytorch-metric-learning
TIE_AWARE = ("simplified", "full")

# A finding with a star is given from memory: the paper was not at hand. The others were looked up, in the papers, in
# what their authors say of them, or in the tables of later papers.
EXPERIMENTS = {
    "losses": Experiment(
        "Losses side by side",
        "Each loss with its paper's parameters, the baselines with pytorch-metric-learning's; the learning rate was "
        "tuned for none of them.",
        {
            "": {
                **{name: Setting(loss=name) for name in (*AP_LOSSES, *RECALL_LOSSES, *THEIRS)},
                "untrained": Setting(images=0),
            }
        },
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
                "RaMBO's recall is above FastAP (SOP, R@1 78.6 and 76.4 in RaMBO's Table 2)",
                "BlackboxRecallLoss",
                "FastAPLoss",
                metric="R@1",
            ),
            Finding("Smooth-AP is above FastAP (SOP, R@1 80.1 and 76.4)", "SmoothAPLoss", "FastAPLoss"),
            Finding(
                "Smooth-AP is above RaMBO's recall (SOP, R@1 80.1 and 78.6)",
                "SmoothAPLoss",
                "BlackboxRecallLoss",
                metric="R@1",
            ),
            Finding("ROADMAP is above earlier forms of AP (abstract)", "ROADMAPLoss", "SmoothAPLoss"),
            Finding("SupAP alone is above Smooth-AP (ROADMAP*)", "SupAPLoss", "SmoothAPLoss"),
            Finding("Recall@k is above Smooth-AP (Patel et al.*)", "RecallAtKLoss", "SmoothAPLoss", metric="R@1"),
        ],
    ),
    "batch_size": Experiment(
        "Batch size",
        "Four images of each class, one learning rate. First the number of images seen is the same, as papers train "
        "for the same epochs: all runs cost the same, but the largest batch takes 16 times fewer steps than the "
        "smallest. So `SmoothAPLoss` is also run with the same number of steps, where the largest batch sees 16 times "
        "more images than the smallest. These runs, and the cut of each claim in two at 128, were added when the "
        "others were known.",
        {
            "SmoothAPLoss": {4 * P: replace(BASE, classes=P) for P in (8, 16, 32, 64, 128)},
            "FastAPLoss": {4 * P: replace(FAST_AP, classes=P) for P in (8, 32, 128)},
            "QuantizedAPLoss": {4 * P: replace(AP_Q, classes=P) for P in (8, 32, 128)},
            "SmoothAPLoss, same steps": {
                4 * P: replace(BASE, classes=P, images=BASE.images * P // BASE.classes) for P in (8, 16, 32, 64, 128)
            },
        },
        [
            Finding(f"Larger is better: {one} against {other} ({source})", f"{curve}, {one}", f"{curve}, {other}")
            for curve, source in {
                "SmoothAPLoss": "Smooth-AP, Table 5",
                "SmoothAPLoss, same steps": "Smooth-AP, Table 5, same steps",
                "FastAPLoss": "FastAP, Fig. 4a*",
                "QuantizedAPLoss": "Revaud et al., Fig. 5*",
            }.items()
            for one, other in ((128, 32), (512, 128))
        ],
        axis="images of a batch",
    ),
    "bins": Experiment(
        "Number of bins",
        "FastAP counts intervals of the squared distance from 0 to 4, AP-Q (`QuantizedAPLoss`) bin centres of the "
        "cosine from -1 to 1.",
        {
            "FastAPLoss": vary(FAST_AP, "num_bins", (5, 10, 20, 40), 10),
            "QuantizedAPLoss": vary(AP_Q, "num_bins", (5, 10, 20, 40), 20),
        },
        [
            Finding("10 bins are enough (FastAP, Fig. 4b*)", "FastAPLoss, 10", "FastAPLoss, 40", "no worse"),
            Finding("20 bins are enough (Revaud, Fig. 4*)", "QuantizedAPLoss, 20", "QuantizedAPLoss, 40", "no worse"),
            Finding("Too few are too coarse (Revaud et al., Fig. 4*)", "QuantizedAPLoss, 20", "QuantizedAPLoss, 5"),
        ],
        axis="bins",
    ),
    "tau": Experiment(
        "Temperature tau",
        "Of the sigmoid that stands for a step in Smooth-AP.",
        {"SmoothAPLoss": vary(BASE, "tau", (0.001, 0.01, 0.1), 0.01)},
        [
            Finding("0.01 is better than 0.1 (Smooth-AP, Table 5*)", "SmoothAPLoss, 0.01", "SmoothAPLoss, 0.1"),
            Finding("0.01 is better than 0.001 (Smooth-AP, Table 5*)", "SmoothAPLoss, 0.01", "SmoothAPLoss, 0.001"),
        ],
        axis="tau",
    ),
    "per_class": Experiment(
        "Images of each class",
        "K of them, in batches of 128, so that more images of a class mean fewer classes. Half of the training "
        "classes have 9 images or fewer; a class with fewer than K gives some of them twice.",
        {"SmoothAPLoss": {K: replace(BASE, classes=128 // K, per_class=K) for K in (2, 4, 8)}},
        [Finding("4 are better than 8 (Smooth-AP, Table 5*)", "SmoothAPLoss, 4", "SmoothAPLoss, 8")],
        axis="images of each class (K)",
    ),
    "category_sampling": Experiment(
        "Category sampling",
        "Batches of two categories (`CategorySampler`) against batches of any classes (`PKSampler`). Glyphs has no "
        "categories of a useful size: here one is 32 training characters that are neighbours in Unicode, such as "
        "accented Latin letters, arrows or Braille.",
        {"": {"FastAPLoss, any classes": FAST_AP, "FastAPLoss, two categories": replace(FAST_AP, sampler="category")}},
        [
            Finding(
                "Two categories are better (FastAP, section 4.2*)",
                "FastAPLoss, two categories",
                "FastAPLoss, any classes",
            )
        ],
    ),
    "class_balancing": Experiment(
        "Class balancing",
        "`class_balanced=True` lets each class of a batch weigh the same, not each image. Batches are filled with "
        "whole classes, of 2 to 29 images, so that there is something to balance.",
        {"": {"AP-Q": WHOLE_CLASSES, "AP-Q, balanced": replace(WHOLE_CLASSES, loss_args={"class_balanced": True})}},
        [Finding("Balancing helps (Revaud et al., Fig. 7*)", "AP-Q, balanced", "AP-Q")],
    ),
    "tie_aware": Experiment(
        "Tie-aware AP",
        "What shares a bin is of equal rank; the tie-aware forms take the mean over its orders.",
        {"": {"AP-Q": AP_Q, **{f"tie-aware, {x}": replace(AP_Q, loss_args={"tie_aware": x}) for x in TIE_AWARE}}},
        [
            Finding(
                f"Plain AP-Q will do, against the {x} form (Revaud et al., Fig. 8*)",
                "AP-Q",
                f"tie-aware, {x}",
                "no worse",
            )
            for x in TIE_AWARE
        ],
    ),
    "memory_margin": Experiment(
        "Memory and margin",
        "RaMBO's recall loss with and without its margin of 0.02, and with and without a memory of 512 images. The "
        "memory is of embeddings (`CrossBatchMemory`); RaMBO's is of scores. A network that starts from nothing, as "
        "here, may change too fast for it: the last row has the memory begin half-way (`start_step`). It and the "
        "claim of the margin without memory were added when the others were known.",
        {
            "": {
                "memory and margin": replace(RECALL, memory=512),
                "margin alone": RECALL,
                "memory alone": replace(RECALL, memory=512, loss_args={"margin": 0.0}),
                "neither": replace(RECALL, loss_args={"margin": 0.0}),
                "margin, and memory from half-way": replace(RECALL, memory=512, memory_start=156),
            }
        },
        [
            Finding(
                "Memory helps (RaMBO, Table 7: CUB 64.0 with, 62.5 without; SOP 78.6, 72.4)",
                "memory and margin",
                "margin alone",
                metric="R@1",
            ),
            Finding(
                "Memory helps, begun half-way (as above)",
                "margin, and memory from half-way",
                "margin alone",
                metric="R@1",
            ),
            Finding(
                "Margin helps (RaMBO, Table 7: CUB 64.0 with, 63.2 without; some runs without diverged)",
                "memory and margin",
                "memory alone",
                metric="R@1",
            ),
            Finding("Margin helps, without the memory (as above)", "margin alone", "neither", metric="R@1"),
        ],
        metric="R@1",
    ),
    "calibration": Experiment(
        "Calibration",
        "ROADMAP is SupAP and a calibration loss, half of each; without the second it is SupAP.",
        {"": {"with calibration": Setting(loss="ROADMAPLoss"), "without": Setting(loss="SupAPLoss")}},
        [Finding("Both parts matter (ROADMAP, abstract)", "with calibration", "without")],
    ),
    "chunks": Experiment(
        "Chunks",
        "A batch of 128 embedded at once, and 48 at a time (`chunk_size=48`), with BatchNorm frozen and in float64, so "
        "that rounding does not grow over the steps; these runs are short, see 12,800 images (6,400 at first, "
        "with which they had hardly learned) and compare with each other only.",
        {"": {"whole batch": EXACT, "chunks of 48": replace(EXACT, chunk_size=48)}},
        [Finding("The gradient is the same (FastAP*, Revaud et al.*)", "chunks of 48", "whole batch", "equal")],
    ),
}
