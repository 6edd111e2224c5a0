"""Quantises ONNX files to eight bits. They get smaller and faster on CPUs; the loss of accuracy must be measured.

A convolutional network gets static quantisation: int8 weights and uint8 activations, with ranges determined from
calibration images. A network with attention gets dynamic quantisation of its matrix products, since fixed ranges reduce
the accuracy of transformers considerably.

Weights use seven of the eight bits (`reduce_range`). Processors that multiply uint8 by int8, but have no instruction
for the whole dot product (AVX2 without VNNI), add pairs of products in 16 bits, where products of eight bits overflow.
"""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_retrieval.search.export.onnx_file import INPUT, errors_only, load_onnx

ATTENTION = "Softmax"  # the ONNX operation by which attention is recognised
STATIC_OPERATIONS = ["Conv", "Gemm", "MatMul", "MaxPool", "Add"]


def quantize_onnx(source: Path, target: Path, calibration: Sequence[Tensor]) -> str:
    """Write an eight-bit copy of an ONNX file.

    Args:
        source: path of the file.
        target: path of the new file.
        calibration: batches of images in the input format of the file; a network with attention does not use them.

    Returns:
        The kind of quantisation: `"static"` or `"dynamic"`.

    Raises:
        ModuleNotFoundError: if onnx or onnxruntime is not installed.
    """
    onnx, _ = load_onnx()
    # onnxruntime writes advice to the root logger.
    with errors_only(logging.getLogger()), tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder, "prepared.onnx")
        _prepare(onnx, source, prepared)
        operations = {node.op_type for node in onnx.load(prepared).graph.node}
        if ATTENTION in operations:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            types = ["MatMul", "Gemm"]
            quantize_dynamic(
                str(prepared), str(target), op_types_to_quantize=types, weight_type=QuantType.QInt8, reduce_range=True
            )
            return "dynamic"
        _quantize_static(prepared, target, calibration)
    return "static"


def _prepare(onnx: Any, source: Path, target: Path) -> None:
    """Fold constants and batch norms, and remove the recorded shapes, because quantisation changes them."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(str(source), str(target), skip_symbolic_shape=True)
    model = onnx.load(target)
    del model.graph.value_info[:]
    onnx.save(model, target)


def _quantize_static(source: Path, target: Path, calibration: Sequence[Tensor]) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc] # onnxruntime has no types
        def __init__(self) -> None:
            self.batches = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.batches, None)
            if batch is None:
                return None
            return {INPUT: batch.numpy()}

    quantize_static(
        str(source),
        str(target),
        Reader(),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=STATIC_OPERATIONS,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        reduce_range=True,
    )
