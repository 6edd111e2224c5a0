"""Why queries have no positive: for each query, in the warning, for any number of processes; against plain loops."""

import pytest
import torch

from lightning_retrieval import SharedTags
from lightning_retrieval.metrics import RandomGalleryMetrics, RetrievalMetrics
from tests.lightning_retrieval.metrics.helpers import LargestTensor
from tests.lightning_retrieval.relevance_rules import RULES, random_entries

# What the reason of a query says.
ALONE, SAME_ID, INSTANCE = "there is no other image", "have its id", "are of its instance"
NOT_IN_GALLERY, CAMERA, RULE = "is in the gallery", "have its camera", "is a relevant candidate by"
OF_LABELS = {ALONE, SAME_ID, NOT_IN_GALLERY}
# For each kind of set: the columns beside labels, ids and roles, the name of its rule in `RULES`, and all reasons.
KINDS = {
    "labels": ((), None, OF_LABELS),
    "levels": ((), None, OF_LABELS),
    "cameras": (("cameras",), None, OF_LABELS | {CAMERA}),
    "cameras and levels": (("cameras",), None, OF_LABELS | {CAMERA}),
    "instances": (("instances",), None, OF_LABELS | {INSTANCE}),
    "instances and cameras": (("instances", "cameras"), None, OF_LABELS | {INSTANCE, CAMERA}),
    "cameras by a rule": ((), "other camera", OF_LABELS | {CAMERA}),
    "tags": ((), "two shared tags", {RULE}),
    "a rule with classes": ((), "near in time", {RULE}),
    "a rule that joins classes": ((), "coarse", {RULE}),
}


