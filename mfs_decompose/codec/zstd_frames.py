"""Bytes through zstd: frames that say how much is in them, and are held to it."""

from __future__ import annotations

import threading

from mfs_decompose.errors import ArtifactInvalid

_LEVEL = 3


class _Contexts(threading.local):
    """One of each for every thread: setting one up costs as much as a small frame."""

    def __init__(self) -> None:
        import zstandard

        symbols = zstandard.ZstdCompressionParameters.from_level(
            1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, target_length=0
        )
        self.text = zstandard.ZstdCompressor(level=_LEVEL)
        self.symbols = zstandard.ZstdCompressor(compression_params=symbols)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts: _Contexts | None = None


def _of_this_thread() -> _Contexts:
    global _contexts
    if _contexts is None:  # not at import, which zstandard would slow down
        _contexts = _Contexts()
    return _contexts


def compress_text(data: bytes | memoryview) -> bytes:
    """Compress what may repeat itself."""
    return _of_this_thread().text.compress(data)


def compress_symbols(data: bytes | memoryview) -> bytes:
    """Compress independent symbols: nearly no search for repetitions, which would be chance."""
    return _of_this_thread().symbols.compress(data)


def decompress(data: bytes, expected: int) -> bytes:
    """The `expected` bytes in one frame.

    Raises:
        ArtifactInvalid: it is not one whole frame, or announces more or fewer bytes; then nothing is unpacked.
    """
    import zstandard

    try:
        declared = zstandard.frame_content_size(data)
        if declared != expected:
            raise ArtifactInvalid(f"codec 'lossless': expected a chunk of {expected} bytes, found {declared}")
        return _of_this_thread().decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ArtifactInvalid(f"codec 'lossless': a chunk does not decompress ({error})") from error
