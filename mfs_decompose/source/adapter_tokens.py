"""The tokenizer that lies beside an adapter, held against the embeddings that the adapter leaves."""

from __future__ import annotations

from mfs_decompose.errors import SourceIncompatible
from mfs_decompose.source.checkpoint import Checkpoint
from mfs_decompose.source.naming import first_few
from mfs_decompose.source.side_files import files_of_checkpoint
from mfs_decompose.source.tokenizer_facts import ADDED_TOKENS, TOKENIZER, read_tokenizer


def describe_unknown_tokens(adapter: Checkpoint, base: Checkpoint, rows: int | None) -> list[str]:
    """A sentence if the adapter's tokenizer makes tokens for which its merge, with `rows` of embeddings, has none.

    So it is where tokens were added for the training, and the resized embeddings were not saved with the adapter.
    """
    if rows is None or not any(sidecar.name in (TOKENIZER, ADDED_TOKENS) for sidecar in adapter.sidecars):
        return []
    unknown = _beyond(adapter, rows)
    if not unknown or not (unknown := unknown - _beyond(base, rows)):
        return []
    return [
        f"adapter: incomplete, its tokenizer has {len(unknown)} tokens beyond the {rows} rows of the embeddings: "
        f"{first_few(sorted(unknown))}; the embeddings that were resized for the training are not in its file"
    ]


def _beyond(checkpoint: Checkpoint, rows: int) -> set[str]:
    try:
        ids = read_tokenizer(files_of_checkpoint(checkpoint)).ids
    except SourceIncompatible:  # of a model of the Hub whose files are not there yet: a dry run
        return set()
    return {text for text, id in ids.items() if id >= rows}
