"""What `mfs diff` shows people: sentences, and a table of the most changed tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mfs_decompose.cli.out import Output
from mfs_decompose.cli.short import cut, short_json
from mfs_decompose.pipeline.diff import ModelsDiff
from mfs_decompose.pipeline.diff_artifacts import ArtifactsDiff, Names
from mfs_decompose.pipeline.diff_files import FilesDiff
from mfs_decompose.pipeline.diff_tensors import TensorDiff
from mfs_decompose.source.config_diff import Change
from mfs_decompose.source.tokenizer_diff import TokenizerDiff
from mfs_decompose.units import format_bytes

_ROWS = 20


def show_models(output: Output, found: ModelsDiff, rows: int) -> None:
    """Two models: tensors first, then what is not weights."""
    output.line(f"A: {found.a.ref} ({found.a.kind}, {len(found.a.specs)} tensors, {format_bytes(found.a.nbytes)})")
    output.line(f"B: {found.b.ref} ({found.b.kind}, {len(found.b.specs)} tensors, {format_bytes(found.b.nbytes)})")
    output.line()
    for line in tensor_sentences(found):
        output.line(line)
    read = ("changed", "retyped", "reshaped") if found.weights else ("retyped", "reshaped")
    changed = [one for one in found.most_changed if one.verdict in read]
    shown = changed[:rows]
    if shown:
        columns = ("tensor", "dtype", "shape", "changed", "largest change", "|A-B|/|A|", "cosine")
        output.line()
        output.table(columns, [_row(one) for one in shown], right=columns[3:])
        if len(shown) < len(changed):
            output.line(f"{len(changed) - len(shown)} more tensors differ: --tensors {len(changed)}")
    output.line()
    for line in file_sentences(found.files):
        output.line(line)
    _show_changes(output, found.files)
    for template in found.files.tokenizer.templates:
        for line in template.diff:
            output.line(f"  {cut(line, 160)}")
    output.line("equal" if found.equal else "different")


def tensor_sentences(found: ModelsDiff) -> Iterator[str]:
    """What there is to say of the tensors in general."""
    tensors = found.tensors
    if tensors.original is not None:
        one, other = ("A", "B") if tensors.original == "a" else ("B", "A")
        yield f"{one} is the checkpoint that {other} was made from"
    for names, side in ((tensors.only_a, "A"), (tensors.only_b, "B")):
        if names:
            yield f"only in {side}: {_list(names)}"
    count = {verdict: sum(one.verdict == verdict for one in tensors.both) for verdict in _VERDICTS}
    parts = [f"{number} {_VERDICTS[verdict]}" for verdict, number in count.items() if number]
    yield f"{_plural(len(tensors.both), 'tensor')} in both{': ' if parts else ''}{', '.join(parts)}"
    broken = [one.name for one in tensors.both if one.nonfinite]
    if broken:
        yield f"{_plural(len(broken), 'tensor')} with NaN or infinite values, left out of sums: {_list(broken)}"
    if (found.a.kind == "adapter") != (found.b.kind == "adapter"):
        yield "an adapter has tensors of its own and none of its base's: what it makes of it is ART::ID of an artifact"
    retyped = [one for one in tensors.both if one.verdict == "retyped"]
    same = sum(one.changed == 0 for one in retyped)
    if retyped:
        pairs = sorted({f"{one.a.dtype} in A and {one.b.dtype} in B" for one in retyped})
        values = f"; {same} of these {len(retyped)} hold the same values" if found.weights else ""
        yield f"dtypes differ: {', '.join(pairs)}{values}"
    if found.rel is not None:
        yield f"|A-B|/|A| over those that differ: {found.rel:.3g}"
    if not found.weights:
        yield "weights were not read (--no-weights)"


_VERDICTS = {
    "equal": "equal",
    "changed": "changed",
    "retyped": "of another dtype",
    "reshaped": "of another shape",
    "unknown": "not compared",
}


def file_sentences(files: FilesDiff) -> Iterator[str]:
    """What there is to say of everything beside the weights."""
    for side, file, what in files.problems:
        yield f"{file} of {side.upper()} cannot be read: {what}"
    for name, diff in files.configs.items():
        if diff.changes:
            yield f"{name}: {_plural(len(diff.changes), 'key')} differ{'s' if len(diff.changes) == 1 else ''}"
        elif diff.noise:
            yield f"{name}: the same, but for {_list(diff.noise)}"
    yield from tokenizer_sentences(files.tokenizer)
    stops_a, stops_b = (stops.ids for stops in files.stop_ids)
    if set(stops_a) != set(stops_b):
        yield f"stop ids: {_ids(stops_a)} in A, {_ids(stops_b)} in B"
    for one in files.files:
        if not one.understood:
            where = {"changed": "differs", "only_a": "only in A", "only_b": "only in B"}[one.kind]
            sizes = ", ".join(format_bytes(size) for size in (one.size_a, one.size_b) if size is not None)
            yield f"{one.file}: {where} ({sizes})"
    if files.equal:
        yield "all that is not weights says the same"


def tokenizer_sentences(diff: TokenizerDiff) -> Iterator[str]:
    """What there is to say of two tokenizers."""
    words = diff.vocabulary
    if bool(words.a) != bool(words.b):
        yield f"tokenizer: only {'B' if words.b else 'A'} has a vocabulary that can be read"
    else:
        for count, first, side in ((words.only_a, words.only_a_first, "A"), (words.only_b, words.only_b_first, "B")):
            if count:
                names = [f"{text!r} ({id})" for text, id in first]
                yield f"tokenizer: {_plural(count, 'token')} only in {side}: {_list(names, count)}"
        if words.moved:
            names = [f"{text!r} ({one}, {two})" for text, one, two in words.moved_first]
            yield f"tokenizer: {_plural(words.moved, 'token')} with another id: {_list(names, words.moved)}"
    if diff.merges is not None and not diff.merges[2]:
        yield f"tokenizer: merges differ ({diff.merges[0]} in A, {diff.merges[1]} in B)"
    for template in diff.templates:
        where = "differs" if template.in_a and template.in_b else f"only in {'A' if template.in_a else 'B'}"
        yield f"chat template{'' if template.name == 'default' else f' {template.name}'}: {where}"


def _show_changes(output: Output, files: FilesDiff) -> None:
    parts: list[tuple[str, Sequence[Change]]] = [(name, diff.changes) for name, diff in files.configs.items()]
    words = files.tokenizer
    parts += [
        ("special tokens", words.special),
        ("added tokens", words.added),
        ("tokenizer_config.json", words.settings),
        ("tokenizer.json", words.pipeline),
    ]
    rows: list[tuple[str, str, str, str]] = []
    for place, changes in parts:
        rows += [(place, cut(one.key), _value(one, "a"), _value(one, "b")) for one in changes[:_ROWS]]
        if len(changes) > _ROWS:
            rows.append((place, f"... and {len(changes) - _ROWS} more", "", ""))
    if rows:
        output.line()
        output.table(("where", "key", "A", "B"), rows)
        output.line()


def _value(change: Change, side: str) -> str:
    absent = change.kind == ("only_b" if side == "a" else "only_a")
    return "-" if absent else short_json(change.a if side == "a" else change.b)


def show_artifacts(output: Output, found: ArtifactsDiff) -> None:
    """Two artifacts: base, variants, and how they were made."""
    for side, path, digest in (("A", found.a, found.digests[0]), ("B", found.b, found.digests[1])):
        output.line(f"{side}: {path} (artifact, digest {digest[:16]})")
    output.line()
    for what, names in (("base tensors", found.base), ("base files", found.base_files)):
        if names:
            output.line(f"{what}: {_counts(names)}")
    for ids, side in ((found.only_a, "A"), (found.only_b, "B")):
        if ids:
            output.line(f"variants only in {side}: {_list(ids)}")
    unlike = [one for one in found.variants if not one.equal]
    if unlike:
        columns = ("variant", "originals", "restored", "stored", "files", "bytes in A", "bytes in B")
        cells = [
            (
                one.id,
                *(
                    _counts(names) if names else "equal"
                    for names in (one.originals, one.restored, one.stored, one.files)
                ),
                format_bytes(one.bytes[0]),
                format_bytes(one.bytes[1]),
            )
            for one in unlike
        ]
        output.table(columns, cells, right=columns[5:])
    alike = len(found.variants) - len(unlike)
    if alike:
        output.line(f"{_plural(alike, 'variant')} equal")
    if found.made:
        rows = [(cut(one.key), _value(one, "a"), _value(one, "b")) for one in found.made[:_ROWS]]
        output.table(("made with", "A", "B"), rows)
    if found.equal and found.digests[0] != found.digests[1]:
        output.line("the same content, made in another way")
    output.line("equal" if found.equal else "different")


def _counts(names: Names) -> str:
    parts = ((len(names.changed), "differ"), (len(names.only_a), "only in A"), (len(names.only_b), "only in B"))
    return ", ".join(f"{count} {what}" for count, what in parts if count)


def _row(one: TensorDiff) -> tuple[str, ...]:
    dtype = one.a.dtype if one.a.dtype == one.b.dtype else f"{one.a.dtype} -> {one.b.dtype}"
    shape = _shape(one.a.shape) if one.a.shape == one.b.shape else f"{_shape(one.a.shape)} -> {_shape(one.b.shape)}"
    changed = "-" if one.changed is None or not one.compared else f"{100 * one.changed / one.compared:.3g} %"
    return (one.name, dtype, shape, changed, _number(one.max_abs), _number(one.rel), _number(one.cosine, 6))


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(str(size) for size in shape)}]"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _ids(ids: Sequence[int]) -> str:
    return ", ".join(str(id) for id in ids[:_ROWS]) or "none"


def _list(names: Sequence[str], count: int | None = None) -> str:
    """The first few names, and how many more there are."""
    count = len(names) if count is None else count
    shown = ", ".join(cut(name) for name in names[:5])
    return shown if count <= 5 else f"{shown} and {count - 5} more"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
