"""The real program run in this process, and what a run may leave behind."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfs_decompose.cli.app import main
from mfs_decompose.pipeline.delta_class import CLASSES


@dataclass(frozen=True)
class Ran:
    """What a command line came to."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """All of stdout as one JSON document, in which NaN and infinity are mistakes."""
        document = json.loads(self.out, parse_constant=_no_such_number)
        assert isinstance(document, dict)
        return document

    @property
    def talk(self) -> list[str]:
        return self.err.splitlines()


def run(*words: object) -> Ran:
    """Run `mfs WORDS` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return Ran(code, out.getvalue(), err.getvalue())


def succeeded(*words: object) -> Ran:
    """Run a command line that must end well."""
    ran = run(*words)
    assert ran.code == 0, ran.err
    return ran


def refused(code: int, *words: object) -> tuple[str, str]:
    """Run a command line that must be refused, for people and as JSON: (message, hint), the same in both."""
    plain, document = run(*words), run(*words, "--json")
    assert (plain.code, document.code) == (code, code), plain.err
    errors = [line for line in plain.talk if line.startswith("Error: ")]
    hints = [line for line in plain.talk if line.startswith("Hint: ")]
    assert len(errors) == 1, plain.err
    assert len(hints) <= 1, plain.err
    assert plain.talk[-1] == (hints or errors)[0], plain.err  # nothing after it, so the sentence is one line
    assert "Traceback" not in plain.err
    message, hint = errors[0].removeprefix("Error: "), hints[0].removeprefix("Hint: ") if hints else ""
    assert len(message) < 400, message
    said = document.document
    assert said.keys() == {"schema", "code", "exit_code", "message", "hint"}
    assert (said["schema"], said["exit_code"]) == ("mfs.error/1", code)
    assert (said["message"], said["hint"] or "") == (message, hint)
    return message, hint


def tree(folder: Path) -> dict[str, str]:
    """Everything under a folder: names, and digests of files. Two equal trees hold the same bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def flip(path: Path, at: int | None = None) -> None:
    """Turn one bit of a file over, in the middle unless told otherwise; twice is none."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


