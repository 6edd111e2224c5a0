"""The command line: `lightning-retrieval fit|validate|test|predict --config FILE`, `check --data NAME --root DIR`,
`index --checkpoint C --images DIR --output INDEX`, `search --index INDEX IMAGE...`.
"""

import argparse
import importlib
import inspect
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from lightning_retrieval.cli.help import HelpLines
from lightning_retrieval.cli.images import TRANSFORMS, Answer, Unread, index_images, search_images, shown
from lightning_retrieval.cli.page import result_page
from lightning_retrieval.search.index import RECALL_AT, RetrievalIndex
from lightning_retrieval.training.module import RetrievalModule
from lightning_retrieval.training.run_folder import run_folder


class _SaveConfig(SaveConfigCallback):
    """Saves the configuration in the run's own folder, also where the logger has none, as Weights & Biases."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        folder = run_folder(trainer)
        if trainer.is_global_zero and not self.already_saved:
            folder.mkdir(parents=True, exist_ok=True)
            self.parser.save(self.config, str(folder / self.config_filename), skip_none=False, overwrite=True)
        self.already_saved = True


class RetrievalCLI(LightningCLI):
    """LightningCLI with one thing more: `fit --test_after_fit true` evaluates the test set when training has ended."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=False,
            help="After fit, evaluate the test set with the best checkpoint (the last weights if none is monitored).",
        )

    def after_fit(self) -> None:
        if not self.config[self.config.subcommand].test_after_fit:
            return
        checkpoint: Any = self.trainer.checkpoint_callback
        best = getattr(checkpoint, "best_model_path", "") and checkpoint.monitor
        self.trainer.test(
            self.model, datamodule=self.datamodule, ckpt_path="best" if best else None, verbose=False, weights_only=True
        )


def check(args: Sequence[str]) -> int:
    """Look at a data set's layout: 0 where all is as published, 1 where not, 2 where it cannot be read.

    Args:
        args: `--data NAME --root DIR`, and the data module's other settings; `Glyphs` has no root.
    """
    rooms = importlib.import_module("lightning_retrieval.datamodules")  # found by name: the core imports no data module
    known = {name: getattr(rooms, name) for name in rooms.__all__}
    known = {name: found for name, found in known.items() if hasattr(found, "check") and not inspect.isabstract(found)}
    first = argparse.ArgumentParser("lightning-retrieval check", add_help=False)
    first.add_argument("--data", choices=sorted(known))
    data, rest = first.parse_known_args(args)
    parser = ArgumentParser(
        "lightning-retrieval check",
        description=f"Look at a data set's layout before training. --data is one of {', '.join(sorted(known))}.",
    )
    parser.add_argument("--data", required=True, choices=sorted(known), help="the data module")
    if data.data is not None:
        parser.add_class_arguments(known[data.data], fail_untyped=False, sub_configs=True)
        rest = ["--data", data.data, *rest]
    settings = parser.instantiate_classes(parser.parse_args(rest)).as_dict()
    name = settings.pop("data")
    try:
        report = known[name](**settings).check()
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(map(shown, str(report).splitlines())))
    return 0 if report.ok else 1


def index(args: Sequence[str]) -> int:
    """Index the images of a folder: 0 where all could be read, 1 where some could not, 2 where there is no index.

    Args:
        args: `--checkpoint C --images DIR --output INDEX`, and how the index is made.
    """
    parser = argparse.ArgumentParser(
        "lightning-retrieval index", description="Embed the images of a folder and write an index to search in."
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="C", help="what `fit` has written")
    parser.add_argument("--images", type=Path, required=True, metavar="DIR", help="searched for images at any depth")
    parser.add_argument("--output", type=Path, required=True, metavar="INDEX", help="a new folder, or an index")
    parser.add_argument(
        "--transform",
        choices=TRANSFORMS,
        help="how an image is prepared: as in a paper's evaluation, or light on dark in grey, 32 x 32 ('glyphs'); by "
        "default as in training's evaluation, where the checkpoint says so, else 'plain', and 'glyphs' for a model of "
        "grey images",
    )
    parser.add_argument("--factory", default="Flat", help="faiss' factory string; Flat, which is exact, by default")
    parser.add_argument("--parameters", default="", help="of the search, in faiss' words, such as nprobe=16")
    parser.add_argument("--shards", type=int, default=1, help="parts of the index, each a file")
    _add_embedding(parser)
    settings = vars(parser.parse_args(args))
    try:
        made, unread = index_images(**settings)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    recall = "exact" if made.recall is None else f"recall@{RECALL_AT} {made.recall:.3f} against exact search"
    images = "1 image" if len(made) == 1 else f"{len(made)} images"
    transform, source = made.about["transform"], made.about["transform_from"]
    said = {"default": ", by default: the checkpoint names none", "checkpoint": ", as the checkpoint says"}.get(
        source, ""
    )
    print(f"images prepared by the transform {transform!r}{said}")
    print(f"{settings['output']}: {images}, {made.dim} dimensions, {made.factory} ({recall})")
    return _complain("index", unread)


