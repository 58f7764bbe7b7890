# make .venv      the environment, with .venv/bin/mfs          make demo       try it, offline, on a built-in family
# make check      lint, types, floors, docs are fresh          make test       the tests (make test-slow: the heavy ones)
# make wheel      dist/*.whl                                   make bench      speed and memory against peers
#
# Needs Python 3.11 to 3.13, pip and make. Another interpreter: make PYTHON=python3.12 .venv

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input
STAMP := $(VENV)/.made

.PHONY: $(VENV) demo test test-slow check format docs wheel bench clean
.DEFAULT_GOAL := check

$(VENV): $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit("mfs needs Python 3.11 to 3.13, and %s is %d.%d: make PYTHON=python3.12" % (("$(PYTHON)",) + v))'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --constraint requirements.lock "$$(grep '^torch==' requirements.lock)"
	@$(PIP) --requirement requirements.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP)
	@$(BIN)/mfs demo

test: $(STAMP)
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -m slow

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/test_floors.py
	@$(BIN)/python -m mfs_decompose.cli.reference --check docs/cli.md

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP)
	@$(BIN)/python -m mfs_decompose.cli.reference > $(VENV)/cli.md
	@mv $(VENV)/cli.md docs/cli.md

wheel: $(STAMP)
	@rm -rf dist
	@$(BIN)/python -m hatchling build --target wheel

bench: $(STAMP)
	@test -n "$(BASE)" -a -n "$(VARIANT)" || { echo "make bench BASE=FOLDER VARIANT=FOLDER: two checkpoints to measure on" >&2; exit 2; }
	@$(BIN)/python benchmarks/against_mergekit.py "$(BASE)" "$(VARIANT)"

clean:
	rm -rf $(VENV) dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis
