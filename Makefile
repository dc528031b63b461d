# Every target sets up what it needs: a virtual environment in .venv, which one pip command installs
# at the versions in constraints.txt. PYTHON chooses the interpreter (3.11 or newer), for example:
# make test PYTHON=/opt/python3.11/bin/python3

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Tests and commands start hundreds of processes. If the environment sets this variable, Python
# caches no bytecode and each process compiles all of Shoal again, so it is cleared here.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= $(firstword $(foreach name,python3.11 python3,$(shell $(name) -c 'import sys; print("$(name)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))
PYTEST_ARGS ?=
# These targets test Shoal on the CPU. On a machine with a GPU, workers would otherwise choose the
# GPU and NCCL; make test-gpu tests that.
test test-slow parity chaos: export CUDA_VISIBLE_DEVICES :=
DIST ?= dist
# Tests spend much of their time waiting for other processes and for leases to expire, so on two
# cores three processes run them, or two if the tests mostly compute. A test that hangs ends its
# process and thereby the run. Test files are handed out in the order of testpaths in
# pyproject.toml, not by their number of tests, because the files that take longest have few tests.
IN_TWO := --numprocesses=2 --max-worker-restart=0
IN_THREE := --numprocesses=3 --max-worker-restart=0 --no-loadscope-reorder

