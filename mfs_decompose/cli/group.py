"""Commands that are imported when they are used, and help that groups options by panel.

`mfs --help` needs a name and a sentence of each command, never its module. Help is plain text: square brackets in it
mean themselves, and it can be piped.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True, slots=True)
class Entry:
    """A command: the module that has its function `command`, the sentence for `mfs --help`, and where it stands there.

    `resumes` says that running the same command again goes on where it was stopped.
    """

    module: str
    help: str
    panel: str
    resumes: bool = False


class PanelCommand(TyperCommand):
    """A command whose help shows its options by panel and keeps indented lines (examples) as they are."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        whole, self.help = self.help, _keep_indented(self.help or "")
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = whole

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_panels(self, ctx, formatter)


class LazyGroup(TyperGroup):
    """The group of the commands in a table; `fill` makes them known without importing them."""

    def fill(self, table: Mapping[str, Entry]) -> None:
        self.commands.update({name: _Deferred(name, entry) for name, entry in table.items()})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        width = max((len(name) for name in self.commands), default=0)
        for name, command in self.commands.items():
            assert isinstance(command, _Deferred)
            panels.setdefault(command.entry.panel, []).append((name.ljust(width), command.entry.help))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)
        _write_panels(self, ctx, formatter)


def load_command(name: str, entry: Entry) -> Any:
    """Import the module of a command and build the command of its function."""
    function = importlib.import_module(entry.module).command
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, cls=PanelCommand, rich_help_panel=entry.panel, short_help=entry.help)(function)
    return typer.main.get_command(app)


class _Deferred(TyperCommand):
    """Stands in the group for a command until its words are parsed; the context it makes is the real command's."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, short_help=entry.help, rich_help_panel=entry.panel)
        self.entry = entry

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        return load_command(str(self.name), self.entry).make_context(info_name, args, parent=parent, **extra)


def _write_panels(command: Any, ctx: Any, formatter: Any) -> None:
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None:
            default = "Arguments" if param.param_type_name == "argument" else "Options"
            panels.setdefault(param.rich_help_panel or default, []).append(record)
    panels["Options"] = panels.pop("Options")  # what every command has comes last
    for title, rows in panels.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def _keep_indented(text: str) -> str:
    """Mark the paragraphs with indented lines so that they are not wrapped."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        f"\b\n{p}" if any(line.startswith(" ") for line in p.splitlines()) and not p.startswith("\b") else p
        for p in paragraphs
    )
