"""An engine for a family loaded from an artifact.

family = load_family("art")
engine = open_engine(family)
(answer,) = engine.generate([Request("math", family.variant("math").load_tokenizer().encode("2 + 2 ="))])
answer.tokens
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mfs_decompose.runtime.engine import Engine
from mfs_decompose.runtime.scheduler import Limits

if TYPE_CHECKING:
    from mfs_decompose.runtime.loaded import LoadedFamily


def open_engine(
    family: LoadedFamily,
    *,
    limits: Limits | None = None,
    kv_tokens: int = 16384,
    block_size: int = 16,
    share_prefixes: bool = True,
    seed: int = 0,
    check: bool = True,
) -> Engine:
    """The base and all variants of a loaded family; arguments and errors are those of Engine."""
    return Engine(
        family.model,
        family.slot,
        family.infos(),
        limits=limits,
        kv_tokens=kv_tokens,
        block_size=block_size,
        share_prefixes=share_prefixes,
        seed=seed,
        check=check,
        tiers=family.tiers,
    )
