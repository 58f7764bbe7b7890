from __future__ import annotations

import pickle

import pytest

from mfs_decompose import errors
from mfs_decompose.errors import MfsError


def every_error() -> list[type[MfsError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MfsError)]


EXIT_CODES = {
    "MfsError": 1, "UsageError": 2, "RecipeError": 10, "SourceNotFound": 11, "SourceIncompatible": 12,
    "ResourceShortage": 13, "OutputBusy": 14, "ResumeRefused": 15, "ArtifactInvalid": 20, "GateFailed": 21,
    "DifferencesFound": 23, "NetworkFailure": 30, "Interrupted": 130,
}  # fmt: skip


def test_scripts_can_rely_on_the_exit_codes() -> None:
    assert {kind.__name__: kind.exit_code for kind in every_error()} == EXIT_CODES


def test_every_error_has_its_own_code() -> None:
    codes = [kind.code for kind in every_error()]
    assert len(set(codes)) == len(codes)
    assert all(code == code.lower() and " " not in code for code in codes)


def test_the_tree_in_the_module_names_every_error_and_its_code() -> None:
    lines = (errors.__doc__ or "").splitlines()
    for name, code in EXIT_CODES.items():
        assert any(name in line.split() and str(code) in line.split() for line in lines), name


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("hint", [None, "type this"])
def test_errors_cross_processes_whole(kind: type[MfsError], hint: str | None) -> None:
    again = pickle.loads(pickle.dumps(kind("expected a, found b", hint=hint)))
    assert (type(again), again.message, again.hint, str(again)) == (
        kind,
        "expected a, found b",
        hint,
        "expected a, found b",
    )
