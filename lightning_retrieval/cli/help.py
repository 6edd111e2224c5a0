"""Compact help for the command line: one line for each option."""

import argparse
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from jsonargparse import DefaultHelpFormatter

NAME_WIDTH = 47  # columns before the description
SHORTEST = 10  # columns; no description is shown if fewer are left for it
FIRST_SENTENCE = re.compile(r"(?<=[a-z0-9`\"')])\. | Default: | \((?:required|type|default)[:,)]")
DEFAULT = re.compile(r"default: ([^,]*?)(?:\)$|, known subclasses)")


class CompactHelpFormatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """One line for each option: its name, the first sentence of its description, and its default.

    A wider terminal shows more of the description. Options `--NAME.help`, which show the settings of a class, are
    omitted if their names are nested.
    """

    def _format_usage(self, usage: Any, actions: Iterable[argparse.Action], *args: Any, **kwargs: Any) -> str:
        actions = list(actions)
        for action in actions:
            if action.option_strings and "." in action.dest:
                return f"usage: {self._prog} [options]\n\n"
        formatted: str = super()._format_usage(usage, actions, *args, **kwargs)
        return formatted

    def start_section(self, heading: str | None) -> None:
        """Start a section; its heading is the first sentence of a docstring."""
        if heading:
            heading = heading.partition(". ")[0]
        super().start_section(heading)

    def _format_action(self, action: argparse.Action) -> str:
        if not action.option_strings or action.help == argparse.SUPPRESS:
            return super()._format_action(action)
        name = _names(action)
        if name.endswith(".help") and name.count(".") > 1:
            return ""
        description = " ".join((self._expand_help(action) or "").split())
        ending = _ending(action, description)
        indent = " " * self._current_indent
        start = f"{indent}{name}  ".ljust(NAME_WIDTH)
        width = self._width - len(start) - len(ending)
        shown = ""
        if width >= SHORTEST:
            shown = textwrap.shorten(FIRST_SENTENCE.split(description)[0].rstrip("."), width, placeholder=" ...")
        return f"{start}{shown}{ending}".rstrip() + "\n"


def _names(action: argparse.Action) -> str:
    """The names of an option, without the variant `--NAME+`, which appends to a list."""
    return ", ".join(name for name in action.option_strings if not name.endswith("+"))


def _ending(action: argparse.Action, description: str) -> str:
    """The end of an option's line: that it is required, or its default if there is one."""
    if action.required:
        return " (required)"
    default = DEFAULT.search(description)
    if default is None or default[1] == "null":
        return ""
    return f" [{default[1]}]"
