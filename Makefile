# make demo   train a small GPT once per method and compare them (10 minutes)
# make test   lint, type-check and test
# make bench  print the tables of the README
# Each makes its own virtual environment in .venv first.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/comm-hooks compare

test: lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p comm_hooks

bench: $(READY)
	$(BIN)/python benchmarks/operators.py

$(READY): setup.cfg pyproject.toml .ci/install_torch.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install_torch.py "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[compare,test,lint]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
