# Everything a user needs: `make help`.
PYTHON ?= python3
VENV ?= .venv
# The versions that `make` installs; empty for the newest ones, with CUDA where torch's own packages bring it.
CONSTRAINTS ?= constraints/cpu.txt
# Where the constrained torch comes from: builds for the CPU (a tenth of the size). Unreachable, the package index serves.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=
# Processes that share the tests: `logical` is one a core.
PROCESSES ?= logical

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
STAMP := $(VENV)/.setup-$(notdir $(CONSTRAINTS))
SGLANG_CPU := constraints/sglang-cpu.txt
SGLANG_STAMP := $(VENV)/.setup-sglang-$(notdir $(CONSTRAINTS))

.DEFAULT_GOAL := help
.PHONY: help setup setup-sglang train test test-all test-sglang lint format clean

help:
	@echo "make train              set up, then run the quickstart: data, warm-up, GRPO, plot (python -m agentrl.train)"
	@echo "make train ARGS='...'   the same job with overrides, e.g. ARGS='trainer.seed=2 trainer.total_training_steps=5'"
	@echo "make test  ARGS='...'   set up, then run the tests (pytest): of each long family a slice"
	@echo "make test-all           set up SGLang too, then run every test and soak; ended and begun again, it goes on"
	@echo "make test-sglang        set up SGLang too, then run the tests that start its servers, on the CPU"
	@echo "make lint               ruff and mypy"
	@echo "make setup              only the environment in $(VENV)/; runs again when pyproject.toml or constraints change"
	@echo "make setup-sglang       the same with SGLang: for the CPU, or with CONSTRAINTS= for CUDA"
	@echo "CONSTRAINTS=            with any of these: the newest packages, and torch with CUDA, instead of constraints/cpu.txt"
	@echo "PYTHON=python3.12       another interpreter (3.11 or newer)"

setup: $(STAMP)

setup-sglang: $(SGLANG_STAMP)

train: $(STAMP)
	$(RUN) -m agentrl.train $(ARGS)

test: $(STAMP)
	$(RUN) -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(STAMP)
	@$(MAKE) setup-sglang VENV=.venv-sglang
	$(RUN) -m tests.whole --sglang-python .venv-sglang/bin/python $(ARGS)

test-sglang: $(SGLANG_STAMP)
	$(RUN) -m pytest tests/sglang $(ARGS)

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV)

$(STAMP): pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/pip
	rm -f $(VENV)/.setup-*
	$(if $(CONSTRAINTS),$(PIP) install --no-deps --retries 1 -c $(CONSTRAINTS) --extra-index-url $(TORCH_INDEX) torch)
	$(PIP) install $(if $(CONSTRAINTS),-c $(CONSTRAINTS),--upgrade --upgrade-strategy eager) -e '.[dev]'
	touch $@

$(SGLANG_STAMP): $(STAMP) $(SGLANG_CPU)
ifeq ($(CONSTRAINTS),)
	$(PIP) install -e '.[dev,sglang]'
else
	$(PIP) install -c $(CONSTRAINTS) -e '.[dev,sglang-cpu]'
	$(PIP) install --no-deps -r $(SGLANG_CPU)
endif
	touch $@

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "agentrl needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 || true)"; \
	  echo "Install one, or name one that you have: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: its venv and ensurepip modules are missing."; \
	  echo "On Debian and Ubuntu: sudo apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
