"""The command line: `lightning-retrieval fit|validate|test|predict --config FILE`, `check --data NAME --root DIR`."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
from jsonargparse import ArgumentParser
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

from lightning_retrieval.module import RetrievalModule


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
    """Look at a data set's layout: 0 where all is as in the papers, 1 where not, 2 where it cannot be read.

    Args:
        args: `--data NAME --root DIR`, and the data module's other settings.
    """
    rooms = importlib.import_module("lightning_retrieval.datamodules")  # found by name: the core imports no data module
    known = {name: getattr(rooms, name) for name in rooms.__all__}
    known = {name: found for name, found in known.items() if callable(getattr(found, "check", None))}
    known.pop("ImageDataModule")
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
    print(report)
    return 0 if report.ok else 1


def main(args: Any = None) -> None:
    """Run the command line, with `args` instead of the process's own where given."""
    given = sys.argv[1:] if args is None else args
    if isinstance(given, (list, tuple)) and given[:1] in (["check"], ("check",)):
        sys.exit(check(given[1:]))
    RetrievalCLI(
        RetrievalModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,  # its --optimizer flags would replace the module's own
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            "prog": "lightning-retrieval",
            "description": "Train image retrieval directly for Average Precision.",
            "epilog": "lightning-retrieval check --data NAME --root DIR looks at a data set's layout.",
        },
        args=args,
    )


if __name__ == "__main__":
    main()
