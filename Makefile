# Each target sets up what it needs; a second call finds it done.
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_RUN ?= runs/demo
# One more than there are cores: some tests wait for processes or a browser. A worker takes a gigabyte.
JOBS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 7 ? cores + 1 : 8)))
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal
export PYTHON

.PHONY: demo test test-all test-soak fuzz test-kernels test-pythons wheel lint types
.PHONY: benchmark docs screenshot experiments plain joint policies networks clean

demo: $(VENV)/core.ready
	$(BIN)/python -m exitwise demo --out $(DEMO_RUN) --force

# What a contributor runs: minutes.
test: lint types
	$(PYTEST) -m "not slow"

# Everything, as CI runs it.
test-all: lint types
	$(PYTEST)

lint: $(VENV)/dev.ready
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/dev.ready
	$(BIN)/python -m mypy

# Kills at random moments and random examples, with new seeds each round: make test-soak ROUNDS=20
ROUNDS ?= 20
test-soak: $(VENV)/dev.ready
	for round in $$(seq $(ROUNDS)); do \
	    seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); \
	    echo "round $$round: EXITWISE_TEST_SEED=$$seed"; \
	    EXITWISE_TEST_SEED=$$seed $(PYTEST) -m "soak or hypothesis" --hypothesis-seed $$seed || exit 1; \
	done

# Damaged files of every kind, see docs/reliability.md: make fuzz [COUNT=20000] [SEED=0]
COUNT ?= 20000
SEED ?= 0
fuzz: $(VENV)/dev.ready
	nice -n 19 $(BIN)/python tools/fuzz.py --count $(COUNT) --seed $(SEED)

# The numerical tests on the arithmetic of other CPUs.
test-kernels: $(VENV)/dev.ready
	$(BIN)/python tools/kernels.py

# Import, demo and fast tests on every Python from 3.11 to 3.13 that is found.
test-pythons:
	tools/pythons

# Build the wheel, and try it in an empty environment without the checkout.
wheel: $(VENV)/dev.ready
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	EXITWISE_WHEELS=dist $(BIN)/python -m pytest tests/packaging/test_wheel.py

# Alone on the machine: about an hour.
benchmark: $(VENV)/dev.ready
	$(BIN)/python benchmarks/method.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/runtime.py
	$(BIN)/python benchmarks/policies.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/dropout.py
	$(BIN)/python benchmarks/heads.py
	$(BIN)/python benchmarks/attach.py
	$(BIN)/python benchmarks/classes.py
	$(BIN)/python benchmarks/answers.py
	$(BIN)/python benchmarks/pool.py
	$(BIN)/python benchmarks/scoring.py
	$(BIN)/python benchmarks/decoding.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/serving.py $(if $(CIFAR100),--cifar100 $(CIFAR100))

# The documentation as a site: open site/index.html.
docs: $(VENV)/dev.ready
	$(BIN)/python docs/command_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# The README's picture of the report.
screenshot: demo $(VENV)/dev.ready
	$(BIN)/python docs/screenshot.py $(DEMO_RUN)/report.html

# Hours, and goes on where it was interrupted: make experiments CIFAR100=DIR
experiments: $(VENV)/dev.ready
	nice -n 19 $(BIN)/python experiments/cifar100.py $(CIFAR100) runs/experiments

# Forty minutes, and goes on where it was interrupted: make plain [CIFAR100=DIR]
plain: $(VENV)/dev.ready
	nice -n 19 $(BIN)/python experiments/plain.py runs/plain $(if $(CIFAR100),--cifar100 $(CIFAR100))

# Some hours, and goes on where it was interrupted: make joint CIFAR100=DIR
joint: $(VENV)/dev.ready
	nice -n 19 $(BIN)/python experiments/joint.py runs/plain $(if $(CIFAR100),--cifar100 $(CIFAR100))

# About an hour: make policies CIFAR100=DIR
policies: $(VENV)/dev.ready
	nice -n 19 $(BIN)/python experiments/policies.py
	nice -n 19 $(BIN)/python experiments/certificates.py
	nice -n 19 $(BIN)/python experiments/drift.py $(CIFAR100)
	$(BIN)/python experiments/tables.py

# An hour, and goes on where it was interrupted: networks of timm, torchvision and transformers, from attach to ONNX.
# Needs them first: .venv/bin/pip install -c constraints.txt timm transformers
networks: $(VENV)/dev.ready
	nice -n 19 $(BIN)/python experiments/zoo_sweep.py

$(VENV)/core.ready: pyproject.toml constraints.txt
	@tools/set-up $(VENV) core

$(VENV)/dev.ready: $(VENV)/core.ready
	@tools/set-up $(VENV) dev dev

clean:
	rm -rf .venv .venv.unfinished runs build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
