# make demo   fine-tune SmolLM2-135M and compare its answers before and after
# make test   formatting, lint, types and tests, of which matrices are thinned out to every pair of their settings
# make prove  every point of the matrices; measures the manual's tables of strategies and of resumed runs anew
# make tables write the tables of README.md and docs/, and the plan, from the code and from recorded measurements
# Each sets up what it needs: a virtual environment at the versions of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
DEMO_OUTPUT ?= runs/demo
BIN := $(abspath $(VENV))/bin
export PATH := $(BIN):$(PATH)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 --constraint constraints.txt

.PHONY: demo test prove tables ops clean

demo: $(VENV)/.demo
	@MODEL=$$(python -m finetune.cli.demo_model) && \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(python -c "from finetune.hardware import cores; print(cores.usable())")} \
	accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $$(python -c "from finetune.distributed import native_precision; print(native_precision())") \
	  recipes/sft.py --config recipes/configs/demo.yaml --model.path "$$MODEL" --train.output_dir $(DEMO_OUTPUT)

test: $(VENV)/.test ops
	ruff format --check .
	ruff check .
	mypy
	python -m pytest

prove: $(VENV)/.test ops
	python -m pytest -m "prove or not prove" --record-parity tests/test_parity.py tests/test_resume.py \
	  tests/test_compatibility.py tests/test_adapters.py
	python -m benchmarks.tables

tables: $(VENV)/.test
	python -m benchmarks.tables

# DeepSpeed's C++ operations, built once and kept in the user's cache
ops: $(VENV)/.test
	@python -m finetune.distributed

# PyTorch first and alone: a package that asks for any PyTorch then finds the pinned one in place
$(VENV)/bin/python: constraints.txt
	@echo "Installing PyTorch into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@touch $@

$(VENV)/.demo: $(VENV)/bin/python setup.cfg
	@echo "Installing finetune and what the demo needs"
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/bin/python setup.cfg
	@echo "Installing finetune and what the tests need"
	@$(PIP) --editable '.[deepspeed,demo,notebooks,test]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist *.egg-info runs
