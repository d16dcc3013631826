# make test    everything that must pass: lint, types, tests
# make demo    make a small checkpoint, convert it, run it where llama.cpp is installed
# make bench   convert against a plain copy; options by ARGS="..."

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
LLAMA := third_party/llama.cpp/requirements.txt
LLAMA_CMAKE_ARGS := -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF

.PHONY: setup check test demo bench clean

setup: $(VENV)/.stamp-dev $(VENV)/.stamp-llama

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-package: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt -e '.[test,dev]'
	touch $(VENV)/.stamp-package $@

# compiles llama.cpp: minutes, once
$(VENV)/.stamp-llama: $(LLAMA) | $(BIN)/python
	CMAKE_ARGS="$(LLAMA_CMAKE_ARGS)" $(PIP) -r $(LLAMA)
	touch $@

check: $(VENV)/.stamp-dev
	$(BIN)/python -m ruff check
	$(BIN)/python -m mypy

test: setup check
	$(BIN)/python -m pytest -q

demo: $(VENV)/.stamp-package
	$(BIN)/python tools/demo.py $(ARGS)

bench: $(VENV)/.stamp-package
	$(BIN)/python benchmarks/convert.py $(ARGS)

clean:
	rm -rf build dist demo benchmarks/work *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find mcpq_gguf tools tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