def search(args: Sequence[str]) -> int:
    """Print the images nearest to others: 0 where all could be read, 1 where some could not, 2 where nothing was found.

    Args:
        args: `--index INDEX IMAGE...`, and what is written where.
    """
    parser = argparse.ArgumentParser(
        "lightning-retrieval search", description="Find the images of an index that are nearest to others."
    )
    parser.add_argument("queries", nargs="+", metavar="IMAGE", help="an image file")
    parser.add_argument("--index", type=Path, required=True, metavar="INDEX", help="what `index` has written")
    parser.add_argument("-k", type=int, help="results of each query; by default 10, or all where there are fewer")
    parser.add_argument("--parameters", help="of the search, such as nprobe=64, in place of the index's own")
    parser.add_argument("--checkpoint", type=Path, metavar="C", help="where the index's checkpoint lies now, if moved")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the results there as a page for a browser")
    parser.add_argument(
        "--images", type=Path, metavar="DIR", help="where the index's images lie now, if moved; for --html"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    _add_embedding(parser)
    settings = vars(parser.parse_args(args))
    folder, page, as_json = settings.pop("index"), settings.pop("html"), settings.pop("json")
    images, parameters = settings.pop("images"), settings.pop("parameters")
    try:
        if page is not None and (page.is_dir() or not page.parent.is_dir()):
            raise ValueError(f"search: `--html` must be a file in a folder that is there, got {page}.")
        if images is not None and not images.is_dir():
            raise ValueError(
                f"search: `--images` must be the folder of the index's images, got {images}, which is none."
            )
        searched = RetrievalIndex.load(folder, mapped=True)
        if parameters is not None:
            searched.set_parameters(parameters)
        answers, unread = search_images(searched, **settings)
        if page is not None:
            _write_page(page, answers, images or Path(searched.about["images"]), len(searched), folder)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(_plain(answers, unread), indent=1) if as_json else "\n\n".join(map(_table, answers)))
    return _complain("search", unread)


def _write_page(page: Path, answers: Sequence[Answer], images: Path, rows: int, folder: Path) -> None:
    """Write the page, and say where its pictures cannot be read."""
    results = [len(answer.hits) for answer in answers]
    about = f"{max(results)} nearest of {rows} images in {shown(str(folder))}"
    source, gone = result_page(answers, images, about)
    partial = page.with_name(f"{page.name}.part")
    partial.write_text(source, encoding="utf-8")
    os.replace(partial, page)
    if gone:
        print(
            f"search: {len(gone)} of {sum(results)} results cannot be read in {shown(str(images))}, the first: "
            f"{gone[0]}; say where the images lie now with `--images`.",
            file=sys.stderr,
        )


def _add_embedding(parser: argparse.ArgumentParser) -> None:
    """What both commands let one say about embedding."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--batch_size", type=int, default=32, help="images embedded at a time, 32 by default")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that read images, none by default")
    parser.add_argument("--device", default=device, help=f"that the model runs on, here {device} by default")


def _complain(who: str, unread: Sequence[Unread]) -> int:
    """Name the files that could not be read; the exit code that says so."""
    for one in unread:
        print(f"{who}: {one}; left out.", file=sys.stderr)
    return 1 if unread else 0


def _table(answer: Answer) -> str:
    lines = [f"{hit.rank:>4}  {hit.similarity:>10.4f}  {hit.distance:>8.4f}  {shown(hit.path)}" for hit in answer.hits]
    return "\n".join([shown(answer.query), "rank  similarity  distance  path", *lines])


def _plain(answers: Sequence[Answer], unread: Sequence[Unread]) -> dict[str, Any]:
    """The results as JSON has them."""
    return {
        "queries": [
            {"query": a.query, "results": [{**vars(hit), "distance": hit.distance} for hit in a.hits]} for a in answers
        ],
        "unread": [vars(one) for one in unread],
    }


_OTHERS = """\
other subcommands:
    check               Look at a data set's layout: --data NAME --root DIR
    index               Embed the images of a folder: --checkpoint C --images DIR --output INDEX
    search              Find the images nearest to others: --index INDEX IMAGE..."""


_MORE = """\
--data.help lightning_retrieval.datamodules.CUB200 shows the settings of a class, so do --model.help,
--trainer.logger.help, --trainer.callbacks.help and others; `lightning-retrieval check --help` lists the data modules.
A wider terminal shows more of each line."""


class _Parser(LightningArgumentParser):
    """Also of subcommands, and of the help of a class: help that fits on a screen."""

    def __init__(self, *args: Any, formatter_class: type[HelpLines] = HelpLines, **kwargs: Any) -> None:
        super().__init__(*args, formatter_class=formatter_class, **kwargs)


COMMANDS = {"check": check, "index": index, "search": search}


def main(args: Any = None) -> None:
    """Run the command line, with `args` instead of the process's own where given."""
    given = sys.argv[1:] if args is None else args
    if isinstance(given, (list, tuple)) and given and given[0] in COMMANDS:
        sys.exit(COMMANDS[given[0]](given[1:]))
    RetrievalCLI(
        RetrievalModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,  # its --optimizer flags would replace the module's own
        save_config_callback=_SaveConfig,
        parser_kwargs={
            "prog": "lightning-retrieval",
            "description": "Train image retrieval directly for Average Precision.",
            "epilog": _OTHERS,
            **{command: {"epilog": _MORE} for command in ("fit", "validate", "test", "predict")},
        },
        parser_class=_Parser,
        args=args,
    )
