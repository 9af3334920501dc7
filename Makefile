# Each target sets up what it needs; a second call finds it done.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
DEMO_RUN ?= runs/demo
JOBS ?= 2

.PHONY: demo test lint types tests benchmark docs screenshot experiments plain policies clean

demo: .venv/core.ready
	$(BIN)/exitwise demo --out $(DEMO_RUN) --force

test: lint types tests

lint: .venv/dev.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev.ready
	$(BIN)/mypy

tests: .venv/dev.ready
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadfile

# Alone on the machine: about an hour.
benchmark: .venv/dev.ready
	$(BIN)/python benchmarks/method.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/runtime.py
	$(BIN)/python benchmarks/policies.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/dropout.py
	$(BIN)/python benchmarks/heads.py
	$(BIN)/python benchmarks/attach.py

# The documentation as a site: open site/index.html.
docs: .venv/dev.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The README's picture of the report.
screenshot: demo .venv/dev.ready
	$(BIN)/python docs/screenshot.py $(DEMO_RUN)/report.html

# Hours, and goes on where it was interrupted: make experiments CIFAR100=DIR
experiments: .venv/dev.ready
	nice -n 19 $(BIN)/python experiments/cifar100.py $(CIFAR100) runs/experiments

# Forty minutes, and goes on where it was interrupted: make plain [CIFAR100=DIR]
plain: .venv/dev.ready
	nice -n 19 $(BIN)/python experiments/plain.py runs/plain $(if $(CIFAR100),--cifar100 $(CIFAR100))

# About an hour: make policies CIFAR100=DIR
policies: .venv/dev.ready
	nice -n 19 $(BIN)/python experiments/policies.py
	nice -n 19 $(BIN)/python experiments/certificates.py
	nice -n 19 $(BIN)/python experiments/drift.py $(CIFAR100)
	$(BIN)/python experiments/tables.py

.venv/core.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/dev.ready: .venv/core.ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs build site .mypy_cache .pytest_cache .ruff_cache .hypothesis
