"""The command line before Typer reads it: several values after one option, global flags anywhere.

    mfs decompose --variants a b --json     ->  mfs --json decompose --variants a --variants b

Typer takes one value an option, and global options only in front of the command. Pure functions on lists of words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mfs_decompose.errors import UsageError

MULTI = frozenset({"--variants", "-V", "--text", "--calibrate", "--originals", "--against"})

GLOBAL_FLAGS = frozenset({"--json", "--quiet", "--verbose", "--no-color", "--debug", "--yes"})
GLOBAL_OPTIONS = frozenset({"--progress", "--log-file"})
_SHORT_FLAGS = re.compile(r"-[qv]+")


def rewrite(words: Sequence[str]) -> list[str]:
    """The words as Typer reads them: global flags first, each value of a multi-value option with its own option.

    Raises:
        UsageError: a multi-value option or a global option has no value.
    """
    front, rest = hoist_globals(expand_multi(words))
    return front + rest


def expand_multi(words: Sequence[str]) -> list[str]:
    """Repeat a multi-value option before each of its values, which go on up to the next word that starts with `-`.

    `--text=a b` gives the option one value: `b` stands for itself. Words after `--` stay as they are.

    Raises:
        UsageError: a multi-value option has no value.
    """
    words, tail = _split_tail(words)
    out: list[str] = []
    option: str | None = None
    empty = False
    for word in words:
        if word in MULTI:
            _need_value(option, empty)
            option, empty = word, True
        elif _is_option(word):
            _need_value(option, empty)
            option, empty = None, False
            out.append(word)
        elif option is not None:
            out += [option, word]
            empty = False
        else:
            out.append(word)
    _need_value(option, empty)
    return out + tail


def hoist_globals(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words into the global flags, in their order, and the rest. Words after `--` are never flags.

    Raises:
        UsageError: a global option has no value.
    """
    words, tail = _split_tail(words)
    front: list[str] = []
    rest: list[str] = []
    option: str | None = None
    for word in words:
        if option is not None:
            _need_value(option, _is_option(word))
            front.append(word)
            option = None
        elif word in GLOBAL_OPTIONS:
            front.append(word)
            option = word
        elif word in GLOBAL_FLAGS or _SHORT_FLAGS.fullmatch(word) or word.partition("=")[0] in GLOBAL_OPTIONS:
            front.append(word)
        else:
            rest.append(word)
    _need_value(option, True)
    return front, rest + tail


def _split_tail(words: Sequence[str]) -> tuple[list[str], list[str]]:
    cut = list(words).index("--") if "--" in words else len(words)
    return list(words[:cut]), list(words[cut:])


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-"


def _need_value(option: str | None, empty: bool) -> None:
    if option is not None and empty:
        raise UsageError(f"expected a value after {option}, found none")
