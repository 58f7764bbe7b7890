"""What a model's tokenizer files say: tokens, special tokens, merges, templates. Read as JSON; no tokenizer is built.

tokenizer.json decides; tokenizer_config.json, added_tokens.json and vocab.json fill in what it does not say, as
transformers does. A sentencepiece or tiktoken model is not opened: it is compared by its digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

from mfs_decompose.source.side_files import SideFiles

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
VOCAB = "vocab.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"

UNDERSTOOD = frozenset({TOKENIZER, TOKENIZER_CONFIG, SPECIAL_MAP, ADDED_TOKENS, TEMPLATE, TEMPLATE_JSON})
"""Files of which all that counts is in the facts, so that their bytes need not be compared."""

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
_OWN_PLACE = frozenset({*ROLES, *_MORE_SPECIAL, "added_tokens_decoder", "chat_template"})

Problems = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """`ids` of all tokens, those added later included.

    `added` has the flags of added tokens by their text, `special` the token of each role, `merges` is None where there
    are none to read, `templates` are chat templates by name (`default`), `settings` the rest of tokenizer_config.json,
    `pipeline` the rest of tokenizer.json, and `problems` are (file, what is wrong with it).
    """

    ids: Mapping[str, int]
    added: Mapping[str, Mapping[str, object]]
    special: Mapping[str, object]
    merges: tuple[str, ...] | None
    templates: Mapping[str, str]
    settings: Mapping[str, object]
    pipeline: Mapping[str, object]
    problems: Problems


def read_tokenizer(files: SideFiles) -> TokenizerFacts:
    """Read all that a model's side files say of its tokenizer; what cannot be read is among the problems."""
    parsed = {name: files.parse(name) for name in sorted(UNDERSTOOD - {TEMPLATE} | {VOCAB})}
    problems = [(name, one.problem) for name, one in parsed.items() if one.problem]
    whole, config = parsed[TOKENIZER].value or {}, parsed[TOKENIZER_CONFIG].value or {}
    model = _object(whole.get("model"))
    added = dict(_added(config.get("added_tokens_decoder"))) | dict(_listed(whole.get("added_tokens")))
    ids = dict(_numbers(parsed[VOCAB].value)) | dict(_numbers(parsed[ADDED_TOKENS].value))
    ids |= {text: id for text, flags in _added(config.get("added_tokens_decoder")) if (id := _id(flags)) is not None}
    ids |= dict(_vocabulary(model.get("vocab")))
    ids |= {text: id for text, flags in _listed(whole.get("added_tokens")) if (id := _id(flags)) is not None}
    template, problem = files.text(TEMPLATE)
    if problem is not None:
        problems.append((TEMPLATE, problem))
    return TokenizerFacts(
        ids=ids,
        added={text: {key: value for key, value in flags.items() if key != "id"} for text, flags in added.items()},
        special=_special(parsed[SPECIAL_MAP].value or {}) | _special(config),
        merges=_merges(model.get("merges")),
        templates=_templates(template, parsed[TEMPLATE_JSON].value or {}, config),
        settings={key: value for key, value in config.items() if key not in _OWN_PLACE},
        pipeline=_pipeline(whole, model),
        problems=tuple(problems),
    )


def token_text(value: object) -> str | None:
    """The text of a token, which is a string or an object with its `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _id(flags: Mapping[str, object]) -> int | None:
    value = flags.get("id")
    return value if isinstance(value, int) and _is_id(value) else None


def _numbers(value: object) -> Iterator[tuple[str, int]]:
    for text, id in _object(value).items():
        if isinstance(id, int) and _is_id(id):
            yield text, id


def _vocabulary(value: object) -> Iterator[tuple[str, int]]:
    """A vocabulary is {text: id}, or a list of [text, score] whose places are the ids (Unigram)."""
    if isinstance(value, list):
        for id, entry in enumerate(value):
            if isinstance(entry, list) and entry and isinstance(entry[0], str):
                yield entry[0], id
    else:
        yield from _numbers(value)


def _listed(value: object) -> Iterator[tuple[str, Mapping[str, object]]]:
    """tokenizer.json: [{"id", "content", flags}]."""
    for entry in value if isinstance(value, list) else ():
        if (text := token_text(entry)) is not None:
            yield text, {key: one for key, one in _object(entry).items() if key != "content"}


def _added(value: object) -> Iterator[tuple[str, Mapping[str, object]]]:
    """tokenizer_config.json: {"id": {"content", flags}}."""
    for number, entry in _object(value).items():
        if (text := token_text(entry)) is not None and number.isascii() and number.isdigit() and len(number) < 16:
            flags = {key: one for key, one in _object(entry).items() if key not in ("content", "__type")}
            yield text, {"id": int(number), **flags}


def _special(config: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for role in ROLES:
        if (text := token_text(config.get(role))) is not None:
            found[role] = text
    for role in _MORE_SPECIAL:
        value = config.get(role)
        if isinstance(value, list) and value:
            found[role] = [text for entry in value if (text := token_text(entry)) is not None]
        elif isinstance(value, Mapping):
            found |= {str(name): text for name, entry in value.items() if (text := token_text(entry)) is not None}
    return found


def _merges(value: object) -> tuple[str, ...] | None:
    """Either spelling: "a b", or ["a", "b"]."""
    if not isinstance(value, list):
        return None
    return tuple(" ".join(str(part) for part in merge) if isinstance(merge, list) else str(merge) for merge in value)


def _templates(text: str | None, file: Mapping[str, object], config: Mapping[str, object]) -> dict[str, str]:
    """Templates by name. The .jinja file goes before the JSON file, and that before tokenizer_config.json."""
    found: dict[str, str] = {}
    for value in (config.get("chat_template"), file.get("chat_template")):
        if isinstance(value, str):
            found["default"] = value
        for entry in value if isinstance(value, list) else ():
            name, template = _object(entry).get("name"), _object(entry).get("template")
            if isinstance(name, str) and isinstance(template, str):
                found[name] = template
    return found if text is None else found | {"default": text}


def _pipeline(whole: Mapping[str, object], model: Mapping[str, object]) -> dict[str, object]:
    rest = {key: value for key, value in whole.items() if key not in ("model", "added_tokens")}
    about = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    if isinstance(vocab := model.get("vocab"), list):  # the scores of a Unigram model decide how it cuts
        scores = [entry[1:] for entry in vocab if isinstance(entry, list)]
        about["scores_sha256"] = sha256(repr(scores).encode("utf-8", "backslashreplace")).hexdigest()
    return {**rest, "model": about} if whole else {}