def random_rows(kind, seed, rows=14):
    """What `update` takes. Some rows have the same id, and then the same values; labels are rare, so many are alone."""
    columns, rule, _ = KINDS[kind]
    torch.manual_seed(seed)
    ids = torch.randint(0, 3 * rows, (rows,))[torch.randint(0, rows, (rows,))]
    instances = ids // 6 if "instances" in columns else ids
    entries = {name: values[instances] for name, values in random_entries(3 * rows).items()}
    entries["labels"] = torch.randint(0, [2, 5, 12][seed % 3], (3 * rows,))[instances]
    given = {"labels": entries["labels"], "ids": ids, "roles": torch.randint(0, 4, (3 * rows,))[instances]}
    if seed % 2:
        given["roles"] = torch.full_like(ids, 3)
    if "levels" in kind:
        given["labels"] = torch.stack([given["labels"], given["labels"] // 3], 1)
    if rule is not None:
        given["labels"] = RULES[rule].rule.columns(entries["labels"], entries)
    for name in columns:
        given[name] = {"cameras": entries["cameras"], "instances": instances}[name]
    return {"embeddings": torch.randn(3 * rows, 4)[ids], **given}


def images_of(given):
    """The images as dicts, by a plain loop: rows with the same id, or of the same instance, are one."""
    images = {}
    for row in range(len(given["ids"])):
        values = {name: given[name][row].tolist() for name in given if name != "embeddings"}
        values["columns"] = values.pop("labels") if given["labels"].ndim == 2 else [values.pop("labels")]
        image = images.setdefault(values.get("instances", values["ids"]), {**values, "rows": 0, "of_ids": set()})
        image["rows"] += 1
        image["of_ids"].add(values["ids"])
        image["roles"] |= values["roles"]
    return list(images.values())


def reasons_by_loops(kind, given):
    """{id of a query without a positive: what its reason says}, pair by pair."""
    name, images, found = KINDS[kind][1], images_of(given), {}
    for query in images:
        if not query["roles"] & 1:
            continue
        others = [image for image in images if image is not query]
        if name in (None, "other camera"):
            others = [image for image in others if image["columns"][0] == query["columns"][0]]
        listed = [image for image in others if image["roles"] & 2]
        if name is not None:
            relevant = [image for image in listed if all(RULES[name].pair(query["columns"], image["columns"]))]
        else:
            relevant = [image for image in listed if "cameras" not in image or image["cameras"] != query["cameras"]]
        if relevant:
            continue
        reason = RULE
        if listed and (name == "other camera" or "cameras" in query):
            reason = CAMERA
        elif others and not listed:
            reason = NOT_IN_GALLERY
        elif not others and len(query["of_ids"]) > 1:
            reason = INSTANCE
        elif not others:
            reason = SAME_ID if query["rows"] > 1 else ALONE
        found[min(query["of_ids"])] = reason
    return found


def metrics_of(kind, **settings):
    rule = KINDS[kind][1]
    return RetrievalMetrics((1,), relevance=None if rule is None else RULES[rule].rule, **settings)


@pytest.mark.filterwarnings("ignore:RetrievalMetrics. none of the")
@pytest.mark.parametrize("kind", KINDS)
def test_the_reason_of_each_query_is_that_of_a_loop_over_all_pairs(kind):
    seen = set()
    for seed in range(12):
        given = random_rows(kind, seed)
        metrics, expected = metrics_of(kind), reasons_by_loops(kind, given)
        metrics.update(**given)
        found, values = metrics.why_skipped(), metrics.per_query()
        assert sorted(found) == values["ids"][values["AP"].isnan()].tolist() == sorted(expected)
        for id_, reason in expected.items():
            assert reason in found[id_], (seed, id_)
        seen |= set(expected.values())
    assert seen == KINDS[kind][2]


def test_each_direction_has_its_reasons():
    given = {"labels": torch.tensor([5, 5, 7, 8]), "roles": torch.tensor([1, 2, 1, 2]), "ids": torch.arange(4)}
    metrics = RetrievalMetrics((1,), reverse=True)
    metrics.update(torch.randn(4, 2), **given)
    assert list(metrics.why_skipped()) == [2]
    assert list(metrics.why_skipped(reverse=True)) == [3]


def test_random_galleries():
    """Each image is a query in some draw; the gallery's image of its label has its camera, or there is none."""
    metrics = RandomGalleryMetrics((1,), draws=5)
    labels, cameras = torch.tensor([5, 5, 7, 7, 8, 9, 9]), torch.tensor([0, 0, 0, 1, 0, 0, 1])
    roles = torch.tensor([3, 3, 3, 3, 3, 3, 0])  # the last image cannot be read
    metrics.update(torch.randn(7, 2), labels, torch.arange(7), roles, cameras=cameras)
    found = metrics.why_skipped()
    assert set(found) == {0, 1}
    assert all(CAMERA in reason for reason in found.values())


def test_the_warning_of_all_queries_gives_their_reasons():
    metrics = RetrievalMetrics((1,))
    labels, cameras = torch.tensor([5, 5, 5, 7, 8, 8]), torch.tensor([1, 1, 1, 1, 2, 2])
    roles = torch.tensor([3, 3, 3, 3, 1, 1])
    metrics.update(torch.randn(6, 2), labels, torch.arange(6), roles, cameras=cameras)
    with pytest.warns(UserWarning, match="none of the 6 queries") as warned:
        metrics.compute()
    message = str(warned[0].message)
    places = [message.find(f"for {queries} of them") for queries in (3, 2, 1)]  # the most frequent first
    assert places == sorted(places)
    assert places[0] > 0
    assert CAMERA in message


@pytest.mark.parametrize("relevance", [None, SharedTags()])
def test_there_is_no_mask_of_all_pairs(relevance):
    labels = torch.arange(1500)
    labels[:500] = 7  # the other 1,000 are alone
    metrics = RetrievalMetrics((1,), relevance=relevance)
    metrics.update(torch.randn(1500, 2), labels[:, None])
    metrics.compute()
    with LargestTensor() as largest:
        assert len(metrics.why_skipped()) == 1000
    assert largest.elements <= 10 * 1500


def of_processes(this, world):
    """The reasons of all kinds, with the rows distributed over the processes; the last process may have none."""
    found = []
    for seed, kind in enumerate(KINDS):
        given = random_rows(kind, seed, rows=30)
        part = torch.arange(len(given["ids"]))[this :: world - seed % 2]
        if this == world - seed % 2:
            part = part[:0]
        metrics = metrics_of(kind)
        metrics.update(**{name: values[part] for name, values in given.items()})
        found.append((metrics.why_skipped(), reasons_by_loops(kind, given)))
    return found


def test_all_processes_get_the_reasons_of_all_queries(run_processes):
    results = run_processes(of_processes, 3)
    assert any(found for found, _ in results[0])
    for of_process in results:
        assert of_process == results[0]
        for found, expected in of_process:
            assert found.keys() == expected.keys()
            assert all(reason in found[id_] for id_, reason in expected.items())
