# make demo   generated data: two classes are added by fine-tuning, MiB and SDR, and compared in a report
# make test   lint, type check and run all tests
# Both set everything up by themselves: a virtual environment in .venv with all that is needed. Other versions:
# make test PYTHON=python3.13 TORCH='torch==2.11.* torchvision==0.26.*'

PYTHON ?= python3
TORCH ?= torch torchvision
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format clean

demo: $(VENV)/.ready
	$(BIN)/sdrseg demo --out demo

test: lint
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch and torchvision in one go, so that they belong together.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.12"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build .mypy_cache .pytest_cache .ruff_cache .hypothesis
