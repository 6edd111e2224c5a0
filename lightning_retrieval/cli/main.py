"""The program `lightning-retrieval`, which runs the function of a subcommand.

    lightning-retrieval fit|validate|test|predict --config FILE
    lightning-retrieval check --data NAME --root DIR
    lightning-retrieval adapt --embeddings DIR --output C
    lightning-retrieval embed --checkpoint C --images DIR --output DIR
    lightning-retrieval export --checkpoint C --output DIR
    lightning-retrieval index --checkpoint C --images DIR --output INDEX
    lightning-retrieval report --checkpoint C --images DIR --output FILE
    lightning-retrieval search --index INDEX IMAGE...
    lightning-retrieval demo --index INDEX
    lightning-retrieval completion SHELL
    lightning-retrieval env
    lightning-retrieval example NAME
    lightning-retrieval shrink IMAGES OUTPUT --size 288

A command is a typed function, whose signature and docstring make its options and help. The libraries that it works with
are imported when it runs, so that help does not wait for torch.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal

from lightning_retrieval.cli.from_signature import TYPES_OF_PATHS, add_options, call, command_parser, error_message
from lightning_retrieval.command_line import CommandParser, imports_of_command, read_by_another_program
from lightning_retrieval.invalid import Invalid, InvalidType
from lightning_retrieval.paths import check_path
from lightning_retrieval.version import __version__

EXPECTED_ERRORS = (OSError, ValueError, ImportError)  # the messages of these errors say what the user can change

LIGHTNING_COMMANDS = {
    "fit": "Train a model, and evaluate it during training: --config FILE",
    "validate": "Evaluate a model on the validation set: --config FILE --ckpt_path C",
    "test": "Evaluate a model on the test set: --config FILE --ckpt_path C",
    "predict": "Embed the test set into files: --config FILE --ckpt_path C --output DIR",
}
OTHER_COMMANDS = {
    "check": "Check the directory structure of a data set: --data NAME --root DIR",
    "adapt": "Train a head on stored embeddings, or compare losses: --embeddings DIR --output C",
    "embed": "Embed images into Parquet files: --checkpoint C --images DIR --output DIR",
    "export": "Export a model to ONNX and torch.export: --checkpoint C --output DIR",
    "index": "Index the images in a folder: --checkpoint C --images DIR --output INDEX",
    "report": "Show what a model gets wrong: --checkpoint C --images DIR --output FILE",
    "search": "Find the nearest images in an index: --index INDEX IMAGE...",
    "demo": "Search an index in the browser: --index INDEX",
    "completion": "Print a script that completes commands and options: bash, zsh or tcsh",
    "env": "Print the versions that a bug report needs",
    "example": "Write the config of an example: glyphs",
    "shrink": "Copy a folder with smaller images, which are read faster: IMAGES OUTPUT --size 288",
}
SEARCH_COMMANDS = "lightning_retrieval.search.commands.functions"  # has the functions of the others
COMMANDS_OF_CLI = ("env", "example", "shrink")  # each is a function of the module of its name in this package
WITHOUT_LIGHTNING = ("completion", "env", "example")  # these commands run whatever the environment variable names
# Owners of the errors that a command reports as its own; an error without an owner is one of the command itself.
OWNERS = (
    "",
    "adapt_head",
    "compare_losses",
    "embed_images",
    "export_model",
    "index_embeddings",
    "index_images",
    "report_images",
    "search_images",
    "MilvusStore",
    "RetrievalIndex",
)
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
FILE_OPTIONS = (
    "--config",
    "--ckpt_path",
    "--run_folder",
    "--output",
    "--root",
    "--weights",
)  # take a path, but have another type


def main(args: Any = None) -> None:
    """Run the program.

    Args:
        args: the arguments; if None, the arguments of the process. `fit`, `validate`, `test` and `predict` also
            accept a parsed config.

    Raises:
        TypeError: if `args` is a single string, or a list with anything but strings.
    """
    configs: list[str] = []
    with suppress(AttributeError):  # a notebook's output takes all characters, and a program without one has none
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    given = args
    if args is None:
        given = sys.argv[1:]
    is_list = isinstance(given, (list, tuple))
    if isinstance(given, str) or (is_list and not all(isinstance(arg, str) for arg in given)):
        rule = "must be a list of strings, such as ['fit', '--config', 'a.yaml']"
        raise InvalidType(rule, "main", "args", got=repr(given))
    if is_list:
        command = _parse_command(given)
        if command in LIGHTNING_COMMANDS:
            configs = _existing_configs(command, given[1:])
        if command not in WITHOUT_LIGHTNING:
            _check_backend(command)
        if command in OTHER_COMMANDS:
            with read_by_another_program():
                code = _run(command, given[1:])
            if code:
                sys.exit(code)
            return

    with imports_of_command():
        from lightning_retrieval.cli.fit import fit

    fit(args, configs)


def _existing_configs(command: str, args: Sequence[str]) -> list[str]:
    """The files of `--config`; exits if one is missing, before libraries are imported, which takes seconds."""
    parser = CommandParser(f"lightning-retrieval {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", action="append", default=[])
    found = []
    for config in parser.parse_known_args(args)[0].config:
        is_text = config and not config.endswith(CONFIG_SUFFIXES)
        if is_text or "://" in config:  # jsonargparse also accepts the text of a config, and an address
            continue
        try:
            path = check_path("--config", config, exists=True)
        except Invalid as error:
            parser.error(str(error))
        if path.is_dir():
            parser.error(f"--config must be a file, got {path}")
        found.append(str(path))
    return found


def _parse_command(args: Sequence[str]) -> str:
    """Return the subcommand; without one, exit with the help or an error."""
    parser = CommandParser(
        "lightning-retrieval",
        description="Train image retrieval directly for Average Precision.",
        epilog="lightning-retrieval COMMAND --help shows the options of a command.",
    )
    descriptions = {**LIGHTNING_COMMANDS, **OTHER_COMMANDS}
    parser.add_argument("--version", action="version", version=f"lightning-retrieval {__version__}")
    if not args:
        parser.error(f"a command is required: {', '.join(descriptions)}")
    if args[0] not in descriptions and not args[0].startswith("-"):
        parser.error(f"there is no command {args[0]!r}, only {', '.join(descriptions)}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, description in descriptions.items():
        commands.add_parser(name, help=description, add_help=False)
    parsed: str = parser.parse_args(args[:1]).command
    return parsed


def _check_backend(command: str) -> None:
    """Exit with one sentence if the environment variable of the package of Lightning is invalid.

    The commands that train or evaluate also need the package itself.
    """
    try:
        backend = import_module("lightning_retrieval.backend")
        if command in LIGHTNING_COMMANDS:
            backend.pl  # noqa: B018
    except Invalid as error:
        print(f"lightning-retrieval {command}: {error}", file=sys.stderr)
        sys.exit(2)


def _run(command: str, args: Sequence[str]) -> int:
    """Run a command, and return its exit code: 0, or 1 if some files could not be used, or 2 if nothing was done."""
    if command == "check":
        from lightning_retrieval.cli.check import check

        return check(args)
    function = _function(command)
    parser = command_parser(command, function)
    options = parser.parse_args(args)
    try:
        return int(call(function, options))
    except BrokenPipeError:
        raise
    except EXPECTED_ERRORS as error:
        print(error_message(command, error, parser, OWNERS), file=sys.stderr)
        return 2


def _function(command: str) -> Callable[..., int]:
    """The typed function of a command, whose module is imported only now."""
    if command == "completion":
        return completion
    module = SEARCH_COMMANDS
    if command in COMMANDS_OF_CLI:
        module = f"lightning_retrieval.cli.{command}"
    function: Callable[..., int] = getattr(import_module(module), command)
    return function


def completion(shell: Literal["bash", "zsh", "tcsh"], /) -> int:
    """Print a script with which a shell completes commands, options and files.

    Args:
        shell: shell that reads the script.

    Example:
        lightning-retrieval completion bash > ~/.local/share/bash-completion/completions/lightning-retrieval
    """
    import shtab

    print(shtab.complete(_parser_of_all_commands(), shell))
    return 0


def _parser_of_all_commands() -> argparse.ArgumentParser:
    """A parser with the options of all commands. It is only used to complete them."""
    import shtab
    from jsonargparse import capture_parser

    from lightning_retrieval.cli.check import DATA_MODULES
    from lightning_retrieval.cli.fit import fit

    parser = argparse.ArgumentParser("lightning-retrieval")
    commands = parser.add_subparsers()
    (of_lightning,) = (
        action for action in capture_parser(fit)._actions if isinstance(action, argparse._SubParsersAction)
    )
    for name, description in {**LIGHTNING_COMMANDS, **OTHER_COMMANDS}.items():
        command = commands.add_parser(name, help=description)
        if name in LIGHTNING_COMMANDS:
            _copy_options(of_lightning.choices[name], command)
        elif name == "check":
            command.add_argument("--data", choices=DATA_MODULES)
            command.add_argument("--root")
        else:
            add_options(command, _function(name))
        for action in command._actions:
            if action.type in TYPES_OF_PATHS.values() or not set(FILE_OPTIONS).isdisjoint(action.option_strings):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def _copy_options(source: argparse.ArgumentParser, target: argparse.ArgumentParser) -> None:
    """Add the names of the options of a parser of jsonargparse, without those that append to a list (`--NAME+`)."""
    for action in source._actions:
        names = [name for name in action.option_strings if name.startswith("--") and not name.endswith("+")]
        if names and names != ["--help"]:
            target.add_argument(*names)
