"""`index` of a folder of images and of embeddings: what is in it, and when it is replaced."""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from lightning_retrieval import Embedder, PCAWhitening, RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation.serialised import serialise_transform
from tests.datamodules.trees import write_image
from tests.lightning_retrieval.search.commands.glyph_commands import (
    command,
    embeddings_in,
    error_of,
    indexing,
    paths_of,
    run,
    save_checkpoint,
)
from tests.quiet_trainer import quiet_trainer


def similarities(capsys, query, index, k):
    """{path: similarity} of a search for one image."""
    _, out, _ = command(capsys, "search", query, "--index", index, f"-k{k}", "--json")
    return {hit["path"]: hit["similarity"] for hit in json.loads(out)["queries"][0]["results"]}


def test_factory_parameters_and_shards_are_those_of_the_index(glyphs, tmp_path, capsys):
    more = ["--factory=IVF2,Flat", "--parameters=nprobe=2", "--shards=2", "--batch_size=7", "--num_workers=1"]
    code, out, err = command(capsys, *indexing(glyphs[0], tmp_path / "index", *more))
    assert (code, err) == (0, "")
    assert "40 images, 24 dimensions, IVF2,Flat" in out
    made = RetrievalIndex.load(tmp_path / "index")
    assert (made.shards, made.parameters, len(made)) == (2, "nprobe=2", 40)
    assert 0.97 < made.recall <= 1  # all lists; near ties go either way
    assert made.about["preparation"] == {"preparation": Preparation.named("glyphs").as_dict()}
    assert made.about["channels"] == 1


def test_embeddings_include_whitening_and_scales_of_the_module(glyphs, tmp_path, capsys):
    torch.manual_seed(1)
    whitening = PCAWhitening(dim=6).fit(glyphs[1])
    settings = {"whitening": whitening, "eval_scales": (1.0, 0.5)}
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss(), **settings).eval()
    model = save_checkpoint(tmp_path / "model.ckpt", module)
    folder = glyphs[0] / "images"
    paths = paths_of(folder)
    images = [v2.functional.to_image(Image.open(folder / path).convert("L")) for path in paths]
    with torch.no_grad():
        expected = module.embed(torch.stack(images).float() / 255).double()
    args = ["--images", folder, "--output", tmp_path / "index", "--checkpoint", model]
    assert command(capsys, "index", *args)[0] == 0
    unit = expected / expected.norm(dim=1, keepdim=True)
    scores = dict(zip(paths, (unit @ unit[7]).tolist()))
    assert similarities(capsys, folder / paths[7], tmp_path / "index", 40) == pytest.approx(scores, abs=1e-5)


def test_all_commands_prepare_images_as_the_checkpoint_says(tmp_path, capsys):
    """Here by decoding at a reduced scale."""
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss()).eval()
    preparation = dataclasses.replace(Preparation.named("glyphs"), reduced_scale=True)
    module.preparation = serialise_transform(preparation)
    model = save_checkpoint(tmp_path / "model.ckpt", module)
    paths = [f"{number}.jpg" for number in range(6)]
    images = []
    for number, path in enumerate(paths):
        write_image(tmp_path / "images" / path, size=(170, 130), seed=number)
        with Image.open(tmp_path / "images" / path) as image:
            image.draft("RGB", (42, 32))
            images.append(Preparation.named("glyphs")(image.convert("RGB")))
    expected = torch.nn.functional.normalize(module.embed(torch.stack(images)), dim=1).detach()
    assert command(capsys, *indexing(tmp_path, tmp_path / "index"))[0] == 0
    index = RetrievalIndex.load(tmp_path / "index")
    assert index.about["preparation"] == {"preparation": preparation.as_dict()}
    assert torch.allclose(index.embeddings(torch.arange(6)), expected, atol=1e-5)
    scores = dict(zip(paths, (expected @ expected[3]).tolist()))
    found = similarities(capsys, tmp_path / "images" / paths[3], tmp_path / "index", 6)
    assert found == pytest.approx(scores, abs=1e-5)
    args = ["--images", tmp_path / "images", "--output", tmp_path / "rows", "--checkpoint", model]
    assert command(capsys, "embed", *args)[0] == 0
    _, rows = embeddings_in(tmp_path / "rows")
    assert torch.allclose(torch.nn.functional.normalize(rows, dim=1), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["index", "embed"])
