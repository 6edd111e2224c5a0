"""Options of the commands that load a model: `adapt`, `embed`, `export`, `index`, `report`, `search` and `demo`.

This module makes the parsers of these commands and does not import torch, so help appears immediately. The code of a
command is in the module of the same name, which is imported after parsing.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_retrieval.command_line import CommandParser, command_parser

TRANSFORMS = ("plain", "smooth_ap", "roadmap", "ap_gem", "glyphs")  # the same names as in `Preparation.NAMES`
HOST_HELP = (
    "address to serve on, which is also the only name under which the page answers, default 127.0.0.1: this machine "
    "only; 0.0.0.0 serves the page to the network, under any name"
)
MODEL_NEEDED = "--backbone with --weights replaces --checkpoint"
# Options of `search` and `demo` that are arguments of `ImageSearcher`.
SEARCHER_OPTIONS = ("show", "checkpoint", "transform", "batch_size", "num_workers", "device")
# Options allowed with `index --embeddings DIR`. The other options of `index` concern the embedding of images.
EMBEDDINGS_OPTIONS = (
    "embeddings",
    "output",
    "checkpoint",
    "store",
    "factory",
    "parameters",
    "shards",
    "rows_in_memory",
    "overwrite",
    "update",
    "metadata",
    "columns",
    "delimiter",
    "missing",
    "validation",
    "false_match_rate",
    "devices",
)


@dataclass(frozen=True)
class PretrainedBackbone:
    """A pretrained network in place of a checkpoint: its embeddings are the pooled features of the backbone.

    Args:
        backbone: as for `Embedder`, like the other arguments.
        weights: `"DEFAULT"`, the name of other weights, or the path of a file.
        image_size: height and width of the images; if None, the size that belongs to the weights.
        preparation: settings of the preparation that differ from those of the weights.
    """

    backbone: str
    weights: str
    image_size: int | None = None
    preparation: Mapping[str, Any] | None = None

    def prepared_as(self, recorded: Any) -> "PretrainedBackbone":
        """The same backbone for the recorded preparation of earlier images, unless settings are given here."""
        if self.image_size is not None or self.preparation is not None or not isinstance(recorded, Mapping):
            return self
        return replace(self, preparation=recorded)

    @property
    def settings_of_preparation(self) -> dict[str, Any] | None:
        """`preparation` as `Embedder` accepts it."""
        if self.preparation is None:
            return None
        return dict(self.preparation)


BACKBONE_OPTIONS = tuple(field.name for field in fields(PretrainedBackbone))


def searcher_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `search` and `demo` that are arguments of `ImageSearcher`."""
    return {name: getattr(options, name) for name in SEARCHER_OPTIONS}


