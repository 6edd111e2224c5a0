"""What `run.py` trains and compares: settings, findings, and the experiments of the papers' ablations."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from intervals import interval

SAME, NOT_SAME, NO_DIFFERENCE = "holds", "the opposite holds", "not shown"
FIVE_SEEDS = (0, 1, 2, 3, 4)
ROUNDING = 1e-4  # largest difference of a metric between equal runs, which a near tie can cause


@dataclass(frozen=True)
class Setting:
    """Everything that determines a run except its seed. All experiments vary these defaults."""

    loss: str = "SmoothAPLoss"  # with the paper's parameters, which are the library's defaults
    loss_args: Mapping[str, Any] = field(default_factory=dict)  # parameters that differ from them
    classes: int = 32  # in a batch
    per_class: int = 4  # images of each class in a batch
    sampler: Literal["pk", "category", "whole classes", "shuffled"] = "pk"
    memory: int = 0  # number of past images that are also ranked
    memory_start: int | float = 0  # first step in which they are ranked; as a float, the drift below which they are
    memory_mode: Literal["one_list", "one_list_detached", "two_terms"] = "one_list"
    chunk_size: int | None = None
    freeze_batch_norm: bool = False
    precision: Literal["32-true", "64-true"] = "32-true"
    images: int = 40_000  # number of training images over all batches; 0 for the untrained network
    lr: float = 0.002
    width: int = 16  # channels of the first layer of the network
    dim: int | None = 128  # None: the features of the pretrained network, without a head
    pooling: Literal["gem", "avg", "max", "flatten"] = "gem"
    weight_decay: float = 0.01
    test_batches: int | None = None  # number of test batches of 512 images; None for the whole test set
    data: Literal["glyphs", "emoji", "photographs"] = "glyphs"
    network: Literal["GlyphNet", "head", "last stages"] = "GlyphNet"  # what is trained of a pretrained network
    start: "Setting | None" = None  # whose network, trained with the same seed, is trained on; None: random weights
    held_out: bool = False  # whether a part of the training classes is held out, and evaluated instead of the test set
    trained_classes: bool = False  # whether an untrained image of each training class queries its trained ones instead
    loss_scale: float = 1.0  # factor of the loss, which changes how much of a gradient is clipped
    first_loss: str | None = None  # with which the first fifth of the steps is trained; None: `loss`
    first_args: Mapping[str, Any] = field(default_factory=dict)  # its parameters that differ from the defaults
    added_loss: str | None = None  # a term that is added to `loss`
    added_args: Mapping[str, Any] = field(default_factory=dict)  # its parameters that differ from the defaults
    added_weight: float = 1.0
    # How the proxies of the training classes begin, if they are trained apart; None: as all parameters are.
    proxies: Literal["class means", "random"] | None = None
    proxy_rate: float = 1.0  # learning rate of these proxies, divided by that of the network

    def key(self, seed: int) -> str:
        """Return a hash of the seed and of what differs from the defaults."""
        text = json.dumps({**self.different(), "seed": seed}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def different(self) -> dict[str, Any]:
        """Return what differs from the defaults, also in the setting from which this one starts."""
        defaults = Setting()
        values = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value != getattr(defaults, entry.name):
                values[entry.name] = value
        if self.start is not None:
            values["start"] = self.start.different()
        return values

    def chosen(self) -> str:
        """Return what is chosen for a loss, on one line."""
        names = ("proxies", "proxy_rate", "sampler", "added_weight", "first_loss")
        values: dict[str, Any] = {"lr": self.lr, "loss_scale": self.loss_scale, **self.loss_args}
        values |= {name: value for name, value in self.different().items() if name in names}
        return ", ".join(f"{name} {value}" for name, value in values.items())


@dataclass(frozen=True)
class Finding:
    """A paper's finding, as a claim about two rows of a table.

    The first row is `"better"` than the other, `"no worse"`, or `"equal"` to it for each seed, up to rounding.
    """

    paper: str
    one: str
    other: str
    claim: Literal["better", "no worse", "equal"] = "better"
    metric: str = "mAP"

    def verdict(self, one: Sequence[float], other: Sequence[float]) -> str:
        """Compare the claim with the values of both rows for each seed, by the interval of their paired differences."""
        if self.claim == "equal":
            if all(abs(a - b) <= ROUNDING for a, b in zip(one, other)):
                return SAME
            return NOT_SAME
        if len(one) < 2:
            return NO_DIFFERENCE
        _, low, high = interval([a - b for a, b in zip(one, other)])
        if high < 0:
            return NOT_SAME
        if self.claim == "no worse" or low > 0:
            return SAME
        return NO_DIFFERENCE


@dataclass(frozen=True)
class Experiment:
    """Settings to compare: the curves of a plot, each with one setting for each x.

    An x is a number if the plot has an `axis`, which is its label, and a name otherwise.
    """

    title: str
    about: str
    curves: Mapping[str, Mapping[Any, Setting]]
    findings: Sequence[Finding]
    axis: str | None = None
    seeds: Sequence[int] = (0, 1, 2)
    shown: bool = True  # on the page; others only choose settings
    with_settings: bool = False  # whether the table has a column with what was chosen
    chosen_by: str | None = None  # the experiment from whose results the settings follow; it is run before

    @property
    def rows(self) -> dict[str, Setting]:
        """The settings by the names that the table and the findings use."""
        rows = {}
        for curve, settings in self.curves.items():
            for x, setting in settings.items():
                name = str(x)
                if curve:
                    name = f"{curve}, {x}"
                rows[name] = setting
        return rows


def vary(start: Setting, argument: str, values: Sequence[Any], default: Any) -> dict[Any, Setting]:
    """Return the setting with each value of one argument of its loss.

    For the default value it is the setting itself, so that experiments share its runs.
    """
    settings = {}
    for value in values:
        settings[value] = start
        if value != default:
            settings[value] = replace(start, loss_args={argument: value})
    return settings


def vary_batch(
    start: Setting, classes: Sequence[int], *, same_steps: bool = False, scale_lr: bool = False
) -> dict[int, Setting]:
    """Return the setting with each number of classes in a batch, by the number of images in the batch.

    The number of training images is the same, or with `same_steps` the number of steps. With `scale_lr` the learning
    rate is proportional to the batch.
    """
    settings = {}
    for number in classes:
        setting = replace(start, classes=number)
        if same_steps:
            setting = replace(setting, images=start.images * number // start.classes)
        if scale_lr:
            setting = replace(setting, lr=start.lr * number / start.classes)
        settings[start.per_class * number] = setting
    return settings


def larger_is_better(curve: str, sources: Mapping[tuple[int, int], str]) -> list[Finding]:
    """Return the claims that the first batch of each pair is better than the second, each with its source."""
    return [
        Finding(f"{curve}: {one} is better than {other} ({source})", f"{curve}, {one}", f"{curve}, {other}")
        for (one, other), source in sources.items()
    ]


BASE, FAST_AP, AP_Q = Setting(), Setting(loss="FastAPLoss"), Setting(loss="QuantizedAPLoss")
FAST_AP_EMOJI = replace(FAST_AP, data="emoji")
RECALL = Setting(loss="BlackboxRecallLoss")
WHOLE_CLASSES = replace(AP_Q, sampler="whole classes")
EXACT = Setting(freeze_batch_norm=True, precision="64-true", images=12_800)
THIRD_PARTY = (
    "ContrastiveLoss",
    "TripletMarginLoss",
    "MultiSimilarityLoss",
    "ProxyAnchorLoss",
    "SupConLoss",
    "CircleLoss",
)  # of pytorch-metric-learning
LARGER = ((128, 32), (512, 128))
TABLE_5 = {(256, 64): "Smooth-AP, Table 5", (512, 128): "beyond Smooth-AP's Table 5, which ends at 256"}
TIE_AWARE = {  # form: the source of the claim that it is not better than the plain one
    "simplified": "Revaud et al., Fig. 8: the plain form is a little better",
    "full": "Revaud et al. tried the simplified form only",
}

ABLATION_EXPERIMENTS = {
    "batch_size": Experiment(
        "Batch size",
        "Four images of each class. The first runs have the same learning rate and the same number of training "
        "images, as papers train for the same number of epochs, so the largest batch takes 16 times fewer steps than "
        "the smallest. `SmoothAPLoss` is also trained with a learning rate in proportion to the batch, and with the "
        "same number of steps.",
        {
            "SmoothAPLoss": vary_batch(BASE, (8, 16, 32, 64, 128)),
            "FastAPLoss": vary_batch(FAST_AP, (8, 32, 128)),
            "QuantizedAPLoss": vary_batch(AP_Q, (8, 32, 128)),
            "SmoothAPLoss, scaled rate": vary_batch(BASE, (8, 16, 32, 64, 128), scale_lr=True),
            "SmoothAPLoss, same steps": vary_batch(BASE, (8, 16, 32, 64, 128), same_steps=True),
        },
        [
            *larger_is_better("SmoothAPLoss", TABLE_5),
            *larger_is_better("SmoothAPLoss, scaled rate", TABLE_5),
            *larger_is_better("SmoothAPLoss, same steps", TABLE_5),
            *larger_is_better("FastAPLoss", dict.fromkeys(LARGER, "FastAP, Fig. 4a")),
            *larger_is_better("QuantizedAPLoss", dict.fromkeys(LARGER, "Revaud et al., Fig. 5")),
        ],
        axis="images of a batch",
    ),
    "bins": Experiment(
        "Number of bins",
        "Of FastAP, intervals of the squared distance from 0 to 4; of AP-Q (`QuantizedAPLoss`), bin centres of the "
        "cosine similarity from -1 to 1.",
        {
            "FastAPLoss": vary(FAST_AP, "num_bins", (5, 10, 20, 40), 10),
            "QuantizedAPLoss": vary(AP_Q, "num_bins", (5, 10, 20, 40), 20),
        },
        [
            Finding("10 bins are enough (FastAP, Fig. 4b)", "FastAPLoss, 10", "FastAPLoss, 40", "no worse"),
            Finding(
                "20 bins are enough (Revaud et al., Fig. 4: the number has little impact)",
                "QuantizedAPLoss, 20",
                "QuantizedAPLoss, 40",
                "no worse",
            ),
            Finding(
                "Too few bins are too coarse (FastAP, section 5.3; Revaud et al. find little impact)",
                "QuantizedAPLoss, 20",
                "QuantizedAPLoss, 5",
            ),
        ],
        axis="bins",
    ),
    "tau": Experiment(
        "Temperature tau",
        "The temperature of the sigmoid that replaces the step function in Smooth-AP.",
        {"SmoothAPLoss": vary(BASE, "tau", (0.001, 0.01, 0.1), 0.01)},
        [
            Finding("0.01 is better than 0.1 (Smooth-AP, Table 5)", "SmoothAPLoss, 0.01", "SmoothAPLoss, 0.1"),
            Finding("0.01 is better than 0.001 (Smooth-AP, Table 5)", "SmoothAPLoss, 0.01", "SmoothAPLoss, 0.001"),
        ],
        axis="tau",
    ),
    "per_class": Experiment(
        "Images of each class",
        "A batch has 128 images, K of each class. Half of the training classes have 9 images or fewer; a class with "
        "fewer than K images contributes some of them twice.",
        {"SmoothAPLoss": {K: replace(BASE, classes=128 // K, per_class=K) for K in (2, 4, 8)}},
        [Finding("4 images are better than 8 (Smooth-AP, Table 5)", "SmoothAPLoss, 4", "SmoothAPLoss, 8")],
        axis="images of each class (K)",
    ),
    "category_sampling": Experiment(
        "Category sampling",
        "Batches of two categories (`CategorySampler`) against batches of any classes (`PKSampler`). The emoji have "
        "ten categories, such as flags. Glyphs has none of a useful size: there a category is 32 training characters "
        "that are neighbours in Unicode.",
        {
            "": {
                "emoji, any classes": FAST_AP_EMOJI,
                "emoji, two categories": replace(FAST_AP_EMOJI, sampler="category"),
                "Glyphs, any classes": FAST_AP,
                "Glyphs, two categories": replace(FAST_AP, sampler="category"),
            }
        },
        [
            Finding(
                f"Two categories are better on {data} (FastAP, section 4.2)",
                f"{data}, two categories",
                f"{data}, any classes",
            )
            for data in ("emoji", "Glyphs")
        ],
    ),
    "class_balancing": Experiment(
        "Class balancing",
        "With `class_balanced=True` each class of a batch has the same weight, instead of each image. The batches are "
        "filled with whole classes of 2 to 29 images, so that there is something to balance.",
        {"": {"AP-Q": WHOLE_CLASSES, "AP-Q, balanced": replace(WHOLE_CLASSES, loss_args={"class_balanced": True})}},
        [Finding("Balancing helps (Revaud et al., Fig. 7)", "AP-Q, balanced", "AP-Q")],
    ),
    "tie_aware": Experiment(
        "Tie-aware AP",
        "Images in the same bin have the same rank; the tie-aware forms average over their orders.",
        {"": {"AP-Q": AP_Q, **{f"tie-aware, {x}": replace(AP_Q, loss_args={"tie_aware": x}) for x in TIE_AWARE}}},
        [
            Finding(
                f"Plain AP-Q is sufficient, against the {x} form ({source})",
                "AP-Q",
                f"tie-aware, {x}",
                "no worse",
            )
            for x, source in TIE_AWARE.items()
        ],
    ),
    "score_memory": Experiment(
        "Memory of scores, and margin",
        "RaMBO's recall loss with and without its margin of 0.02, and its memory of the scores of four past batches. "
        "That memory makes no list longer: it acts as a weighting, `BlackboxRecallLoss(batch_memory=4)`. A memory of "
        "embeddings has [a page of its own](memory.md).",
        {
            "": {
                "memory and margin": replace(RECALL, loss_args={"batch_memory": 4}),
                "margin alone": RECALL,
                "memory alone": replace(RECALL, loss_args={"batch_memory": 4, "margin": 0.0}),
                "neither": replace(RECALL, loss_args={"margin": 0.0}),
            }
        },
        [
            Finding(
                "Memory helps (RaMBO, Table 7: CUB 64.0 with, 62.5 without; SOP, with log log, 78.6 and 72.4)",
                "memory and margin",
                "margin alone",
                metric="R@1",
            ),
            Finding("Memory helps without the margin (as above)", "memory alone", "neither", metric="R@1"),
            Finding(
                "Margin helps (RaMBO, Table 7: CUB 64.0 with, 63.2 without; some runs without diverged)",
                "memory and margin",
                "memory alone",
                metric="R@1",
            ),
            Finding("Margin helps without the memory (as above)", "margin alone", "neither", metric="R@1"),
        ],
    ),
    "calibration": Experiment(
        "Calibration",
        "ROADMAP is the mean of SupAP and a calibration loss.",
        {"": {"with calibration": Setting(loss="ROADMAPLoss"), "without": Setting(loss="SupAPLoss")}},
        [Finding("Both parts matter (ROADMAP, abstract)", "with calibration", "without")],
    ),
    "chunks": Experiment(
        "Chunks",
        "A batch of 128 images is embedded at once, or 48 images at a time (`chunk_size=48`). BatchNorm is frozen, and "
        "the runs are in float64, so that rounding errors do not grow over the steps. They see 12,800 images only, so "
        "they compare only with each other.",
        {"": {"whole batch": EXACT, "chunks of 48": replace(EXACT, chunk_size=48)}},
        [
            Finding(
                "The gradient is the same (FastAP, section 4.1; Revaud et al., section 3.3)",
                "chunks of 48",
                "whole batch",
                "equal",
            )
        ],
    ),
}