def test_pictures_that_are_not_decoded_are_counted_by_their_suffix(name, glyphs, tmp_path, capsys):
    write_image(tmp_path / "images/deep/er/1.png")
    for other in ("2.heic", "deep/3.HEIC", "deep/er/4.jxl", "notes.txt"):
        (tmp_path / "images" / other).write_text("")
    args = ["--checkpoint", glyphs[0] / "model.ckpt", "--images", tmp_path / "images", "--output", tmp_path / name]
    code, _, err = command(capsys, name, *args)
    assert (code, ".heic 2, .jxl 1" in err, ".txt" in err) == (0, True, False)


def test_a_folder_stands_for_the_best_checkpoint_of_its_newest_run(glyphs, tmp_path, capsys):
    runs = tmp_path / "runs"
    for name in ("version_9/checkpoints/best", "version_10/checkpoints/best", "version_11/checkpoints/last"):
        path = runs / f"{name}.ckpt"
        path.parent.mkdir(parents=True)
        shutil.copy(glyphs[0] / "model.ckpt", path)
    for given, newest in ((runs, "version_10"), (runs / "version_9", "version_9")):
        args = indexing(glyphs[0], tmp_path / newest, f"--checkpoint={given}")
        assert command(capsys, *args)[0] == 0
        best = runs / newest / "checkpoints/best.ckpt"
        assert RetrievalIndex.load(tmp_path / newest).about["checkpoint"] == str(best)
    query = ["search", glyphs[0] / "images" / paths_of(glyphs[0] / "images")[0], f"--index={tmp_path / 'version_9'}"]
    assert command(capsys, *query, f"--checkpoint={runs}")[0] == 0


