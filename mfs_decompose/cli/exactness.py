"""How exactly a variant comes back, in the words that tables use."""

from __future__ import annotations

from collections.abc import Iterable

ERROR = "error served"
"""Column of ||decoded - delta|| / ||delta||: of the delta, as it is served."""

RESTORED = "restored"


def restored(exact: int, tensors: int, *, adapter: bool) -> str:
    """What `mfs restore` gives: all bits, or those of some tensors."""
    if adapter:
        return "the adapter, exact"
    return "exact" if exact == tensors else f"{exact} of {tensors} exact"


def explain_error(errors: Iterable[float]) -> str | None:
    """What an error is of, where a reader sees one above 0."""
    if not any(errors):
        return None
    return f"note: `{ERROR}` is how much of the delta is lost, and says little of behaviour: mfs eval measures that"
