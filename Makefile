# Needs Python 3.11 or newer and make. uv is used when it is there. Servers are started by the tests themselves.
SHELL := /bin/sh
.DEFAULT_GOAL := help
VENV := .venv
BENCH_VENV := .venv-bench
BIN := $(VENV)/bin
ARGS ?=
# Else every worker that a test starts compiles each module that it imports, which takes a second.
unexport PYTHONDONTWRITEBYTECODE

# The plain python3 if it is new enough, else the newest that has a name of its own.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
UV := $(shell uv --version >/dev/null 2>&1 && command -v uv)
ifneq ($(UV),)
INSTALL = $(UV) pip install --quiet --compile-bytecode --python $(BIN)/python
else
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
endif

# Three quarters of a test's time are waiting, so there are three processes for each of the two cores that this was
# measured on: with two the cores were idle for a quarter of a run.
PYTEST = $(BIN)/python -m pytest -n 6 --dist loadfile --no-loadscope-reorder

LOCK = uv pip compile --quiet --universal --python-version 3.11 --upgrade --generate-hashes \
	--no-header --no-annotate --no-emit-index-url
IMAGE_EXTRAS = kafka rabbitmq sqs metrics speed

.PHONY: help demo orders test test-long test-lowest durations mutants golden reference docs shape check format bench bench-quick bench-report lock \
	base-image sbom version-before clean

help: ## this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.demo ## duplicates and killed workers, each payment applied once; ARGS="..." goes to the command
	@$(BIN)/idemconsumer demo $(ARGS)

orders: $(VENV)/.dev ## orders from a POST to another service's reply over Kafka, every process killed; ARGS=100 for fewer
	@$(BIN)/python -m examples.orders.storm $(ARGS)

test: $(VENV)/.dev ## the tests, on real servers; ARGS="tests/test_embedded.py -x" narrows them
	@$(PYTEST) --junitxml=build/junit.xml $(ARGS)

test-long: $(VENV)/.dev ## the longest storms, which `make test` has in a short version; about fifteen minutes
	@KILL_ROUND_TRIP=1 $(PYTEST) -n 2 -m long --timeout 3600 $(ARGS)

test-lowest: ## the tests on the lowest versions that pyproject.toml allows of what it names; needs uv
	@uv venv --quiet --allow-existing --python $(PYTHON) .venv-lowest
	@uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e '.[dev]'
	@.venv-lowest/bin/python -m pytest -n 6 --dist loadfile --no-loadscope-reorder -p no:cacheprovider $(ARGS)

durations: $(VENV)/.dev ## run the tests and keep the seconds of each file, by which `make test` orders them
	@$(PYTEST) --keep-durations $(ARGS)

mutants: $(VENV)/.dev ## each rule of the protocol taken out, to see that its tests notice; ARGS="J3 K" chooses, --list, --again
	@$(BIN)/python -m tests.mutants.run $(ARGS)

golden: $(VENV)/.dev ## write again what each command answers, in tests/cli/golden; look at the difference
	@GOLDEN=renew $(BIN)/python -m pytest -n 0 -q tests/cli/test_golden.py $(ARGS)
	@git diff --stat -- tests/cli/golden

reference: $(VENV)/.dev ## write docs/reference again, from the code; look at the difference
	@$(BIN)/python -m manual
	@git diff --stat -- docs/reference

docs: $(VENV)/.dev ## the site with all of docs/, into build/site; a link that leads nowhere fails
	@$(BIN)/python -m manual site

shape: $(VENV)/.dev ## how large the package is, what stands in it twice, how far a message goes; ARGS=--json
	@$(BIN)/python -m benchmarks.shape $(ARGS)

check: $(VENV)/.dev ## style, types and import layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.dev ## put the code into its style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(BENCH_VENV)/.bench ## ours and others side by side, more than an hour; ARGS="sagas kafka" chooses, ARGS=--list names
	@$(BENCH_VENV)/bin/python -m benchmarks $(ARGS)

bench-quick: $(BENCH_VENV)/.bench ## the core of it with small loads, in under two minutes
	@$(BENCH_VENV)/bin/python -m benchmarks --quick $(ARGS)

bench-report: $(BENCH_VENV)/.bench ## put the results of `make bench` into docs/benchmarks.md
	@$(BENCH_VENV)/bin/python -m benchmarks.report

lock: ## the versions and hashes of all that development and the image install; needs uv
	@$(LOCK) --extra dev pyproject.toml -o requirements-dev.lock
	@$(LOCK) $(IMAGE_EXTRAS:%=--extra %) pyproject.toml -o deploy/requirements.lock
	@printf '%s\n' hatchling uv | $(LOCK) - -o deploy/build.lock

base-image: ## the newest Python 3.13 for the image, by version and digest, into deploy/Dockerfile; needs docker
	@docker pull --quiet python:3.13-slim-trixie
	@digest=$$(docker image inspect --format '{{index .RepoDigests 0}}' python:3.13-slim-trixie) && \
	version=$$(docker run --rm $$digest python -c 'import platform; print(platform.python_version())') && \
	sed -E "s|^FROM python:[^ ]+|FROM python:$$version-slim-trixie@$${digest#*@}|" deploy/Dockerfile > deploy/Dockerfile.new
	@mv deploy/Dockerfile.new deploy/Dockerfile && git diff --stat -- deploy/Dockerfile

sbom: ## what is in an installation with all brokers, into dist/sbom.json (CycloneDX); needs uv
	@mkdir -p dist build && rm -rf build/sbom && uv venv --quiet build/sbom
	@uv pip install --quiet --python build/sbom/bin/python '.[kafka,msk,rabbitmq,sqs,sqlalchemy,speed]'
	@uvx --quiet --from cyclonedx-bom cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--of JSON -o dist/sbom.json build/sbom/bin/python
	@echo dist/sbom.json

version-before: ## once released, this commit is what tests/stores/test_version_before.py runs beside later ones
	@git archive HEAD idemconsumer migrations | xz -9e > tests/stores/version_before.tar.xz

clean: ## remove what was made here; downloaded servers stay in ~/.cache/idemconsumer
	rm -rf $(VENV) $(BENCH_VENV) .venv-lowest build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer is on the PATH; install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
ifneq ($(UV),)
	@$(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV)
else
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Python cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
endif

# What is installed holds until pyproject.toml changes. The package itself is linked, not copied.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@$(INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.demo

# What the benchmarks compare with stays out of the environment of the tests.
$(BENCH_VENV)/bin/python: | $(BIN)/python
	@$(BIN)/python -m venv --without-pip $(BENCH_VENV)

$(BENCH_VENV)/.bench: pyproject.toml | $(BENCH_VENV)/bin/python
ifneq ($(UV),)
	@$(UV) pip install --quiet --compile-bytecode --python $(BENCH_VENV)/bin/python -e '.[bench]'
else
	@$(BIN)/python -m pip --python $(BENCH_VENV)/bin/python install --quiet --disable-pip-version-check -e '.[bench]'
endif
	@touch $@
