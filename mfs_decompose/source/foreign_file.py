"""What people find in place of weights: the usual wrong files, recognised by their first bytes."""

from __future__ import annotations

import re

_KINDS: tuple[tuple[re.Pattern[bytes], str, str], ...] = (
    (
        re.compile(rb"version https://git-lfs"),
        "a Git LFS pointer, not the weights themselves",
        "Fetch the weights with `git lfs pull` in that folder.",
    ),
    (
        re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|head|body|script|\?xml|!--)", re.IGNORECASE),
        "an HTML page (a login or error page saved under this name)",
        "Download the file again, logged in and with access to the model.",
    ),
    (
        re.compile(rb"PK\x03\x04"),
        "a zip archive, as torch.save writes it",
        "Load it in transformers and write it with save_pretrained, which writes safetensors.",
    ),
    (
        re.compile(rb"\x80[\x02-\x05]"),
        "a Python pickle",
        "Load it in transformers and write it with save_pretrained, which writes safetensors.",
    ),
    (
        re.compile(rb"\x00{16}"),
        "zeros (the room for a download that never came)",
        "Download the file again.",
    ),
    (
        re.compile(rb"GGUF"),
        "a GGUF file",
        "Give the safetensors checkpoint it was made from.",
    ),
    (
        re.compile(rb'\s*[{\[]\s*["{\]}]'),
        "a JSON document",
        "Download the file again: this is probably the error message of a server.",
    ),
)


def recognise(first_bytes: bytes) -> tuple[str, str] | None:
    """Name a file that is no safetensors file: (what it is, what to do about it), or None when it is unknown."""
    for pattern, kind, hint in _KINDS:
        if pattern.match(first_bytes):
            return kind, hint
    return None
