# One virtual environment, one build, then what was asked for. `make test` a second time only runs the tests.
#   make PYTHON=python3.12        another Python (3.11 or newer)
#   make TORCH=torch==2.13.0      the torch that pip's default index offers, CUDA packages included, instead of a CPU build
#   make test ARGS="-k golden"    arguments of pytest, of the demo or of the study
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS := constraints.txt
ARGS ?=
# Without +cpu, pip on Linux would bring 2 GB of CUDA libraries.
TORCH ?= $(shell sed -n 's/^torch==.*/&/p' $(CONSTRAINTS))$(if $(filter Linux,$(shell uname -s)),+cpu)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
LIBRARY := carryover_kernels/libcarryover_kernels_cpu.so
SOURCES := CMakeLists.txt setup.py $(shell find csrc -type f)

.PHONY: help demo test native bench bench-quick models study study-quick study-shipped wheel clean

help:
	@echo 'make demo | test | native | bench | bench-quick | models | study | study-quick | study-shipped | wheel | clean'

demo: $(LIBRARY)
	$(PY) -m carryover_kernels.cli demo $(ARGS)

test: $(LIBRARY)
	$(PY) -m pytest $(ARGS)

native: $(LIBRARY)

bench: $(LIBRARY)
	$(PY) -m bench.report $(ARGS)

bench-quick: $(LIBRARY)
	$(PY) -m bench.report --quick $(ARGS)

models: $(LIBRARY)
	$(PY) -m carryover_kernels.training.embedded --out build/models --work build/training

# Hours, from the embedded models; what is finished is not run again.
study: $(LIBRARY)
	$(PY) -m carryover_kernels.training.study --work build/study --out docs/study.json $(ARGS)
	$(PY) -m carryover_kernels.training.study_docs docs/study.json docs/study.md

study-quick: $(LIBRARY)
	$(PY) -m carryover_kernels.training.study --quick --seeds 7 --work build/study-quick --out build/study-quick/study.json $(ARGS)
	$(PY) -m carryover_kernels.training.study_docs build/study-quick/study.json build/study-quick/study.md

# Trains nothing: the embedded pair on 64 held-out prompts a kind and temperature (PROMPTS=256: four times as long).
PROMPTS ?= 64
study-shipped: $(LIBRARY)
	$(PY) -m carryover_kernels.training.study --shipped --prompts $(PROMPTS) --work build/study-shipped-$(PROMPTS) --out docs/study.json $(ARGS)
	$(PY) -m carryover_kernels.training.study_docs docs/study.json docs/study.md

wheel: $(LIBRARY)
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info carryover_kernels/*.so carryover_kernels/include carryover_kernels/share
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip install -e builds the library too, so this rule finds it up to date after the first time.
$(LIBRARY): $(VENV)/.installed $(SOURCES)
	$(PY) setup.py -q build_ext --inplace
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

# A CPU wheel where pip's own settings know one (a local index, a folder of wheels), else PyTorch's index of CPU builds.
$(VENV)/.torch: $(VENV)/.made
	@echo "installing $(TORCH)"
	@$(PIP) '$(TORCH)' 2>$(VENV)/torch.log || $(PIP) --extra-index-url $(TORCH_INDEX) '$(TORCH)' || \
		{ cat $(VENV)/torch.log >&2; echo "carryover_kernels: $(TORCH) cannot be installed, must be on PyTorch's index of CPU builds or in pip's own settings: 'make TORCH=torch==VERSION' takes another build" >&2; exit 1; }
	@touch $@

$(VENV)/.made: $(CONSTRAINTS)
	@command -v '$(PYTHON)' >/dev/null || { echo "carryover_kernels: Python ($(PYTHON)) is missing, must be 3.11 or newer: install it with 'apt install python3 python3-venv python3-dev' or name it, as in 'make PYTHON=python3.11'" >&2; exit 1; }
	@'$(PYTHON)' setup.py check_tools
	'$(PYTHON)' -m venv $(VENV)
	$(PIP) --upgrade setuptools pybind11 ninja numpy
	@touch $@
