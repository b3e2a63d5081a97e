# make setup | check | test | quickstart: each builds .venv first when it is missing or older than the pins.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PINS := requirements/cpu.txt requirements/cpu-no-deps.txt pyproject.toml

.PHONY: setup check test quickstart clean

setup: $(VENV)/.installed

$(VENV)/.installed: $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --requirement requirements/cpu-no-deps.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_structure.py tests/test_config.py

test: setup
	$(BIN)/pytest

quickstart: setup
	$(BIN)/python -m tools.quickstart
	$(BIN)/sao train configs/quickstart.toml
	$(BIN)/python -m tools.plot runs/quickstart

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
