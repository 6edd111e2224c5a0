"""`lightning-retrieval export`: export a model to programs that do not need this library, and check their outputs."""

import dataclasses
import io
import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lightning_retrieval.datamodules.table_format import ColumnNames, TableFormat
from lightning_retrieval.files import is_of_others, new_files, writing
from lightning_retrieval.invalid import InvalidValue, owned_by
from lightning_retrieval.metrics import RetrievalMetrics
from lightning_retrieval.paths import check_path
from lightning_retrieval.preparation import prepare
from lightning_retrieval.preparation.preparation import Preparation
from lightning_retrieval.search.commands.embedding import (
    ImageEmbedder,
    ListedImages,
    list_images,
    shown_model,
)
from lightning_retrieval.search.commands.of_backbone import BACKBONE
from lightning_retrieval.search.commands.shared import PretrainedBackbone
from lightning_retrieval.search.export.onnx_file import METADATA, OnnxModel, load_onnx, write_onnx
from lightning_retrieval.search.export.program import EmbeddingProgram, InputType, export_program, largest_difference
from lightning_retrieval.search.export.quantization import quantize_onnx

OWNER = "export_model"
FORMAT = "lightning-retrieval model"
ONNX, TORCH, INT8 = "model.onnx", "model.pt2", "model.int8.onnx"
PREPARATION, PREPARE = "preparation.json", "prepare.py"
SCRIPT_START = b'"""Prepares images for an exported model'
FILES = (PREPARATION, ONNX, TORCH, INT8, PREPARE)  # all files that an export may write
TOLERANCE = 1e-5  # largest allowed difference from torch in float32
CHECKED_BATCHES = (1, 3)  # batch sizes with which a program is compared
CALIBRATION_IMAGES = 256
TIMED_IMAGES, TIMED_RUNS = 64, 15


@dataclass(frozen=True)
class Int8Cost:
    """The cost and the gain of int8 on the given images.

    Args:
        kind: `"static"` or `"dynamic"`.
        images: number of images that were embedded.
        recall: R@1 of the int8 model.
        recall_before: R@1 of the float model.
        size_ratio: file size of the int8 model divided by that of the float model.
        speed_ratio: throughput of the int8 model divided by that of the float model, in batches of 64.
    """

    kind: str
    images: int
    recall: float
    recall_before: float
    size_ratio: float
    speed_ratio: float


@dataclass
class ExportedModel:
    """The result of an export.

    Args:
        about: the plain values of `preparation.json`.
        differences: largest difference of each program from torch, by the file name of the program.
        int8: cost and gain of int8; None if int8 was not requested.
    """

    about: dict[str, Any]
    differences: dict[str, float] = field(default_factory=dict)
    int8: Int8Cost | None = None


def summary(made: ExportedModel, output: Path) -> list[str]:
    """Lines on what was written."""
    shape = ", ".join(map(str, made.about["input_shape"]))
    lines = [f"input: {made.about['input']} ({shape}); output: (batch, {made.about['dim']})"]
    for name, difference in made.differences.items():
        file = output / name
        lines.append(f"{file}: {_megabytes(file)}, largest difference to torch {difference:.1e}")
    if made.int8 is not None:
        lines += _int8_lines(made.int8, output / "model.int8.onnx")
    lines.append(f"{output / PREPARATION}: how an image is prepared for the programs")
    lines.append(f"{output / PREPARE}: prepares an image; needs only Pillow and NumPy")
    return lines


def _int8_lines(cost: Int8Cost, file: Path) -> list[str]:
    return [
        f"{file}: {_megabytes(file)}, {cost.size_ratio:.2f} times the size, {cost.speed_ratio:.2f} times the speed "
        f"({cost.kind} int8)",
        f"R@1 of int8 on {cost.images} images: {cost.recall:.4f}, of float {cost.recall_before:.4f}",
    ]


def _megabytes(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.2f} MB"


