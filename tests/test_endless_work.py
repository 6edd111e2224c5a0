"""A file takes no time or memory without end: what it asks for is bounded by what it holds.

Each case runs in a process of its own, whose time and memory are limited, so that a file that is obeyed fails the test.
"""

import base64
import contextlib
import io
import json
import zipfile

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.main import main
from lightning_retrieval.datamodules import ImageTable
from lightning_retrieval.files import file_digest
from lightning_retrieval.invalid import owned_by
from lightning_retrieval.loading import module_of_checkpoint
from lightning_retrieval.models.adapted import embedder_of_checkpoint
from lightning_retrieval.models.tokenizers import JSONTokenizer
from lightning_retrieval.preparation.serialised import rebuild_transform, serialise_transform
from lightning_retrieval.search.store.conditions import parse_where
from lightning_retrieval.search.store.index import RetrievalIndex
from lightning_retrieval.search.store.storage import FORMAT, MANIFEST
from lightning_retrieval.training.checkpoint_files import restored_network
from tests.lightning_retrieval.search.commands.glyph_commands import save_checkpoint

pytestmark = [pytest.mark.hostile, pytest.mark.refusal, pytest.mark.slow]

MOST_MEMORY = 12 << 30  # bytes of addresses, of which most are those of libraries
SECONDS = 120


def limited():
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def embedder(backbone, **arguments):
    return {"class_path": "lightning_retrieval.Embedder", "init_args": {"backbone": backbone, **arguments}}


def described(path, **arguments):
    return {"class_path": path, "init_args": arguments}


