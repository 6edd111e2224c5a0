"""`lightning-retrieval index`: what it prints, its exit codes and its error messages."""

import shutil

import pytest
import torch

from lightning_retrieval import Embedder, RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli import embedding
from lightning_retrieval.cli.embed import embed_images
from lightning_retrieval.cli.index import index
from lightning_retrieval.models import Preparation
from tests.lightning_retrieval.cli.glyph_commands import (
    command,
    error_of,
    indexing,
    paths_of,
    save_checkpoint,
)


def test_factory_parameters_and_shards_are_those_of_the_index(glyphs, tmp_path, capsys):
    more = ["--factory=IVF2,Flat", "--parameters=nprobe=2", "--shards=2", "--batch_size=7", "--num_workers=1"]
    code, out, err = command(capsys, *indexing(glyphs[0], tmp_path / "index", *more))
    assert (code, err) == (0, "")
    transform, out = out.split("\n", 1)
    assert transform.startswith("images prepared with 'glyphs', ")
    printed, recall = out.split("recall@10 ")
    assert printed == f"{tmp_path / 'index'}: 40 images, 24 dimensions, IVF2,Flat ("
    assert 0.97 < float(recall.removesuffix(" against exact search)\n")) <= 1  # all lists; near ties go either way
    made = RetrievalIndex.load(tmp_path / "index")
    assert (made.shards, made.parameters, len(made)) == (2, "nprobe=2", 40)
    assert made.about["preparation"] == {"preparation": Preparation.named("glyphs").as_dict()}
    assert made.about["channels"] == 1