@owned_by(OWNER)
def export_model(
    checkpoint: Path | PretrainedBackbone,
    output: Path,
    *,
    input_type: InputType = "uint8",
    int8: bool = False,
    images: Path | None = None,
    root: Path | None = None,
    columns: ColumnNames = None,
    delimiter: str = ",",
    transform: str | None = None,
) -> ExportedModel:
    """Export a model to ONNX and to a program of `torch.export`, and compare both with the model.

    The programs include the whitening and the scales of the model. `preparation.json` describes the preparation of
    images for the programs; the metadata of the programs hold the same values. `prepare.py` prepares an image as these
    values say, with Pillow and NumPy alone. All files of an earlier export to the folder are replaced or deleted, when
    the new ones are complete.

    The arguments are the options of the command, see `functions.export`, but for two:

    Args:
        checkpoint: as for `index_images`; LoRA adapters are merged first.
        input_type: the option `input`.

    Raises:
        FileNotFoundError: if the checkpoint or the images do not exist.
        ModuleNotFoundError: if onnx, onnxscript or onnxruntime is missing.
        ValueError: if the model cannot be traced, a program differs from the model, an argument is invalid, or the
            folder has a `prepare.py` or `preparation.json` that no export wrote.
        OSError: if the folder cannot be written to; the files of an earlier export are unchanged.
    """
    load_onnx()  # raises before any work is done, if a package is missing
    output = check_path("output", output)
    if output.exists() and not output.is_dir():
        raise InvalidValue("must be a folder", argument="output", got=f"{output}, which is something else")
    _check_not_of_others(output)
    if int8 != (images is not None):
        raise InvalidValue("must be given with `int8`, which alone uses images, and not without it", argument="images")
    table_format = TableFormat.checked(columns, delimiter)
    listed = None
    if images is not None:
        listed = _labelled_images(images, root, table_format)
    embedder = ImageEmbedder.load(checkpoint, transform=transform, batch_size=TIMED_IMAGES, num_workers=0, device="cpu")
    merge = getattr(getattr(embedder.module, "embedder", None), "merge_lora", None)
    if merge is not None:
        merge()
    preparation = _preparation(embedder)
    program = EmbeddingProgram(embedder.module, preparation, input_type).eval()
    about = _about(program, embedder)
    made = ExportedModel(about)
    with writing(output), new_files(output, FILES) as new:
        exported = export_program(program)
        content = io.BytesIO()  # on a full disk, torch would end the process
        torch.export.save(exported, content, extra_files={METADATA: json.dumps(about)})
        (new / TORCH).write_bytes(content.getbuffer())
        write_onnx(exported, new / ONNX, about)
        programs: dict[str, Callable[[Tensor], Tensor]] = {
            ONNX: OnnxModel(new / ONNX).embed,
            TORCH: torch.export.load(new / TORCH).module(),
        }
        for name, embed in programs.items():
            made.differences[name] = check_program(name, embed, program)
        if listed is not None:
            made.int8 = _write_int8(new, embedder, program, listed)
        (new / PREPARATION).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        shutil.copyfile(prepare.__file__, new / PREPARE)
    return made


def _check_not_of_others(output: Path) -> None:
    """Raise if an export would replace a `prepare.py` or `preparation.json` that no export wrote."""
    of_others = []
    with suppress(OSError):
        script = output / PREPARE
        if script.is_file() and not script.read_bytes().startswith(SCRIPT_START):
            of_others.append(PREPARE)
    if is_of_others(output / PREPARATION, FORMAT):
        of_others.append(PREPARATION)
    if of_others:
        rule = "must be a folder without files of others that an export would replace"
        got = f"{output}, whose {' and '.join(of_others)} no export wrote"
        raise InvalidValue(rule, argument="output", got=got, cure="give another folder")


def _preparation(embedder: ImageEmbedder) -> Preparation:
    """The preparation of a model with a single network, which a program can include."""
    if embedder.module.query_embedder is not None:
        got = f"{shown_model(embedder.about)}, which has a `query_embedder`"
        cure = "export the checkpoint of the candidates, and serve queries with `embed_queries`"
        raise InvalidValue("must be of a model with one network", argument="checkpoint", got=got, cure=cure)
    preparation = embedder.transform
    if not isinstance(preparation, Preparation):
        rule = "the model must have been evaluated with a Preparation, which a program can include"
        got = "another transform"
        raise InvalidValue(rule, got=got, cure="evaluate it with `image_size`, `mean` and `std` instead")
    return preparation


