"""What is not weights, compared: configs by their keys, tokenizers by what they say, all other files by digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mfs_decompose.source.checkpoint import CONFIG
from mfs_decompose.source.config_diff import ConfigDiff, compare_configs
from mfs_decompose.source.side_files import GENERATION_CONFIG, Parsed, SideFiles
from mfs_decompose.source.stop_ids import StopIds, find_stop_ids
from mfs_decompose.source.tokenizer_diff import TokenizerDiff, compare_tokenizers
from mfs_decompose.source.tokenizer_facts import UNDERSTOOD, read_tokenizer
from mfs_decompose.source.weights import ADAPTER_CONFIG

CONFIGS = (CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG)


@dataclass(frozen=True, slots=True)
class FileDiff:
    """A side file that differs in its bytes, or is on one side alone; sizes in bytes, None on the side without it.

    `understood` says that it was compared by its meaning, which `FilesDiff` has elsewhere.
    """

    file: str
    kind: Literal["changed", "only_a", "only_b"]
    size_a: int | None
    size_b: int | None
    understood: bool


@dataclass(frozen=True, slots=True)
class FilesDiff:
    """All that differs beside the weights. `problems` are (side, file, what is wrong): such files count by bytes."""

    configs: Mapping[str, ConfigDiff]
    tokenizer: TokenizerDiff
    stop_ids: tuple[StopIds, StopIds]
    files: tuple[FileDiff, ...]
    problems: tuple[tuple[str, str, str], ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs that means something."""
        meant = any(diff.changes for diff in self.configs.values()) or not self.tokenizer.equal
        return not meant and all(one.understood for one in self.files)


def compare_files(a: SideFiles, b: SideFiles) -> FilesDiff:
    """Compare everything beside the weights.

    A config that one side lacks counts as a file on one side alone, and not as a list of keys.
    """
    problems: list[tuple[str, str, str]] = []
    configs: dict[str, ConfigDiff] = {}
    for name in CONFIGS:
        parsed = a.parse(name), b.parse(name)
        problems += [(side, name, one.problem) for side, one in zip("ab", parsed, strict=True) if one.problem]
        configs[name] = _config(*parsed)
    facts = read_tokenizer(a), read_tokenizer(b)
    for side, one in zip("ab", facts, strict=True):
        problems += [(side, name, what) for name, what in one.problems]
    broken = {name for _, name, _ in problems}
    stops = find_stop_ids(a, facts[0]), find_stop_ids(b, facts[1])
    return FilesDiff(configs, compare_tokenizers(*facts), stops, tuple(_files(a, b, broken)), tuple(problems))


def _config(a: Parsed, b: Parsed) -> ConfigDiff:
    if a.value is None or b.value is None:
        return ConfigDiff((), ())
    return compare_configs(a.value, b.value)


def _files(a: SideFiles, b: SideFiles, broken: set[str]) -> list[FileDiff]:
    found = []
    for name in sorted(a.sizes.keys() | b.sizes.keys()):
        one, two = a.sizes.get(name), b.sizes.get(name)
        both = name in a and name in b
        if both and one == two and a.digest(name) == b.digest(name):
            continue
        understood = name not in broken and (name in UNDERSTOOD or (name in CONFIGS and both))
        kind: Literal["changed", "only_a", "only_b"] = "changed" if both else "only_a" if name in a else "only_b"
        found.append(FileDiff(name, kind, one, two, understood))
    return found


def files_to_json(diff: FilesDiff) -> dict[str, Any]:
    """Plain JSON; see docs/json.md."""
    tokenizer = asdict(diff.tokenizer)
    merges = diff.tokenizer.merges
    tokenizer["merges"] = None if merges is None else {"a": merges[0], "b": merges[1], "equal": merges[2]}
    configs = {
        name: {"changes": [asdict(one) for one in d.changes], "noise": list(d.noise)}
        for name, d in diff.configs.items()
    }
    return {
        "config": configs[CONFIG],
        "generation_config": configs[GENERATION_CONFIG],
        "adapter_config": configs[ADAPTER_CONFIG],
        "tokenizer": {"equal": diff.tokenizer.equal, **tokenizer},
        "stop_ids": {"a": asdict(diff.stop_ids[0]), "b": asdict(diff.stop_ids[1])},
        "files": [asdict(one) for one in diff.files],
        "problems": [{"side": side, "file": file, "what": what} for side, file, what in diff.problems],
    }
