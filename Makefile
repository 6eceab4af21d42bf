# make demo    train a small MoE language model with ETP and compare it with one device   (PLATFORM=torch|mindspore|both)
# make finetune    a Hugging Face MoE model on ranks: loaded, trained, killed, resumed on another mesh, exported (Python 3.11 or 3.12)
# make matrix  the same model under many arrangements, each against one device   (PLATFORM as above, RANKS=4|8)
# make test    all tests, on both frameworks
# make quick   the tests that start no ranks: about a minute once the environment is made
# make test-npu-sim    tests of the Ascend path with CANN stood in for (part of make test)
# make lint    style, format and types (part of make test)
# make docs    the documents and the reference as a site, build/docs/index.html
# make bench   speed beside TorchTitan and the machine's limit
# Each makes its own .venv when needed, with the tested releases of platform/<name>/requirements.txt.

PLATFORM ?= both
RANKS ?= 4
PLATFORMS := $(if $(filter both,$(PLATFORM)),torch mindspore,$(PLATFORM))
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
RUN := $(VENV)/bin/python

# Two files of tests at a time: the ranks of one often wait for each other.
BESIDE_EACH_OTHER := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo finetune matrix test quick lint docs bench clean
.SECONDARY:

demo: $(PLATFORMS:%=$(VENV)/with-%)
	$(RUN) examples/train_moe.py --platform $(PLATFORM)

finetune: $(VENV)/with-torch $(VENV)/with-huggingface
	$(RUN) examples/finetune_hf.py
matrix: $(PLATFORMS:%=$(VENV)/with-%)
	$(RUN) examples/train_matrix.py --platform $(PLATFORM) --ranks $(RANKS)

test: $(VENV)/with-torch $(VENV)/with-mindspore $(VENV)/with-test $(VENV)/with-peer lint
	HYPER_PARALLEL_TEST_PLATFORMS=torch,mindspore $(RUN) -m pytest $(BESIDE_EACH_OTHER)
	$(MAKE) test-npu-sim

quick: $(PLATFORMS:%=$(VENV)/with-%) $(VENV)/with-test
	$(RUN) -m pytest -m "not ranks and not slow" $(BESIDE_EACH_OTHER)

lint: $(VENV)/with-test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per extra, so that a framework is installed only when something needs it.
$(VENV)/with-examples: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --editable '.[examples]'
	touch $@

$(VENV)/with-test: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --editable '.[test]'
	touch $@

$(VENV)/with-huggingface: pyproject.toml | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --editable '.[huggingface]'
	touch $@

# TorchTitan and PEFT beside ours, for the tests that compare. What they depend on would bring another torch: three files
# of the one are loaded, and the other needs two packages more.
$(VENV)/with-peer: | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --no-deps torchtitan==0.2.2 peft==0.21.2 accelerate==1.15.0 psutil
	touch $@

$(VENV)/with-%: platform/%/requirements.txt pyproject.toml | $(VENV)/with-examples
	$(RUN) -m pip install --quiet --requirement $< --editable '.[$*]'
	touch $@

# In an environment of its own: docstrings are read, not imported, so no framework is needed.
build/docs-venv/done: docs/requirements.txt
	$(PYTHON) -m venv build/docs-venv
	build/docs-venv/bin/python -m pip install --quiet --requirement $<
	touch $@

docs: build/docs-venv/done
	build/docs-venv/bin/python docs/site/stage.py build/docs-source
	build/docs-venv/bin/python -m mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

bench: $(VENV)/with-torch $(VENV)/with-mindspore $(VENV)/with-peer
	$(RUN) -m tests.benchmark --out docs/benchmark

clean:
	rm -rf $(VENV) $(NPU_VENV) $(NPU_BUILD) build *.egg-info

include tests/npu_sim/rules.mk
