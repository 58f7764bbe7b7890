"""Whether two measurements were made alike: unlike settings are never compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What a measurement means, and what rounds it. Versions and threads change less than the noise floor, and notes and
# the name of a suite nothing; how many tokens were taken stands with each text.
_SCALARS = ("window", "stride", "bos_policy", "convention", "dtype", "batch_size", "padding", "attention")
_BY_NAME = {"bos": "bos of variant", "texts": "text"}


@dataclass(frozen=True)
class Comparability:
    """True where two measurements may be compared; else `differences` names what is unlike, with both values."""

    differences: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.differences


def comparable(settings_a: Mapping[str, Any], settings_b: Mapping[str, Any]) -> Comparability:
    """Hold the `settings` of two `mfs.eval/1` documents against each other.

    Variants and texts that only one of them measured do not count: there is nothing of theirs to compare. A setting
    that one of them lacks is a difference.
    """
    found = [
        f"{name}: {_shown(settings_a, name)} and {_shown(settings_b, name)}"
        for name in _SCALARS
        if name not in settings_a or name not in settings_b or settings_a[name] != settings_b[name]
    ]
    kinds = [str(settings.get("device", "none")).partition(":")[0] for settings in (settings_a, settings_b)]
    if kinds[0] != kinds[1]:
        found.append(f"device: {kinds[0]} and {kinds[1]}")
    for key, what in _BY_NAME.items():
        a, b = settings_a.get(key, {}), settings_b.get(key, {})
        for name in sorted(a.keys() & b.keys()):
            if a[name] != b[name]:
                found.append(f"{what} {name}: {_unlike(a[name], b[name])}")
    return Comparability(tuple(found))


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "none"


def _unlike(a: Any, b: Any) -> str:
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return f"{a!r} and {b!r}"
    # A digest tells nobody anything: sizes first, and the digest only where they are equal.
    names = sorted({*a, *b}, key=lambda name: (name == "sha256", name))
    name = next(name for name in names if a.get(name) != b.get(name))
    return f"{name} {a.get(name)!r} and {b.get(name)!r}"
