"""`lightning-retrieval export`: arguments and output. The work, which needs torch, is imported after parsing."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_retrieval.cli.embedding_options import (
    EXPECTED_ERRORS,
    add_import_option,
    add_transform_option,
    import_modules,
    report_error,
)

if TYPE_CHECKING:
    from lightning_retrieval.cli.export_model import ExportedModel, Int8Cost


def export(args: Sequence[str]) -> int:
    """Export the model of a checkpoint.

    Args:
        args: `--checkpoint C --output DIR` and further settings.

    Returns:
        The exit code: 0, or 2 if nothing was exported.
    """
    settings = vars(_parser().parse_args(args))

    from lightning_retrieval.cli.export_model import export_model

    try:
        import_modules("export", settings.pop("import_module"))
        made = export_model(**settings)
    except EXPECTED_ERRORS as error:
        return report_error("export", error, settings)
    print("\n".join(_summary(made, settings["output"])))
    return 0


def _summary(made: "ExportedModel", output: Path) -> list[str]:
    shape = ", ".join(map(str, made.about["input_shape"]))
    lines = [f"input: {made.about['input']} ({shape}); output: (batch, {made.about['dim']})"]
    for name, difference in made.differences.items():
        file = output / name
        lines.append(f"{file}: {_megabytes(file)}, largest difference to torch {difference:.1e}")
    if made.int8 is not None:
        lines += _int8_lines(made.int8, output / "model.int8.onnx")
    lines.append(f"{output / 'preparation.json'}: what is done to an image before")
    return lines


def _int8_lines(cost: "Int8Cost", file: Path) -> list[str]:
    return [
        f"{file}: {_megabytes(file)}, {cost.size_ratio:.2f} times the size, {cost.speed_ratio:.2f} times the speed "
        f"({cost.kind} int8)",
        f"R@1 of int8 on {cost.images} images: {cost.recall:.4f}, of float {cost.recall_before:.4f}",
    ]


def _megabytes(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.2f} MB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-retrieval export",
        description="Export a model to ONNX and to a program of torch.export, and compare both with the model.",
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="C", help="checkpoint that `fit` wrote")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--input",
        dest="input_type",
        choices=("uint8", "float"),
        default="uint8",
        help="pixels after resizing and cropping (uint8, the default), or normalised images (float)",
    )
    parser.add_argument("--int8", action="store_true", help="also write an ONNX file of 8 bits, and measure its cost")
    parser.add_argument(
        "--images", type=Path, metavar="DIR|TABLE", help="for --int8: images in class folders, or a table with labels"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder that the table's paths are relative to")
    add_transform_option(parser)
    add_import_option(parser)
    return parser
