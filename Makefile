# Two targets are all a newcomer needs: `make serve` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := kvstore engine measuring server rootstock_serve load_tests tools tests
CLIENTS := $(basename $(notdir $(wildcard tests/clients/requirements/*)))
NPM_FLAGS := --no-package-lock --no-audit --no-fund --silent
WARNING = echo "$* could not be installed"
ARGS ?=
PORT ?=

# What MLX computes with, an extra of pyproject.toml: CUDA where there is an NVIDIA card, as new as
# its driver has it; the processor elsewhere on Linux; nothing on macOS, where MLX has Metal.
# `make serve BACKEND=cpu` leaves the card alone.
BACKEND :=
ifeq ($(shell uname -s),Linux)
BACKEND := cpu
ifneq ($(wildcard /dev/nvidiactl),)
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')
BACKEND := $(if $(filter 12,$(CUDA)),cuda12,cuda)
endif
endif

# The fastest BLAS of x86-64 Linux for the processor. It takes 1 GB: `make serve MKL=` leaves it out.
MKL :=
ifeq ($(BACKEND) $(shell uname -m),cpu x86_64)
MKL := $(VENV)/.mkl
endif

# `make serve BACKEND=...` installs another one into an environment that exists.
INSTALLED := $(VENV)/.mlx-$(or $(BACKEND),metal)

# Python compiles a module when it is first imported. Compiled at installation, all of transformers'
# thousands would keep a new user waiting.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

# What images need, without what mlx-vlm names in turn: 23 packages that are not used.
IMAGES := $(INSTALL) --no-deps mlx-vlm pillow

.PHONY: help serve free-port chat doctor install-service test test-all check format reference wheel simulate kernel-proof restarts pressure hostile conformance \
	browser screenshots clients bench figures grafana demo-model clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*##/ {printf "%-18s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Large pages for what MLX takes from glibc's malloc: docs/serving.md. Ignored elsewhere.
serve chat: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
serve: $(if $(wildcard $(VENV)/.runtime),,free-port) $(VENV)/.runtime  ## run the daemon; make serve PORT=9000, options in ARGS="--model NAME"
	$(BIN)/rootstock serve $(if $(PORT),--port $(PORT)) $(ARGS)

# Before anything is installed, which takes a minute. Afterwards the daemon says it, and who has it.
free-port:
	@$(PYTHON) tools/free_port.py "$(PORT)" $(ARGS)

chat: $(VENV)/.runtime  ## talk to the running daemon, else to one of its own; --url: to any server
	$(BIN)/rootstock chat $(ARGS)

doctor: $(VENV)/.runtime  ## show this machine and the memory plan
	$(BIN)/rootstock doctor $(ARGS)

install-service: $(VENV)/.runtime  ## run the daemon as a service of your user
	@$(BIN)/python -m tools.install_service

# Workers and all the processes that tests start share what has been compiled. Unit tests come last,
# short files that leave no worker waiting for another.
PYTEST := $(BIN)/python -m pytest --numprocesses=auto --dist=loadfile --no-loadscope-reorder
test test-all: export PYTHONDONTWRITEBYTECODE =
test: export HYPOTHESIS_PROFILE ?= fast
test-all: export HYPOTHESIS_PROFILE ?= ci
test: $(VENV)/.dev  ## the fast tests
	$(PYTEST) -m "not slow and not browser" $(ARGS)

test-all: $(VENV)/.dev  ## every test, with all examples
	$(PYTEST) $(ARGS)

check: $(VENV)/.dev  ## style, types and the direction of imports
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## format the code with ruff
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

reference: $(VENV)/.dev  ## write configs/default.yaml, docs/settings.md and docs/metrics.md from the code
	$(BIN)/python -m tools.reference

wheel: $(VENV)/.dev  ## dist/, for `pip install`
	$(BIN)/python -m hatchling build --target wheel

simulate: $(VENV)/.dev  ## simulate a million steps, with a recount after each
	$(BIN)/python -m tests.simulation $(ARGS)

kernel-proof: $(VENV)/.dev  ## prove the attention kernel for GPUs without one, in sanitized C++; see docs/internals
	$(BIN)/python -m tests.kernel_proof $(ARGS)

restarts: $(VENV)/.dev  ## kill daemons with a disk cache and let their disks fail; every answer must be right; half an hour
	$(BIN)/python -m tests.restart kills $(ARGS)
	$(BIN)/python -m tests.restart faults
	$(BIN)/python -m tests.restart families

pressure: $(VENV)/.dev  ## let processes grow next to a daemon in a control group, fifty times; none may die; a quarter of an hour
	$(BIN)/python -m tests.pressure $(ARGS)

hostile: $(VENV)/.dev  ## harmful requests to every field of every route; another client must not wait a second
	$(BIN)/python -m tests.hostile $(ARGS)

conformance: $(VENV)/.dev  ## serve every architecture of mlx-lm; writes docs/architectures.md
	$(BIN)/python -m tests.conformance $(ARGS)

browser: $(VENV)/.dev  ## all tests of the dashboard, in an installed Chromium
	$(BIN)/python -m tests.browser $(ARGS)

screenshots: $(VENV)/.dev  ## make the pictures of docs/images
	$(BIN)/python -m tests.browser.screenshots

clients: $(VENV)/.dev $(CLIENTS:%=.clients/%/.installed)  ## test other projects' clients: docs/clients.md
	$(BIN)/python -m tests.clients $(ARGS)

bench: $(VENV)/.dev .peers/vllm_mlx/.installed  ## compare with mlx_lm.server and vllm-mlx (6 GB on Linux) on real texts; ARGS=--quick for a trial
	$(BIN)/python -m load_tests compare $(ARGS)

figures: $(VENV)/.dev  ## print the tables of README and docs/performance.md from the runs in docs/benchmarks
	$(BIN)/python -m load_tests results --into docs/benchmarks --markdown

grafana: $(VENV)/.dev  ## check the panels and alerts of configs/ with a real Prometheus, if installed
	$(BIN)/python -m load_tests grafana $(ARGS)

demo-model: $(VENV)/.dev  ## train and score the demo model: two hours on two cores
	$(BIN)/python -m tools.train_demo_model train $(ARGS)

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .clients .peers .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# There are other libraries, so make goes on without it.
$(VENV)/.mkl: constraints.txt | $(VENV)/bin/python
	@echo "Installing MKL, a fast BLAS with Intel's licence: 0.3 GB to fetch, 1 GB on the disk."
	@echo "To do without: make $(MAKECMDGOALS) MKL="
	@$(INSTALL) mkl && touch $@ || \
		echo "MKL could not be installed: 'make doctor' says which BLAS is used"

$(INSTALLED): | $(VENV)/bin/python
	@echo "MLX will compute with: $(or $(BACKEND),metal)$(if $(filter cuda%,$(BACKEND)), (an NVIDIA card is there; 2 GB to fetch. To do without: make $(MAKECMDGOALS) BACKEND=cpu))"
	@$(BIN)/python -m pip uninstall --quiet --yes mlx mlx-cpu mlx-cuda-12 mlx-cuda-13 2>/dev/null
	@rm -f $(VENV)/.mlx-* $(VENV)/.runtime $(VENV)/.dev
	@touch $@

$(VENV)/.runtime: pyproject.toml constraints.txt $(INSTALLED) | $(VENV)/bin/python $(MKL)
	$(INSTALL) --editable ".$(BACKEND:%=[%])"
	@$(IMAGES) || echo "mlx-vlm and pillow could not be installed: images are refused"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(INSTALLED) | $(VENV)/bin/python $(MKL)
	$(INSTALL) --editable ".[dev$(BACKEND:%=,%)]"
	$(IMAGES)
	@touch $@ $(VENV)/.runtime

# What cannot be installed (npm is missing, or the Python too new) fails in the run, and it alone.
.clients/%/.installed: tests/clients/requirements/%.txt | $(VENV)/bin/python
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --requirement $< && touch $@ || $(WARNING)

.clients/%/.installed: tests/clients/requirements/%.json
	rm -rf $(@D)
	mkdir -p $(@D)
	cp $< $(@D)/package.json
	@npm install --prefix $(@D) $(NPM_FLAGS) && touch $@ || $(WARNING)

.peers/%/.installed: load_tests/requirements/%.txt | $(VENV)/bin/python
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --requirement $<
	@touch $@
