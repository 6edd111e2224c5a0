"""Whitening, expansion and several scales: the official numbers, plain loops, scikit-learn."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA
from torch import nn
from torch.nn.functional import normalize

import lightning_retrieval.models.whitening
import lightning_retrieval.ranking.expansion
from lightning_retrieval import (
    DatabaseAugmentation,
    PCAWhitening,
    QueryExpansion,
    RetrievalMetrics,
    database_augmentation,
    multi_scale,
    query_expansion,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "postprocessing.json").read_text())["cases"]
OFFICIAL = {"rtol": 0, "atol": 1e-10}


def golden(prefix):
    return pytest.mark.parametrize("case", [pytest.param(c, id=c["id"]) for c in GOLDEN if c["id"].startswith(prefix)])


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def rows(count, dim, seed=0, dtype=torch.float64):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Expansion.


def test_every_official_case_is_run():
    assert len(GOLDEN) == 12
    assert {case["id"].split(".")[0] for case in GOLDEN} == {"alpha_qe", "alpha_dba", "pca_whitening"}


@golden("alpha_qe")
def test_query_expansion_is_the_official_one(case):
    queries, gallery = tensor(case["inputs"]["query_embeddings"]), tensor(case["inputs"]["gallery_embeddings"])
    expected = tensor(case["expected"]["expanded"])
    torch.testing.assert_close(query_expansion(queries, gallery, **case["params"]), expected, **OFFICIAL)
    torch.testing.assert_close(QueryExpansion(**case["params"])(queries, gallery), expected, **OFFICIAL)


@golden("alpha_dba")
def test_database_augmentation_is_the_official_one(case):
    gallery, expected = tensor(case["inputs"]["embeddings"]), tensor(case["expected"]["expanded"])
    torch.testing.assert_close(database_augmentation(gallery, **case["params"]), expected, **OFFICIAL)
    torch.testing.assert_close(DatabaseAugmentation(**case["params"])(gallery), expected, **OFFICIAL)


def by_loop(queries, gallery, alpha, k, own):
    """Lists and floats; a negative similarity weighs nothing where its power does not exist."""

    def unit(row):
        norm = math.sqrt(sum(x * x for x in row))
        return [x / norm for x in row]

    gallery = [unit(row) for row in gallery.tolist()]
    expanded = []
    for query, mine in zip([unit(row) for row in queries.tolist()], own):
        scored = sorted(
            ((sum(a * b for a, b in zip(query, row)), j) for j, row in enumerate(gallery) if j != mine), reverse=True
        )
        total = list(query)
        for score, j in scored[:k]:
            power = score**alpha
            weight = 0.0 if isinstance(power, complex) else power
            total = [t + weight * x for t, x in zip(total, gallery[j])]
        expanded.append(unit(total))
    return tensor(expanded)


@pytest.mark.parametrize("alpha", [0, 0.5, 1, 2.0, 3])
@pytest.mark.parametrize("k", [1, 4, 30])  # 30: more than there are
@pytest.mark.parametrize("block", [1, 40, 1 << 26])
def test_query_expansion_is_that_of_a_loop(monkeypatch, alpha, k, block):
    monkeypatch.setattr(lightning_retrieval.ranking.expansion, "_BLOCK_NUMBERS", block)
    queries, gallery, own = 3 * rows(7, 3), 2 * rows(11, 3, seed=1), [-1, 3, 0, -1, 10, 3, -1]
    gallery[3], gallery[0], gallery[10] = queries[1], queries[2], queries[4]
    expanded = query_expansion(queries, gallery, alpha, k, torch.tensor(own))
    torch.testing.assert_close(expanded, by_loop(queries, gallery, alpha, k, own))
    alone = query_expansion(queries, gallery, alpha, k)
    torch.testing.assert_close(alone, by_loop(queries, gallery, alpha, k, [-1] * 7))
    assert not torch.allclose(expanded, alone)


def test_a_similarity_of_zero_weighs_nothing_but_with_alpha_zero():
    queries, gallery = tensor([[1.0, 0.0]]), tensor([[0.0, 1.0]])
    assert query_expansion(queries, gallery, alpha=0.5, k=1).tolist() == [[1.0, 0.0]]
    torch.testing.assert_close(query_expansion(queries, gallery, alpha=0, k=1), tensor([[0.5**0.5, 0.5**0.5]]))


@pytest.mark.parametrize("block", [1, 50])
def test_database_augmentation_does_not_depend_on_blocks(monkeypatch, block):
    gallery = rows(23, 5)
    whole = database_augmentation(gallery)
    monkeypatch.setattr(lightning_retrieval.ranking.expansion, "_BLOCK_NUMBERS", block)
    torch.testing.assert_close(database_augmentation(gallery), whole)


def test_half_precision_is_widened():
    queries, gallery = rows(3, 4, dtype=torch.bfloat16), rows(9, 4, seed=1, dtype=torch.bfloat16)
    expanded = query_expansion(queries, gallery)
    assert expanded.dtype == torch.float32
    torch.testing.assert_close(expanded, query_expansion(queries.float(), gallery.float()))


def test_whitening_lets_nan_through_for_those_who_know_the_ids():
    whitening = PCAWhitening(dim=2)
    whitening.fit(rows(20, 4))
    x = rows(5, 4, seed=1)
    x[3, 1], x[4, 0] = torch.nan, torch.inf
    whitened = whitening(x)
    assert whitened.isnan().all(1).tolist() == [False, False, False, True, True]
    with pytest.raises(ValueError, match=r"RetrievalMetrics: .* NaN or inf in 2 of 5 rows \(ids 33, 34\)"):
        RetrievalMetrics().update(whitened, torch.zeros(5).long(), torch.arange(30, 35))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"alpha": -1.0}, ValueError, "`alpha` must be a finite number >= 0, got -1.0"),
        ({"k": 0}, ValueError, "`k` must be an integer >= 1, got 0"),
        ({"gallery": rows(5, 4)}, ValueError, r"`gallery` .* got \(5, 4\) of torch.float64 for \(2, 3\) of torch.fl"),
        ({"gallery": rows(5, 3).float()}, ValueError, "dimension and dtype of `queries`, got .* of torch.float32"),
        ({"queries": torch.full((2, 3), torch.nan)}, ValueError, "`queries` must hold finite numbers only"),
        ({"own": torch.tensor([0, 5])}, ValueError, "`own` must hold rows of the gallery, 0 to 4, or -1, got 0 to 5"),
        ({"own": torch.tensor([-2, 1])}, ValueError, "or -1, got -2 to 1"),
        ({"own": torch.tensor([1.0, 2.0])}, TypeError, "`own` must be integers"),
    ],
)
def test_query_expansion_refuses(changes, error, message):
    with pytest.raises(error, match="query_expansion: " + (message if message[0] == "`" else ".*" + message)):
        query_expansion(**{"queries": rows(2, 3), "gallery": rows(5, 3), **changes})


@pytest.mark.refusal
@pytest.mark.parametrize("kind", [QueryExpansion, DatabaseAugmentation])
def test_settings_are_refused_when_they_are_stored(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__}: `k` must be an integer >= 1, got 0"):
        kind(k=0)
    with pytest.raises(TypeError, match=f"{kind.__name__}: `alpha` must be a number, got '2'"):
        kind(alpha="2")


# Whitening.


@golden("pca_whitening")
def test_whitening_is_the_official_one(case):
    whitening = PCAWhitening(case["params"]["dims"], case["params"]["power"])
    whitening.fit(tensor(case["inputs"]["fit_embeddings"]))
    whitened, expected = whitening(tensor(case["inputs"]["embeddings"])), case["expected"]
    torch.testing.assert_close(whitened @ whitened.T, tensor(expected["gram"]), **OFFICIAL)
    torch.testing.assert_close(whitened.abs(), tensor(expected["whitened"]).abs(), **OFFICIAL)  # up to signs
    dim = case["params"]["dims"]
    torch.testing.assert_close(whitening.learned.mean, tensor(expected["mean"]), **OFFICIAL)
    torch.testing.assert_close(whitening.learned.variances, tensor(expected["explained_variance"])[:dim], **OFFICIAL)
    torch.testing.assert_close(
        whitening.learned.components.abs(), tensor(expected["components"])[:dim].abs(), **OFFICIAL
    )


@pytest.mark.parametrize("power", [0, 0.25, 0.5, 1.0])
def test_whitening_is_that_of_scikit_learn(monkeypatch, power):
    monkeypatch.setattr(lightning_retrieval.models.whitening, "_FIT_ROWS", 7)
    learned_from = rows(50, 6) * torch.arange(1.0, 7.0) + 3
    others = rows(9, 6, seed=1)
    pca = PCA(n_components=4, svd_solver="full").fit(learned_from.numpy())
    expected = pca.transform(others.numpy()) / pca.explained_variance_**power
    expected = torch.from_numpy(expected / np.linalg.norm(expected, axis=1, keepdims=True))
    whitened = PCAWhitening(dim=4, power=power).fit(learned_from)(others)
    torch.testing.assert_close(whitened @ whitened.T, expected @ expected.T)


def test_whitened_rows_vary_alike():
    embeddings = rows(200, 5) @ rows(5, 5, seed=1)
    whitening = PCAWhitening().fit(embeddings)
    mean, components, variances = whitening.learned
    scaled = (embeddings - mean) @ components.T / variances.sqrt()
    torch.testing.assert_close(scaled.T.cov(), torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(whitening(embeddings), normalize(scaled))
    assert (variances.diff() < 0).all()


def test_turned_and_stretched_embeddings_are_whitened_to_the_same_similarities():
    learned_from, others, turn = rows(60, 4), rows(8, 4, seed=1), rows(4, 4, seed=2)
    before = PCAWhitening().fit(learned_from)(others)
    after = PCAWhitening().fit(learned_from @ turn + 5)(others @ turn + 5)
    torch.testing.assert_close(before @ before.T, after @ after.T)


def test_a_direction_has_the_same_sign_on_every_machine():
    components = PCAWhitening().fit(rows(30, 6)).learned.components
    assert (components.gather(1, components.abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whitening_computes_in_float32_also_under_autocast(dtype):
    learned_from, others = rows(60, 4).to(dtype), rows(8, 4, seed=1).to(dtype)
    exact = PCAWhitening().fit(learned_from.double())(others.double()).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whitened = PCAWhitening().fit(learned_from)(others)
    assert whitened.dtype == torch.float32
    torch.testing.assert_close(whitened, exact, rtol=0, atol=1e-5)


def test_what_was_learned_in_inference_mode_serves_training():
    with torch.inference_mode():
        whitening = PCAWhitening().fit(rows(20, 3))
    assert not any(part.is_inference() for part in whitening.learned)
    embeddings = rows(4, 3, seed=1).requires_grad_()
    whitening(embeddings).sum().backward()
    assert embeddings.grad.abs().sum() > 0


@pytest.mark.parametrize("dim", [None, 3])
def test_a_checkpoint_is_loaded_whatever_its_size(tmp_path, dim):
    fitted = nn.Sequential(PCAWhitening(dim=3, power=0.3).fit(rows(20, 5)))
    torch.save(fitted.state_dict(), tmp_path / "whitening.pt")
    other = nn.Sequential(PCAWhitening(dim, power=0.3))
    other.load_state_dict(torch.load(tmp_path / "whitening.pt", weights_only=True), strict=True)
    others = rows(4, 5, seed=1)
    assert torch.equal(other(others), fitted(others))


def test_a_checkpoint_is_cut_to_fewer_directions():
    learned_from, others = rows(20, 5), rows(4, 5, seed=1)
    cut = PCAWhitening(dim=2)
    cut.load_state_dict(PCAWhitening().fit(learned_from).state_dict())
    assert torch.equal(cut(others), PCAWhitening(dim=2).fit(learned_from)(others))


def test_a_checkpoint_without_whitening_leaves_it_to_be_learned():
    model = nn.Sequential(nn.Linear(2, 2), PCAWhitening())
    model.load_state_dict(nn.Sequential(nn.Linear(2, 2)).state_dict(), strict=True)
    assert model[1].learned is None


def test_half_precision_of_the_module_does_not_round_it():
    whitening = PCAWhitening().fit(rows(20, 5))
    before = whitening.learned
    assert all(torch.equal(a, b) for a, b in zip(whitening.half().learned, before))


def test_nothing_of_it_is_sent_around_by_ddp():
    assert not list(PCAWhitening().fit(rows(20, 5)).buffers())


@pytest.mark.gpu
def test_whitening_goes_where_the_embeddings_are():
    whitening, others = PCAWhitening().fit(rows(40, 6)), rows(4, 6, seed=1)
    on_device = whitening(others.to("cuda"))
    assert on_device.is_cuda
    torch.testing.assert_close(on_device.cpu(), whitening(others))
    queries, gallery, own = rows(5, 6), rows(30, 6, seed=2), torch.tensor([-1, 2, 3, -1, 0])
    arguments = (queries, gallery, 3.0, 4, own)
    moved = [a.to("cuda") if isinstance(a, torch.Tensor) else a for a in arguments]
    torch.testing.assert_close(query_expansion(*moved).cpu(), query_expansion(*arguments))
    torch.testing.assert_close(database_augmentation(gallery.to("cuda")).cpu(), database_augmentation(gallery))
    fitted = PCAWhitening(dim=4).fit(gallery.to("cuda"))
    torch.testing.assert_close(fitted(others).cpu(), PCAWhitening(dim=4).fit(gallery)(others))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "embeddings", "error", "message"),
    [
        ({"dim": 5}, rows(9, 4), ValueError, "`dim` must be at most that of the embeddings, 4, got 5"),
        ({}, rows(4, 4), ValueError, "at least 5 rows to learn 4 directions from, got 4; give more, or a smaller dim"),
        ({"dim": 2, "power": 0}, rows(1, 4), ValueError, "at least 2 rows to learn 2 directions from, got 1"),
        ({}, torch.full((9, 2), torch.inf), ValueError, "`embeddings` must hold finite numbers only"),
        ({}, torch.ones(9, 2).long(), TypeError, "`embeddings` must be floating point, got torch.int64"),
        ({}, torch.ones(9, 2), ValueError, "in each of the 2 directions .* got only 0 in which they do; the rows are"),
    ],
)
def test_fit_refuses(settings, embeddings, error, message):
    with pytest.raises(error, match="PCAWhitening: .*" + message):
        PCAWhitening(**settings).fit(embeddings)


@pytest.mark.refusal
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_without_variance_are_refused_where_they_are_scaled(dtype):
    flat = (rows(50, 3) @ rows(3, 6, seed=1)).to(dtype)  # but for rounding, in three of six directions
    message = (
        "in each of the 6 directions that are scaled, got only 3 in which they do; set dim to at most 3, or power=0"
    )
    with pytest.raises(ValueError, match=message):
        PCAWhitening().fit(flat)
    assert PCAWhitening(dim=3).fit(flat)(flat).shape == (50, 3)
    assert PCAWhitening(power=0).fit(flat)(flat).isfinite().all()


@pytest.mark.refusal
def test_the_call_refuses():
    with pytest.raises(ValueError, match="PCAWhitening: nothing has been learned yet; call fit"):
        PCAWhitening()(rows(2, 4))
    fitted = PCAWhitening(dim=2).fit(rows(9, 4))
    with pytest.raises(ValueError, match="dimension of those it was learned from, 4, got 3"):
        fitted(rows(2, 3))
    with pytest.raises(ValueError, match="`dim` must be at most the number of directions in the checkpoint, 2, got 3"):
        PCAWhitening(dim=3).load_state_dict(fitted.state_dict())


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("settings", "message"), [({"dim": 0}, "`dim` .* got 0"), ({"power": -1}, "`power` .* got -1")]
)
def test_settings_of_the_whitening_are_refused(settings, message):
    with pytest.raises(ValueError, match="PCAWhitening: " + message):
        PCAWhitening(**settings)


# Several scales.


class Sizes:
    """Embeds an image by its mean and its middle, and remembers the sizes that it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, images):
        self.seen.append(tuple(images.shape[2:]))
        middle = images[:, :, images.shape[2] // 2, images.shape[3] // 2]
        return torch.cat([images.mean((2, 3)), middle], 1)


def test_scales_are_averaged_over_unit_rows():
    images, embed = torch.rand(3, 2, 9, 14), Sizes()
    found = multi_scale(embed, images, scales=(1, 0.5, 1.5))
    assert embed.seen == [(9, 14), (4, 7), (14, 21)]
    sizes = [(9, 14), (4, 7), (14, 21)]
    resized = [nn.functional.interpolate(images, size=s, mode="bilinear", antialias=True) for s in sizes]
    expected = sum(normalize(embed(x)) for x in resized) / 3
    torch.testing.assert_close(found, normalize(expected))


def test_scales_with_a_power_keep_signs():
    embed = lambda images: torch.stack([images.shape[2] * torch.ones(2), -torch.ones(2)], 1)  # noqa: E731
    found = multi_scale(embed, torch.rand(2, 1, 4, 4), scales=[0.5, 1], p=3.0)
    parts = [(2 / 5**0.5, -1 / 5**0.5), (4 / 17**0.5, -1 / 17**0.5)]
    mean = [math.copysign((sum(abs(x) ** 3 for x in column) / 2) ** (1 / 3), column[0]) for column in zip(*parts)]
    torch.testing.assert_close(found[0], normalize(torch.tensor([mean]))[0])


def test_resizing_is_that_of_pil():
    pixels = (255 * torch.rand(20, 30, generator=torch.Generator().manual_seed(0))).to(torch.uint8)
    by_pil = torch.from_numpy(np.array(Image.fromarray(pixels.numpy()).resize((15, 10), Image.Resampling.BILINEAR)))
    seen = []
    multi_scale(lambda x: (seen.append(x), x.flatten(1))[1], pixels[None, None].float(), scales=[0.5])
    assert (seen[0][0, 0] - by_pil).abs().max() <= 1  # PIL rounds twice


def test_an_image_keeps_a_pixel():
    embed = Sizes()
    multi_scale(embed, torch.rand(1, 1, 4, 40), scales=[0.1])
    assert embed.seen == [(1, 4)]


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scales": ()}, ValueError, r"`scales` must hold at least one scale, such as \(1.0,\), got \(\)"),
        ({"scales": 0.5}, ValueError, "`scales` must hold at least one scale.* got 0.5"),
        ({"scales": (1, 0)}, ValueError, "`scales` must be a finite number > 0, got 0"),
        ({"p": 0.0}, ValueError, "`p` must be a finite number > 0, got 0.0"),
        ({"images": torch.rand(3, 4, 4)}, ValueError, r"`images` must have shape .* got \(3, 4, 4\)"),
        ({"images": torch.ones(1, 3, 4, 4, dtype=torch.uint8)}, TypeError, "`images` must be floating .* torch.uint8"),
    ],
)
def test_multi_scale_refuses(changes, error, message):
    with pytest.raises(error, match="multi_scale: " + message):
        multi_scale(**{"embed": Sizes(), "images": torch.rand(1, 3, 4, 4), "scales": (1.0,), **changes})
