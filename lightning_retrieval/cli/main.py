"""The program `lightning-retrieval`: it passes the arguments on to the function of the subcommand.

    lightning-retrieval fit|validate|test|predict --config FILE
    lightning-retrieval check --data NAME --root DIR
    lightning-retrieval index --checkpoint C --images DIR --output INDEX
    lightning-retrieval search --index INDEX IMAGE...

A subcommand's module is imported when the subcommand is called.
"""

import sys
from collections.abc import Sequence
from typing import Any


def main(args: Any = None) -> None:
    """Run the program.

    Args:
        args: the arguments, if None those of the process; `fit` and its siblings also accept a parsed config.
    """
    given = args
    if args is None:
        given = sys.argv[1:]
    if isinstance(given, (list, tuple)) and given:
        command = COMMANDS.get(given[0])
        if command is not None:
            sys.exit(command(given[1:]))

    from lightning_retrieval.cli.fit import fit

    fit(args)


def _check(args: Sequence[str]) -> int:
    from lightning_retrieval.cli.check import check

    return check(args)


def _index(args: Sequence[str]) -> int:
    from lightning_retrieval.cli.index import index

    return index(args)


def _search(args: Sequence[str]) -> int:
    from lightning_retrieval.cli.search import search

    return search(args)


COMMANDS = {"check": _check, "index": _index, "search": _search}
