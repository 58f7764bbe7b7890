"""The only place that prints: data on stdout, talk on stderr.

Text from users and files is shown as it is: never read as markup, control characters made visible. Nothing here fails
on a terminal that cannot show a character.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from mfs_decompose.errors import MfsError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mfs_decompose.cli.log import Log

# A table that is piped is as wide as its widest row: a reader after us must not meet a cut name.
_PIPED_WIDTH = 100_000
# Overrides of the writing direction can make a name read as another one.
_BIDI = frozenset(range(0x202A, 0x202F)) | frozenset(range(0x2066, 0x206A)) | {0x200E, 0x200F, 0x2028, 0x2029}


def visible(text: str, *, keep: str = "\n\t") -> str:
    """The text with control characters, escape codes and direction overrides written out as `\\x1b`."""
    return "".join(c if c in keep or not _is_control(c) else c.encode("unicode_escape").decode() for c in text)


def _is_control(char: str) -> bool:
    code = ord(char)
    return code < 0x20 or 0x7F <= code < 0xA0 or code in _BIDI


class Output:
    """Where a command speaks. In JSON mode stdout gets exactly one document and no table.

    A command calls `document` and `table` (or `line`) one after the other; the mode decides which of them shows.
    """

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.json_mode = False
        self.progress = "auto"
        self.verbosity = 0
        self.debug = False
        self.assume_yes = False
        self.live = False
        """Whether a live display is on stderr, which talk must go around."""
        self.command_line = ""
        self.log: Log | None = None
        """The file of --log-file, which gets all talk, also what --quiet keeps from the terminal."""
        self._color = True
        self._stdout = _forgiving(stdout or sys.stdout or _nowhere())
        self._stderr = _forgiving(stderr or sys.stderr or _nowhere())
        self._consoles: dict[int, Console] = {}
        self._closers: list[Callable[[], None]] = []
        self._answered = False

    def configure(
        self, *, json_mode: bool, progress: str, verbosity: int, color: bool, debug: bool, assume_yes: bool
    ) -> None:
        """Take over the global options; `verbosity` is -1 for quiet, 0, or the number of -v."""
        self.json_mode, self.progress, self.verbosity = json_mode, progress, verbosity
        self.debug, self.assume_yes, self._color = debug, assume_yes, color
        self._consoles.clear()

    # stdout ------------------------------------------------------------------------------------------------------

    def document(self, document: Mapping[str, Any]) -> None:
        """Write the one JSON document; nothing outside JSON mode. It names its `schema`."""
        if not self.json_mode:
            return
        assert "schema" in document and not self._answered
        self._answered = True
        self._stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
        self._stdout.flush()

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Collection[str] = (), title: str = ""
    ) -> None:
        """Write a table; nothing in JSON mode. The columns named in `right` are aligned to the right."""
        if self.json_mode:
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", show_edge=False)
        for column in columns:
            grid.add_column(
                Text(visible(column, keep="")), justify="right" if column in right else "left", overflow="fold"
            )
        for row in rows:
            grid.add_row(*(Text(visible(str(cell), keep="")) for cell in row))
        if title:
            self.line(title)
        console = self._console(self._stdout)
        with console.capture() as capture:
            console.print(grid)
        self._stdout.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())
        self._stdout.flush()

    def line(self, text: str = "") -> None:
        """Write a line of data for people; nothing in JSON mode."""
        if not self.json_mode:
            self._stdout.write(visible(text) + "\n")
            self._stdout.flush()

    # stderr ------------------------------------------------------------------------------------------------------

    @property
    def talk_console(self) -> Console:
        """The rich console on stderr, for live displays."""
        return self._console(self._stderr)

    def say(self, text: str, *, logged: bool = True) -> None:
        """Tell the user something; not under --quiet. `logged` is false where the log says it in its own way."""
        if logged:
            self.record("info", text)
        if self.verbosity >= 0:
            self._talk("info", text)

    def detail(self, text: str) -> None:
        """Tell something only under --verbose."""
        self.record("detail", text)
        if self.verbosity > 0:
            self._talk("detail", text)

    def warn(self, text: str) -> None:
        """Warn, also under --quiet."""
        self.record("warning", text)
        self._talk("warning", text, label="Warning: ", style="yellow")

    def error(self, error: MfsError, *, exit_code: int | None = None) -> None:
        """Report an error: `Error:` and `Hint:` on stderr, and in JSON mode a document, unless there was one."""
        code = error.exit_code if exit_code is None else exit_code
        self.close()
        self.record("error", error.message)
        if error.hint:
            self.record("hint", error.hint)
        self._talk("error", error.message, label="Error: ", style="bold red")
        if error.hint:
            self._talk("hint", error.hint, label="Hint: ", style="bold")
        if self.json_mode and not self._answered:
            self.document(
                {
                    "schema": "mfs.error/1",
                    "code": error.code,
                    "exit_code": code,
                    "message": error.message,
                    "hint": error.hint,
                }
            )

    def record(self, level: str, text: str) -> None:
        """Write to the log file alone, where there is one. A log that fails ends with a warning, never the work."""
        if self.log is None:
            return
        try:
            self.log.write(level, text)
        except OSError as error:
            self.log = None
            self.warn(f"the log file ends here: {error.strerror}")

    def event(self, event: Mapping[str, Any]) -> None:
        """Write one line of JSON on stderr, for `--progress json`."""
        self._stderr.write(json.dumps(event) + "\n")
        self._stderr.flush()

    def is_terminal(self) -> bool:
        """Whether somebody watches stderr."""
        return self._stderr.isatty() and os.environ.get("TERM") != "dumb"

    def confirm(self, question: str) -> bool:
        """Ask; yes by itself under --yes.

        Raises:
            UsageError: nobody is there to answer.
        """
        if self.assume_yes:
            return True
        if self.json_mode or not (sys.stdin and sys.stdin.isatty() and self._stderr.isatty()):
            raise UsageError(f"{question}: nobody is there to answer", hint="add --yes")
        self._stderr.write(f"{visible(question)} [y/N] ")
        self._stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    # lifetime ----------------------------------------------------------------------------------------------------

    def attach(self, closer: Callable[[], None]) -> None:
        """Call `closer` before an error is shown and at the end: live displays must not outlive the command."""
        self._closers.append(closer)

    def close(self) -> None:
        """Stop live displays; may be called twice."""
        while self._closers:
            self._closers.pop()()

    def _talk(self, level: str, text: str, *, label: str = "", style: str = "") -> None:
        if self.progress == "json":
            self.event({"event": "note", "level": level, "message": text})
            return
        from rich.text import Text

        line = Text.assemble((label, style), visible(text))
        console = self.talk_console
        if self.live:
            console.print(line, soft_wrap=True)
            return
        # rich empties its buffer only after it wrote: an interrupt in between would say the line twice.
        with console.capture() as capture:
            console.print(line, soft_wrap=True)
        self._stderr.write(capture.get())
        self._stderr.flush()

    def _console(self, stream: TextIO) -> Console:
        from rich.console import Console

        if id(stream) not in self._consoles:
            plain = not self._color or bool(os.environ.get("NO_COLOR"))
            self._consoles[id(stream)] = Console(
                file=stream,
                color_system=None if plain else "auto",
                markup=False,
                emoji=False,
                highlight=False,
                width=None if stream.isatty() else _PIPED_WIDTH,
            )
        return self._consoles[id(stream)]


def _nowhere() -> TextIO:
    """For a stream that was closed before we started."""
    return open(os.devnull, "w", encoding="utf-8")


def _forgiving(stream: TextIO) -> TextIO:
    """Make the stream write `\\u2026` where its encoding has no character, instead of failing."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream
