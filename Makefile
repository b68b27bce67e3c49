# make demo   generated data: what the steps see, then two classes are added with and without SDR
# make test   lint, type check and run all tests
# Both set everything up by themselves: a virtual environment in .venv with all that is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The rate and the demo's distillation weight were chosen by trial on these very images: it shows, it does not prove.
DEMO := shapes:8-2@disjoint --bases demo/bases --set optim.lr_later=0.02 --set optim.head_lr_factor_later=1

.PHONY: demo test lint format clean

demo: $(VENV)/.ready
	$(BIN)/sdrseg data shapes:8-2@disjoint --picture demo/shapes.png
	$(BIN)/sdrseg train $(DEMO) --method ft --out demo/ft
	$(BIN)/sdrseg train $(DEMO) --method sdr --out demo/sdr --set kd.weight=5

test: lint
	$(BIN)/pytest

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
	$(BIN)/pip install --quiet torch torchvision
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build .mypy_cache .pytest_cache .ruff_cache .hypothesis