VIT = {"model_type": "vit", "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
LAYER = described("torch.nn.TransformerEncoderLayer", d_model=16, nhead=2)
# Descriptions of networks that are far larger than the weights beside them.
NETWORKS = [
    embedder("hf/any", backbone_args={**VIT, "num_hidden_layers": 10**7}),
    embedder("hf/any", backbone_args={**VIT, "num_hidden_layers": 10**6}),
    embedder("hf/any", backbone_args={**VIT, "num_hidden_layers": 1, "hidden_size": 10**7}),
    embedder("hf/any", backbone_args={**VIT, "num_hidden_layers": 9, "intermediate_size": 4 * 10**6}),
    embedder("hf/any", backbone_args={"model_type": "dinov2", "num_hidden_layers": 10**9}),
    embedder("hf/any", backbone_args={"model_type": "resnet", "depths": [10**6] * 4}),
    embedder("timm/vit_tiny_patch16_224", backbone_args={"depth": 10**6}),
    embedder("timm/vit_tiny_patch16_224", backbone_args={"embed_dim": 3 * 10**6}),
    embedder("timm/resnet18", backbone_args={"layers": [10**6] * 4}),
    embedder("timm/swin_tiny_patch4_window7_224", backbone_args={"window_size": 2000}, image_size=4000),
    embedder("glyph_net", backbone_args={"width": 1024}, embedding_dim=2**20),
    described("torch.nn.Linear", in_features=10**9, out_features=10**9),
    described("torch.nn.Linear", in_features=10**5, out_features=10**5),
    described("torch.nn.Linear", in_features=10**30, out_features=1),
    described("torch.nn.TransformerEncoder", encoder_layer=LAYER, num_layers=10**7),
    described("torch.nn.Transformer", num_encoder_layers=10**7),
    described("torch.nn.LSTM", input_size=4, hidden_size=4, num_layers=10**7),
    described("torchvision.models.vit_b_16", image_size=16 * 10**4),
    described("timm.create_model", model_name="vit_tiny_patch16_224", depth=10**7),
]


RULES = (
    ": a file must describe a network of about the size of its weights (2 tensors with 10 numbers), got",
    "must have integers up to 4,194,304 in a file, got",
)


def errors_of_networks(rank, world_size, path, networks):
    """The errors of rebuilding networks from a checkpoint, in each of three ways."""
    limited()
    content, errors = torch.load(path, weights_only=True), []
    for network in networks:
        content["hyper_parameters"]["embedder"] = network
        torch.save(content, path)
        for rebuild in (
            lambda: module_of_checkpoint(RetrievalModule, content),
            lambda: restored_network(content),
            lambda: embedder_of_checkpoint(path),
        ):
            with pytest.raises((ValueError, TypeError)) as raised:
                rebuild()
            errors.append(str(raised.value))
    return errors


@pytest.mark.parametrize(
    "network",
    [
        embedder("hf/any", backbone_args={**VIT, "hidden_act": "__import__"}),
        embedder("timm/vit_tiny_patch16_224", backbone_args={"act_layer": "__import__"}),
        embedder("timm/resnet18", backbone_args={"block": "__import__"}),
        embedder("hf/any", backbone_args={**VIT, "num_attention_heads": 0}),
        described("torch.nn.Linear", in_features=-1, out_features=2),
        described("torch.nn.Conv2d", in_channels=4, out_channels=4, kernel_size=3, groups=0),
    ],
    ids=str,
)
def test_a_network_that_cannot_be_built_is_one_sentence(network):
    content = {"hyper_parameters": {"embedder": network, "loss": described("lightning_retrieval.SmoothAPLoss")}}
    content["state_dict"] = {"a": torch.zeros(4)}
    for rebuild in (lambda: module_of_checkpoint(RetrievalModule, content), lambda: restored_network(content)):
        with pytest.raises((ValueError, TypeError)):
            rebuild()


@pytest.mark.parametrize("part", range(2))
def test_a_checkpoint_describes_no_network_that_is_larger_than_its_weights(part, tmp_path, run_alone):
    path = save_checkpoint(tmp_path / "model.ckpt", RetrievalModule(nn.Linear(4, 2), SmoothAPLoss()))
    for error in run_alone(errors_of_networks, path, NETWORKS[part::2], timeout=SECONDS):
        assert (
            "a file must describe a network of about the size of its weights (2 tensors with 10 numbers)" in error
            or ("must have integers up to 4,194,304 in a file" in error)
        )


def step(name, **arguments):
    return described(f"torchvision.transforms.{name}", **arguments)


TRANSFORMS = [
    step("AugMix", mixture_width=10**7),
    step("v2.AugMix", chain_depth=10**7),
    step("RandAugment", num_ops=10**9),
    step("Pad", padding=10**6),
    step("Pad", padding=[1, 10**9]),
    step("Compose", transforms=[step("Pad", padding=10**4)] * 50),
    step("Resize", size=10**7),
    step("Resize", size=[10**30, 4]),
    step("CenterCrop", size=float("inf")),
    step("GaussianBlur", kernel_size=10**7 + 1),
    step("v2.ElasticTransform", sigma=1e12),
    step("Compose", transforms=[step("ToTensor")] * 10**5),
    step("Compose", transforms=[step("RandomRotation", degrees=45, expand=True)] * 60),
    step("Compose", transforms=[step("v2.RandomZoomOut", side_range=[1, 10])] * 30),
    {"albumentations": {"transform": {"__class_fullname__": "Resize", "height": 10**7, "width": 10**7}}},
    {"preparation": {"image_size": 10**7}},
    {"preparation": {"resize": 10**7}},
]


def errors_of_transforms(rank, world_size, transforms):
    limited()
    errors = []
    nested = step("ToTensor")
    for _ in range(500):
        nested = step("Compose", transforms=[nested])
    for transform in (*transforms, nested):
        with pytest.raises(ValueError, match=r"^Test: ") as raised, owned_by("Test"):
            rebuild_transform(transform)(Image.new("RGB", (64, 64)))
        errors.append(str(raised.value))
    return errors


def test_a_recorded_transform_does_not_ask_for_endless_work(run_alone):
    for error in run_alone(errors_of_transforms, TRANSFORMS, timeout=SECONDS):
        assert len(error) < 700


def test_a_usual_transform_is_rebuilt():
    usual = v2.Compose([v2.RandomZoomOut(), v2.RandAugment(), v2.AugMix(), v2.Pad(8), v2.Resize(512), v2.ToImage()])
    serialised = serialise_transform(usual)
    assert serialise_transform(rebuild_transform(serialised)) == serialised


COLUMNS = {"price": "number", "brand": "text"}


def errors_of_conditions(rank, world_size, conditions):
    limited()
    errors = []
    for where in conditions:
        with pytest.raises(ValueError, match=r"^`where` must ") as raised:
            parse_where(where, COLUMNS)
        errors.append(str(raised.value))
    return errors


def test_a_condition_does_not_ask_for_endless_work(run_alone):
    conditions = [
        " or ".join(["price == 1"] * 200_000),
        " or ".join(["price == 1"] * 201),
        f"price in {list(range(1_000_000))}",
        "(" * 10_000 + "price == 1" + ")" * 10_000,
        "not " * 20_000 + "price == 1",
        "price == " + "-" * 90_000 + "1",
        "price == " + "9" * 90_000,
        "brand == '" + "x" * 600_000 + "'",
        "price" + "." * 90_000,
    ]
    for error in run_alone(errors_of_conditions, conditions, timeout=SECONDS):
        assert len(error) < 500
    assert parse_where(f"price in {list(range(10_000))} and brand == 'a'", COLUMNS) is not None


def tokenizer(**parts):
    """The content of a tokenizer of one word."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts})


def replacing(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def in_sequence(parts):
    return {"type": "Sequence", "normalizers": parts}


TENFOLD = [replacing({"String": "a"}, "a" * 10)] * 9
TWICE = {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 10, "pair": [], "special_tokens": {}}
MAP = base64.b64encode((0).to_bytes(4, "little") + b"x" * 10**6 + b"\0").decode()
TOKENIZERS = [
    tokenizer(normalizer=in_sequence(TENFOLD)),
    tokenizer(normalizer=in_sequence([in_sequence([part]) for part in TENFOLD])),
    tokenizer(normalizer=in_sequence([replacing({"Regex": "a"}, "a" * 10)] * 9)),
    tokenizer(normalizer=in_sequence([replacing({"Regex": "(?=.)"}, "a")] * 30)),
    tokenizer(normalizer=replacing({"String": "a"}, "a" * 10**6)),
    tokenizer(normalizer=replacing({"Regex": "(a+)+b"}, "")),
    tokenizer(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a|aa)*b"}, "behavior": "Isolated", "invert": False}
    ),
    tokenizer(post_processor={"type": "Sequence", "processors": [{"type": "TemplateProcessing", **TWICE}] * 9}),
    tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": MAP}),
]


def errors_of_tokenizers(rank, world_size, tokenizers):
    limited()
    errors = []
    for text in tokenizers:
        with pytest.raises(ValueError, match=r"^JSONTokenizer: `text` must be a tokenizer that makes no") as raised:
            JSONTokenizer(text, max_length=8)(["a" * 1000])
        errors.append(str(raised.value))
    return errors


def test_a_tokenizer_does_not_make_texts_grow_without_end(run_alone):
    pytest.importorskip("tokenizers")
    assert len(run_alone(errors_of_tokenizers, TOKENIZERS, timeout=SECONDS)) == len(TOKENIZERS)
    usual = [replacing({"Regex": r"\s+"}, " "), replacing({"String": " "}, "\u2581"), {"type": "NFKC"}]
    assert JSONTokenizer(tokenizer(normalizer=in_sequence(usual)), max_length=8)(["a"]).tolist() == [[0]]


def test_a_checkpoint_holds_as_much_as_its_records_claim(tmp_path):
    """torch.save neither compresses records, nor lets several of them share their bytes."""
    path = save_checkpoint(tmp_path / "model.ckpt", RetrievalModule(nn.Linear(4, 2), SmoothAPLoss()))
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "deflated.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
        archive.writestr("archive/data/99", bytes(1 << 28))
    with zipfile.ZipFile(tmp_path / "shared.ckpt", "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
        archive.writestr("archive/data/99", bytes(1 << 20))
        archive.filelist += [archive.filelist[-1]] * 10_000
    for name in ("deflated", "shared"):
        with pytest.raises(ValueError, match=r"^RetrievalModule: the checkpoint .* is damaged, it"):
            RetrievalModule.load_from_checkpoint(tmp_path / f"{name}.ckpt")


def times_nine(depth):
    """Lists that share lists: few in memory, 9 to the power of `depth` values for whoever walks through them."""
    shared = ["x"]
    for _ in range(depth):
        shared = [shared] * 9
    return shared


def errors_of_shared_lists(rank, world_size, path):
    """The errors of loading a checkpoint with lists that share lists, at different places."""
    limited()
    content, errors = torch.load(path, weights_only=True), []
    for place in ("preparation", "callbacks", "loops", "trainable_parameters", "another"):
        torch.save({**content, place: {"a": times_nine(12)}}, path)
        for load in (
            lambda: RetrievalModule.load_from_checkpoint(path),
            lambda: restored_network(torch.load(path, weights_only=True)),
        ):
            with pytest.raises(ValueError, match="nested too deeply") as raised:
                load()
            errors.append(str(raised.value))
    return errors


def test_lists_of_a_checkpoint_that_share_lists(tmp_path, run_alone):
    path = save_checkpoint(tmp_path / "model.ckpt", RetrievalModule(Embedder("glyph_net", 8), SmoothAPLoss()))
    for error in run_alone(errors_of_shared_lists, path, timeout=SECONDS):
        assert error.startswith("RetrievalModule: the checkpoint has lists or dicts that are nested too deeply")


def output_of_a_config(rank, world_size, path):
    """What `fit` prints for a config that it refuses."""
    limited()
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit):
        main(["fit", f"--config={path}"])
    return printed.getvalue()


def test_aliases_of_a_config(tmp_path, run_alone):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 12):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]")
    (tmp_path / "config.yaml").write_text("\n".join([*lines, "model: *a11"]))
    assert "aliases make it longer than" in run_alone(output_of_a_config, tmp_path / "config.yaml", timeout=SECONDS)


def error_of_a_table(rank, world_size, path):
    limited()
    with pytest.raises(ValueError, match="rows") as raised:
        ImageTable(path.parent, path).setup("fit")
    return str(raised.value)


def test_a_table_with_more_rows_than_bytes(tmp_path, run_alone):
    path = tmp_path / "table.parquet"
    with pyarrow.parquet.ParquetWriter(path, pyarrow.schema([("image", pyarrow.string())])) as writer:
        for _ in range(20):
            images = pyarrow.DictionaryArray.from_arrays(np.zeros(2_000_000, dtype=np.int32), ["a.jpg"])
            writer.write_table(pyarrow.table({"image": images.cast(pyarrow.string())}))
    error = run_alone(error_of_a_table, path, timeout=SECONDS)
    assert error.startswith(f"ImageTable: {path} must be a Parquet file, but ")
    assert "40,000,000 rows" in error


def errors_of_arrays(rank, world_size, folder):
    """The errors of loading an index one of whose arrays claims a size that its file does not have."""
    limited()
    manifest, errors = FORMAT.read(folder), []
    for name in manifest["files"]:
        file = folder / name
        content = file.read_bytes()
        if file.suffix != ".npy":
            continue
        for shape in ((10**12,), (10**30,), (2**62,), (2**40, 2**40), (-1,)):
            header = io.BytesIO()
            described = {"descr": np.load(io.BytesIO(content)).dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(header, described)
            file.write_bytes(header.getvalue() + bytes(64))
            changed = {name: {"bytes": file.stat().st_size, "sha256": file_digest(file)}}
            files = {**manifest["files"], **changed}
            (folder / MANIFEST).write_bytes(FORMAT.encode({**manifest, "files": files}))
            for mapped in (False, True):
                with pytest.raises(ValueError, match="damaged") as raised:
                    RetrievalIndex.load(folder, mapped=mapped)
                errors.append(str(raised.value))
        file.write_bytes(content)
    return errors


def test_arrays_of_an_index_that_claim_another_size(tmp_path, run_alone):
    index = RetrievalIndex(8)
    index.add(torch.nn.functional.normalize(torch.randn(9, 8)), torch.arange(9), paths=[f"{i}.jpg" for i in range(9)])
    index.save(tmp_path / "index")
    errors = run_alone(errors_of_arrays, tmp_path / "index", timeout=SECONDS)
    assert len(errors) == 3 * 5 * 2
    for error in errors:
        assert error.startswith(f"RetrievalIndex: {tmp_path / 'index'} is damaged, its manifest and its files do not")
