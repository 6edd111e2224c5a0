"""Commands with `--backbone` and `--weights` in place of a checkpoint: embeddings, records, comparison and rebuilding.

The weights are those of small networks with random numbers, in files that torchvision's and timm's users have.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from PIL import Image

from lightning_retrieval import RetrievalIndex, RetrievalModule
from lightning_retrieval.models import AdaptedEmbedder, Embedder, GeM
from lightning_retrieval.search.embedding_folder import EmbeddingFolder
from lightning_retrieval.search.export.onnx_file import can_write_onnx
from tests.lightning_retrieval.search.commands.glyph_commands import command, error_of, run

SIZE = 64
CACHED = "squeezenet1_1-b8a52dc0.pth"  # torchvision's name of the file with the weights DEFAULT


def save_weights(path, seed=0, name="squeezenet1_1"):
    """A file of weights with torchvision's names, classifier included, as `torch.save(model.state_dict())` writes."""
    torch.manual_seed(seed)
    torch.save(torchvision.models.get_model(name).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return save_weights(tmp_path_factory.mktemp("weights") / "squeezenet.pth")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Eight classes with three pictures each."""
    folder = tmp_path_factory.mktemp("photos")
    for label in range(8):
        (folder / f"class-{label}").mkdir()
        for number in range(3):
            image = Image.effect_noise((80, 70), 12 * (label + 1)).convert("RGB")
            image.save(folder / f"class-{label}" / f"{number}.png")
    return folder


def of_backbone(weights, *more):
    return ["--backbone=squeezenet1_1", f"--weights={weights}", f"--image_size={SIZE}", *more]


@pytest.fixture
def indexed(photos, weights, tmp_path, capsys):
    """An index of the pictures, made with a file of weights."""
    to = f"--output={tmp_path / 'index'}"
    assert command(capsys, "index", *of_backbone(weights), f"--images={photos}", to)[0] == 0
    return tmp_path / "index"


def search(capsys, photos, index, *more):
    """{path: similarity} for the first picture."""
    query = photos / "class-0" / "0.png"
    code, out, err = command(capsys, "search", query, f"--index={index}", "-k24", "--json", *more)
    assert (code, err) == (0, "")
    return {hit["path"]: hit["similarity"] for hit in json.loads(out)["queries"][0]["results"]}


def test_an_index_of_a_pretrained_network_is_searched_by_its_pooled_features(photos, weights, indexed, capsys):
    network = torchvision.models.get_model("squeezenet1_1")
    network.load_state_dict(torch.load(weights, weights_only=True))
    prepare = Embedder("squeezenet1_1", None, image_size=SIZE).preparation
    images = {path.relative_to(photos).as_posix(): prepare(Image.open(path)) for path in sorted(photos.rglob("*.png"))}
    with torch.no_grad():
        rows = GeM()(network.eval().features(torch.stack(list(images.values())))).double()
    unit = rows / rows.norm(dim=1, keepdim=True)
    expected = dict(zip(images, (unit @ unit[0]).tolist()))
    assert search(capsys, photos, indexed) == pytest.approx(expected, abs=1e-5)


def test_embeddings_of_a_pretrained_network_are_continued_indexed_and_adapted(photos, weights, tmp_path, capsys):
    labels = tmp_path / "labels.csv"
    rows = (f"{path.relative_to(photos)},{path.parent.name}" for path in sorted(photos.rglob("*.png")))
    labels.write_text("\n".join(["image,label", *rows]) + "\n")
    embed = ["embed", f"--images={labels}", f"--root={photos}", f"--output={tmp_path / 'e'}", "--shard_size=10"]
    assert command(capsys, *embed, *of_backbone(weights))[0] == 0
    folder = EmbeddingFolder.load(tmp_path / "e")
    record = folder.manifest.about["backbone"]
    assert (record["backbone"], record["weights"]) == ("squeezenet1_1", weights.as_posix())
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "e").glob("part-*")}
    assert command(capsys, *embed, *of_backbone(weights))[0] == 0
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "e").glob("part-*")} == before
    other = save_weights(tmp_path / "other.pth", seed=1)
    assert "another model" in error_of(capsys, *embed, *of_backbone(other))
    indexing = ["index", f"--embeddings={tmp_path / 'e'}", f"--output={tmp_path / 'index'}"]
    assert run(capsys, *indexing)[0] == 0
    assert RetrievalIndex.load(tmp_path / "index").about["backbone"] == record
    query = photos / "class-0" / "0.png"
    assert command(capsys, "search", query, f"--index={tmp_path / 'index'}", "-k1")[::2] == (0, "")
    adapt = ["adapt", f"--embeddings={tmp_path / 'e'}", f"--output={tmp_path / 'adapted.ckpt'}", "--max_epochs=1"]
    code, _, err = run(capsys, *adapt, *of_backbone(other))
    assert (code, "`--backbone`" in err) == (2, True)
    assert run(capsys, *adapt)[0] == 0
    module = RetrievalModule.load_from_checkpoint(tmp_path / "adapted.ckpt")
    assert isinstance(module.embedder, AdaptedEmbedder)
    assert module.preparation == folder.manifest.preparation


@pytest.mark.skipif(not can_write_onnx(torch.__version__), reason="torch writes ONNX from 2.8 on")
def test_an_export_of_a_pretrained_network_says_what_it_is(weights, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    assert run(capsys, "export", *of_backbone(weights), f"--output={tmp_path}")[0] == 0
    about = json.loads((tmp_path / "preparation.json").read_text())
    assert about["backbone"] == {"backbone": "squeezenet1_1", "weights": weights.name}
    assert about["preparation"]["image_size"] == SIZE


def test_an_index_is_rebuilt_where_its_weights_are_found_and_with_no_others(photos, weights, indexed, tmp_path, capsys):
    moved, other = tmp_path / "moved.pth", save_weights(tmp_path / "other.pth", seed=1)
    shutil.copy(weights, moved)
    expected = search(capsys, photos, indexed)
    assert search(capsys, photos, indexed, *of_backbone(moved)[:2]) == expected
    query = photos / "class-0" / "0.png"
    searching = ["search", query, f"--index={indexed}"]
    for args in ([*of_backbone(other)[:2]], [*of_backbone(moved)[:2], "--image_size=96"]):
        assert "`--backbone`" in error_of(capsys, *searching, *args)
    of_index = RetrievalIndex.load(indexed)
    of_index.about["backbone"]["weights"] = str(tmp_path / "gone.pth")
    of_index.save(tmp_path / "copy")
    searching[-1] = f"--index={tmp_path / 'copy'}"
    assert str(tmp_path / "gone.pth") in error_of(capsys, *searching)
    assert search(capsys, photos, tmp_path / "copy", *of_backbone(moved)[:2]) == expected


def test_a_checkpoint_and_a_network_do_not_search_the_index_of_each_other(
    photos, indexed, weights, colour, tmp_path, capsys
):
    searching = ["search", photos / "class-0" / "0.png"]
    assert "`--checkpoint`" in error_of(capsys, *searching, f"--index={indexed}", f"--checkpoint={colour[0]}")
    args = [f"--checkpoint={colour[0]}", f"--images={photos}", f"--output={tmp_path / 'other'}"]
    assert command(capsys, "index", *args)[0] == 0
    error = error_of(capsys, *searching, f"--index={tmp_path / 'other'}", *of_backbone(weights)[:2])
    assert "`--backbone`" in error


def test_networks_of_timm_are_searched_with_a_file_of_their_weights(photos, tmp_path, capsys):
    name = "test_vit"
    torch.manual_seed(0)
    file = tmp_path / "weights.safetensors"
    pytest.importorskip("safetensors.torch").save_file(timm.create_model(name).state_dict(), file)
    args = [f"--backbone=timm/{name}", f"--weights={file}", '--preparation={"mean": [0.5, 0.5, 0.5]}']
    assert command(capsys, "index", *args, f"--images={photos}", f"--output={tmp_path / 'index'}")[0] == 0
    about = RetrievalIndex.load(tmp_path / "index").about
    assert about["preparation"]["preparation"]["mean"] == [0.5, 0.5, 0.5]
    assert search(capsys, photos, tmp_path / "index")["class-0/0.png"] == pytest.approx(1, abs=1e-5)


@pytest.fixture
def cached(tmp_path, monkeypatch, weights):
    """PyTorch's folder of downloaded weights, which has those of one network."""
    folder = tmp_path / "home" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(weights, folder / CACHED)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return folder


@pytest.mark.hostile
def test_recorded_weights_are_downloaded_only_if_the_user_names_them(photos, weights, cached, tmp_path, capsys):
    """The fixture of the marker fails the test if anything tries to reach the network."""
    args = [f"--images={photos}", f"--output={tmp_path / 'index'}"]
    assert command(capsys, "index", *of_backbone("DEFAULT"), *args)[0] == 0
    expected = search(capsys, photos, tmp_path / "index")
    assert RetrievalIndex.load(tmp_path / "index").about["backbone"]["weights"] == "DEFAULT"
    (cached / CACHED).unlink()
    error = error_of(capsys, "search", photos / "class-0" / "0.png", f"--index={tmp_path / 'index'}")
    assert "`--weights`" in error
    for more in ([], ['--preparation={"image_size": 64, "resize": 73}']):  # the recorded settings, or the same
        found = search(capsys, photos, tmp_path / "index", *of_backbone(weights)[:2], *more)
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.hostile
@pytest.mark.posix
@pytest.mark.parametrize(
    "change",
    [
        {"backbone": "resnet18", "weights": "IMAGENET1K_V1", "lora": 4},
        {"backbone": "timm/test_vit", "weights": "DEFAULT"},
        {"backbone": "timm/hf-hub:user/model", "weights": "DEFAULT"},
        {"backbone": "hf/user/model", "weights": "DEFAULT", "backbone_args": {"trust_remote_code": True}},
        {"weights": "https://example.org/weights.pth"},
        {"weights": "FIFO"},
        {"weights": "CODE"},
        {"backbone": {"class_path": "os.system", "init_args": {"command": "gs"}}},
    ],
    ids=str,
)
def test_a_record_is_data(photos, indexed, cached, tmp_path, capsys, change):
    """Nothing that an index records in place of its network is run, opened or looked up in a network."""
    os.mkfifo(tmp_path / "fifo.pth")
    marker = tmp_path / "marker"
    torch.save(Code(marker), tmp_path / "code.pth")
    made = RetrievalIndex.load(indexed)
    record = {**made.about["backbone"], **change}
    files = {"FIFO": str(tmp_path / "fifo.pth"), "CODE": str(tmp_path / "code.pth")}
    record["weights"] = files.get(record["weights"], record["weights"])
    made.about["backbone"] = record
    made.save(tmp_path / "made")
    error = error_of(capsys, "search", photos / "class-0" / "0.png", f"--index={tmp_path / 'made'}")
    assert "`--backbone`" in error
    assert not marker.exists()


class Code:
    """An object whose file creates another file if it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)
