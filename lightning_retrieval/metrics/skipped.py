"""Why a query has no positive, and is skipped.

The other images of the query's label become fewer in this order, and the first step that leaves none is the reason:

    1. rows      of all updates with its label
    2. ids       rows with the same id are the same image
    3. images    the images of an instance are averaged and count as one
    4. gallery   an image that is only a query, or has no role, is in no list
    5. cameras   an image of its camera is excluded from its list, if cameras are known
    6. rule      any other rule of relevance decides which of the images that are left are relevant candidates

Under a rule by which relevant images need not share labels, the steps begin with all images, not with those of the
query's label, and what else the rule reads is not explained. Rows are counted by sorting, without a mask of queries
and images. Every process has the labels, ids and roles of all rows, so all find the same reasons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from lightning_retrieval.metrics.gathering import Images
from lightning_retrieval.ranking.labels import Role, has_role
from lightning_retrieval.ranking.lists import count_equal
from lightning_retrieval.ranking.relevance import OtherCamera, Relevance, label_rule_of


class Reason(NamedTuple):
    """Why a query has no positive, as the end of a sentence, and what to change, "" if that is not known."""

    text: str
    cure: str


# By the number of steps that leave another image; `of` is " of its label", or "" if the rule is not one of labels.
_REASONS = (
    Reason("there is no other image{of}", "give at least two images of a label"),
    Reason("all rows{of} have its id, so they are the same image", "give each image its own id"),
    Reason(
        "all images{of} are of its instance and are averaged",
        "give at least two instances of a label, or no `instances`",
    ),
    Reason("no other image{of} is in the gallery", "give images of the same labels as queries and as gallery"),
    Reason(
        "all other images{of} in the gallery have its camera and are excluded from its list",
        "give images of a label from at least two cameras, or no `cameras`",
    ),
    Reason("no other image{of} in the gallery is a relevant candidate by {rule}", ""),
)


@dataclass(frozen=True)
class SkippedQueries:
    """Queries without a positive, and the reason of each.

    Args:
        ids: the ids of the queries.
        reason: index of each query's reason.
        reasons: all reasons.
    """

    ids: Int[Tensor, " query"]
    reason: Int[Tensor, " query"]
    reasons: Sequence[Reason]

    def by_id(self) -> dict[int, str]:
        """The reason of each query, by its id."""
        found = {}
        for query, reason in zip(self.ids.tolist(), self.reason.tolist()):
            found[query] = self.reasons[reason].text
        return found

    def summary(self) -> str:
        """The reasons, the most frequent first, each with its number of queries and what to change."""
        counts = torch.bincount(self.reason, minlength=len(self.reasons))
        parts = []
        for index in counts.argsort(descending=True, stable=True).tolist():
            count, reason = int(counts[index]), self.reasons[index]
            if count == len(self.ids):
                return "; ".join(filter(None, (f"for each, {reason.text}", reason.cure)))
            if count > 0:
                part = f"for {count} of them, {reason.text}"
                if reason.cure:
                    part += f" ({reason.cure})"
                parts.append(part)
        return "; ".join(parts)


def skipped_queries(ids: Int[Tensor, " query"], images: Images, collected: Images, rule: Relevance) -> SkippedQueries:
    """Find out why queries have no positive.

    Args:
        ids: the ids of these queries, of which none has a positive.
        images: all images, with the roles in which they are ranked.
        collected: the rows of which the images were merged.
        rule: the rule of the lists.
    """
    columns, roles = images.listed.labels, images.columns["roles"]
    label, label_of_row = columns[:, 0], collected.labels[:, 0]
    of, label_rule = " of its label", label_rule_of(rule)
    # The lists of a subclass may follow a rule of its own, and not the labels.
    if label_rule is None or type(rule) is not type(images.rule):
        of, label, label_of_row = "", torch.zeros_like(label), torch.zeros_like(label_of_row)
    elif label_rule.labels(columns).shape[1] > 1:
        of = " of its finest label"
    label_of_id = torch.stack([label_of_row, collected.ids], 1).unique(dim=0)[:, 0]

    queries = torch.searchsorted(images.ids, ids.to(images.ids.device))
    of_queries, is_gallery = label[queries], has_role(roles, Role.GALLERY)
    in_gallery = is_gallery[queries].long()
    others = [count_equal([of_queries], [labels]) - 1 for labels in (label_of_row, label_of_id, label)]
    others.append(count_equal([of_queries], [label[is_gallery]]) - in_gallery)
    of_other_cameras = others[-1]
    if type(rule) is OtherCamera:  # an image of another camera would be a positive
        of_other_cameras = torch.zeros_like(of_other_cameras)
    others.append(of_other_cameras)
    reasons = [Reason(text.format(of=of, rule=rule), cure) for text, cure in _REASONS]
    return SkippedQueries(images.ids[queries], (torch.stack(others) > 0).sum(0), reasons)
