"""Write docs/cli.md from the live commands: `python -m mfs_decompose.cli.reference [--check] docs/cli.md`.

Read from the parameters, never from rendered help, so the page is the same whatever the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mfs_decompose.cli.app import COMMANDS, build
from mfs_decompose.cli.group import Entry, load_command
from mfs_decompose.cli.out import Output

_HEAD = """\
# The command line

Generated from the program: `make docs` writes this page, `make check` compares it. Do not edit it.

Global options stand in front of the command or anywhere after it. Data goes to stdout, talk to stderr.
"""


def render(commands: Mapping[str, Entry] = COMMANDS) -> str:
    """The page as Markdown: the global options, then every command in the order of the table."""
    group = build(commands)
    parts = [_HEAD, "## Global options\n", *_options(group, group.make_context("mfs", ["--json"], obj=Output()))]
    for name, entry in commands.items():
        command = load_command(name, entry)
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(["mfs", name, *command.collect_usage_pieces(context)])
        parts += [f"## mfs {name}\n", f"```\n{usage}\n```\n", *_prose(command.help or entry.help)]
        parts += _options(command, context)
    return "\n".join(parts).rstrip() + "\n"


def main(argv: Sequence[str]) -> int:
    """Print the page, or with `--check FILE` say by the exit code whether the file is fresh."""
    page = render()
    if not argv:
        sys.stdout.write(page)
        return 0
    if len(argv) != 2 or argv[0] != "--check":
        sys.stderr.write("usage: python -m mfs_decompose.cli.reference [--check FILE]\n")
        return 2
    file = Path(argv[1])
    if file.is_file() and file.read_text(encoding="utf-8") == page:
        return 0
    sys.stderr.write(f"{file} is not what the program says; `make docs` writes it again\n")
    return 1


def _prose(text: str) -> Iterator[str]:
    """The help text; paragraphs with indented lines become code."""
    for paragraph in text.replace("\b\n", "").split("\n\n"):
        lines = paragraph.strip("\n").splitlines()
        indented = [line for line in lines if line.startswith(" ")]
        heading = [line for line in lines if not line.startswith(" ")]
        if heading:
            yield "\n".join(heading).replace("<", "\\<") + "\n"
        if indented:
            cut = min(len(line) - len(line.lstrip()) for line in indented)
            yield "\n".join(["```", *(line[cut:] for line in indented), "```", ""])


def _options(command: Any, context: Any) -> Iterator[str]:
    panels: dict[str, list[Any]] = {}
    for param in command.get_params(context):
        if getattr(param, "hidden", False) or (param.name == "help" and command.name != "mfs"):
            continue
        default = "Arguments" if param.param_type_name == "argument" else "Options"
        panels.setdefault(param.rich_help_panel or default, []).append(param)
    for title, params in panels.items():
        yield f"| {title} | | default |\n|---|---|---|"
        for param in params:
            yield f"| {_names(param, context)} | {_cell(param.help or '')} | {_default(param)} |"
        yield ""


def _names(param: Any, context: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name.upper()}`"
    names = ", ".join(f"`{name}`" for name in [*reversed(param.opts), *param.secondary_opts])
    takes_no_value = param.is_flag or param.count
    return names if takes_no_value else f"{names} {_cell(param.metavar or param.display_type(context))}"


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if not param.show_default or param.default is None or param.default is False or getattr(param, "count", False):
        return ""
    if isinstance(param.default, bool):
        return f"`{param.opts[0]}`"
    return f"`{param.default}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
