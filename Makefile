# make demo | test | lint | typecheck | venv | clean
#
# Installs into $(VENV), which is made with $(PYTHON) if missing; pip runs again only when pyproject.toml changes.
#     make test PYTHON=python3.12 VENV=/tmp/venv

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON_FILES := slimpipe tests tools

# One stamp per set of extras. It also depends on where the checkout is: an editable install points there.
STAMP = $(VENV)/.stamp-$(shell echo '$(CURDIR)' | cksum | cut -d ' ' -f 1)

.PHONY: demo test lint typecheck venv clean

demo: $(STAMP)-run
	$(BIN)/python tools/make_demo_data.py
	WANDB_MODE=$${WANDB_MODE:-offline} exec $(BIN)/slimpipe train torchtitan_configs/llama3_debug_cpu.toml

test: $(STAMP)-dev
	$(BIN)/python -m pytest -q

lint: $(STAMP)-dev
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)

typecheck: $(STAMP)-dev
	$(BIN)/mypy

venv: $(STAMP)-dev

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find $(PYTHON_FILES) -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP)-run: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[torchtitan]'
	touch $@

$(STAMP)-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[torchtitan,dev]'
	touch $@ $(STAMP)-run

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "SlimPipe needs Python >= 3.11, but '$(PYTHON)' is not; choose another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip --version > /dev/null || \
		{ rm -f $(BIN)/python; echo "'$(PYTHON) -m venv' gave no working pip; install your system's package for it" \
		"(on Debian and Ubuntu: python3-venv)" >&2; exit 1; }
