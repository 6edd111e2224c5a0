"""The exported files give the embeddings of the checkpoint, and say how images are prepared."""

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_retrieval import Embedder, PCAWhitening, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.main import main
from lightning_retrieval.models import Preparation
from lightning_retrieval.preparation import prepare
from lightning_retrieval.search.commands.embed import embed_images
from lightning_retrieval.search.commands.export import export_model
from lightning_retrieval.search.export.onnx_file import can_write_onnx
from tests.datamodules.pictures import write_pictures_of_all_kinds
from tests.lightning_retrieval.search.commands.glyph_commands import embeddings_in, paths_of, save_checkpoint

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.skipif(not can_write_onnx(torch.__version__), reason="torch writes ONNX from 2.8 on")


@pytest.fixture(scope="module")
def exported(glyphs, tmp_path_factory):
    """A folder with the files; the images of four glyphs make a class."""
    folder, classes = tmp_path_factory.mktemp("exported"), tmp_path_factory.mktemp("classes")
    for position, path in enumerate(paths_of(glyphs[0] / "images")):
        (classes / str(position // 4)).mkdir(exist_ok=True)
        Image.open(glyphs[0] / "images" / path).save(classes / str(position // 4) / f"{position}.png")
    args = [f"--checkpoint={glyphs[0] / 'model.ckpt'}", f"--output={folder}", "--int8", f"--images={classes}"]
    with redirect_stdout(io.StringIO()):
        main(["export", *args])
    return folder


@pytest.fixture(scope="module")
def later(glyphs, exported, tmp_path_factory):
    """A folder with files of an earlier export and of the user, after an export of a program for floats."""
    folder = tmp_path_factory.mktemp("later")
    for name in ("model.int8.onnx", "model.onnx", "preparation.json"):
        shutil.copy(exported / name, folder)
    (folder / "notes.txt").write_text("the user's")
    export_model(glyphs[0] / "model.ckpt", folder, input_type="float")
    return folder


def pixels_of(glyphs, preparation):
    """All images as the programs take them."""
    images = [Image.open(glyphs[0] / "images" / path) for path in paths_of(glyphs[0] / "images")]
    return torch.stack([preparation.to_uint8(image) for image in images])


def test_files_give_the_embeddings_of_the_checkpoint(glyphs, exported):
    session = onnxruntime.InferenceSession(exported / "model.onnx")
    about = json.loads(session.get_modelmeta().custom_metadata_map["lightning_retrieval"])
    assert about == json.loads((exported / "preparation.json").read_text())
    assert (about["input"], about["input_shape"], about["dim"]) == ("uint8", ["batch", 1, 32, 32], 24)
    preparation = Preparation(**about["preparation"])
    pixels = pixels_of(glyphs, preparation)
    (found,) = session.run(None, {"images": pixels.numpy()})
    np.testing.assert_allclose(found, glyphs[1], atol=1e-5)
    (one,) = session.run(None, {"images": pixels[:1].numpy()})
    np.testing.assert_allclose(one, glyphs[1][:1], atol=1e-5)
    program = torch.export.load(exported / "model.pt2").module()
    np.testing.assert_allclose(program(pixels).detach(), glyphs[1], atol=1e-5)
    np.testing.assert_allclose(program(pixels[:1]).detach(), glyphs[1][:1], atol=1e-5)
    files = {"model.onnx", "model.pt2", "model.int8.onnx", "preparation.json", "prepare.py"}
    assert {path.name for path in exported.iterdir()} == files


# A service that can import onnxruntime, NumPy, Pillow and the exported `prepare.py`, and nothing else.
SERVICE = """
import sys

class NothingElse:
    def find_spec(self, name, path=None, target=None):
        known = {"numpy", "onnxruntime", "PIL", "prepare", *sys.stdlib_module_names}
        if name.partition(".")[0] not in known:
            raise ModuleNotFoundError(f"{name} must not be imported")

sys.meta_path.insert(0, NothingElse())
model, pictures = sys.argv[1:]
sys.path.insert(0, model)

import json
from pathlib import Path
import numpy
import onnxruntime
from PIL import Image
from prepare import prepare

session = onnxruntime.InferenceSession(f"{model}/model.onnx")
about = json.loads(session.get_modelmeta().custom_metadata_map["lightning_retrieval"])
found = {}
for path in Path(pictures).iterdir():
    images = prepare(Image.open(path), about)[None]
    (embeddings,) = session.run(None, {"images": images})
    found[path.name] = embeddings[0].tolist()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_service_without_this_library_embeds_as_it_does(tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    write_pictures_of_all_kinds(pictures)
    torch.manual_seed(0)
    embedder = Embedder("squeezenet1_1", embedding_dim=16, image_size=64)
    # An untrained network gives similar embeddings to all pictures; after whitening, they differ.
    _, similar = embedded(save_checkpoint(tmp_path / "1.ckpt", RetrievalModule(embedder, SmoothAPLoss())), pictures)
    module = RetrievalModule(embedder, SmoothAPLoss(), whitening=PCAWhitening(dim=8).fit(similar))
    checkpoint = save_checkpoint(tmp_path / "2.ckpt", module)
    export_model(checkpoint, tmp_path / "exported")
    answer = subprocess.run(
        [sys.executable, "-c", SERVICE, tmp_path / "exported", pictures], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    of_service = json.loads(answer.stdout)
    names, expected = embedded(checkpoint, pictures)
    found = torch.tensor([of_service[name] for name in names])
    assert len(names) == len(of_service) > 60
    cosines = torch.nn.functional.cosine_similarity(found[:, None], expected, dim=2)
    assert cosines.diagonal().min() > 1 - 1e-3
    assert cosines.median() < 0.5


def embedded(checkpoint, pictures):
    """The names and the embeddings of pictures, as `embed` embeds them."""
    output = checkpoint.with_suffix(".embeddings")
    embed_images(checkpoint, pictures, output, device="cpu")
    return embeddings_in(output)


def test_a_program_that_differs_is_not_written(glyphs, tmp_path, monkeypatch):
    run = onnxruntime.InferenceSession.run

    def other_numbers(*args):
        return [numbers + 1e-3 for numbers in run(*args)]

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", other_numbers)
    with pytest.raises(ValueError, match=r"model\.onnx must differ"):
        export_model(glyphs[0] / "model.ckpt", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_int8_says_what_it_costs(glyphs, exported):
    sizes = [(exported / name).stat().st_size for name in ("model.int8.onnx", "model.onnx")]
    assert sizes[0] < 0.3 * sizes[1]
    # With weights of eight bits, sums of two products would overflow on processors without VNNI.
    initializers = onnx.load(exported / "model.int8.onnx").graph.initializer
    weights = [onnx.numpy_helper.to_array(value) for value in initializers if value.data_type == onnx.TensorProto.INT8]
    assert max(abs(weight.astype(int)).max() for weight in weights) == 64
    session = onnxruntime.InferenceSession(exported / "model.int8.onnx")
    preparation = Preparation(**json.loads((exported / "preparation.json").read_text())["preparation"])
    (found,) = session.run(None, {"images": pixels_of(glyphs, preparation).numpy()})
    cosines = torch.nn.functional.cosine_similarity(torch.from_numpy(found), glyphs[1])
    assert cosines.min() > 0.98


def test_a_later_export_leaves_no_file_of_an_earlier_one(exported, later, tmp_path):
    """A file of another export is noticed."""
    written = {"model.onnx", "model.pt2", "preparation.json", "prepare.py"}
    assert {path.name for path in later.iterdir()} == written | {"notes.txt"}
    about = prepare.read_settings(later)
    assert about["input"] == "float"
    for mixed in ("model.onnx", "model.pt2", "model.int8.onnx", "preparation.json"):
        folder = shutil.copytree(later, tmp_path / f"with {mixed}")
        shutil.copy(exported / mixed, folder)
        with pytest.raises(ValueError, match="must be of the export"):
            prepare.read_settings(folder)


@pytest.mark.parametrize(("name", "content"), [("prepare.py", "print(1)"), ("preparation.json", '{"steps": 3}')])
def test_a_file_of_the_user_is_not_replaced(name, content, glyphs, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        export_model(glyphs[0] / "model.ckpt", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == content


def test_an_old_torch_is_named_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0+cu124")
    with pytest.raises(ValueError, match=r"2\.6\.0"):
        export_model(tmp_path / "model.ckpt", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
