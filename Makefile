# make demo   train a small GPT once per method and compare them (5 minutes, a first table after 3)
# make test   lint, type-check and test (8 minutes); make test-core, test-optim, …: one area
# make test-slow  the tests that `make test` leaves out: whole studies, audits, several nodes (half an hour)
# make bench  print tables of small measurements: compressors, wire format, noise, checks ...
# make bench-gpu  compare the GPU kernels with a copy, and train over NCCL (needs a GPU)
# make links  train over capped links and compare (forty minutes; needs root)
# make docs   build the documentation site into docs/_build
# make quality  what methods keep of what exchanging is worth: adds missing runs to the page (hours)
# make studies  repeat the papers' comparisons on small tasks (seven hours; goes on where it was interrupted)
# make fuzz   feed a million inputs of any bytes to all that reads what others wrote (5 minutes)
# make soak   look for what grows in 5,000 steps of five methods (20 minutes)
# make predictions  check the advice against links of network namespaces (20 minutes; needs root)
# make faults  inject faults into runs of every method, and write docs/faults.md (half an hour)
# make third-party SOURCES=folder  other projects' scripts with one or two edited lines (two hours)
# make release-check  build wheel and source archive, install them in empty environments, train (6 minutes)
# Each makes its own virtual environment in .venv first.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests start hundreds of processes, each of which would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE
# Python compiles what it imports; pip would compile all that it installs, most of which nobody does.
PIP_OPTIONS := --quiet --no-compile

# The longest first, after lint, so that none runs alone at the end.
AREAS := core benchmarks deepspeed optim private frameworks launchers docs doctests

.PHONY: demo test $(AREAS:%=test-%) test-slow lint bench bench-gpu links docs quality studies fuzz soak predictions faults third-party release-check clean

demo: $(READY)
	$(BIN)/python -m benchmarks.compare --steps 90

# An area is a process of its own: it collects its own tests, and its ranks live until it ends.
FILES_frameworks := tests/frameworks --ignore tests/frameworks/deepspeed tests/checkpoints
FILES_deepspeed := tests/frameworks/deepspeed tests/collectives
FILES_optim := tests/optim --ignore tests/optim/private
FILES_private := tests/optim/private
FILES_core := tests/compressors tests/memory tests/wire tests/kernels tests/gpu $(wildcard tests/test_*.py)
FILES_launchers := tests/launchers tests/faults tests/fuzz
FILES_benchmarks := tests/benchmarks
FILES_docs := tests/docs tests/examples
FILES_doctests := --doctest-modules comm_hooks benchmarks
# An area per core: three on two cores take a tenth longer than two.
JOBS = $(shell $(BIN)/python -c "import os; print(os.cpu_count())")

test: $(READY)
	$(MAKE) --no-print-directory --keep-going --output-sync --jobs $(JOBS) lint $(AREAS:%=test-%)

test-slow: $(READY)
	$(MAKE) --no-print-directory --keep-going --output-sync --jobs $(JOBS) TESTS=slow $(AREAS:%=test-%)

TESTS := not slow
$(AREAS:%=test-%): test-%: $(READY)
	$(BIN)/python -m pytest -q -m "$(TESTS)" $(FILES_$*)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p comm_hooks

bench: $(READY)
	$(BIN)/python -m benchmarks.micro speed wire per_sample_gradients private_checks noise queued checks

bench-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu tests/kernels/triton
	$(BIN)/python -m benchmarks.gpu_kernels

links: $(READY)
	$(BIN)/python -m benchmarks.bench --out benchmarks/results/bench

docs: $(READY)
	$(BIN)/sphinx-build -W --keep-going docs docs/_build

quality: $(READY)
	$(BIN)/python -m benchmarks.quality

studies: $(READY)
	$(BIN)/python -m benchmarks.studies.safl
	$(BIN)/python -m benchmarks.studies.safl_dimension
	$(BIN)/python -m benchmarks.studies.convergence
	$(BIN)/python -m benchmarks.studies.fed_lamb
	$(BIN)/python -m benchmarks.studies.private_toy_regression
	$(BIN)/python -m benchmarks.studies.private_moments
	$(BIN)/python -m benchmarks.studies.private_optimizers
	$(BIN)/python -m benchmarks.studies.private_optimizers --task verses --sigmas 1 \
	  --out comm-hooks-report/private_verses
	$(BIN)/python -m benchmarks.studies.private_federated
	$(BIN)/python -m benchmarks.studies.private_compressed
	$(BIN)/python -m benchmarks.studies.scale

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz

soak: $(READY)
	$(BIN)/python -m benchmarks.soak

predictions: $(READY)
	$(BIN)/python -m benchmarks.netns.check_predictions

faults: $(READY)
	$(BIN)/python -m tests.faults

THIRD_PARTY := .venv-third-party/bin
third-party:
	$(PYTHON) -m venv .venv-third-party
	$(THIRD_PARTY)/python -m pip install $(PIP_OPTIONS) --editable ".[launch,benchmarks]" \
		--requirement benchmarks/third_party/requirements.txt
	$(THIRD_PARTY)/python -m benchmarks.third_party --sources "$(SOURCES)"

release-check: $(READY)
	$(BIN)/python -m pip install $(PIP_OPTIONS) build twine
	$(BIN)/python .ci/release_check.py "$(TORCH)"

$(READY): setup.cfg pyproject.toml .ci/install_torch.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install_torch.py "$(TORCH)"
	$(BIN)/python -m pip install $(PIP_OPTIONS) --editable ".[launch,benchmarks,docs,test,lint]"
	touch $@

clean:
	rm -rf $(VENV) .venv-third-party build dist docs/_build docs/reference/generated *.egg-info
