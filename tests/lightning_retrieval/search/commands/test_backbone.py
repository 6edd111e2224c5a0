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

from lightning_retrieval import RetrievalIndex
from lightning_retrieval.models import AdaptedEmbedder, Embedder, GeM
from lightning_retrieval.search.commands.embedding import load_checkpoint
from lightning_retrieval.search.commands.options import COMMANDS, make_parser
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
    code, out, _ = command(
        capsys, "index", *of_backbone(weights), f"--images={photos}", f"--output={tmp_path / 'index'}"
    )
    assert code == 0
    assert out.startswith("images prepared with Preparation(image_size=64), as chosen with the backbone\n")
    assert "24 images, 512 dimensions" in out
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
    _, out, _ = command(capsys, *embed, *of_backbone(weights))
    assert "3 of which were there" in out
    other = save_weights(tmp_path / "other.pth", seed=1)
    assert "embeddings of another model" in error_of(capsys, *embed, *of_backbone(other))
    indexing = ["index", f"--embeddings={tmp_path / 'e'}", f"--output={tmp_path / 'index'}"]
    assert run(capsys, *indexing)[0] == 0
    assert RetrievalIndex.load(tmp_path / "index").about["backbone"] == record
    query = photos / "class-0" / "0.png"
    assert command(capsys, "search", query, f"--index={tmp_path / 'index'}", "-k1")[::2] == (0, "")
    adapt = ["adapt", f"--embeddings={tmp_path / 'e'}", f"--output={tmp_path / 'adapted.ckpt'}", "--max_epochs=1"]
    assert error_of_adapt(capsys, *adapt, *of_backbone(other)).startswith("adapt: `--backbone` must be the one that")
    assert run(capsys, *adapt)[0] == 0
    module = load_checkpoint(tmp_path / "adapted.ckpt")
    assert isinstance(module.embedder, AdaptedEmbedder)
    assert module.preparation == folder.manifest.preparation


def error_of_adapt(capsys, *args):
    """The one line of standard error of `adapt`, which has no option `--device`."""
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


