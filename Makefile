# make demo   fine-tune SmolLM2-135M and compare its answers before and after
# make check  before each commit, in a few minutes: formatting, lint, types, and the tests that start no processes
# make test   formatting, lint, types and tests, of which matrices are thinned out to every value of their settings
# make prove  every point of the matrices; records in benchmarks/results what is proven, and of which sources, and
#             measures the manual's tables of strategies and of resumed runs anew
# make tables write the tables of README.md and docs/, and the plan, from the code and from recorded measurements
# make notebooks  run the notebooks, and keep them with what they print and draw
# Each sets up what it needs: a virtual environment at the versions of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
DEMO_OUTPUT ?= runs/demo
DEMO_FLAGS ?=
BIN := $(abspath $(VENV))/bin
export PATH := $(BIN):$(PATH)
# Hundreds of processes import the package in a run of the tests: compiled once, each starts a fifth sooner
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 --constraint constraints.txt

.PHONY: demo lint check test prove tables notebooks ops model clean

demo: $(VENV)/.demo
	@MODEL=$$(python -m finetune.cli.demo_model) && \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(python -c "from finetune.hardware import cores; print(cores.usable())")} \
	accelerate launch --config_file accelerate_configs/single.yaml \
	  --mixed_precision $$(python -c "from finetune.distributed import native_precision; print(native_precision())") \
	  recipes/sft.py --config recipes/configs/demo.yaml --model.path "$$MODEL" --train.output_dir $(DEMO_OUTPUT) $(DEMO_FLAGS)

# Two workers, file by file: a tiny run on two processes leaves much of two cores idle
WORKERS ?= 2
PYTEST := python -m pytest
BY_FILE := --dist loadfile --no-loadscope-reorder --numprocesses
BESIDE := $(BY_FILE) $(WORKERS)

lint: $(VENV)/.test
	ruff format --check .
	ruff check .
	mypy

check: lint
	$(PYTEST) $(BESIDE) -m "not slow and not prove"

# Types beside the tests: in a fresh clone, mypy keeps one of two cores busy for 40 seconds
test: $(VENV)/.test ops model
	ruff format --check .
	ruff check .
	@failed=0; report=$$(mktemp); \
	mypy > $$report 2>&1 & types=$$!; \
	$(PYTEST) $(BESIDE) -m "not alone and not prove" || failed=1; \
	$(PYTEST) $(BY_FILE) 2 -m "alone and not prove" || failed=1; \
	wait $$types || failed=1; \
	cat $$report; rm $$report; \
	exit $$failed

prove: $(VENV)/.test ops model
	$(PYTEST) -m "prove or not prove" --record-proofs tests/test_parity.py tests/test_resume.py \
	  tests/test_compatibility.py tests/test_adapters.py tests/test_state.py tests/test_launch.py \
	  tests/test_families.py tests/test_recipes.py tests/test_kills.py
	$(PYTEST) $(BESIDE) -m prove \
	  tests/test_architectures.py tests/test_benchmarks_layouts.py tests/test_context.py \
	  tests/test_context_runs.py tests/test_context_tensor.py tests/test_demo.py tests/test_dry_run.py \
	  tests/test_ema.py tests/test_expert_runs.py tests/test_experts.py tests/test_fp8.py \
	  tests/test_frequencies.py tests/test_improvement.py tests/test_interleaving.py tests/test_memory_check.py \
	  tests/test_model_types.py tests/test_mutations.py tests/test_new_tokens.py tests/test_not_finite.py \
	  tests/test_notebooks.py tests/test_options.py tests/test_part_shards.py tests/test_partly.py \
	  tests/test_pipeline.py tests/test_plan_part_shards.py tests/test_plan_pipelines.py tests/test_plan_sharded.py \
	  tests/test_plan_speed.py tests/test_plan_tensor.py tests/test_plan_tensor_stages.py tests/test_plan_verb.py tests/test_pretrain.py \
	  tests/test_router_balance.py tests/test_shallow.py tests/test_stage_shards.py tests/test_task_scores.py \
	  tests/test_tensor_parallel.py tests/test_tensor_runs.py tests/test_tensor_stages.py tests/test_text_part.py \
	  tests/test_train.py tests/test_two_machines.py tests/test_wheel.py tests/test_zero_bubble.py
	python -m benchmarks.tables

tables: $(VENV)/.test
	python -m benchmarks.tables

notebooks: $(VENV)/.test ops model
	python -m benchmarks.notebooks

# DeepSpeed's C++ operations, built once and kept in the user's cache
ops: $(VENV)/.test
	@python -m finetune.distributed

# The demo's model, fetched and converted once and kept there too
model: $(VENV)/.demo
	@python -m finetune.cli.demo_model > /dev/null

# PyTorch first and alone: a package that asks for any PyTorch then finds the pinned one in place
$(VENV)/.torch: constraints.txt
	@echo "Installing PyTorch into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@touch $@

$(VENV)/.demo: $(VENV)/.torch setup.cfg
	@echo "Installing finetune and what the demo needs"
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.torch setup.cfg
	@echo "Installing finetune and what the tests need"
	@$(PIP) --editable '.[deepspeed,demo,notebooks,test]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist *.egg-info $(DEMO_OUTPUT)
