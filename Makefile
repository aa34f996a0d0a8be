# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# `make demo` and `make test` start from a bare Debian or Ubuntu with python3, make and git. What is downloaded or built
# is kept under .cache by the hash of what it is made from; what a run writes goes to build. Both can be deleted.

.DEFAULT_GOAL := help
SHELL := /bin/sh

PYTHON ?= python3
LAB_NAME ?= lab
LAB_HOSTS ?= gpu1=bookworm gpu2=bullseye,user=ops gpu3=trixie gw=bookworm,role=gateway
PYTEST_ARGS ?=

VENV := .cache/venv
BIN := $(CURDIR)/$(VENV)/bin
COLLECTION := .cache/collections/ansible_collections/gpuops/serving
VENV_KEY := $(shell { $(PYTHON) -V; cat requirements-dev.txt; } 2>/dev/null | sha256sum | cut -c1-16)
VENV_STAMP := $(VENV)/.stamp-$(VENV_KEY)
LAB := $(PYTHON) tests/lab/lab.py
VLLM_KEY := $(shell { $(PYTHON) -V; cat tests/vllm/requirements.txt tests/vllm/install.py tests/vllm/tiny_llama.py; } \
	2>/dev/null | sha256sum | cut -c1-16)
VLLM := .cache/vllm-$(VLLM_KEY)

export ANSIBLE_CONFIG := $(CURDIR)/tests/ansible.cfg
export ANSIBLE_HOME := $(CURDIR)/.cache/ansible
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/.cache/collections
export MOLECULE_GLOB := molecule/*/molecule.yml
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHON
VENV_PATH := PATH="$(BIN):$$PATH"

.PHONY: help
help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

.PHONY: prereqs
prereqs: ## install the Debian packages that are missing (as root)
	@sh tests/lab/prereqs.sh

.PHONY: venv
venv: $(VENV_STAMP) $(COLLECTION) ## create the Python environment of the tools

$(VENV_STAMP): | prereqs
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	touch $@

$(COLLECTION):
	mkdir -p $(@D)
	ln -sfn ../../../.. $@

# What labs are made of is built beside the checks that need none; what fails there shows when the first lab is booted.
# Then two rows side by side, each printed whole when it has ended: each of them waits for half of its time. The tests of
# the waits come last and alone, because their limits of time hold on a machine that does nothing else.
.PHONY: test
test: venv ## run all checks and tests
	@if [ "$$(id -u)" -eq 0 ]; then $(LAB) build & fi; $(MAKE) lint unit; status=$$?; wait; exit $$status
	@echo "the tests on real processes and the rollouts run side by side, for about half an hour"
	@$(MAKE) --jobs=2 --output-sync=target integration-work rollout
	@$(MAKE) integration-waits molecule

.PHONY: lint lint-yaml lint-python lint-types lint-ansible
lint: lint-yaml lint-python lint-types lint-ansible ## yamllint, ruff, mypy and ansible-lint

lint-yaml: venv
	$(BIN)/yamllint --strict .

lint-python: venv
	$(BIN)/ruff check .

lint-types: venv
	cd .cache/collections && MYPYPATH=. $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
		-p ansible_collections.gpuops.serving.plugins
	MYPYPATH=tests/lab $(BIN)/mypy --config-file pyproject.toml -p gpulab
	MYPYPATH=tests/lab $(BIN)/mypy --config-file pyproject.toml tests/lab/*.py
	MYPYPATH=tests/lab:.cache/collections $(BIN)/mypy --config-file pyproject.toml tests/vllm/*.py

lint-ansible: venv
	$(VENV_PATH) ansible-lint --offline --nocolor --profile production

.PHONY: unit
unit: venv ## run the unit tests
	$(VENV_PATH) $(BIN)/pytest $(PYTEST_ARGS) tests/unit

.PHONY: integration
integration: venv ## run the integration tests: real processes, real programs, a real lab (as root)
	$(VENV_PATH) $(BIN)/pytest $(PYTEST_ARGS) tests/integration

# The two halves of it: tests that work, and tests of how long something takes.
WAITS := tests/integration/test_wait_systemd.py tests/integration/test_readiness_systemd.py
.PHONY: integration-work integration-waits
integration-work: venv
	$(VENV_PATH) $(BIN)/pytest $(PYTEST_ARGS) tests/integration $(addprefix --ignore=,$(WAITS))

integration-waits: venv
	$(VENV_PATH) $(BIN)/pytest $(PYTEST_ARGS) $(WAITS)

.PHONY: rollout
rollout: venv ## run the rollout tests on lab hosts: lost hosts, killed controllers, client traffic (as root)
	$(VENV_PATH) $(BIN)/pytest $(PYTEST_ARGS) tests/rollout

.PHONY: molecule
molecule: venv ## run every Molecule scenario on lab hosts (as root)
	@set -e; for file in molecule/*/molecule.yml; do \
		scenario=$$(basename "$$(dirname "$$file")"); \
		echo "molecule: $$scenario"; \
		$(VENV_PATH) molecule -c molecule/config.yml test --scenario-name "$$scenario"; \
	done

.PHONY: docs
docs: venv ## write the tables of docs/engines.md and docs/unit-audit.md anew from the data
	$(VENV_PATH) $(BIN)/python tests/docs/engines.py
	$(VENV_PATH) $(BIN)/python tests/docs/audit.py

.PHONY: bench
bench: venv ## measure what the checks cost, as ratios in one run (as root)
	$(VENV_PATH) $(BIN)/python tests/bench/bench.py

.PHONY: test-gpu
test-gpu: venv ## try the rules on this machine's real NVIDIA GPU, and write what was found (as root)
	$(VENV_PATH) $(BIN)/python tests/gpu/test_gpu.py

.PHONY: test-vllm
test-vllm: venv $(VLLM) ## try the waits and stops on the real vLLM, on the processor of a lab host (as root; fetches 1 to 5 GB once)
	$(VENV_PATH) VLLM_FOLDER="$(CURDIR)/$(VLLM)" $(BIN)/pytest $(PYTEST_ARGS) tests/vllm

$(VLLM): | prereqs
	$(PYTHON) tests/vllm/install.py $@

.PHONY: demo
demo: venv ## restart three hosts under client traffic, and show it (as root)
	$(VENV_PATH) $(BIN)/python tests/demo/demo.py

.PHONY: demo-down
demo-down: ## remove the demo's hosts
	$(LAB) down --name demo

.PHONY: lab-up
lab-up: venv ## boot a lab to play with: LAB_NAME=lab LAB_HOSTS="gpu1=bookworm gw=bookworm,role=gateway"
	$(LAB) up --name $(LAB_NAME) $(foreach host,$(LAB_HOSTS),--host $(host))

.PHONY: lab-down
lab-down: ## remove that lab
	$(LAB) down --name $(LAB_NAME)

.PHONY: clean
clean: ## remove this checkout's labs and outputs, keep the cache
	@if [ "$$(id -u)" -eq 0 ]; then $(LAB) down --all; fi
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: clean-all
clean-all: clean ## remove the cache as well
	rm -rf .cache
