# Two commands are enough on a fresh machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Which build of torch: `cpu`, `cu130`, ..., as uv's --torch-backend has them, or nothing for the package index's own.
# The stamp has the name of the installed one, which later commands keep if they name none.
TORCH ?= $(shell cat $(STAMP) 2>/dev/null)
# uv would keep another build that an interrupted installation left.
TORCH_OPTIONS := $(if $(TORCH),--torch-backend='$(TORCH)' --reinstall-package torch --reinstall-package torchvision)

# Without compiled modules every process compiles torch again, which doubles the time of its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup same-torch demo test test-slow check docs tables defaults clean

setup: same-torch $(STAMP)

$(STAMP): pyproject.toml | same-torch
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Piecework needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (set PYTHON=...)")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import uv' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python $(TORCH_OPTIONS) --editable '.[simulation,data,table,hub,report,attacks,onnx,privacy,docs,dev]'
	$(BIN)/piecework plan >/dev/null
	@echo '$(TORCH)' >$@

# Nothing swaps the build in a .venv, which may hold packages of your own and would keep the CUDA libraries.
same-torch:
	@installed=$$(cat $(STAMP) 2>/dev/null) || exit 0; test "$$installed" = '$(TORCH)' || { \
	echo "TORCH=$(TORCH): .venv has torch from TORCH=$${installed:-(the package index)}. Keep it (leave TORCH out), or begin anew:" \
	"make clean, and this command again." >&2; exit 1; }

demo: setup
	$(BIN)/piecework run

# A worker for each core: none of these tests waits for long.
test: setup
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal --durations 10 --durations-min 3 \
	-m 'not slow and not docker and not alone'

# Many of these wait for processes, and a third worker uses the cores meanwhile.
test-slow: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'slow and not docker and not alone'

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Builds the site into docs/_build/html, and fails for any warning: a link to nowhere, a name that is not there.
docs: setup
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder dirhtml docs docs/_build/html

# Writes the defaults that training/settings declares into pyproject.toml.
defaults: setup
	$(BIN)/python -m benchmarks.defaults

tables: setup
	$(BIN)/python -m benchmarks.tables

clean:
	rm -rf .venv
