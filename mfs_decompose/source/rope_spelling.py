"""The two spellings of rotary embeddings in config.json, read as one.

transformers 5 writes `rope_parameters`, one dict or one for each kind of layer; before, there were `rope_theta`,
`rope_scaling` and relatives beside each other. What goes where follows `RotaryEmbeddingConfigMixin` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

PARAMETERS = "rope_parameters"

_THETA = ("rope_theta", "rotary_emb_base", "global_rope_theta")
_LOCAL_THETA = ("rope_local_base_freq", "local_rope_theta")
_PARTIAL = ("partial_rotary_factor", "rotary_pct")
ROPE_KEYS = frozenset({PARAMETERS, "rope_scaling", *_THETA, *_LOCAL_THETA, *_PARTIAL})
"""Every key that the spellings use, at one level of a config."""

_STRETCHED = ("llama3", "yarn", "longrope")  # these know the length that was trained before
_TRAINED_LENGTH = "original_max_position_embeddings"


def join_rope(config: Mapping[str, object]) -> dict[str, object]:
    """One level of a config with all it says of rotary embeddings under `rope_parameters`.

    A default type alone says nothing and is left out. What cannot be read as either spelling stays as it is.
    """
    scaling = config.get(PARAMETERS) or config.get("rope_scaling") or {}
    if not (ROPE_KEYS & config.keys()) or not isinstance(scaling, Mapping):
        return dict(config)
    rest = {key: value for key, value in config.items() if key not in ROPE_KEYS}
    by_layer = {key: value for key, value in scaling.items() if isinstance(value, Mapping)}
    local = _first(config, _LOCAL_THETA)
    joined: dict[str, object]
    if by_layer:
        joined = {key: _one(config, part) for key, part in by_layer.items()}
    elif local is not None:
        joined = {
            "full_attention": _one(config, scaling),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    else:
        joined = _one(config, scaling)
    if joined != {"rope_type": "default"}:
        rest[PARAMETERS] = joined
    return rest


def _one(config: Mapping[str, object], scaling: Mapping[str, object]) -> dict[str, object]:
    joined = dict(scaling)
    old_type = joined.pop("type", None)
    joined.setdefault("rope_type", old_type or "default")
    for key, names in (("rope_theta", _THETA), ("partial_rotary_factor", _PARTIAL)):
        value = _first(config, names)
        if value is not None:
            joined.setdefault(key, value)
    if joined["rope_type"] in _STRETCHED:
        trained = config.get(_TRAINED_LENGTH, config.get("max_position_embeddings"))
        if _TRAINED_LENGTH in config:
            joined[_TRAINED_LENGTH] = trained
        elif trained is not None:
            joined.setdefault(_TRAINED_LENGTH, trained)
    return joined


def _first(config: Mapping[str, object], names: tuple[str, ...]) -> object:
    return next((config[name] for name in names if config.get(name) is not None), None)
