"""The command line: `lightning-retrieval fit|validate|test|predict --config FILE`."""

from typing import Any

import pytorch_lightning as pl
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


def main(args: Any = None) -> None:
    """Run the command line, with `args` instead of the process's own where given."""
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
        },
        args=args,
    )


if __name__ == "__main__":
    main()
