# make test-npu-sim    tests of the Ascend path on the real torch_npu, with CANN stood in for; see tests/npu_sim/README.md
#
# It has an environment of its own: where torch_npu is installed, `import torch` needs CANN's libraries or the stand-ins.

NPU_VENV ?= .venv-npu
NPU_RUN := $(NPU_VENV)/bin/python
NPU_BUILD := tests/npu_sim/build
# The tasks of torch_npu's queue would run on a thread of their own, out of order with the simulated kernels.
NPU_ENVIRONMENT := env -u ASCEND_HOME_PATH TASK_QUEUE_ENABLE=0 NPU_SIM_DEVICES=4 HYPER_PARALLEL_NPU_SIM=1
NPU_PYTEST := timeout 600 $(NPU_RUN) -m pytest -W ignore

.PHONY: test-npu-sim
test-npu-sim: $(NPU_BUILD)/done
	@echo "npu-sim: stubs only"
	LD_LIBRARY_PATH=$(CURDIR)/$(NPU_BUILD)/stubs $(NPU_ENVIRONMENT) $(NPU_PYTEST) tests/npu_sim/test_floor.py
	@echo "npu-sim: simulated devices"
	LD_LIBRARY_PATH=$(CURDIR)/$(NPU_BUILD)/runtime $(NPU_ENVIRONMENT) $(NPU_PYTEST) tests/npu_sim \
		--ignore tests/npu_sim/test_floor.py

$(NPU_BUILD)/done: tests/npu_sim/build.py $(wildcard tests/npu_sim/src/*.[ch]) $(NPU_VENV)/done
	$(NPU_RUN) tests/npu_sim/build.py $(NPU_BUILD)
	touch $@

$(NPU_VENV)/done: platform/torch_npu/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(NPU_VENV)
	$(NPU_RUN) -m pip install --quiet --requirement platform/torch_npu/requirements.txt --editable '.[test]'
	touch $@