BIN := .venv/bin
DISTRIBUTIONS := protos common coordinator ps_server worker sdk
# --quiet is not used, because with it MkDocs ignores the warnings for which --strict should fail.
SITE = NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict 2>&1 | { grep -v '^INFO' || true; }
PROTOS := $(wildcard protos/shoal_protos/v1/*.proto)
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)

.PHONY: help
help: ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do printf '%-18s %s\n' "$$target" "$$text"; done

# ------------------------------------------------------------------------------------------- to run

.PHONY: demo
demo: .venv/installed ## Train on handwritten digits on a cluster of processes, with faults (about 90 s)
	$(BIN)/shoal demo

.PHONY: test
test: .venv/installed ## Run the tests (about 30 minutes on 2 cores); PYTEST_ARGS='-x -k name' narrows them
	$(BIN)/python -m pytest $(IN_THREE) --dist=loadfile --durations-file=out/durations.txt $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: .venv/installed ## Run the slow tests that make test leaves out (about 20 minutes, of which Ray takes 2 and, if it is installed, SLURM 2)
	$(BIN)/python -m pytest $(IN_TWO) --dist=worksteal -m 'slow and not matrix' $(PYTEST_ARGS)

.PHONY: test-compose
test-compose: .venv/installed ## Build the images, run the cluster of compose.yaml in podman and inject faults (about 10 minutes; skipped if podman does not run)
	$(BIN)/python -m pytest tests/compose $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: .venv/installed ## Run the tests that need a CUDA device, if there is one (GPU_SHARED=1 lets NCCL ranks share it); docs/gpu.md lists what ran on which GPU
	$(BIN)/python -m pytest -m 'gpu and not soak' -o faulthandler_timeout=120 tests/gpu $(PYTEST_ARGS)

# The tests of whatever a version of torch can break: strategies and their engines, DTensors,
# process groups, hooks and hidden parameters, and tensor files.
TORCH_TESTS ?= tests/unit/tooling/test_torch_internals.py tests/unit/tooling/test_torch_backends.py tests/unit/torch_calls tests/unit/worker_strategies tests/unit/sharding \
	tests/unit/tensor_parallel tests/unit/pipelining tests/unit/compression tests/unit/worker_backends tests/unit/worker_state \
	tests/unit/worker_checkpoint tests/integration/worker_backends tests/integration/tensor_parallel tests/integration/pipelining

.PHONY: test-torch
test-torch: ## Run the tests that depend on internals of torch with another version of it: make test-torch VERSION=2.15.0 (five to eight minutes; installs some gigabytes)
	@test -n "$(VERSION)" || { echo "VERSION is not given; expected one of torch's, as in make test-torch VERSION=2.12.1"; exit 1; }
	@$(MAKE) --no-print-directory .venv-torch-$(VERSION)/installed
	.venv-torch-$(VERSION)/bin/python -m pytest $(IN_TWO) --dist=loadfile $(TORCH_TESTS) $(PYTEST_ARGS)

TORCHES ?= 2.11.0 2.12.1 2.14.1 2.15.0

.PHONY: test-torches
test-torches: ## Run test-torch with every other version of torch that Shoal supports (TORCHES), one after another (about half an hour)
	@failed=; for version in $(TORCHES); do $(MAKE) --no-print-directory test-torch VERSION=$$version || failed="$$failed $$version"; done; \
	test -z "$$failed" || { echo "tests failed with torch$$failed"; exit 1; }

.PHONY: parity
parity: .venv/installed ## Run the cases of the parity matrix and of other large matrices that make test leaves out; write docs/parity.md
	$(BIN)/python -m pytest $(IN_TWO) --dist=worksteal -m matrix $(PYTEST_ARGS)
	$(BIN)/python -m tests.parity docs/parity.md

SEEDS ?= 10000
FIRST_SEED ?= 0
CHAOS_SEEDS ?= 1
CHAOS_FAULTS ?= 600

.PHONY: chaos
chaos: .venv/installed ## Run soak tests, network cuts, simulated schedules (SEEDS, FIRST_SEED), new random examples and 600 faults on parameter servers (CHAOS_SEEDS, CHAOS_FAULTS), and print a verdict
	$(BIN)/python -m pytest tests/chaos $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(IN_TWO) --dist=worksteal --timeout=600 -m 'soak or not soak' tests/networks $(PYTEST_ARGS)
	$(BIN)/python -m tests.simulation --exhaustive
	$(BIN)/python -m tests.simulation --partitions
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST_SEED)
	$(BIN)/python -m pytest $(IN_TWO) -m 'hypothesis and not matrix' --hypothesis-profile searching $(PYTEST_ARGS)
	$(BIN)/python -m tests.history --seeds $(CHAOS_SEEDS) --faults $(CHAOS_FAULTS)

DEVICE ?= cpu

.PHONY: bench
bench: .venv/installed $(if $(filter cpu,$(DEVICE)),.venv-peers/installed) ## Measure the published figures, next to torchrun, torchft and DeepSpeed (about two and a half hours); DEVICE=cuda measures some of them on GPUs
	$(BIN)/python -m benchmarks --device $(DEVICE)

.PHONY: bench-gpu
bench-gpu: .venv/installed ## Measure on one CUDA device: steps, 1.3 billion parameters, the parts of a recovery, a checkpoint, copies, groups over NCCL; skipped if there is none
	$(BIN)/python -m benchmarks.gpu

KIT_PYTHON ?= 3.12
PIP_LIST ?=

.PHONY: gpu-kit
gpu-kit: .venv/installed ## Download into .gpu-kit the packages that a GPU machine without network lacks (KIT_PYTHON=3.12, PIP_LIST=its pip list); run python3 -m gpu_kit run there
	$(BIN)/python -m gpu_kit pack --python $(KIT_PYTHON) $(if $(PIP_LIST),--pip-list $(PIP_LIST))

# --------------------------------------------------------------------------------------- to hand on

.PHONY: dist
dist: .venv-build/installed ## Build the wheels of all packages in dist/ within seconds (docs/install.md explains how to install them)
	@rm -f $(DIST)/shoal-*.whl $(DIST)/shoal_*.whl
	@.venv-build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) $(DISTRIBUTIONS:%=./%)
	@echo "six wheels are in $(DIST)"

.PHONY: docs
docs: reference .venv-docs/installed ## Build the documentation site in out/docs; open out/docs/index.html, which needs no network
	@$(SITE)
	@echo "the site is in out/docs; with the search: python -m http.server --directory out/docs"

# ----------------------------------------------------------------------------------- verify and fix

.PHONY: verify
verify: verify-stubs verify-style verify-types verify-imports verify-text verify-docs verify-deployment verify-images ## Run all checks that are not tests: stubs, style, types, imports, texts, documentation, deployment files and images

.PHONY: fix
fix: protos dashboards reference ## Regenerate generated files and reformat the code
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

.PHONY: protos
protos: .venv/installed ## Regenerate the gRPC stubs
	$(call PROTOC,protos)

.PHONY: dashboards
dashboards: .venv/installed ## Regenerate the Grafana dashboards
	PYTHONPATH=docker/grafana $(BIN)/python -m shoal_dashboards

.PHONY: reference
reference: .venv/installed ## Write docs/reference/commands.md and environment.md from the code
	$(BIN)/python -m docsite

.PHONY: verify-docs
verify-docs: .venv-docs/installed
	$(SITE)

.PHONY: verify-stubs
verify-stubs: .venv/installed
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; $(call PROTOC,"$$fresh"); \
	for stub in $$(cd "$$fresh" && find . -name '*_pb2*' -printf '%P\n'); do \
		cmp "$$fresh/$$stub" "protos/$$stub" || { echo "protos/$$stub is not what protoc generates: run make protos"; exit 1; }; \
	done

.PHONY: verify-style
verify-style: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: verify-types
verify-types: .venv/installed
	$(BIN)/mypy
	$(BIN)/mypy docker

.PHONY: verify-imports
verify-imports: .venv/installed
	$(BIN)/lint-imports --no-logo

.PHONY: verify-text
verify-text: .venv/installed
	@if git grep -nwIE 'TO[D]O|FIX[M]E|XX[X]'; then echo "Committed text is finished text: open an issue instead of the marks above"; exit 1; fi
	$(BIN)/python -m pytest --quiet tests/unit/tooling/test_docstrings.py tests/unit/tooling/test_prose.py

.PHONY: verify-deployment
verify-deployment: .venv/installed
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml compose.gpu.yaml
	$(BIN)/podman-compose --dry-run --profile servers --profile monitoring -f compose.yaml config > /dev/null
	$(BIN)/podman-compose --dry-run --profile servers --profile monitoring -f compose.yaml -f compose.gpu.yaml config > /dev/null
	PYTHONPATH=docker/grafana $(BIN)/python -m shoal_dashboards --check
	@if command -v promtool > /dev/null; then promtool check config --syntax-only docker/prometheus/prometheus.yml && \
		promtool check rules docker/prometheus/alerts.yml && promtool test rules docker/prometheus/alerts_test.yml; \
	else echo "promtool is not on PATH: docker/prometheus is not checked"; fi

.PHONY: verify-images
verify-images: .venv/installed .venv-docs/installed
	$(BIN)/python -m pytest -m images tests/integration/deployment tests/integration/pages $(PYTEST_ARGS)

# ------------------------------------------------------------------------------------- environments

.venv/installed: constraints.txt dev-requirements.txt $(DISTRIBUTIONS:%=%/pyproject.toml)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: none found as python3.11 or python3; name one with PYTHON=..."; exit 1; }
	@echo "Installing into .venv (about a minute, once)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -r dev-requirements.txt \
		-e protos -e common -e coordinator -e ps_server -e 'worker[mpi]' -e 'sdk[demo,gcs,lightning,mlflow,opentelemetry,ray,s3,tensorboard,transformers,trl,wandb]'
	@touch $@

# Third-party packages have the versions in constraints.txt, except torch and setuptools, because
# older versions of torch need an older setuptools.
.venv-torch-%/installed: constraints.txt dev-requirements.txt $(DISTRIBUTIONS:%=%/pyproject.toml)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: none found as python3.11 or python3; name one with PYTHON=..."; exit 1; }
	@echo "Installing into .venv-torch-$* (some minutes, once)"
	$(PYTHON) -m venv .venv-torch-$*
	.venv-torch-$*/bin/pip install --quiet --no-compile -c <(grep -vE '^(torch|setuptools)==' constraints.txt) torch==$* -r dev-requirements.txt \
		-e protos -e common -e coordinator -e ps_server -e 'worker[mpi]' -e 'sdk[demo,gcs,lightning,mlflow,opentelemetry,ray,s3,tensorboard,transformers,trl,wandb]'
	@touch $@

.venv-build/installed: protos/pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: none found as python3.11 or python3; name one with PYTHON=..."; exit 1; }
	@echo "Installing the tools that build the wheels into .venv-build"
	$(PYTHON) -m venv .venv-build
	.venv-build/bin/pip install --quiet --no-compile "$$(sed -n 's/^requires = \["\(.*\)"\]$$/\1/p' protos/pyproject.toml)"
	@touch $@

.venv-docs/installed: docs-requirements.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: none found as python3.11 or python3; name one with PYTHON=..."; exit 1; }
	@echo "Installing the tools that build the documentation site into .venv-docs"
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --no-deps -r docs-requirements.txt
	@touch $@

.venv-peers/installed: benchmarks/peers-constraints.txt
	@echo "Installing the peers into .venv-peers (about two minutes, once)"
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet -c benchmarks/peers-constraints.txt torch torchft-nightly numpy setuptools
	DS_BUILD_OPS=0 .venv-peers/bin/pip install --quiet -c benchmarks/peers-constraints.txt --no-build-isolation deepspeed
	DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv-peers/extensions .venv-peers/bin/python -c \
		'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()' > /dev/null
	@touch $@

.PHONY: pin-images
pin-images: .venv/installed ## Write compose.pinned.yaml, which names third-party images by digest (ENGINE=podman uses podman)
	$(BIN)/python docker/pin_images.py $(or $(ENGINE),docker)

.PHONY: secrets
secrets: ## Create the tokens and passwords that compose.yaml mounts (docker/secrets), unless they exist
	$(PYTHON) docker/make_secrets.py

.PHONY: clean
clean: ## Remove the environments, caches and outputs
	rm -rf .venv .venv-build .venv-docs .venv-peers .venv-torch-* .gpu-kit out dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
