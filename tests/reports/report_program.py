"""The real program run in this process."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from typing import Any

from mfs_decompose.cli.app import main


@dataclass(frozen=True)
class Ran:
    """What a command line came to."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def talk(self) -> list[str]:
        return self.err.splitlines()


def run(*words: object) -> Ran:
    """Run `mfs WORDS`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return Ran(code, out.getvalue(), err.getvalue())


def succeeded(*words: object) -> Ran:
    """Run a command line that must end well."""
    ran = run(*words)
    assert ran.code == 0, ran.err
    return ran
