"""A folder's own tokenizer, and what it puts before a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mfs_decompose.errors import SourceIncompatible, SourceNotFound, UsageError
from mfs_decompose.source.quiet import quiet_transformers

if TYPE_CHECKING:
    from pathlib import Path

    from mfs_decompose.fidelity.settings import BosPolicy

# Encoded with and without special tokens to see what is added; the first one that gives any token decides.
_PROBES = ("Hello", "a", "0", ".")


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer with its BOS policy resolved.

    Attributes:
        prefix: token ids put before every window: usually one BOS or nothing.
        bos: `prefix` as text, or `none`.
    """

    tokenizer: Any
    prefix: tuple[int, ...]
    bos: str

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens of the tokenizer's own.

        A prefix that the text itself spells out at its start is dropped: there is exactly one BOS in a window.
        """
        ids = _encode(self.tokenizer, text, special=False)
        if self.prefix and tuple(ids[: len(self.prefix)]) == self.prefix:
            return ids[len(self.prefix) :]
        return ids


def load_encoder(folder: Path, policy: BosPolicy) -> TextEncoder:
    """Load the tokenizer of a checkpoint folder and resolve the BOS policy by encoding.

    Raises:
        SourceNotFound: no such folder.
        SourceIncompatible: no tokenizer that transformers can load without running the folder's own code.
        UsageError: `on` for a tokenizer without a BOS token.
    """
    if not folder.is_dir():
        raise SourceNotFound(f"expected a checkpoint folder at {folder}, found none", hint="check the path")
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # Whatever goes wrong here comes from the files of the folder, in exceptions of several libraries.
        raise SourceIncompatible(
            f"expected a tokenizer that transformers can load in {folder}, found none ({_first_line(error)})",
            hint="copy the variant's tokenizer files into its checkpoint folder",
        ) from error
    prefix = _resolve_prefix(folder, tokenizer, policy)
    return TextEncoder(tokenizer, prefix, "".join(tokenizer.convert_ids_to_tokens(list(prefix))) or "none")


def _resolve_prefix(folder: Path, tokenizer: Any, policy: BosPolicy) -> tuple[int, ...]:
    if policy == "off":
        return ()
    if policy == "on":
        if tokenizer.bos_token_id is None:
            raise UsageError(
                f"expected a BOS token in the tokenizer of {folder}, found none", hint="use BOS auto or off"
            )
        return (int(tokenizer.bos_token_id),)
    for probe in _PROBES:
        plain = _encode(tokenizer, probe, special=False)
        full = _encode(tokenizer, probe, special=True)
        if not plain:
            continue
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start])
    raise SourceIncompatible(
        f"expected the tokenizer of {folder} to add special tokens around a text, found a changed text",
        hint="set BOS on or off",
    )


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    # verbose=False: no warning about texts longer than the model; they are cut into windows.
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