def test_unreadable_images_are_named_and_the_others_indexed(glyphs, tmp_path, capsys):
    shutil.copytree(glyphs[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "images" / "a\nb.jpg").write_bytes(b"no image")
    whole = (tmp_path / "images" / paths_of(tmp_path / "images")[8]).read_bytes()
    (tmp_path / "images" / "cut.png").write_bytes(whole[: len(whole) // 2])
    code, out, err = command(capsys, *indexing(tmp_path, tmp_path / "index2"))
    assert code == 1
    assert "40 images" in out
    first, second = err.splitlines()
    assert first.startswith(r"index: cannot read the image a\nb.jpg (cannot identify image file")
    assert second.startswith("index: cannot read the image cut.png (")
    assert first.endswith("; skipped.")


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


def embedding_args(kind, indexed, output):
    """Arguments of `index` for the images themselves, or for a folder of their embeddings."""
    if kind == "images":
        return indexing(indexed, output)
    embeddings = output.with_name("embeddings")
    embed_images(indexed / "model.ckpt", indexed / "images", embeddings, file_format="npy", device="cpu")
    return ["index", f"--embeddings={embeddings}", f"--output={output}"]


@pytest.mark.parametrize("kind", ["images", "embeddings"])
def test_rows_that_were_added_by_hand_are_only_lost_where_that_is_asked_for(kind, indexed, tmp_path, capsys):
    args = embedding_args(kind, indexed, tmp_path / "index")
    assert finish(capsys, args) == 0
    left = changed_by_hand(tmp_path / "index")
    before = files_of(tmp_path / "index")
    assert index(args[1:]) == 2
    assert capsys.readouterr().err == (
        "index: `--output` must be new, or an index whose rows are all in the new one, but 3 of the 41 rows of "
        f"{tmp_path / 'index'} are not, because their images are not among the new ones; give "
        "`--overwrite` to replace it, or `--update` to add the images that are new and remove the rows of those that "
        "are gone, or give another path.\n"
    )
    assert files_of(tmp_path / "index") == before

    expected = RetrievalIndex.load(indexed / "index")
    assert finish(capsys, [*args, "--update"]) == 0
    updated = RetrievalIndex.load(tmp_path / "index")
    assert updated.ids.tolist() == [*left.tolist(), 40, 41]  # after the largest id that is left
    paths = dict(zip(updated.paths(updated.ids), updated.embeddings()))
    assert paths.keys() == set(expected.paths(expected.ids))
    for path, row in zip(expected.paths(expected.ids), expected.embeddings()):
        torch.testing.assert_close(paths[path], row, rtol=0, atol=1e-6)

    changed_by_hand(tmp_path / "index")
    assert finish(capsys, [*args, "--overwrite"]) == 0
    assert RetrievalIndex.load(tmp_path / "index").ids.tolist() == list(range(40))
    assert finish(capsys, args) == 0  # nothing of it is lost
    assert finish(capsys, [*args, "--update"]) == 0
    assert RetrievalIndex.load(tmp_path / "index").ids.tolist() == list(range(40))


def finish(capsys, args):
    """The exit code of `index`."""
    code = index([str(arg) for arg in args[1:]])
    capsys.readouterr()
    return code


def test_an_update_embeds_only_the_images_that_are_new(indexed, tmp_path, capsys, monkeypatch):
    shutil.copytree(indexed / "images", tmp_path / "images")
    shutil.copy(indexed / "model.ckpt", tmp_path)
    args = indexing(tmp_path, tmp_path / "index", "--factory=IVF2,Flat", "--update")
    assert finish(capsys, args) == 0  # there is none yet
    paths = paths_of(tmp_path / "images")
    (tmp_path / "images" / paths[7]).rename(tmp_path / "images" / "new.png")
    (tmp_path / "images" / "bad.png").write_text("no image")
    printed = error_of(capsys, *args[:-1])
    assert f"but 1 of the 40 rows of {tmp_path / 'index'} are not, because their images are not" in printed
    real, seen = embedding.ImageEmbedder.embed_items, []

    def counted(self, items, names):
        seen.extend(names)
        return real(self, items, names)

    monkeypatch.setattr(embedding.ImageEmbedder, "embed_items", counted)
    code, out, err = command(capsys, *args)
    assert (code, sorted(set(seen))) == (1, ["bad.png", "new.png"])
    assert "40 images, 24 dimensions, IVF2,Flat" in out
    assert err.startswith("index: cannot read the image bad.png")
    made = RetrievalIndex.load(tmp_path / "index")
    assert set(made.paths(made.ids)) == {*paths, "new.png"} - {paths[7]}


@pytest.mark.refusal
def test_an_index_of_something_else_is_only_replaced_where_that_is_asked_for(indexed, colour, tmp_path, capsys):
    index_folder = tmp_path / "index"
    shutil.copytree(indexed / "index", index_folder)
    before = files_of(index_folder)
    other = tmp_path / "other"
    shutil.copytree(indexed / "images", other / "images")
    shutil.copy(indexed / "model.ckpt", other)
    torch.manual_seed(1)
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=24), SmoothAPLoss()).eval()
    retrained = save_checkpoint(tmp_path / "retrained.ckpt", module)
    capsys.readouterr()
    model = ["index", f"--checkpoint={retrained}", f"--images={indexed / 'images'}", f"--output={index_folder}"]
    for args, why in (
        (
            indexing(other, index_folder),
            f"40 of the 40 rows of {index_folder} are not, because they are of images in {indexed}",
        ),
        (model, "are not, because they are of another model; give `--overwrite` to replace it, or give another path."),
    ):
        assert why in error_of(capsys, *args)
        printed = error_of(capsys, *args, "--update")
        assert printed.startswith("index: `--update` must be given for an index of the same model and images, got ")
    by_hand = RetrievalIndex(24)
    by_hand.add(torch.eye(24))
    by_hand.save(tmp_path / "by hand")
    printed = error_of(capsys, *indexing(indexed, tmp_path / "by hand"))
    assert "are not, because something else than this command has made them; give `--overwrite`" in printed
    with pytest.raises(SystemExit, match=r"^2$"):
        index(indexing(indexed, index_folder, "--update", "--overwrite")[1:])
    assert "not allowed with argument --update" in capsys.readouterr().err
    printed = error_of(capsys, *indexing(indexed, index_folder, "--update", "--shards=2"))
    assert (
        "`--shards` must be that of the index with `--update`, 1, or not be given, got 2; give `--overwrite`" in printed
    )
    assert files_of(index_folder) == before

    (index_folder / "manifest.json").write_text("{")
    printed = error_of(capsys, *indexing(indexed, index_folder))
    assert "`--output` must be new, or an index that can be read, got " in printed
    assert "is damaged, it is not valid JSON; build the index again); give `--overwrite` to replace it" in printed
    assert finish(capsys, indexing(indexed, index_folder, "--overwrite")) == 0
    assert len(RetrievalIndex.load(index_folder)) == 40
    (index_folder / "manifest.json").unlink()  # what a run leaves that was killed before it had written all
    assert finish(capsys, indexing(indexed, index_folder)) == 0


@pytest.mark.refusal
def test_rows_of_images_that_cannot_be_read_any_more_are_not_lost(indexed, tmp_path, capsys):
    shutil.copytree(indexed / "images", tmp_path / "images")
    shutil.copy(indexed / "model.ckpt", tmp_path)
    assert finish(capsys, indexing(tmp_path, tmp_path / "index")) == 0
    (tmp_path / "images" / paths_of(tmp_path / "images")[9]).write_bytes(b"damaged")
    printed = error_of(capsys, *indexing(tmp_path, tmp_path / "index"))
    assert f"but 1 of the 40 rows of {tmp_path / 'index'} are not, because their images are not among" in printed
    assert len(RetrievalIndex.load(tmp_path / "index")) == 40


@pytest.mark.refusal
def test_invalid_arguments_are_reported_in_one_sentence(glyphs, colour, indexed, tmp_path, capsys):
    to = ["--output", tmp_path / "index"]
    images = ["--images", indexed / "images"]
    model = ["--checkpoint", indexed / "model.ckpt"]
    printed = error_of(capsys, "index", *images, *to, *model, "--transform=plain")
    assert "`--transform` must give images with the number of channels that the model of " in printed
    assert "takes, 1, got 'plain', which gives 3; take 'glyphs'." in printed
    printed = error_of(capsys, "index", *images, *to, "--checkpoint", colour[0], "--transform=glyphs")
    assert "takes, 3, got 'glyphs', which gives 1; take 'plain'." in printed
    printed = error_of(capsys, "index", *images, *to, "--checkpoint=gone.ckpt")
    assert printed.endswith("must be a file that training wrote, got gone.ckpt, which does not exist.\n")
    printed = error_of(capsys, "index", *images, *to, "--checkpoint", tmp_path)
    assert printed.endswith(f"must be a file that training wrote, got {tmp_path}, which is a folder.\n")
    (tmp_path / "no.ckpt").write_text("no checkpoint")
    printed = error_of(capsys, "index", *images, *to, "--checkpoint", tmp_path / "no.ckpt")
    assert "must be the checkpoint of a RetrievalModule that can be rebuilt from it" in printed
    assert "`--images` must be a folder of images, got gone" in error_of(capsys, "index", "--images=gone", *to, *model)
    (tmp_path / "empty").mkdir()
    assert "which holds no image" in error_of(capsys, "index", "--images", tmp_path / "empty", *to, *model)
    (tmp_path / "empty" / "a.png").write_text("no image")
    printed = error_of(capsys, "index", "--images", tmp_path / "empty", *to, *model)
    assert printed.startswith("index: none of the 1 images in")
    printed = error_of(capsys, "index", *images, "--output", tmp_path / "empty", *model)
    assert "must be written to a new folder or over an index" in printed
    assert "`--factory` must be one of faiss'" in error_of(capsys, "index", *images, *to, *model, "--factory=Flatt")
    assert "`--factory` 'IVF64,Flat' must be trained" in error_of(
        capsys, *indexing(indexed, to[1], "--factory=IVF64,Flat")
    )
    assert "`--batch_size` must be an integer >= 1, got 0" in error_of(
        capsys, *indexing(indexed, to[1], "--batch_size=0")
    )
    for command_of in (indexing(indexed, "n" * 500), ["embed", *images, *model, "--output", tmp_path / ("n" * 500)]):
        printed = error_of(capsys, *command_of)
        assert ": a path must have names of at most 255 bytes, got " in printed
        assert printed.endswith("nn..., which is longer; shorten it.\n")
    assert not (tmp_path / "index").exists()


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "subprocess.Popen",
            "must name a function of yours from a PIL image to a tensor, got 'subprocess.Popen', which",
        ),
        ("os.system", "must name a function of yours from a PIL image to a tensor, got 'os.system', which is part of"),
        (
            "torch.nn.Linear",
            "must name a function from a PIL image to a tensor, got 'torch.nn.Linear', which is a class",
        ),
        ("torch.linalg.inv", "got 'torch.linalg.inv', which raises TypeError for a black image of 224 x 224 pixels ("),
        ("numpy.shape", "got 'numpy.shape', which returns tuple; end it with v2.ToImage() and"),
        ("numpy.nothing", "must name a function that can be imported, got numpy.nothing ("),
    ],
)
def test_invalid_function_in_place_of_a_transform(indexed, tmp_path, capsys, name, message):
    printed = error_of(capsys, *indexing(indexed, tmp_path / "index", f"--transform={name}"))
    assert printed.startswith("index: `--transform` ")
    assert message in printed
    assert not (tmp_path / "index").exists()
