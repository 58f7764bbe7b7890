"""Suites `mfs.suite/1`: which texts a measurement reads, and how, in a YAML file."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from mfs_decompose.errors import RecipeError
from mfs_decompose.fidelity.settings import BosPolicy, EvalSettings
from mfs_decompose.fidelity.text import Corpus, read_corpus_file
from mfs_decompose.recipe.explain import dotted, explain
from mfs_decompose.recipe.strict_yaml import Document, Mistake, read_document

SCHEMA: Literal["mfs.suite/1"] = "mfs.suite/1"

Words = Annotated[tuple[StrictStr, ...], Field(min_length=1)]


def _bos_word(value: object) -> object:
    # YAML 1.1 reads a bare on and off as true and false.
    return ("on" if value else "off") if isinstance(value, bool) else value


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SuiteText(_Model):
    """One text: a shipped `corpus`, or a `file` beside the suite; of a .jsonl, `fields` are joined."""

    corpus: StrictStr | None = None
    file: StrictStr | None = None
    name: StrictStr | None = None
    fields: Words | None = None
    max_tokens: Annotated[StrictInt, Field(ge=2)] = EvalSettings.max_tokens

    @model_validator(mode="after")
    def _one_place(self) -> SuiteText:
        if (self.corpus is None) == (self.file is None):
            raise ValueError("expected one of corpus (shipped with mfs) and file (beside the suite)")
        return self


class SuiteFile(_Model):
    """What a suite file says."""

    schema_: Literal["mfs.suite/1"] = Field(alias="schema")
    about: StrictStr = ""
    window: Annotated[StrictInt, Field(ge=2)] = EvalSettings.window
    stride: Annotated[StrictInt, Field(ge=1)] | None = None
    bos: Annotated[BosPolicy, BeforeValidator(_bos_word)] = EvalSettings.bos
    batch_size: Annotated[StrictInt, Field(ge=1)] = EvalSettings.batch_size
    corpora: Annotated[tuple[SuiteText, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _stride_within_window(self) -> SuiteFile:
        if self.stride is not None and self.stride > self.window:
            raise ValueError(f"expected a stride of at most the window of {self.window}, found {self.stride}")
        return self


@dataclass(frozen=True)
class Suite:
    """A suite with its texts read."""

    name: str
    settings: EvalSettings
    corpora: tuple[Corpus, ...]


def load_suite(source: str) -> Suite:
    """Read a shipped suite by its name, or a file that ends in .yaml, and the texts it names.

    Raises:
        RecipeError: no such suite, or a suite that is wrong; every mistake is named with its line.
        SourceNotFound, UsageError: a text that is not there or cannot be read as the suite says.
    """
    is_file = Path(source).suffix in (".yaml", ".yml") or Path(source).name != source
    path = Path(source) if is_file else _shipped(source)
    content = _parse(path)
    settings = EvalSettings(
        window=content.window,
        stride=content.stride,
        bos=content.bos,
        max_tokens=max(text.max_tokens for text in content.corpora),
        batch_size=content.batch_size,
    )
    return Suite(path.stem if is_file else source, settings, tuple(_read(path, text) for text in content.corpora))


def suite_names() -> tuple[str, ...]:
    """The names of the shipped suites, sorted."""
    return tuple(sorted(path.stem for path in _stems(eval_folder() / "suites", ".yaml")))


def eval_folder() -> Path:
    """Where suites and corpora lie: in the wheel's data, or in the checkout while developing."""
    packaged = Path(str(importlib.resources.files("mfs_decompose"))) / "_data" / "eval"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "eval"


def _read(suite: Path, text: SuiteText) -> Corpus:
    if text.file is not None:
        path = suite.parent / text.file
    else:
        assert text.corpus is not None
        path = _shipped_corpus(text.corpus)
    fields = None if text.fields is None else list(text.fields)
    return read_corpus_file(path, fields, name=text.name, max_tokens=text.max_tokens)


def _shipped(name: str) -> Path:
    names = suite_names()
    if name not in names:
        raise RecipeError(
            f"there is no suite named {name!r}{_guess(name, names)}",
            hint=f"name one of {', '.join(names)}, or a file that ends in .yaml",
        )
    return eval_folder() / "suites" / f"{name}.yaml"


def _shipped_corpus(name: str) -> Path:
    names = [path.stem for path in _stems(eval_folder() / "corpora", ".jsonl")]
    if name not in names:
        raise RecipeError(
            f"there is no shipped corpus named {name!r}{_guess(name, names)}",
            hint=f"name one of {', '.join(sorted(names))}, or write file: and a path",
        )
    return eval_folder() / "corpora" / f"{name}.jsonl"


def _stems(folder: Path, suffix: str) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.suffix == suffix)


def _guess(word: str, known: tuple[str, ...] | list[str]) -> str:
    near = get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _parse(path: Path) -> SuiteFile:
    try:
        document = read_document(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"expected a suite at {path}, found nothing there", hint="check the path") from None
    except UnicodeDecodeError:
        raise RecipeError(f"expected text in UTF-8 in {path}, found other bytes") from None
    except OSError as error:
        raise RecipeError(f"cannot read the suite {path}: {error.strerror}") from None
    content, mistakes = _validate(document)
    if content is None:
        lines = [f"{path}:{m.line or 1}: {': '.join([*filter(None, [dotted(m.path)]), m.message])}" for m in mistakes]
        raise RecipeError(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} mistakes in {path}:", *lines]))
    return content


def _validate(document: Document) -> tuple[SuiteFile | None, list[Mistake]]:
    mistakes = list(document.mistakes)
    if mistakes and not document.data:
        return None, mistakes
    try:
        content = SuiteFile.model_validate(document.data)
    except ValidationError as error:
        for detail, mistake in zip(error.errors(include_url=False), explain(error), strict=True):
            message = _unknown_key(detail["loc"]) if detail["type"] == "extra_forbidden" else mistake.message
            mistakes.append(Mistake(mistake.path, message, document.line_of(mistake.path)))
        return None, sorted(mistakes, key=lambda m: m.line or 0)
    mistakes += _double_names(content, document)
    return (None if mistakes else content), mistakes


def _unknown_key(path: tuple[Any, ...]) -> str:
    model: type[BaseModel] = SuiteText if len(path) > 1 else SuiteFile
    keys = [field.alias or name for name, field in model.model_fields.items()]
    return "unknown key" + (_guess(str(path[-1]), keys) or f"; {', '.join(keys)} are known here")


def _double_names(content: SuiteFile, document: Document) -> Iterator[Mistake]:
    seen: set[str] = set()
    for number, text in enumerate(content.corpora):
        name = text.name or text.corpus or Path(text.file or "").stem
        if name in seen:
            place = ("corpora", number)
            yield Mistake(place, f"a second text named {name!r}; give it another name", document.line_of(place))
        seen.add(name)
