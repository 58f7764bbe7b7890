"""Decompose a base model and its fine-tunes into one family artifact, and give every checkpoint back.

The functions of `mfs_decompose.api` are importable from here; see its docstring for the three calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mfs_decompose.api import Family, decompose, evaluate, restore

__all__ = ["Family", "__version__", "decompose", "evaluate", "restore"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazily (PEP 562): `import mfs_decompose` is what every start of the command line pays for.
    if name in ("Family", "decompose", "evaluate", "restore"):
        from mfs_decompose import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
