"""`lightning-retrieval fit`, `validate`, `test` and `predict`: LightningCLI that continues runs."""

import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace, get_loader, set_dumper, set_loader

from lightning_retrieval import callbacks, datamodules
from lightning_retrieval.backend import (
    LightningArgumentParser,
    LightningCLI,
    ProgressBar,
    SaveConfigCallback,
    of_this_backend,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_retrieval.callbacks.csv_logger import (
    ResumableCSVLogger,
    RowsBeforeCheckpoints,
    SameCheckpoint,
    other_loggers,
    run_folder,
)
from lightning_retrieval.callbacks.interrupt import EXIT_CODE, CheckpointOnInterrupt
from lightning_retrieval.checkpoints import (
    check_checkpoint,
    delete_temporary_checkpoints,
    find_checkpoint,
    is_checkpoint,
    is_of_another_program,
    read_checkpoint,
)
from lightning_retrieval.checks import first_line, first_of, short_repr
from lightning_retrieval.cli.resume import FORMAT_LINE, check_format, find_checkpoint_of_run, find_last_checkpoint
from lightning_retrieval.command_line import null_for_none
from lightning_retrieval.detection.module import DetectionModule as DetectionModule  # for --model DetectionModule
from lightning_retrieval.files import NOT_WRITABLE, folder_lock, new_file, reason, writing
from lightning_retrieval.invalid import Invalid, InvalidValue, MissingFile, NotWritten, owned_by
from lightning_retrieval.loading import module_of_checkpoint
from lightning_retrieval.paths import check_path
from lightning_retrieval.plain_data import (
    INSTALLED,
    KWARGS,
    add_named_packages,
    load_function,
)
from lightning_retrieval.training.checkpointed_module import CheckpointedModule
from lightning_retrieval.training.module import RetrievalModule as RetrievalModule  # for --model RetrievalModule
from lightning_retrieval.training.restored_states import is_within
from lightning_retrieval.training.run_report import RunProgressBar, quiet_trainer

# Arguments of a module that an evaluation depends on.
OF_EVALUATION = ("embedder", "sides", "relevance", "eval_scales", "eval_scales_pooling", "whitening")
HELP = (  # added to that of LightningCLI
    "--data.help lightning_retrieval.datamodules.CUB200 shows the settings of a class, as do --model.help, "
    "--trainer.logger.help, --trainer.callbacks.help and others. `lightning-retrieval check --help` lists the data "
    "modules. Example: lightning-retrieval "
)
EXAMPLES = {
    "fit": "fit --config examples/glyphs.yaml",
    "validate": "validate --config config.yaml --ckpt_path best.ckpt",
    "test": "test --config config.yaml --ckpt_path best.ckpt",
    "predict": "predict --config config.yaml --ckpt_path best.ckpt",
}
CONFIGS = "lightning-retrieval"  # name of the mode of jsonargparse that reads configs


def fit(args: Any = None, configs: Sequence[str] = ()) -> None:
    """Run `fit`, `validate`, `test` or `predict`.

    Args:
        args: the arguments with the subcommand first, or a parsed config; if None, the arguments of the process.
        configs: the files in `args` that an error names.
    """
    for name in datamodules.__all__:  # imported, a data module can be named without its package
        getattr(datamodules, name)
    parser_settings: dict[str, Any] = {"prog": "lightning-retrieval", "configs": configs}
    for subcommand, example in EXAMPLES.items():
        usage = f"lightning-retrieval {subcommand} [options]"
        parser_settings[subcommand] = {"epilog": HELP + example, "usage": usage, "configs": configs}
    with quiet_trainer():
        RetrievalCLI(
            CheckpointedModule,
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,  # LightningCLI's --optimizer would replace the module's optimizer
            save_config_callback=_SaveConfig,
            trainer_defaults={"enable_model_summary": False},  # the first step is reported instead
            parser_kwargs=parser_settings,
            parser_class=_Parser,
            args=of_this_backend(args),  # None if they are those of the process, of which Lightning would warn
        )


def _as_meant_here(args: Sequence[str]) -> list[str]:
    """The arguments of a command, each with its value as in a config, see `_value`."""
    changed = []
    for argument in args:
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        changed.append(option + equals + _value(value))
    return changed


def _value(value: Any) -> Any:
    """A value of a config, with Lightning's classes as in the package that this process uses.

    A path that begins with `~` becomes one in the home folder, since it may be for a class that does not know it.
    """
    if isinstance(value, dict):
        return {key: _value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_value(item) for item in value]
    is_path = isinstance(value, str) and value.startswith("~") and ("/" in value or os.sep in value)
    if is_path:
        return str(check_path("", value))
    return of_this_backend(value)


def _load_config(text: str) -> Any:
    """The content of a config, or the value of an option."""
    check_format(text)
    try:
        return _value(get_loader("yaml")(text))
    except MissingFile as error:
        raise yaml.YAMLError(str(error)) from None


set_loader(CONFIGS, _load_config, exceptions=(yaml.YAMLError,))


class _ConfigDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes texts that jsonargparse would read as numbers, such as 25921e05, in quotes.

    PyYAML itself reads them as texts, and would leave out the quotes.
    """


_ConfigDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9_]*\.?[0-9_]*[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def _dump_config(content: Any) -> str:
    """A config as YAML, from which `_load_config` reads the same values."""
    text: str = yaml.dump(content, Dumper=_ConfigDumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


set_dumper(CONFIGS, _dump_config)


class RetrievalCLI(LightningCLI):
    """LightningCLI that can evaluate after training and continue an earlier run.

    `fit --test_after_fit true` evaluates the test set after training. `fit --ckpt_path last` continues the newest
    earlier run with the same model, data and seed. `fit --run_folder FOLDER` continues the run in this folder or, if it
    holds no run, begins one.
    """

    @property
    def _owner(self) -> str:
        """Prefix of error messages."""
        return f"lightning-retrieval {self.config.subcommand}"

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=False,
            help="After fit, evaluate the test set with the best checkpoint (the last weights if none is monitored).",
        )
        parser.add_argument(
            "--output",
            type=str | None,
            default=None,
            help="Folder for the embeddings of predict, new or begun before (embeddings in the folder of the run).",
        )
        parser.add_argument(
            "--run_folder",
            type=str | None,
            default=None,
            help="Folder of the run: fit logs and saves there, and continues what is there when it is started again.",
        )
        parser.add_argument(
            "--matmul_precision",
            type=Literal["highest", "high", "medium"] | None,
            default=None,
            help="Precision of the network's float32 products; high lets GPUs use TF32. Rankings keep the highest.",
        )

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Make the run log to the folder `--run_folder`, and show `RunProgressBar` if the config has no progress bar.

        Checkpoints are saved in the folder of the first logger. `--matmul_precision` is set here, before the Trainer
        looks for a GPU and advises a precision.
        """
        precision = self._get(self.config_init, "matmul_precision")
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        settings = self._get(self.config_init, "trainer")
        given = settings.callbacks or []
        if isinstance(given, pl.Callback):
            given = [given]
        has_bar = any(isinstance(callback, ProgressBar) for callback in given)
        if settings.enable_progress_bar is not False and not has_bar:
            kwargs["callbacks"] = [*given, RunProgressBar()]
        folder = self._get(self.config_init, "run_folder")
        if folder is not None:
            configured = settings.logger
            try:
                logger = ResumableCSVLogger(folder)
            except InvalidValue as error:
                self.parser.error(str(error.of(self._owner, folder="--run_folder")))
            kwargs["logger"] = [logger, *other_loggers(configured)]
        return super().instantiate_trainer(**kwargs)

    def _parse_ckpt_path(self) -> None:
        """Read the checkpoint of `--ckpt_path`, if it is a file, or the best checkpoint in this folder.

        The hyperparameters of the checkpoint replace the model of the config. Here, only `plain_data` reads the
        hyperparameters. Lightning would merge them into the config, and a checkpoint could then choose what
        jsonargparse imports and calls.
        """
        self._checkpoint: dict[str, Any] = {}
        options = self.config[self.config.subcommand]
        path = options.get("ckpt_path")
        try:
            is_folder = path and Path(path).is_dir() and not is_checkpoint(Path(path))
            if is_folder and self.config.subcommand != "fit":
                path = options.ckpt_path = str(find_checkpoint(Path(path)))
            elif is_folder and next(Path(path).rglob("*.ckpt"), None) is not None:
                rule = "must be a checkpoint, or last, which continues the newest run of the config"
                raise InvalidValue(rule, self._owner, "--ckpt_path", got=f"{path}, a folder of runs")
            check_checkpoint(path)
        except Invalid as error:
            self.parser.error(str(error.of(self._owner, checkpoint="--ckpt_path")))
        if path and is_checkpoint(Path(path)):
            self._checkpoint = self._read_checkpoint(path)

    def _read_checkpoint(self, path: str) -> dict[str, Any]:
        """The content of a checkpoint without the values of its tensors; exits if it is not a checkpoint."""
        try:
            content = read_checkpoint(path, map_location="meta")
        except Exception as error:  # the file holds an object that may not be unpickled
            self.parser.error(f"`--ckpt_path` must be a checkpoint of plain values, got {path} ({first_line(error)}).")
        if not isinstance(content, dict):
            self.parser.error(f"`--ckpt_path` must be a checkpoint of Lightning, got {path}, which holds no dict.")
        if "pytorch-lightning_version" not in content:
            self.parser.error(_of_another_program(path))
        return content

    def instantiate_classes(self) -> None:
        """Create the objects of the config. An invalid argument or a missing package is reported as one sentence."""
        try:
            if self._checkpoint.get("hyper_parameters"):
                self._instantiate_with_checkpoint()
            else:
                super().instantiate_classes()
        except (FileNotFoundError, ModuleNotFoundError, TypeError, ValueError) as error:
            message = _sentence(error)
            if message is None:
                raise
            self.parser.error(message, error)

    def _instantiate_with_checkpoint(self) -> None:
        """Create the objects of the config, but with the model of the checkpoint instead of the config's model."""
        subcommand = self.config.subcommand
        class_path = self.config[subcommand].model.class_path
        with owned_by(self._owner):
            cls = load_function("--model", class_path)
        add_named_packages(self.config[subcommand].model.as_dict())
        try:
            with owned_by(cls.__name__):
                self.model = module_of_checkpoint(cls, self._checkpoint)
        except (ValueError, TypeError) as error:
            if is_of_another_program(self._checkpoint):
                self.parser.error(_of_another_program(self.config[subcommand].ckpt_path))
            self.parser.error(f"{self._owner}: `--ckpt_path`: {error}")
        settings = dict(self.model.hparams)
        settings.pop("_instantiator", None)
        settings.pop(KWARGS, None)
        described = {"class_path": settings.pop("_class_path", class_path), "init_args": settings}
        given = self.config[subcommand].model.as_dict()
        if subcommand != "fit":  # an evaluation uses no others
            arguments = given.get("init_args") or {}
            given = {"init_args": {name: arguments.get(name) for name in OF_EVALUATION}}
        unused = _differing_settings("", given, described)
        if unused:
            rank_zero_warn(
                f"{self._owner}: the model is that of the checkpoint, so what the config has instead is not used: "
                f"{first_of(unused)}; {cls.__name__}.load_from_checkpoint(PATH, NAME=VALUE) changes it in Python."
            )
        self.save_config_kwargs = {**self.save_config_kwargs, "model": described}
        config = self.config.clone()
        del config[subcommand]["model"]
        self.config_init = self.parser.instantiate_classes(config)
        self.datamodule = self._get(self.config_init, "data")
        self.trainer = self.instantiate_trainer()

    def before_fit(self) -> None:
        """Install the callback that saves a checkpoint on Ctrl-C, and find the checkpoint to continue from."""
        trainer: Any = self.trainer
        trainer.callbacks.append(CheckpointOnInterrupt("--ckpt_path last"))
        options = self.config_init.fit
        if options.run_folder is None and options.ckpt_path != "last":
            return
        self._continue_run()

    def _continue_run(self) -> None:
        """Continue from the checkpoint that `--run_folder` or `--ckpt_path last` stands for."""
        trainer: Any = self.trainer
        options = self.config_init.fit
        config = self._parser("fit").dump(self.config.fit, skip_none=False)
        try:
            with owned_by(self._owner):
                if options.run_folder is None:
                    option, found = "--ckpt_path last", find_last_checkpoint(trainer, config)
                else:
                    option, found = "--run_folder", find_checkpoint_of_run(trainer, config)
        except (FileNotFoundError, ValueError) as error:
            self.parser.error(str(error))
        if found is not None:
            rank_zero_info(f"{option}: continuing from {found}.")
            options.ckpt_path = str(found)
        elif options.run_folder is not None and options.ckpt_path == "last":
            options.ckpt_path = None
        trainer.callbacks.append(SameCheckpoint(found))
        if options.run_folder is not None:
            if trainer.is_global_zero:
                self._delete_temporary_checkpoints(Path(trainer.logger.log_dir))
            first_checkpoint = len(trainer.callbacks)
            if trainer.checkpoint_callback is not None:
                first_checkpoint = trainer.callbacks.index(trainer.checkpoint_callback)
            trainer.callbacks.insert(first_checkpoint, RowsBeforeCheckpoints(trainer.logger))

    def _delete_temporary_checkpoints(self, folder: Path) -> None:
        """Delete what killed runs have left of checkpoints in the folder of the run, which this process has locked."""
        paths = [folder / "checkpoints"]
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            dirpath = getattr(callback, "dirpath", None)
            if dirpath and is_within(dirpath, folder):
                paths.append(Path(dirpath))
        for path in paths:
            if path.is_dir():
                delete_temporary_checkpoints(path)

    def before_predict(self) -> None:
        """Write the embeddings to files instead of collecting them in memory."""
        trainer: Any = self.trainer
        if not isinstance(self.model, RetrievalModule):
            return
        self.config_init.predict.return_predictions = False
        if any(isinstance(callback, callbacks.EmbeddingWriter) for callback in trainer.callbacks):
            return
        try:
            trainer.callbacks.append(callbacks.EmbeddingWriter(self.config_init.predict.output))
        except InvalidValue as error:
            self.parser.error(str(error.of(self._owner, output="--output")))

    def after_predict(self) -> None:
        """Print where the embeddings are."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, callbacks.EmbeddingWriter):
                rank_zero_info(f"The embeddings are in {callback.output}.")
                if callback.renewed > 0:
                    rank_zero_info(f"Made again, because images in them have changed: {callback.renewed} files.")

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the subcommand; after Ctrl-C, exit with the usual code 130 instead of Lightning's code 1.

        Invalid input is reported as one sentence, unless the user's own code has led to it.
        """
        with self._locked_run_folder():
            try:
                with owned_by(self._owner):
                    super()._run_subcommand(subcommand)
            except SystemExit:
                if self.trainer.interrupted:
                    sys.exit(EXIT_CODE)
                raise
            except Invalid as error:
                if isinstance(error, NotWritten) or not _passes_through_own_code(error):
                    self.parser.error(str(error))
                raise
            except OSError as error:  # a full disk, or a folder that cannot be written to
                if error.errno in NOT_WRITABLE:
                    self.parser.error(f"{self._owner}: {error}")
                raise

    @contextmanager
    def _locked_run_folder(self) -> Iterator[None]:
        """Context that locks the folder `--run_folder`, so that no other program logs, saves or continues there.

        The first process takes the lock before it looks for a checkpoint, because another run that is still active
        would write newer checkpoints.
        """
        given = self._get(self.config_init, "run_folder")
        with ExitStack() as stack:
            if given is not None and self.trainer.global_rank == 0:
                folder = check_path("--run_folder", given)
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(folder_lock(folder))
                except OSError as error:
                    self.parser.error(
                        f"{self._owner}: `--run_folder` must be a folder that can be written to, "
                        f"got {folder} ({reason(error)}); give another path."
                    )
                except InvalidValue as error:
                    self.parser.error(str(error.of(self._owner)))
            yield

    def after_fit(self) -> None:
        if not self.config[self.config.subcommand].test_after_fit:
            return
        checkpoint_callback: Any = self.trainer.checkpoint_callback
        best_path = getattr(checkpoint_callback, "best_model_path", "")
        checkpoint = None
        if best_path and checkpoint_callback.monitor:
            checkpoint = best_path
        self.trainer.test(
            self.model, datamodule=self.datamodule, ckpt_path=checkpoint, verbose=False, weights_only=True
        )


def _differing_settings(name: str, given: Any, used: Any) -> list[str]:
    """Settings of the config's model that differ from those of the checkpoint's model.

    Settings that only one of them has, or that the config leaves open, are skipped: a checkpoint has more of them. So
    are those that a class has turned into others, such as the rank of adapters into their settings.

    Args:
        name: path of the setting, such as `loss.tau`.
        given: its value in the config.
        used: its value in the checkpoint.
    """
    if isinstance(given, Namespace):
        given = given.as_dict()
    if isinstance(given, tuple):  # a checkpoint has lists
        given = list(given)
    parts = _parts_of_both(given, used)
    if parts:
        differing = []
        for key, of_given, of_used in parts:
            inner = ".".join(part for part in (name, key) if part not in ("", "init_args"))
            differing += _differing_settings(inner, of_given, of_used)
        return differing
    if given is None or given == used or isinstance(given, dict) or isinstance(used, dict):
        return []
    return [f"{name} {short_repr(given)} ({short_repr(used)} in the checkpoint)"]


def _parts_of_both(given: Any, used: Any) -> list[tuple[str, Any, Any]]:
    """Key and both values of each part that two dicts share, or of two lists of one length; empty for other values."""
    if isinstance(given, dict) and isinstance(used, dict):
        return [(key, given[key], used[key]) for key in given if key in used]
    if isinstance(given, list) and isinstance(used, list) and len(given) == len(used):
        return [("", *values) for values in zip(given, used)]
    return []


def _of_another_program(path: Any) -> str:
    """The sentence about a `--ckpt_path` that another program wrote."""
    return (
        f"`--ckpt_path` must be a checkpoint of a RetrievalModule, got {path}, which another program wrote; to begin "
        "with its weights, give it as `weights` of the Embedder in the config."
    )


def _passes_through_own_code(error: BaseException) -> bool:
    """Whether a function of the user is in the traceback of an error, which then says where the mistake is."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        is_installed = not INSTALLED.isdisjoint(Path(frame.f_code.co_filename).parts)
        if package not in (*sys.stdlib_module_names, "lightning_retrieval") and not is_installed:
            return True
    return False


def _sentence(error: BaseException) -> str | None:
    """The sentence about an invalid argument of a config, or about a package that a class of a config needs, or None.

    jsonargparse wraps the error of a class in its own errors. For other errors, such as those of a user's class, the
    result is None, because the traceback helps the user more than a sentence.

    Args:
        error: the error that the parser raised while creating the objects of a config.

    Example:
        >>> from lightning_retrieval import SmoothAPLoss
        >>> error = ValueError("Problem with given class_path 'lightning_retrieval.SmoothAPLoss'")
        >>> try:
        ...     SmoothAPLoss(tau=-1.0)
        ... except ValueError as cause:
        ...     error.__cause__ = cause
        >>> _sentence(error)
        'SmoothAPLoss: `tau` must be a number from 1e-12 to 1e+12, got -1.0.'
    """
    cause: BaseException | None = error
    while cause is not None:
        is_missing = isinstance(cause, ModuleNotFoundError) and cause.name is None  # a message about what to install
        if is_missing or isinstance(cause, Invalid):
            return str(cause)
        cause = cause.__cause__
    return None


class _Parser(LightningArgumentParser):
    """A parser that reads values as `_value` says, and writes the number of the format into each config."""

    def __init__(
        self,
        *args: Any,
        configs: Sequence[str] = (),
        parser_mode: str = CONFIGS,
        dump_header: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._configs = configs
        if dump_header is not None:
            dump_header = [*dump_header, FORMAT_LINE]
        super().__init__(*args, parser_mode=parser_mode, dump_header=dump_header, **kwargs)

    def parse_args(self, args: Any = None, *further: Any, **settings: Any) -> Any:
        """Parse arguments, in which None and null are the same, and so are Lightning's two packages."""
        if args is None:
            args = sys.argv[1:]
        try:
            meant = _as_meant_here(args)
        except Invalid as error:
            self.error(str(error))
        return super().parse_args(null_for_none(meant), *further, **settings)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print an error, if it is one of jsonargparse with the names of the configs, and exit."""
        if ex is not None and self._configs:
            message = f"{message}\nThe config is {' and '.join(self._configs)}."
        super().error(message, ex)


class _SaveConfig(SaveConfigCallback):
    """Saves the config in the folder of the run, even if the logger (such as Weights & Biases) has no folder.

    Args:
        model: plain data of the model, if the model is that of a checkpoint and not that of the config.
    """

    def __init__(self, *args: Any, model: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model = model

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        folder = run_folder(trainer)
        is_of_run = stage != "fit" and (folder / self.config_filename).exists()  # what training must find again
        if trainer.is_global_zero and not self.already_saved and not is_of_run:
            config = self.parser.dump(self.config, skip_none=False)
            if self.model is not None:
                content = {**yaml.safe_load(config), "model": self.model}
                config = f"# {FORMAT_LINE}\n{_dump_config(content)}"
            path = folder / self.config_filename
            with owned_by("fit"), writing(path):
                folder.mkdir(parents=True, exist_ok=True)
                with new_file(path) as file:
                    file.write(config.encode())
        self.already_saved = True