@pytest.mark.skipif(not can_write_onnx(torch.__version__), reason="torch writes ONNX from 2.8 on")
def test_an_export_of_a_pretrained_network_says_what_it_is(photos, weights, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    assert run(capsys, "export", *of_backbone(weights), f"--output={tmp_path / 'exported'}")[0] == 0
    about = json.loads((tmp_path / "exported" / "preparation.json").read_text())
    assert about["backbone"] == {"backbone": "squeezenet1_1", "weights": weights.name}
    assert about["preparation"]["image_size"] == SIZE


def test_an_index_is_rebuilt_where_its_weights_are_found_and_with_no_others(photos, weights, indexed, tmp_path, capsys):
    moved, other = tmp_path / "moved.pth", save_weights(tmp_path / "other.pth", seed=1)
    shutil.copy(weights, moved)
    expected = search(capsys, photos, indexed)
    assert search(capsys, photos, indexed, *of_backbone(moved)[:2]) == expected
    query = photos / "class-0" / "0.png"
    searching = ["search", query, f"--index={indexed}"]
    different = "search: `--backbone` must be the one that the index was made with"
    error = error_of(capsys, *searching, *of_backbone(moved)[:2], "--image_size=96")
    assert f"got another, 'squeezenet1_1' with the weights '{moved.as_posix()}' for images of the size 96;" in error
    for args in ([*of_backbone(other)[:2]], [*of_backbone(moved)[:2], "--image_size=96"]):
        assert error_of(capsys, *searching, *args).startswith(different)
    of_index = RetrievalIndex.load(indexed)
    of_index.about["backbone"]["weights"] = str(tmp_path / "gone.pth")
    of_index.save(tmp_path / "copy")
    searching[-1] = f"--index={tmp_path / 'copy'}"
    error = error_of(capsys, *searching)
    assert error.startswith("search: `--backbone` must be given with `--weights`, because the backbone that the index")
    assert f"{tmp_path / 'gone.pth'}, which does not exist" in error
    assert search(capsys, photos, tmp_path / "copy", *of_backbone(moved)[:2]) == expected


@pytest.mark.refusal
def test_an_index_is_not_searched_with_a_checkpoint_in_place_of_its_network(photos, indexed, glyphs, colour, capsys):
    searching = ["search", photos / "class-0" / "0.png", f"--index={indexed}", f"--checkpoint={colour[0]}"]
    assert error_of(capsys, *searching).startswith(
        "search: `--checkpoint` must be the one that the index was made with"
    )


@pytest.mark.refusal
def test_an_index_of_a_checkpoint_is_not_searched_with_a_pretrained_network(photos, weights, colour, tmp_path, capsys):
    args = [f"--checkpoint={colour[0]}", f"--images={photos}", f"--output={tmp_path / 'index'}"]
    assert command(capsys, "index", *args)[0] == 0
    searching = ["search", photos / "class-0" / "0.png", f"--index={tmp_path / 'index'}", *of_backbone(weights)[:2]]
    assert error_of(capsys, *searching).startswith("search: `--backbone` must be the one that the index was made with")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_networks_of_timm_are_searched_with_a_file_of_their_weights(photos, tmp_path, capsys, suffix):
    name = "test_vit"
    torch.manual_seed(0)
    state = timm.create_model(name).state_dict()
    file = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": state}, file)
    else:
        pytest.importorskip("safetensors.torch").save_file(state, file)
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
    assert error.startswith("search: `--backbone` must be given with `--weights`, because the backbone that the index")
    for more in ([], ['--preparation={"image_size": 64, "resize": 73}']):  # the recorded settings, or the same
        found = search(capsys, photos, tmp_path / "index", *of_backbone(weights)[:2], *more)
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.hostile
@pytest.mark.posix
@pytest.mark.refusal
@pytest.mark.parametrize(
    "change",
    [
        {"backbone": "resnet18", "weights": "DEFAULT"},
        {"backbone": "resnet18", "weights": "IMAGENET1K_V1", "lora": 4},
        {"backbone": "timm/legacy_seresnet18", "weights": "DEFAULT"},
        {"backbone": "timm/test_vit", "weights": "DEFAULT"},
        {"backbone": "timm/test_vit", "weights": "DEFAULT", "backbone_args": {"pretrained_cfg": {"url": "x"}}},
        {"backbone": "timm/hf-hub:user/model", "weights": "DEFAULT"},
        {"backbone": "hf/user/model", "weights": "DEFAULT"},
        {"backbone": "hf/user/model", "weights": "DEFAULT", "backbone_args": {"trust_remote_code": True}},
        {"weights": "https://example.org/weights.pth"},
        {"weights": None},
        {"weights": ["DEFAULT"]},
        {"weights": "FIFO"},
        {"weights": "CODE"},
        {"weights": "/dev/zero"},
        {"backbone": {"class_path": "os.system", "init_args": {"command": "gs"}}},
        {"backbone": "vit_h_14"},
        {"embedding_dim": 1 << 20},
        {"unknown": 1},
        "squeezenet1_1",
        None,
    ],
    ids=str,
)
def test_a_record_is_data(photos, indexed, cached, tmp_path, capsys, change):
    """Nothing that an index records in place of its network is run, opened or looked up in a network."""
    os.mkfifo(tmp_path / "fifo.pth")
    marker = tmp_path / "marker"
    torch.save(Code(marker), tmp_path / "code.pth")
    made = RetrievalIndex.load(indexed)
    if isinstance(change, dict):
        record = {**made.about["backbone"], **change}
        files = {"FIFO": str(tmp_path / "fifo.pth"), "CODE": str(tmp_path / "code.pth")}
        if isinstance(record["weights"], str):
            record["weights"] = files.get(record["weights"], record["weights"])
        change = record
    made.about["backbone"] = change
    made.save(tmp_path / "made")
    error = error_of(capsys, "search", photos / "class-0" / "0.png", f"--index={tmp_path / 'made'}")
    assert error.startswith(
        ("search: `--backbone` must be given with `--weights`, ", "search: `--backbone` must be the")
    )
    assert not marker.exists()


class Code:
    """An object whose file creates another file if it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--backbone with --weights replaces --checkpoint"),
        (
            ["--checkpoint=a", "--backbone=resnet18", "--weights=DEFAULT"],
            "--backbone must not be given with --checkpoint",
        ),
        (["--checkpoint=a", "--image_size=64"], "--image_size must not be given with --checkpoint"),
        (["--backbone=resnet18"], "--backbone must be given with --weights: DEFAULT, the name of other weights, or a"),
        (["--weights=DEFAULT"], "--weights must be given with --backbone"),
        (
            ["--backbone=a", "--weights=b", "--transform=plain", "--image_size=9"],
            "--image_size must not be given with -",
        ),
        (["--backbone=a", "--weights=b", "--image_size=0"], "--image_size: must be an integer >= 1, got 0"),
        (["--backbone=a", "--weights=b", "--preparation=[1]"], "--preparation: must be names and values such as "),
        (["--backbone=a", "--weights=b", "--preparation={"], "--preparation: must be JSON such as "),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["index", "embed", "export"])
def test_exactly_one_model_is_given(photos, tmp_path, capsys, name, args, message):
    more = [f"--output={tmp_path / 'made'}"]
    if name != "export":
        more.append(f"--images={photos}")
    code, out, err = run(capsys, name, *args, *more)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not (tmp_path / "made").exists()


@pytest.mark.refusal
def test_an_unknown_backbone_and_weights_that_do_not_fit_are_named(photos, weights, tmp_path, capsys):
    damaged = tmp_path / "damaged.pth"
    damaged.write_bytes(weights.read_bytes()[:5000])
    for backbone, file, message in (
        ("squeezenet11", weights, "`--backbone` must be the name of a torchvision classification model, "),
        ("squeezenet11", weights, "close names are 'squeezenet1_1'"),
        ("timm/test_vitt", weights, "'timm/test_vit'"),
        (
            "resnet18",
            weights,
            f"`--weights` must be a file with the weights of this backbone, got {weights}, loaded 0 of",
        ),
        (
            "squeezenet1_1",
            tmp_path / "gone.pth",
            f"`--weights` must be a file of weights, got {tmp_path / 'gone.pth'}, ",
        ),
        (
            "squeezenet1_1",
            damaged,
            "`--weights` must be a file of safetensors or of torch.save with tensors only, got ",
        ),
        ("squeezenet1_1", "IMAGENET", "`--weights` must be one of "),
        ("glyph_net", weights, "`--weights` must be None unless `--backbone` is the name of a torchvision"),
    ):
        args = [f"--backbone={backbone}", f"--weights={file}", f"--images={photos}", f"--output={tmp_path / 'made'}"]
        error = error_of(capsys, "index", *args)
        assert error.startswith("index: ")
        assert message in error
    assert not (tmp_path / "made").exists()


def test_every_command_that_loads_a_model_takes_a_pretrained_network():
    for name in COMMANDS:
        assert {"checkpoint", "backbone", "weights", "image_size"} <= {a.dest for a in make_parser(name)._actions}
