"""Help of the command line that fits on a screen: a line for each option."""

import argparse
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from jsonargparse import DefaultHelpFormatter

_NAMES = 46  # columns


class HelpLines(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Each option on one line: its name, how its help begins, and its default. Wider terminals show more of the help.

    Of options `--NAME.help`, which show the settings of a class, those of nested names are left out.
    """

    def _format_usage(self, usage: Any, actions: Iterable[argparse.Action], *args: Any, **kwargs: Any) -> str:
        actions = list(actions)
        if any(action.option_strings and "." in action.dest for action in actions):
            return f"usage: {self._prog} [options]\n\n"
        whole: str = super()._format_usage(usage, actions, *args, **kwargs)
        return whole

    def start_section(self, heading: str | None) -> None:
        """Titles come from docstrings: their first sentence."""
        super().start_section(heading and heading.partition(". ")[0])

    def _format_action(self, action: argparse.Action) -> str:
        if not action.option_strings or action.help == argparse.SUPPRESS:
            return super()._format_action(action)
        name = ", ".join(option for option in action.option_strings if not option.endswith("+"))
        if name.endswith(".help") and name.count(".") > 1:
            return ""
        whole = " ".join((self._expand_help(action) or "").split())
        default = re.search(r"default: ([^,]*?)(?:\)$|, known subclasses)", whole)
        says = "" if default is None or default[1] == "null" else f" [{default[1]}]"
        says = " (required)" if action.required else says
        first = re.split(r"(?<=[a-z0-9`\"')])\. | Default: | \((?:required|type|default)[:,)]", whole)[0].rstrip(".")
        left = " " * self._current_indent + name
        left = f"{left:<{_NAMES}} " if len(left) < _NAMES else f"{left}  "
        room = self._width - len(left) - len(says)
        return f"{left}{textwrap.shorten(first, room, placeholder=' ...') if room > 9 else ''}{says}".rstrip() + "\n"