@pytest.mark.hostile
def test_a_function_is_imported_only_if_the_user_names_it(colour, tmp_path, capsys, monkeypatch):
    code = "import torch\n\ndef evaluate(image):\n    return torch.ones(3, 64, 64)\n"
    (tmp_path / "user_code_of_index.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    content = torch.load(colour[0], weights_only=True)
    torch.save({**content, "preparation": {"function": "user_code_of_index.evaluate"}}, tmp_path / "model.ckpt")
    write_image(tmp_path / "images" / "0.jpg")
    for more in ([], ["--transform=os.remove"]):
        assert "user_code_of_index.evaluate" in error_of(capsys, *indexing(tmp_path, tmp_path / "index", *more))
    assert "user_code_of_index" not in sys.modules
    assert not (tmp_path / "index").exists()
    option = "--transform=user_code_of_index.evaluate"
    assert command(capsys, *indexing(tmp_path, tmp_path / "index", option))[0] == 0
    query = ["search", f"--index={tmp_path / 'index'}", tmp_path / "images" / "0.jpg"]
    assert "`--transform` must be given" in error_of(capsys, *query)
    assert command(capsys, *query, option)[0] == 0


def test_images_are_upright_and_in_colour_whatever_the_file_format(colour, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", None)  # the weights are in the checkpoint
    path, module = colour
    write_image(tmp_path / "upright.png", size=(300, 260), seed=3)
    upright = Image.open(tmp_path / "upright.png").convert("RGB")
    (tmp_path / "images").mkdir()
    upright.save(tmp_path / "images" / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    upright.rotate(90, expand=True).save(tmp_path / "images" / "b.PNG", exif=exif)
    grey = upright.convert("L").crop((0, 0, 280, 250))
    grey.save(tmp_path / "images" / "c.png")
    images = ["--images", tmp_path / "images", "--checkpoint", path]
    code, _, err = command(capsys, "index", *images, "--output", tmp_path / "index", "--transform=plain")
    assert (code, err) == (0, "")
    prepare = Preparation.named("plain")
    with torch.no_grad():
        rows = [module(prepare(image)[None])[0] for image in (upright, upright, grey.convert("RGB"))]
    expected = torch.nn.functional.normalize(torch.stack(rows), dim=1)
    made = RetrievalIndex.load(tmp_path / "index")
    torch.testing.assert_close(made.embeddings(torch.arange(3)), expected, rtol=0, atol=1e-5)
    assert expected[2] @ expected[0] < 1 - 1e-4  # or the test would show nothing


@pytest.fixture
def own_copy(indexed, tmp_path):
    """A copy of the images and the model, without an index."""
    shutil.copytree(indexed / "images", tmp_path / "images")
    shutil.copy(indexed / "model.ckpt", tmp_path)
    return tmp_path


def changed_by_hand(folder):
    """Remove two rows of images, and add three of no image of the folder; the ids of the images that are left."""
    changed = RetrievalIndex.load(folder)
    changed.remove(changed.ids[[3, 5]])
    left = changed.ids
    changed.add(torch.eye(3, 24), torch.tensor([1000, 2000, 3000]), ["mine/a.png", "mine/b.png", ""])
    changed.save(folder)
    return left


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rows_that_were_added_by_hand_are_only_lost_where_that_is_asked_for(indexed, embeddings, tmp_path, capsys):
    """Of an index of embeddings, which is that of the images, so `search` embeds its queries in the same way."""
    args = ["index", f"--embeddings={embeddings}", f"--output={tmp_path / 'index'}"]
    assert run(capsys, *args)[::2] == (0, "")
    left = changed_by_hand(tmp_path / "index")
    before = files_of(tmp_path / "index")
    code, _, err = run(capsys, *args)
    assert (code, "3 of the 41 rows" in err, "`--overwrite`" in err) == (2, True, True)
    assert files_of(tmp_path / "index") == before

    expected = RetrievalIndex.load(indexed / "index")
    assert run(capsys, *args, "--update")[0] == 0
    updated = RetrievalIndex.load(tmp_path / "index")
    assert updated.ids.tolist() == [*left.tolist(), 40, 41]  # after the largest id that is left
    paths = dict(zip(updated.paths(updated.ids), updated.embeddings()))
    assert paths.keys() == set(expected.paths(expected.ids))
    assert updated.about == expected.about
    for path, row in zip(expected.paths(expected.ids), expected.embeddings()):
        torch.testing.assert_close(paths[path], row, rtol=0, atol=1e-6)

    changed_by_hand(tmp_path / "index")
    for more in (["--overwrite"], [], ["--update"]):  # by the last two, nothing is lost
        assert run(capsys, *args, *more)[0] == 0
        assert RetrievalIndex.load(tmp_path / "index").ids.tolist() == list(range(40))


def test_an_update_embeds_only_the_images_that_are_new(own_copy, capsys):
    """So an image that can no longer be read keeps its row, and is not reported."""
    args = indexing(own_copy, own_copy / "index", "--factory=IVF2,Flat", "--update")
    assert command(capsys, *args)[0] == 0  # there is none yet
    paths = paths_of(own_copy / "images")
    (own_copy / "images" / paths[9]).write_bytes(b"damaged")
    assert "1 of the 40 rows" in error_of(capsys, *args[:-1])  # which would embed all
    (own_copy / "images" / paths[7]).rename(own_copy / "images" / "new.png")
    (own_copy / "images" / "bad.png").write_text("no image")
    code, out, err = command(capsys, *args)
    assert (code, "bad.png" in err, err.count("\n")) == (1, True, 1)
    assert "40 images, 24 dimensions, IVF2,Flat" in out
    made = RetrievalIndex.load(own_copy / "index")
    assert set(made.paths(made.ids)) == {*paths, "new.png"} - {paths[7]}


@pytest.mark.posix
def test_images_in_linked_folders_are_indexed_and_special_files_are_not_read(own_copy, capsys):
    """An update keeps the rows of a folder that a link replaces; a FIFO is an image that cannot be read."""
    args = indexing(own_copy, own_copy / "index", "--update")
    assert command(capsys, *args)[0] == 0
    paths = paths_of(own_copy / "images")
    (own_copy / "images" / "1").rename(own_copy / "moved")
    (own_copy / "images" / "1").symlink_to(own_copy / "moved")
    os.mkfifo(own_copy / "images" / "fifo.jpg")
    code, _, err = command(capsys, *args)
    assert (code, "fifo.jpg" in err) == (1, True)
    made = RetrievalIndex.load(own_copy / "index")
    assert sorted(made.paths(made.ids)) == sorted(paths)


def test_an_update_loses_no_rows_of_a_linked_folder_that_is_gone_before_the_link_is(own_copy, capsys):
    shutil.move(own_copy / "images" / "2", own_copy / "elsewhere")
    link = own_copy / "images" / "2"
    link.symlink_to(own_copy / "elsewhere")
    args = indexing(own_copy, own_copy / "index", "--update")
    assert command(capsys, *args)[0] == 0
    number = len(RetrievalIndex.load(own_copy / "index"))
    before = files_of(own_copy / "index")
    (own_copy / "elsewhere").rename(own_copy / "unmounted")
    assert str(link) in error_of(capsys, *args)
    assert files_of(own_copy / "index") == before
    link.unlink()
    assert command(capsys, *args)[0] == 0
    assert 0 < len(RetrievalIndex.load(own_copy / "index")) < number


def test_an_index_of_something_else_is_only_replaced_where_that_is_asked_for(indexed, other_model, own_copy, capsys):
    index = own_copy / "index"
    shutil.copytree(indexed / "index", index)
    before = files_of(index)
    model = ["index", f"--checkpoint={other_model}", f"--images={indexed / 'images'}", f"--output={index}"]
    for args in (indexing(own_copy, index), model):  # other images, another model
        assert "`--overwrite`" in error_of(capsys, *args)
        assert "`--update`" in error_of(capsys, *args, "--update")
    by_hand = RetrievalIndex(24)
    by_hand.add(torch.eye(24))
    by_hand.save(own_copy / "by hand")
    assert "`--overwrite`" in error_of(capsys, *indexing(indexed, own_copy / "by hand"))
    assert "`--shards`" in error_of(capsys, *indexing(indexed, index, "--update", "--shards=2"))
    assert files_of(index) == before

    (index / "manifest.json").write_text("{")
    assert "`--output`" in error_of(capsys, *indexing(indexed, index))
    assert command(capsys, *indexing(indexed, index, "--overwrite"))[0] == 0
    assert len(RetrievalIndex.load(index)) == 40
    (index / "manifest.json").unlink()  # what a run leaves that was killed before it had written all
    assert command(capsys, *indexing(indexed, index))[0] == 0


def test_damaged_missing_and_foreign_files_of_embeddings_are_not_indexed(embeddings, tmp_path, capsys):
    folder, bad = tmp_path / "e", tmp_path / "e" / "part-00001.parquet"
    shutil.copytree(embeddings, folder)
    args = ["index", f"--embeddings={folder}", f"--output={tmp_path / 'index'}"]
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    assert "part-00001.parquet" in run(capsys, *args)[2]
    shutil.copy(embeddings / "part-00000.parquet", bad)
    assert "part-00001.parquet" in run(capsys, *args)[2]
    bad.unlink()
    assert "1 of its 3" in run(capsys, *args)[2]
    shutil.copytree(embeddings, folder, dirs_exist_ok=True)
    manifest = folder / "_manifest.json"
    manifest.write_text(manifest.read_text().replace('"model_sha256": "', '"model_sha256": "f'))
    assert run(capsys, *args)[0] == 2
    assert not (tmp_path / "index").exists()


def test_warns_that_the_preparation_of_a_trained_network_is_not_known(tmp_path, capsys):
    """By each command that loads the checkpoint, unless the user names a preparation."""
    module = RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss())
    data = [(torch.rand(8, 1, 32, 32), torch.arange(8) // 2)]
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, DataLoader(data, batch_size=None))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    write_image(tmp_path / "images" / "0.png")
    words = "does not say how its images were prepared"
    given = ["--checkpoint", tmp_path / "own.ckpt", "--images", tmp_path / "images", "--output"]
    search = ["search", tmp_path / "images" / "0.png", "--index", tmp_path / "index"]
    for args in (["index", *given, tmp_path / "index"], ["embed", *given, tmp_path / "e"], search):
        code, _, err = command(capsys, *args)
        assert (code, err.count(words)) == (0, 1)
    for args in (["index", *given, tmp_path / "index", "--overwrite", "--transform=glyphs"], search):
        code, _, err = command(capsys, *args)
        assert (code, err.count(words)) == (0, 0)


def test_a_model_may_be_given_with_embeddings_if_it_made_them(glyphs, embeddings, other_model, tmp_path, capsys):
    """The index then records this model, also where the checkpoint was moved."""
    moved = shutil.copy(glyphs[0] / "model.ckpt", tmp_path / "moved.ckpt")
    args = ["index", f"--embeddings={embeddings}", f"--output={tmp_path / 'index'}"]
    code, out, err = run(capsys, *args, f"--checkpoint={other_model}")
    assert (code, out, "`--checkpoint`" in err) == (2, "", True)
    assert not (tmp_path / "index").exists()
    assert run(capsys, *args, f"--checkpoint={moved}")[::2] == (0, "")
    assert RetrievalIndex.load(tmp_path / "index").about["checkpoint"] == Path(moved).as_posix()
