# make setup | check | test | quickstart: each builds .venv first when it is missing or older than the pins.
# make test-megatron MEGATRON=0.18.2: the tests that run Megatron, with another megatron-core, in an environment of its own.
# make test-te MEGATRON=0.19.2: the same tests on Transformer Engine's layer spec, its kernels played by torch on the CPU.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PINS := requirements/cpu.txt requirements/cpu-no-deps.txt pyproject.toml

MEGATRON ?= 0.19.2
MEGATRON_PYTHON ?= python3.12
MEGATRON_VENV := .venv-megatron-$(MEGATRON)
MEGATRON_PINS := requirements/megatron.txt requirements/cpu.txt pyproject.toml
MEGATRON_TESTS := tests/megatron tests/controller/test_deterministic.py tests/roles/test_roles.py $(addprefix tests/sync/test_,\
	sync_send.py publish_direct.py publish_deadlines.py)

TE_PACKAGES := .te-packages
TE_PATH := $(CURDIR)/tests/support/te_cpu/hook:$(CURDIR):$(CURDIR)/$(TE_PACKAGES)

.PHONY: setup check test test-megatron test-te quickstart clean

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

test-megatron: $(MEGATRON_VENV)/.installed
	$(MEGATRON_VENV)/bin/pytest $(MEGATRON_TESTS)

test-te: $(MEGATRON_VENV)/.installed $(TE_PACKAGES)/.installed
	PYTHONPATH=$(TE_PATH) $(MEGATRON_VENV)/bin/pytest $(MEGATRON_TESTS)

$(TE_PACKAGES)/.installed: requirements/te.txt | $(MEGATRON_VENV)/.installed
	rm -rf $(TE_PACKAGES)
	$(MEGATRON_VENV)/bin/pip install --quiet --no-deps --target $(TE_PACKAGES) --requirement requirements/te.txt
	touch $@

$(MEGATRON_VENV)/.installed: $(MEGATRON_PINS)
	$(MEGATRON_PYTHON) -m venv $(MEGATRON_VENV)
	$(MEGATRON_VENV)/bin/pip install --quiet --requirement requirements/megatron.txt
	$(MEGATRON_VENV)/bin/pip install --quiet --no-deps megatron-core==$(MEGATRON)
	$(MEGATRON_VENV)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

quickstart: setup
	$(BIN)/python -m tools.quickstart
	$(BIN)/sao train configs/quickstart.toml
	$(BIN)/python -m tools.plot runs/quickstart

clean:
	rm -rf $(VENV) .venv-megatron-* $(TE_PACKAGES) .mypy_cache .ruff_cache .pytest_cache
