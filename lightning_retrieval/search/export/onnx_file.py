"""Writes programs as ONNX files, with the preparation in the metadata, and runs such files with onnxruntime."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.export import ExportedProgram

from lightning_retrieval.checks import first_line
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.optional_packages import optional_import

METADATA = "lightning_retrieval"  # key of the JSON in the file's metadata
INPUT, OUTPUT = "images", "embeddings"


def can_write_onnx(torch_version: str) -> bool:
    """Whether this version of torch can write a program of `torch.export` as ONNX, with the required onnxscript."""
    major, minor = torch_version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 8)


def load_onnx() -> tuple[Any, Any]:
    """Import and return `onnx` and `onnxruntime`.

    Raises:
        ModuleNotFoundError: if onnx, onnxscript or onnxruntime is missing.
        ValueError: if torch is too old.
    """
    if not can_write_onnx(torch.__version__):
        raise InvalidValue("ONNX files need torch >= 2.8", got=torch.__version__, cure="install a newer torch")
    with optional_import(
        "onnx, onnxscript and onnxruntime must be installed: pip install 'lightning-retrieval[onnx]'."
    ):
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch.onnx needs it
    return onnx, onnxruntime


def write_onnx(exported: ExportedProgram, path: Path, about: Mapping[str, Any]) -> None:
    """Write a program as an ONNX file.

    Args:
        exported: the program.
        path: path of the file.
        about: plain values, such as the preparation, that are stored in the file as JSON.

    Raises:
        ValueError: if an operation of the program has no counterpart in ONNX.
        OSError: if the file cannot be written.
    """
    onnx, _ = load_onnx()
    try:
        with _quiet():
            program: Any = torch.onnx.export(exported, (), input_names=[INPUT], output_names=[OUTPUT], dynamo=True)
    except Exception as error:  # the exporter raises errors of many types
        rule = "the model must consist of operations that ONNX has"
        got = f"an error ({first_line(error)})"
        raise InvalidValue(rule, got=got, cure="use the program of torch.export") from None
    model = program.model_proto
    onnx.helper.set_model_props(model, {METADATA: json.dumps(about)})
    onnx.save(model, path)


class OnnxModel:
    """Runs an ONNX file. It has the method `embed`, like a `RetrievalModule`.

    Args:
        path: path of the file; onnxruntime uses as many threads as torch does.
    """

    def __init__(self, path: Path) -> None:
        _, onnxruntime = load_onnx()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def embed(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        """Embed a batch."""
        (embeddings,) = self.session.run([OUTPUT], {INPUT: images.numpy()})
        return torch.from_numpy(embeddings)


@contextlib.contextmanager
def errors_only(logger: logging.Logger) -> Iterator[None]:
    """Context in which a logger writes only errors.

    Args:
        logger: the logger; its level is restored on exit.
    """
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context without the exporter's progress output and warnings, which concern torch's own code."""
    output = contextlib.redirect_stdout(io.StringIO())
    with errors_only(logging.getLogger("torch.onnx")), warnings.catch_warnings(), output:
        warnings.simplefilter("ignore")
        yield