# The type of every key that docs/json.md names. A list stands for any number of its one element, MAP for keys of the
# user's own; a tuple allows any of its types.
MAP: type = dict
NULL: type = type(None)
_VARIANT = {"id": str, "footprint": float, "bytes": int, "checkpoint_bytes": int}
RESULT = {
    "variant": str,
    "through": str,
    "corpus": str,
    "tokens": int,
    "ppl_original": float,
    "ppl_x": float,
    "ppl_base": (float, NULL),
    "ppl_ratio": float,
    "ppl_ratio_ci": (list, NULL),
    "kl_base": (float, NULL),
    "kl_mean": float,
    "kl_p99": float,
    "top1": float,
    "recovered": (float, NULL),
    "units": int,
    "kl_ci": (list, NULL),
    "top1_ci": (list, NULL),
    "noise_kl": (float, NULL),
    "noise_ln_ppl": (float, NULL),
}
STOPS = {
    "ids": list,
    "sources": [{"file": str, "key": str, "ids": list, "token": (str, NULL)}],
    "warnings": list,
}
COUNTS = dict.fromkeys(CLASSES, int)
DIRECTIONS = dict.fromkeys(("50", "90", "99"), (int, float, NULL))
_SIDE = {"ref": str, "kind": str, "tensors": int, "bytes": int, "dtypes": MAP, "left_out": list}
_CHANGES = {"changes": list, "noise": list}
_NAMES = {"only_a": list, "only_b": list, "changed": list}
_PART = {"name": str, "tensors": int, "bytes": int, "rel_error": float}
_SIZE = {"bytes": (int, NULL), "footprint": (float, NULL), "left": (float, NULL), "fitted": bool}
RUNG = {**_SIZE, "budget": float, "cap": int, "kl": (float, NULL)}
LADDER = {
    "id": str,
    "checkpoint_bytes": int,
    "shared_bytes": int,
    "adapter": bool,
    "planned": (dict, NULL),
    "budgets": [RUNG],
    "targets": (list, NULL),
    "unforeseen": int,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "mfs.decompose/1": {
        "artifact": str,
        "artifact_digest": str,
        "written": bool,
        "variants": [{**_VARIANT, "rel_error": float, "codecs": MAP}],
        "base_bytes": int,
        "total_bytes": int,
        "stages": MAP,
        "bytes_read": int,
        "resumed_units": int,
    },
    "mfs.plan/1": {
        "version": str,
        "recipe": MAP,
        "recipe_origins": MAP,
        "sources": [{"id": str, "ref": str, "shards": [{"file": str, "bytes": int, "header_sha256": str}]}],
        "base": {"mode": str, "store": str, "bytes": int},
        "variants": [{"id": str, "checkpoint_bytes": int, "max_bytes": int, "max_footprint": float, "codecs": MAP}],
        "coverage": {"tensors": int, "planned": int, "groups": int},
        "lineage": NULL,
        "read_bytes": int,
        "peak_ram": int,
        "disk_bytes": int,
        "disk_free": int,
        "seconds_estimated": float,
        "hashing_measured": float,
    },
    "mfs.forecast/1": {
        "recipe": MAP,
        "base": {"mode": str, "store": str, "bytes": int},
        "shared_bytes": int,
        "keep_exact": bool,
        "variants": [LADDER],
        "work": str,
        "bytes_read": int,
        "resumed_units": int,
    },
    "mfs.frontier/1": {
        "artifact_digest": str,
        "no_ladder": (str, NULL),
        "plot": (str, NULL),
        "variants": [
            {
                **_VARIANT,
                "shared_bytes": int,
                "rel_error": float,
                "codecs": [_PART],
                "layers": [_PART],
                "depths": [_PART],
                "ladder": (dict, NULL),
            }
        ],
    },
    "mfs.inspect/1": {
        "variants": [
            {
                **_VARIANT,
                "shared_bytes": int,
                "files_bytes": int,
                "codecs": MAP,
                "correction_bytes": int,
                "rel_error": float,
                "tensors": int,
                "exact_tensors": int,
                "missing": int,
                "left_out": list,
                "config_changes": list,
                "stop_ids": STOPS,
            }
        ],
        "base": {"mode": str, "store": str, "bytes": int},
        "total_bytes": int,
        "files_bytes": int,
        "coverage": float,
        "artifact_digest": str,
        "tool": MAP,
        "platform": MAP,
        "recipe": MAP,
    },
    "mfs.spectrum/1": {
        "artifact_digest": str,
        "plots": [str],
        "variants": [
            {
                "id": str,
                "of": str,
                "class": (str, NULL),
                "classes": COUNTS,
                "unclassified": int,
                "energy": float,
                "families": [
                    {
                        "family": str,
                        "class": (str, NULL),
                        "classes": COUNTS,
                        "matrices": int,
                        "energy": float,
                        "unchanged": (float, NULL),
                        "noise_share": (float, NULL),
                        "effective_rank": (float, NULL),
                        "rank": (int, NULL),
                        "directions": DIRECTIONS,
                        "curve": (dict, NULL),
                    }
                ],
                "tensors": [
                    {
                        "tensor": str,
                        "slice": (int, NULL),
                        "family": str,
                        "layer": (int, NULL),
                        "dtype": str,
                        "shape": list,
                        "of": str,
                        "class": (str, NULL),
                        "why": str,
                        "elements": int,
                        "unchanged": int,
                        "nonfinite": int,
                        "energy": float,
                        "noise": float,
                        "noise_share": (float, NULL),
                        "rank": (int, NULL),
                        "tail": (float, NULL),
                        "standing_out": (int, NULL),
                        "head": (float, NULL),
                        "effective_rank": (float, NULL),
                        "directions": DIRECTIONS,
                    }
                ],
            }
        ],
    },
    "mfs.diff/1": {
        "equal": bool,
        "a": _SIDE,
        "b": _SIDE,
        "weights_compared": bool,
        "tensors": {
            "only_a": list,
            "only_b": list,
            "equal": int,
            "unknown": int,
            "rel": (float, NULL),
            "changes": [
                {
                    "tensor": str,
                    "verdict": str,
                    "dtype_a": str,
                    "dtype_b": str,
                    "shape_a": list,
                    "shape_b": list,
                    "compared": (int, NULL),
                    "changed": (int, NULL),
                    "max_abs": (float, NULL),
                    "rel": (float, NULL),
                    "cosine": (float, NULL),
                    "nonfinite": (int, NULL),
                }
            ],
            "original": (str, NULL),
        },
        "config": _CHANGES,
        "generation_config": _CHANGES,
        "adapter_config": _CHANGES,
        "tokenizer": {
            "equal": bool,
            "vocabulary": {
                "a": int,
                "b": int,
                "only_a": int,
                "only_b": int,
                "moved": int,
                "only_a_first": list,
                "only_b_first": list,
                "moved_first": list,
            },
            "special": list,
            "added": list,
            "merges": (MAP, NULL),
            "templates": [{"name": str, "in_a": bool, "in_b": bool, "diff": list}],
            "settings": list,
            "pipeline": list,
        },
        "stop_ids": {"a": STOPS, "b": STOPS},
        "files": [
            {"file": str, "kind": str, "size_a": (int, NULL), "size_b": (int, NULL), "understood": bool},
        ],
        "problems": [{"side": str, "file": str, "what": str}],
    },
    "mfs.diff-artifacts/1": {
        "equal": bool,
        "a": {"ref": str, "artifact_digest": str},
        "b": {"ref": str, "artifact_digest": str},
        "base": {"tensors": _NAMES, "files": _NAMES},
        "only_a": list,
        "only_b": list,
        "variants": [
            {
                "id": str,
                "equal": bool,
                "originals": _NAMES,
                "restored": _NAMES,
                "stored": _NAMES,
                "files": _NAMES,
                "bytes_a": int,
                "bytes_b": int,
                "rel_error_a": (float, NULL),
                "rel_error_b": (float, NULL),
            }
        ],
        "made": list,
    },
    "mfs.verify/1": {
        "ok": bool,
        "level": str,
        "checked_bytes": int,
        "problems": [{"file": str, "tensor": (str, NULL), "what": str}],
    },
    "mfs.restore/1": {
        "restored": [{"id": str, "folder": str, "bytes": int, "tensors": int, "exact": bool, "checked": bool}]
    },
    "mfs.eval/1": {
        "results": [RESULT],
        "tasks": list,
        "artifact_digest": str,
        "settings": {
            "window": int,
            "stride": int,
            "bos_policy": str,
            "bos": MAP,
            "served_by": MAP,
            "max_tokens": int,
            "convention": str,
            "dtype": str,
            "batch_size": int,
            "attention": str,
            "device": str,
            "threads": int,
            "torch": str,
            "transformers": str,
            "notes": list,
            "suite": (str, NULL),
            "texts": MAP,
            "padding": str,
        },
    },
    "mfs.demo/1": {
        "artifact_digest": str,
        "checkpoints_bytes": int,
        "total_bytes": int,
        "variants": [{"id": str, "footprint": float, "bytes": int}],
        "results": [RESULT],
        "verified_bytes": int,
    },
}
COMPARED = {"id": str, "tensors": int, "exact": int, "rel_error": float, "recorded": float, "ok": bool}
TENSOR = {
    "tensor": str,
    "dtype": str,
    "shape": list,
    "kind": str,
    "codec": str,
    "bytes": int,
    "rel_error": float,
    "energy": float,
    "exact": bool,
    "nonfinite": int,
}


def check_document(document: Mapping[str, Any], **more: Any) -> None:
    """Hold a document against the shape of its schema, `more` being the keys that this call of the command adds."""
    shape = {"schema": str, **SHAPES[document["schema"]], **more}
    _check(document, shape, str(document["schema"]))


def _check(value: Any, shape: Any, where: str) -> None:
    if isinstance(shape, Mapping):
        assert isinstance(value, dict), where
        assert value.keys() == shape.keys(), f"{where}: {value.keys() ^ shape.keys()}"
        for key, inner in shape.items():
            _check(value[key], inner, f"{where}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for element in value:
            _check(element, shape[0], f"{where}[]")
    else:
        kinds = shape if isinstance(shape, tuple) else (shape,)
        assert type(value) in kinds, f"{where}: expected {kinds}, found {value!r}"


def _no_such_number(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")
