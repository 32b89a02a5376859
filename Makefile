# Each target sets everything up from a bare Python >= 3.11: its own .venv, pinned versions.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check bench clean

demo: .venv/runtime
	$(BIN)/forebay demo --out runs/demo --force

test: check
	$(BIN)/pytest -n 2 --dist loadfile

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/runtime
	$(BIN)/forebay bench all --out runs/bench --force

.venv/runtime: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("forebay needs Python 3.11 or newer; try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install -q --disable-pip-version-check --no-deps -e .
	@touch $@

.venv/dev: .venv/runtime requirements-dev.lock
	$(BIN)/pip install -q --disable-pip-version-check -r requirements-dev.lock
	@touch $@

clean:
	rm -rf .venv build *.egg-info
