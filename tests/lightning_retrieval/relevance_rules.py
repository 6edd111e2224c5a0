"""Rules of relevance and random images for them; what each rule says of one pair of images, in plain Python."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_retrieval import GalleryOnly, OtherCamera, Relevance, SharedTags


class NearInTime(Relevance):
    """A rule of one's own: relevant are images of the class that were taken at about the same time."""

    reads = ("times",)

    def __init__(self, seconds: int = 2):
        self.seconds = seconds

    def masks(self, queries, references):
        label, time = queries[:, None].unbind(2)
        ref_label, ref_time = references.unbind(1)
        return (label == ref_label) & ((time - ref_time).abs() <= self.seconds), None


class Coarse(Relevance):
    """A rule of one's own that reads labels only: relevant are images of the same `size` consecutive classes."""

    def __init__(self, size: int = 2):
        self.size = size

    def masks(self, queries, references):
        return queries // self.size == references[:, 0] // self.size, None


def coarse(query, reference):
    return query[0] // 2 == reference[0] // 2, True


def shared_tags(at_least):
    def pair(query, reference):
        return len({*query} & {*reference} - {-1}) >= at_least, True

    return pair


def other_camera(query, reference):
    is_candidate = query != reference
    return is_candidate and query[0] == reference[0], is_candidate


def gallery_only(query, reference):
    is_candidate = query[1] in (1, 3) and reference[1] in (2, 3)
    return is_candidate and query[0] == reference[0], is_candidate


def near_in_time(query, reference):
    return query[0] == reference[0] and abs(query[1] - reference[1]) <= 2, True


@dataclass(frozen=True)
class RuleCase:
    """A rule, and whether a reference is relevant to a query and in its list, given what the rule reads of both."""

    rule: Relevance
    pair: Callable


RULES = {
    "shared tags": RuleCase(SharedTags(), shared_tags(1)),
    "two shared tags": RuleCase(SharedTags(2), shared_tags(2)),
    "other camera": RuleCase(OtherCamera(), other_camera),
    "gallery only": RuleCase(GalleryOnly(), gallery_only),
    "near in time": RuleCase(NearInTime(), near_in_time),
    "coarse": RuleCase(Coarse(), coarse),
}


def random_entries(rows: int) -> dict[str, torch.Tensor]:
    """All that the rules read of some images: few values each, so that images share them; some images have no tag."""
    tags = torch.randint(6, (rows, 4)) - (torch.rand(rows, 4) < 0.4) * 6
    return {
        "labels": torch.randint(3, (rows,)),
        "tags": tags.clamp(min=-1),
        "cameras": torch.randint(2, (rows,)),
        "roles": torch.tensor([1, 2, 3, 3])[torch.randint(4, (rows,))],
        "times": torch.randint(6, (rows,)),
    }


def random_columns(name: str, rows: int) -> torch.Tensor:
    entries = random_entries(rows)
    return RULES[name].rule.columns(entries["labels"], entries)


def masks_by_pairs(name: str, queries: torch.Tensor, references: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which references are relevant, and which are candidates, pair by pair."""
    pair = RULES[name].pair
    both = torch.tensor([[pair(query, other) for other in references.tolist()] for query in queries.tolist()])
    return both[..., 0], both[..., 1]
