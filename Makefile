# Two commands are enough on a fresh machine with Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Without compiled modules every process compiles torch again, which doubles the time of its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test check tables defaults clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Piecework needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (set PYTHON=...)")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import uv' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python --editable '.[simulation,data,report,attacks,dev]'
	$(BIN)/piecework plan >/dev/null
	@touch $@

demo: setup
	$(BIN)/piecework run

test: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Writes the defaults that training/settings declares into pyproject.toml.
defaults: setup
	$(BIN)/python -m benchmarks.defaults

tables: setup
	$(BIN)/python -m benchmarks.tables

clean:
	rm -rf .venv
