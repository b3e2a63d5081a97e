# make setup | check | test | test-gpu | quickstart: each builds .venv first when it is missing or older than the pins.
# On a machine with an NVIDIA GPU .venv holds the GPU set, on Python 3.12; `make GPU= ...` takes the CPU set there too.
# make test-megatron MEGATRON=0.18.2: the tests that run Megatron, with another megatron-core, in an environment of its own.
# make test-te MEGATRON=0.19.2: the same tests on Transformer Engine's layer spec, its kernels played by torch on the CPU.
GPU ?= $(shell nvidia-smi -L 2>/dev/null | grep -m 1 '^GPU')
VENV := .venv
BIN := $(VENV)/bin
ifeq ($(strip $(GPU)),)
PYTHON ?= python3.11
PINS := requirements/cpu.txt requirements/cpu-no-deps.txt pyproject.toml
INSTALLED := $(VENV)/.installed
QUICKSTART :=
else
PYTHON ?= python3.12
PINS := requirements/gpu.txt pyproject.toml
INSTALLED := $(VENV)/.installed-gpu
QUICKSTART := model.dtype=bfloat16 actor.layout.num_ranks=1 actor.layout.expert=1
endif

MEGATRON ?= 0.19.2
MEGATRON_PYTHON ?= python3.12
MEGATRON_VENV := .venv-megatron-$(MEGATRON)
MEGATRON_PINS := requirements/megatron.txt requirements/cpu.txt pyproject.toml
MEGATRON_TESTS := tests/megatron tests/controller/test_deterministic.py tests/roles/test_roles.py $(addprefix tests/sync/test_,\
	sync_send.py publish_direct.py publish_deadlines.py)

TE_PACKAGES := .te-packages
TE_PATH := $(CURDIR)/tests/support/te_cpu/hook:$(CURDIR):$(CURDIR)/$(TE_PACKAGES)

.PHONY: setup check test test-megatron test-te test-gpu quickstart clean

setup: $(INSTALLED)

$(VENV)/.installed: $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --requirement requirements/cpu-no-deps.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Transformer Engine's part for torch is compiled (docs/gpu.md), in an environment of pip's own: the constraint gives it
# the torch that will be there, not the newest one.
$(VENV)/.installed-gpu: $(PINS)
	@echo "an NVIDIA GPU is here: requirements/gpu.txt on $(PYTHON) (the CPU set: make clean, then make GPU= setup)"
	$(PYTHON) -m venv --clear $(VENV)
	grep '^torch==' requirements/gpu.txt > $(VENV)/torch.txt
	PIP_CONSTRAINT=$(CURDIR)/$(VENV)/torch.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/$(VENV)/torch.txt \
		$(BIN)/pip install --quiet --requirement requirements/gpu.txt pytest pytest-asyncio pytest-timeout ruff mypy
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest tests/test_structure.py tests/test_config.py

test: setup
	$(BIN)/pytest

test-gpu: setup
	$(BIN)/pytest tests/gpu

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
	$(if $(QUICKSTART),@echo "on a GPU the actor has one rank and weights are bfloat16: $(QUICKSTART)")
	$(BIN)/sao train configs/quickstart.toml $(QUICKSTART)
	$(BIN)/python -m tools.plot runs/quickstart

clean:
	rm -rf $(VENV) .venv-megatron-* $(TE_PACKAGES) .mypy_cache .ruff_cache .pytest_cache
