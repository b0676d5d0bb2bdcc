# Two commands do everything on a fresh machine: `make compare` and `make test`.
# Both make .venv and install what they need from constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
OUT ?= runs/first

.PHONY: compare test test-all lint types docs clean

compare: .venv/ready  ## train a small grid of (attention x position) on real text; table, chart and page in $(OUT)
	$(BIN)/anyformer compare --out $(OUT)

test: lint types unit docs demo  ## everything that must hold before a change lands

lint: .venv/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/ready-dev
	$(BIN)/pyright

unit: .venv/ready-dev
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"
	ANYFORMER_PLAIN=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-all: .venv/ready-dev  ## every admitted pair of attention and position against every law
	$(BIN)/python -m pytest -n auto --dist worksteal
	ANYFORMER_PLAIN=1 $(BIN)/python -m pytest -n auto --dist worksteal

docs: .venv/ready-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

demo: .venv/ready-dev
	rm -rf build/demo
	$(BIN)/anyformer compare --attention softmax "local(32)" linear --position none rope --task text --steps 20 --lengths 256 512 --out build/demo
	$(BIN)/anyformer report build/demo

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) torch==2.13.0
	$(INSTALL) --editable .
	touch $@

.venv/ready-dev: .venv/ready
	$(INSTALL) --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build runs