def parse(command: str, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of a command, and name all that it has. Exits for `--help`, or if an option is invalid."""
    parser = make_parser(command)
    options: argparse.Namespace = parser.parse_args(args)
    _take_backbone(parser, options)
    if command == "index":
        _check_index_options(parser, options)
    if command in ("embed", "export", "report") and options.checkpoint is None:
        parser.error(f"the following arguments are required: --checkpoint; {MODEL_NEEDED}")
    if command == "search" and not options.queries and not options.text:
        parser.error("an image or --text must be given")
    return options, [action.dest for action in parser._actions]


def make_parser(command: str) -> CommandParser:
    """The parser of a command."""
    description, example, add_options = COMMANDS[command]
    parser = command_parser(command, description, f"example:\n{example}")
    add_options(parser)
    parser.add_argument(
        "--import_module",
        action="append",
        default=[],
        metavar="NAME",
        help="module with classes of the checkpoint that are not of this library, torch, torchvision, timm or "
        "pytorch_metric_learning; it is imported, which runs its code",
    )
    return parser


def _take_backbone(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Replace the options of a pretrained backbone by a `PretrainedBackbone` in place of the checkpoint.

    Exits if one of them is given alone, or a checkpoint as well, or the preparation twice.
    """
    given = {name: vars(options).pop(name) for name in BACKBONE_OPTIONS}
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if not names:
        return
    if options.checkpoint is not None:
        parser.error(f"{names[0]} must not be given with --checkpoint, which is another model; give one of them")
    if given["backbone"] is None:
        parser.error(f"{names[0]} must be given with --backbone, the name of a pretrained network")
    if given["weights"] is None:
        parser.error("--backbone must be given with --weights: DEFAULT, the name of other weights, or a file")
    transform = getattr(options, "transform", None)
    if transform is not None and len(names) > 2:
        parser.error(f"{names[2]} must not be given with --transform, which replaces the preparation of the backbone")
    options.checkpoint = PretrainedBackbone(**given)


def _check_index_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit unless `--output` is given with either the options for images or the options for embeddings."""
    needed = ["output"]
    if options.embeddings is None:
        needed += ["checkpoint", "images"]
    missing = [f"--{name}" for name in needed if getattr(options, name) is None]
    if missing:
        message = f"the following arguments are required: {', '.join(missing)}"
        if options.embeddings is None:
            message += f"; --embeddings replaces --checkpoint and --images, and {MODEL_NEEDED}"
        parser.error(message)
    if options.embeddings is None:
        if options.devices != parser.get_default("devices"):
            parser.error("--devices must be given with --embeddings; embed the images first, with `embed --devices`")
        return
    for name, value in vars(options).items():
        if name not in (*EMBEDDINGS_OPTIONS, "import_module") and value != parser.get_default(name):
            parser.error(f"--{name} must not be given with --embeddings, because no image is embedded")


def _add_adapt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--embeddings", type=Path, required=True, metavar="DIR", help="folder that `embed` wrote")
    parser.add_argument("--output", type=Path, required=True, metavar="C", help="file of the new checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --output if it exists")
    parser.add_argument(
        "--labels", type=Path, metavar="TABLE", help="table of image and label, if `embed` had no labels"
    )
    _add_table_format(parser)
    _add_model(parser, help_of_checkpoint="checkpoint of the embeddings, if it was moved")
    parser.add_argument(
        "--loss",
        default="LogRankLoss",
        help="loss of this library or of pytorch-metric-learning, default LogRankLoss",
    )
    parser.add_argument("--loss_args", default="{}", metavar="JSON", help='arguments of the loss, as {"tau": 0.1}')
    parser.add_argument("--embedding_dim", type=int, metavar="D", help="new dimension, default that of the embeddings")
    parser.add_argument("--hidden_dim", type=int, metavar="H", help="hidden units; by default the head is linear")
    parser.add_argument("--batch_size", type=int, default=2048, help="length of a list, up to 16384, default 2048")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW, default 0.001")
    parser.add_argument("--max_epochs", type=int, default=100, help="maximum number of epochs, default 100")
    parser.add_argument("--seed", type=int, default=0, help="seed of the held-out classes and the lists, default 0")


def _add_embed_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--images",
        type=Path,
        required=True,
        metavar="DIR|TABLE",
        help="folder of images, searched at any depth, or a CSV or Parquet table with the column `image` and, "
        "optionally, `label` and `box`; with --side queries, a table with the column `text` if queries are texts",
    )
    parser.add_argument(
        "--side",
        choices=("queries", "candidates"),
        default="candidates",
        help="which network of a checkpoint with two networks embeds them, default candidates",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="new folder, or one that this command began; files of it whose images have changed are made again",
    )
    _add_table(parser)
    parser.add_argument(
        "--shard_size",
        type=int,
        default=10_000,
        help="images of a file, default 10000; a kill costs at most these in each process",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="of the numbers in the files"
    )
    _add_processes(parser)
    _add_transform(parser)
    _add_embedding(parser)


def _add_table(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how the table of `--images` is read."""
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="folder that the table's paths are relative to, default the table's"
    )
    _add_table_format(parser)


def _add_table_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--columns",
        metavar="NAMES",
        help="names of the table's columns, if they differ, as image=path,label=class; oml: of open-metric-learning",
    )
    parser.add_argument(
        "--delimiter",
        default=",",
        metavar="C",
        help="character that separates the fields of a CSV file, such as ';' or tab, default a comma",
    )


def _add_processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", type=int, default=1, help="number of GPUs of each machine, or of processes on CPUs, default 1"
    )
    parser.add_argument(
        "--num_nodes", type=int, default=1, help="number of machines, on each of which the command is started"
    )
    parser.add_argument(
        "--precision",
        choices=("32-true", "bf16-mixed", "16-mixed"),
        default="32-true",
        help="that the network computes in, default 32-true",
    )


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
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
    _add_table(parser)
    _add_transform(parser)


def _add_index_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--images", type=Path, metavar="DIR", help="folder of images, searched at any depth")
    parser.add_argument(
        "--embeddings",
        type=Path,
        metavar="DIR",
        help="instead of --images: folder that `embed` wrote, which also records the model",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="INDEX",
        help="new folder for the index, or an index to replace or update",
    )
    _add_replacement(parser.add_mutually_exclusive_group())
    _add_store(parser, "--output")
    _add_transform(parser)
    parser.add_argument(
        "--factory",
        default="Flat",
        help="factory string of faiss, or type of index of Milvus; default Flat, which is exact",
    )
    parser.add_argument("--parameters", default="", help="search parameters of the index, such as nprobe=16")
    parser.add_argument("--shards", type=int, default=1, help="number of shards of the index, one file each")
    parser.add_argument(
        "--rows_in_memory",
        type=int,
        metavar="N",
        help="build an index that is larger than memory on disk, with the codes of at most N rows in memory, at least "
        "65,536; for factories IVF with Flat, SQ or PQ",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="with --embeddings and such a factory: number of processes that add the rows, on disk, default 1",
    )
    _add_metadata(parser)
    _add_embedding(parser)


def _add_metadata(parser: argparse.ArgumentParser) -> None:
    """Add the options for what an index stores for searches: metadata and a threshold."""
    parser.add_argument(
        "--metadata", type=Path, metavar="TABLE", help="table of image and further columns, for search --where"
    )
    _add_table_format(parser)
    parser.add_argument(
        "--missing",
        choices=("error", "keep"),
        default="error",
        help="with --metadata: whether images that have no row are an error, the default, or kept without metadata",
    )
    parser.add_argument(
        "--validation", type=Path, metavar="DIR", help="labelled embeddings of the same model, to choose a threshold on"
    )
    parser.add_argument(
        "--false_match_rate",
        type=float,
        metavar="F",
        help="with --validation: choose the similarity below which a search shows nothing, such that this fraction of "
        "its images, from 0 to 1, finds an image of another label",
    )


def _add_replacement(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an index that is there; without it, one with rows that the new one would not hold is kept, and "
        "the command stops",
    )
    group.add_argument(
        "--update",
        action="store_true",
        help="change an index that is there: embed and add the images that it lacks, and remove the rows whose images "
        "are gone; images that have changed under their names keep their embeddings",
    )


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--images",
        type=Path,
        required=True,
        metavar="DIR|TABLE",
        help="class folders, in which the folders train and test may be splits, or a CSV or Parquet table with the "
        "columns image and label and, optionally, split, role, camera and box",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="file of the page, which ends with .html; the table is written beside it, with the ending .csv",
    )
    _add_table(parser)
    parser.add_argument(
        "--false_match_rate",
        type=float,
        default=0.05,
        metavar="F",
        help="fraction of the queries, from 0 to 1, for which the threshold may show an image of another class, "
        "default 0.05",
    )
    _add_transform(parser)
    _add_embedding(parser)


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queries", nargs="*", metavar="IMAGE", help="image file to search for")
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="WORDS",
        help='text to search for, such as "red shoes", if the checkpoint has a network for texts; may be repeated',
    )
    _add_searched_index(parser, images_help="folder of the index's images, if it was moved; for --html")
    parser.add_argument("-k", type=int, help="number of results of each query, default 10, or all if there are fewer")
    parser.add_argument(
        "--where", metavar="CONDITION", help="on the metadata, such as \"price <= 20 and brand != 'a'\""
    )
    parser.add_argument("--group_by", metavar="COLUMN", help="show one image for each value of this column")
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="T",
        help="least similarity, instead of the index's, which is not used for queries of another network; -1: all",
    )
    parser.add_argument("--parameters", help="search parameters, such as nprobe=64, instead of the index's")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the results to this file as an HTML page")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _add_embedding(parser)


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    _add_searched_index(parser, images_help="folder of the index's images, if it was moved")
    parser.add_argument("-k", type=_positive, default=20, help="number of results, default 20")
    parser.add_argument("--host", default="127.0.0.1", help=HOST_HELP)
    parser.add_argument("--port", type=_port, default=7860, help="port to serve on, default 7860")
    _add_embedding(parser)


