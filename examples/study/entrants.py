"""The peers and candidates of choice.md, with the settings of their own that are tried."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from experiments import Setting

# The tau that the study of pairs chose on each task for log rank with lambda 1.
TAUS = {"glyphs": 0.005, "emoji": 0.005, "head": 0.02, "fine_tuning": 0.02, "photographs": 0.02}
FIELDS = {entry.name for entry in fields(Setting)} - {"loss"}
LOG_RANK, MULTI_SIMILARITY, NORMALIZED_SOFTMAX = "log rank", "multi-similarity", "NormalizedSoftmax"

Values = dict[str, Any]  # of settings, by their names


@dataclass(frozen=True)
class Own:
    """A setting of an entrant's own.

    Args:
        name: a field of `Setting`, or else a parameter of the loss. Several parameters are joined with commas.
        values: what is tried, with a value for each parameter. The first is tried with all learning rates.
        below: what is tried next if the first value is the best one, in this order.
        above: what is tried next if the last value is the best one, in this order.
    """

    name: str
    values: Sequence[Any]
    below: Sequence[Any] = ()
    above: Sequence[Any] = ()


@dataclass(frozen=True)
class Entrant:
    """A peer or a candidate.

    Args:
        base: what differs from the setting of the task.
        own: the settings that are tried.
        adds: the peer whose chosen setting is the added term; None: there is no added term.
        candidate: whether it is a candidate, whose log rank has the tau of `TAUS`.
        begins: the peer whose chosen setting trains the first steps, unless the own setting `first_loss` is None; None:
            there is none.
        extends: the entrant whose chosen setting this one changes; None: it changes the setting of the task.
    """

    base: Mapping[str, Any]
    own: Sequence[Own]
    adds: str | None = None
    candidate: bool = False
    begins: str | None = None
    extends: str | None = None

    @property
    def needs(self) -> set[str]:
        """The entrants whose settings must be chosen before."""
        return {entrant for entrant in (self.adds, self.begins, self.extends) if entrant is not None}

    @property
    def tries_random_proxies(self) -> bool:
        """Whether the best setting is tried with proxies that begin at random, too."""
        return "proxies" in self.base and not self.candidate

    def setting(self, task: str, start: Setting, values: Values, chosen: Mapping[str, Setting]) -> Setting:
        """Return the setting with values.

        Args:
            task: name of the task.
            start: setting of the task.
            values: of `lr`, of `loss_scale`, of the entrant's own settings, and of other fields of `Setting`.
            chosen: the chosen settings of the entrants that this one needs.
        """
        if self.extends is not None:
            start = chosen[self.extends]
        made = replace(start, **self.base)
        arguments = dict(made.loss_args)
        if self.candidate:
            arguments["tau"] = TAUS[task]
        if self.adds is not None:
            peer = chosen[self.adds]
            made = replace(made, added_loss=peer.loss, added_args=peer.loss_args, proxy_rate=peer.proxy_rate)
        if self.begins is not None:
            made = replace(made, first_loss=chosen[self.begins].loss, first_args=chosen[self.begins].loss_args)
        for name, value in values.items():
            if name in FIELDS:
                made = replace(made, **{name: value})
            elif "," in name:
                arguments |= dict(zip(name.split(","), value))
            else:
                arguments[name] = value
        if made.first_loss is None:
            made = replace(made, first_args={})
        return replace(made, loss_args=arguments)

    def combinations(self) -> Iterator[Values]:
        """Yield all combinations of the values of the own settings, the first values first."""
        names = [own.name for own in self.own]
        for combination in itertools.product(*(own.values for own in self.own)):
            yield dict(zip(names, combination))


TEMPERATURE = Own("temperature", (0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5), (0.02, 0.015), (0.7, 1.0))
FACTOR = Own("proxy_rate", (1.0, 10.0), (0.1, 0.01), (100.0, 1000.0))
BATCHES = Own("sampler", ("pk", "shuffled"))
ANGLE = Own("margin", (14.3, 28.6), (7.2, 3.6), (42.9, 57.3))
WITH_PAIRS = Own("added_weight", (1.0, 3.0), (0.3, 0.1), (10.0, 30.0))
WITH_PROXIES = Own("added_weight", (0.1, 0.3, 1.0), (0.03, 0.01), (3.0, 10.0))
HALF_TO_1, ALL_TO_1, NONE_OR_1 = (
    Own("p", (0.5, 1.0), (0.25, 0.1), (1.5, 2.0)),
    Own("p", (0.0, 0.5, 1.0), (), (1.5, 2.0)),
    Own("p", (0.0, 1.0), (), (1.5, 2.0)),
)


def with_proxies(loss: str, *own: Own, **arguments: Any) -> Entrant:
    """Return a peer with proxies of the training classes."""
    base = {"loss": loss, "loss_args": arguments, "proxies": "class means"}
    return Entrant(base, (*own, FACTOR, BATCHES))


def candidate(*own: Own, **settings: Any) -> Entrant:
    """Return a candidate: log rank with weights on its positives, and what is added to it."""
    base = {"loss": "WeightedLogRankLoss", "loss_args": {"lambda_": 1.0}}
    if settings.get("adds") == NORMALIZED_SOFTMAX:
        base["proxies"] = "class means"
    return Entrant(base, own, candidate=True, **settings)


PEERS = {
    LOG_RANK: Entrant(
        {"loss": "LogRankLoss", "loss_args": {"lambda_": 1.0}},
        [Own("tau", (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1), (0.003, 0.002), (0.15, 0.2))],
    ),
    MULTI_SIMILARITY: Entrant(
        {"loss": "MultiSimilarityLoss"},
        [
            Own("alpha", (1.0, 2.0), (0.5, 0.25), (4.0, 8.0)),
            Own("base", (0.5, 0.7), (0.3, 0.1), (0.8, 0.9)),
            Own("beta", (25.0, 50.0), (12.0, 6.0), (100.0, 200.0)),
        ],
    ),
    "supervised contrastive": Entrant({"loss": "SupConLoss"}, [TEMPERATURE]),
    "InfoNCE": Entrant({"loss": "InfoNCELoss"}, [TEMPERATURE]),
    "triplets": Entrant(
        {"loss": "MinedTripletLoss"},
        [
            Own("mining", ("semi-hard", "distance-weighted")),
            Own("margin", (0.05, 0.1, 0.2, 0.3), (0.03, 0.02), (0.5, 0.7)),
        ],
    ),
    "Circle": Entrant(
        {"loss": "CircleLoss"},
        [
            Own("m", (0.25, 0.4), (0.15, 0.1), (0.5, 0.6)),
            Own("gamma", (16.0, 32.0, 64.0, 128.0), (8.0, 4.0), (256.0, 512.0)),
        ],
    ),
    "ArcFace": with_proxies("ArcFaceLoss", ANGLE, scale=16.0),
    "sub-centre ArcFace": with_proxies("SubCenterArcFaceLoss", ANGLE, scale=16.0),
    "CosFace": with_proxies("CosFaceLoss", Own("margin", (0.1, 0.35), (0.05, 0.02), (0.5, 0.7)), scale=16.0),
    NORMALIZED_SOFTMAX: with_proxies(
        "NormalizedSoftmaxLoss", Own("temperature", (0.05, 0.1), (0.03, 0.02), (0.2, 0.3))
    ),
    "ProxyAnchor": with_proxies("ProxyAnchorLoss", Own("alpha", (16.0, 32.0), (8.0, 4.0), (64.0, 128.0))),
    # Two centres, because classes have few images: emoji have three or four.
    "SoftTriple": with_proxies(
        "SoftTripleLoss",
        Own("gamma,la", ((0.1, 20.0), (0.2, 10.0)), ((0.05, 40.0), (0.03, 80.0)), ((0.4, 5.0), (0.8, 2.5))),
        centers_per_class=2,
    ),
}
CANDIDATES = {
    "weighted log rank": candidate(HALF_TO_1),
    "weighted log rank + multi-similarity": candidate(ALL_TO_1, WITH_PAIRS, adds=MULTI_SIMILARITY),
    "weighted log rank + NormalizedSoftmax": candidate(NONE_OR_1, WITH_PROXIES, adds=NORMALIZED_SOFTMAX),
    "multi-similarity for 20 % of the steps, then weighted log rank + multi-similarity": candidate(
        NONE_OR_1, WITH_PAIRS, adds=MULTI_SIMILARITY, begins=MULTI_SIMILARITY
    ),
}
LONGER_LISTS = "log rank of longer lists"
LATER_CANDIDATES = {
    LONGER_LISTS: Entrant(
        {"loss": "WeightedLogRankLoss"},
        [
            Own("tau", (0.01, 0.03), (0.005, 0.003), (0.05, 0.1)),
            Own("lambda_", (1.0, 3.0), (0.3, 0.0), (10.0,)),
            Own("c", (1.0, 10.0), (0.3, 0.1), (100.0, 1000.0)),
        ],
    ),
    f"{LONGER_LISTS} + multi-similarity": Entrant(
        {},
        [Own("first_loss", ("MultiSimilarityLoss", None)), Own("p", (0.0, 1.0), (), (1.5, 2.0)), WITH_PAIRS],
        adds=MULTI_SIMILARITY,
        begins=MULTI_SIMILARITY,
        extends=LONGER_LISTS,
    ),
}
ENTRANTS = {**PEERS, **CANDIDATES, **LATER_CANDIDATES}
