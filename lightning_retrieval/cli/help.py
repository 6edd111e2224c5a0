"""Compact help for the command line: of each option its name, the first sentence of its description, its default."""

import argparse
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from jsonargparse import DefaultHelpFormatter

NAME_WIDTH = 47  # columns before a description on the line of the name
INDENT = 4  # columns before a description on lines of its own, besides those of the name
FIRST_SENTENCE = re.compile(r"(?<=[a-z0-9`\"')])\. | Default: | \((?:required|type|default)[:,)]")
DEFAULT = re.compile(r"default: ([^,]*?)(?:\)$|, known subclasses)")


class CompactHelpFormatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """For each option its name, the first sentence of its description, and its default.

    They are on one line if the terminal is wide enough; otherwise, the sentence and the default are on lines of their
    own. Options `--NAME.help`, which show the settings of a class, are omitted if their names are nested.
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
            heading = textwrap.fill(heading.partition(". ")[0], self._width - 1)  # a colon follows
        super().start_section(heading)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """A description, whose lines are kept unless they are too long."""
        lines = []
        for line in text.splitlines():
            lines += textwrap.wrap(line, width, initial_indent=indent, subsequent_indent=indent) or [""]
        return "\n".join(lines)

    def _format_action(self, action: argparse.Action) -> str:
        if not action.option_strings or action.help == argparse.SUPPRESS:
            return super()._format_action(action)
        name = _names(action)
        if name.endswith(".help") and name.count(".") > 1:
            return ""
        description = " ".join((self._expand_help(action) or "").split())
        text = FIRST_SENTENCE.split(description)[0].rstrip(".") + _ending(action, description)
        name = " " * self._current_indent + name
        line = f"{name}  ".ljust(NAME_WIDTH) + text.strip()
        if len(line) <= self._width:
            return line.rstrip() + "\n"
        indent = " " * (self._current_indent + INDENT)
        below = textwrap.fill(text, self._width, initial_indent=indent, subsequent_indent=indent)
        return f"{name}\n{below}\n"


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