def _add_model(
    parser: argparse.ArgumentParser,
    *,
    help_of_checkpoint: str = "checkpoint that `fit` wrote, or the folder of its runs, whose newest best.ckpt is used",
) -> None:
    """Add the options that name a model: a checkpoint, or a pretrained backbone in place of it."""
    parser.add_argument("--checkpoint", type=Path, metavar="C", help=help_of_checkpoint)
    parser.add_argument(
        "--backbone",
        metavar="NAME",
        help="in place of --checkpoint: pretrained network of torchvision, timm/NAME or hf/NAME; embeddings are its "
        "pooled features",
    )
    parser.add_argument(
        "--weights",
        metavar="NAME|FILE",
        help="with --backbone: DEFAULT, the name of other weights, which are downloaded once, or a file of weights",
    )
    parser.add_argument(
        "--image_size",
        type=_positive,
        metavar="N",
        help="with --backbone: height and width of the images, default that of the weights",
    )
    parser.add_argument(
        "--preparation",
        type=_settings,
        metavar="JSON",
        help='with --backbone: how else images are prepared than for the weights, as {"resize": 224}',
    )


def _add_searched_index(parser: argparse.ArgumentParser, *, images_help: str) -> None:
    """Add the options that name an index, its model and its images."""
    parser.add_argument("--index", type=Path, required=True, metavar="INDEX", help="folder that `index` wrote")
    _add_store(parser, "--index")
    _add_model(
        parser,
        help_of_checkpoint="checkpoint that the index was made with, if it was moved; or another whose network of "
        "candidates is the same, such as one that was trained with it as a FrozenEmbedder",
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help=images_help)
    parser.add_argument(
        "--transform", metavar="NAME", help="function that prepared the images of the index, if one did; it is imported"
    )
    parser.add_argument(
        "--show",
        type=_names,
        metavar="COLUMNS",
        help="columns of the metadata to show with each result, as price,title; default all, '' for none",
    )


def _add_store(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the option `--store`. With it, the value of the option `name` is the name of an index in Milvus."""
    parser.add_argument(
        "--store",
        metavar="milvus:URI",
        help=f"the index is in Milvus, under the name {name}: in a file of Milvus Lite, such as milvus:photos.db, or "
        "on a server or cluster, such as milvus:http://localhost:19530",
    )


def _add_transform(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transform",
        metavar="NAME",
        help=f"how images are prepared, if the checkpoint does not say it: {', '.join(TRANSFORMS)}; or the function "
        "package.function that the model was evaluated with, which is imported. By default as in the evaluation during "
        "training, else as the model wants",
    )


def _add_embedding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch_size", type=int, default=32, help="number of images embedded at a time, default 32")
    parser.add_argument("--num_workers", type=int, default=0, help="number of processes that read images, default 0")
    parser.add_argument("--device", help="device that the model runs on, default cuda if there is one, else cpu")


def _names(text: str) -> list[str]:
    """The names in a list that is separated by commas; an empty text is an empty list."""
    names = map(str.strip, text.split(","))
    return list(filter(None, names))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text}")
    return int(text)


def _settings(text: str) -> dict[str, Any]:
    """The settings in a JSON object."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f'must be JSON such as {{"resize": 224}}, got {text} ({error})') from None
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(f'must be names and values such as {{"resize": 224}}, got {text}')
    return settings


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 65535, got {text}")
    return int(text)


class Command(NamedTuple):
    """A command's description, an example, and the function that adds its options."""

    description: str
    example: str
    add_options: Callable[[argparse.ArgumentParser], None]


COMMANDS = {
    "adapt": Command(
        "Train a head on embeddings that `embed` wrote, and write a checkpoint of the frozen model with its head.",
        "lightning-retrieval adapt --embeddings out --output adapted.ckpt",
        _add_adapt_options,
    ),
    "embed": Command(
        "Embed images or texts into a folder of Parquet files. After a kill, the same command continues.",
        "lightning-retrieval embed --checkpoint best.ckpt --images photos --output out",
        _add_embed_options,
    ),
    "export": Command(
        "Export a model to ONNX and to a program of torch.export, and compare both with the model.",
        "lightning-retrieval export --checkpoint best.ckpt --output exported",
        _add_export_options,
    ),
    "index": Command(
        "Embed the images in a folder and write an index of them, or of embeddings that `embed` wrote.",
        "lightning-retrieval index --checkpoint best.ckpt --images photos --output index",
        _add_index_options,
    ),
    "report": Command(
        "Show what a model gets wrong on labelled images: a page, and a table to correct the labels with.",
        "lightning-retrieval report --checkpoint best.ckpt --images test --output a.html",
        _add_report_options,
    ),
    "search": Command(
        "Find the images of an index that are nearest to query images or texts.",
        "lightning-retrieval search --index index query.jpg --html results.html",
        _add_search_options,
    ),
    "demo": Command(
        "Search an index in the browser, by upload, by clicking a result or by text.",
        "lightning-retrieval demo --index index",
        _add_demo_options,
    ),
}