@torch.inference_mode()
def _about(program: EmbeddingProgram, embedder: ImageEmbedder) -> dict[str, Any]:
    images = program.random_images(1)
    model = {"checkpoint_sha256": embedder.about["checkpoint_sha256"]}
    if BACKBONE in embedder.about:
        record = embedder.about[BACKBONE]
        # Others get the export, to whom the folder of a file of weights says nothing.
        model[BACKBONE] = {"backbone": record["backbone"], "weights": Path(record["weights"]).name}
    return {
        "format": FORMAT,
        "preparation": program.preparation.as_dict(),
        "input": program.input_type,
        "input_shape": ["batch", *images.shape[1:]],
        "dim": program(images).shape[1],
        **model,
    }


@torch.inference_mode()
def check_program(name: str, embed: Callable[[Tensor], Tensor], program: EmbeddingProgram) -> float:
    """The largest difference between an exported program and the model; raises if the difference is too large or NaN.

    Args:
        name: name of the file, for the error message.
        embed: runs the exported program.
        program: the model.
    """
    largest = 0.0
    for count in CHECKED_BATCHES:
        images = program.random_images(count, seed=count)
        difference = largest_difference(embed(images), program(images))
        if not difference <= TOLERANCE:
            rule = f"{name} must differ from the model by at most {TOLERANCE:g}"
            raise InvalidValue(rule, got=f"{difference:.2g}", cure="please report the backbone")
        largest = max(largest, difference)
    return largest


def _labelled_images(images: Path, root: Path | None, table_format: TableFormat) -> ListedImages:
    """The images of a table with labels, or of class folders; the name of a class folder is the label of its images."""
    listed = list_images(images, root, table_format)
    labels = listed.labels
    if set(labels) == {None}:
        labels = [Path(path).parent.as_posix() for path in listed.index.paths]
    if None in labels or not 1 < len(set(labels)) < len(labels):
        rule = "must be of several classes with several images, in class folders or in a table with the column label"
        raise InvalidValue(rule, argument="images", got=images)
    return dataclasses.replace(listed, labels=labels)


def _write_int8(folder: Path, embedder: ImageEmbedder, program: EmbeddingProgram, listed: ListedImages) -> Int8Cost:
    """Write the int8 file, and compare it with the float file."""
    embedder = dataclasses.replace(embedder, transform=program.preparation, normalizes=program.input_type == "float")
    count = len(listed.index)
    step = max(1, count // CALIBRATION_IMAGES)
    recorder = _Recorder()
    groups = [range(position, position + 1) for position in range(0, count, step)]
    for _ in dataclasses.replace(embedder, module=recorder).embed(listed, groups):
        pass
    kind = quantize_onnx(folder / ONNX, folder / INT8, recorder.batches)
    before, after = OnnxModel(folder / ONNX), OnnxModel(folder / INT8)
    return Int8Cost(
        kind,
        count,
        _recall(embedder, after, listed),
        _recall(embedder, before, listed),
        (folder / INT8).stat().st_size / (folder / ONNX).stat().st_size,
        _speed_ratio(after, before, program),
    )


class _Recorder:
    """Stands in for a model: records the batches instead of embedding them."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []

    def embed(self, images: Tensor) -> Tensor:
        """Record a batch, and return zeros."""
        self.batches.append(images.clone())
        return torch.zeros(len(images), 1)


def _recall(embedder: ImageEmbedder, model: OnnxModel, listed: ListedImages) -> float:
    """R@1 of a model on all images."""
    numbers = {label: number for number, label in enumerate(dict.fromkeys(listed.labels))}
    metrics = RetrievalMetrics(ks=(1,))
    for batch in dataclasses.replace(embedder, module=model).embed(listed):
        if batch.embeddings is not None:
            labels = torch.tensor([numbers[listed.labels[position]] for position in batch.positions])
            metrics.update(batch.embeddings, labels, torch.tensor(batch.positions))
    return float(metrics.compute()["R@1"])


def _speed_ratio(after: OnnxModel, before: OnnxModel, program: EmbeddingProgram) -> float:
    """The speed of `after` divided by that of `before`: medians over alternating batches, after a warm-up batch."""
    images = program.random_images(TIMED_IMAGES)
    seconds: list[list[float]] = [[], []]
    for run in range(-1, TIMED_RUNS):
        for number, model in enumerate((after, before)):
            begin = time.perf_counter()
            model.embed(images)
            if run >= 0:
                seconds[number].append(time.perf_counter() - begin)
    return median(seconds[1]) / median(seconds[0])
