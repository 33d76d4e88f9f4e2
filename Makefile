# make demo   set up, then compare mechanisms on Python's standard library for about five minutes and write a report
# make check  set up, then style, types, import layers and the core laws in eager mode: for the inner loop
# make test   set up, then everything make check does and every test
# make docs   set up, then build the documentation into site/
# make bench  set up, then run the speed benchmarks and fill in the tables of docs/speed.md and README.md (BENCH=--quick)
.PHONY: demo check test docs bench style types layers laws tests compiled interpreted clean
.DEFAULT_GOAL := demo

python := .venv/bin/python
# One torch thread per worker: more would compete for the cores, and results depend on the number in the last bits.
# CI=true: torch then raises where it otherwise warns (a custom operator that returns the same tensor twice).
# Bytecode is cached even where the environment says otherwise: the tests start many processes.
pytest := PYTHONDONTWRITEBYTECODE= CI=true OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(python) -m pytest -n auto --dist worksteal

demo:
	@tools/setup.sh run
	@rm -rf runs/demo
	@$(python) -m qkflow compare --arms standard,coupled,differential,qdelta,kuramoto --budget 5m $(DEMO) --out runs/demo

check: style types layers laws

test: style types layers tests compiled interpreted

style: .setup
	$(python) -m ruff format --check .
	$(python) -m ruff check .

types: .setup
	$(python) -m basedpyright

layers: .setup
	$(python) -c "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"

laws: .setup
	$(pytest) -m "not compiled and not interpreted" tests/laws

# Shape annotations are checked at run time.
tests: .setup
	$(pytest) -m "not compiled and not interpreted" --jaxtyping-packages=qkflow,beartype.beartype

# Without shape checks, which would break the graphs. Only files with such tests are imported.
compiled: .setup
	$(pytest) -m compiled $$(grep -rl --include='*.py' 'mark\.compiled' tests)

# Triton kernels in the interpreter, on a CPU.
interpreted: .setup
	TRITON_INTERPRET=1 $(pytest) -m interpreted tests/laws tests/unit/ops

docs: .setup
	$(python) -m zensical build --clean --strict

# Other processes on the machine distort the results: see the column "control" of the tables.
bench:
	@tools/setup.sh bench
	$(python) benchmarks/run_all.py $(BENCH)

.PHONY: .setup
.setup:
	@tools/setup.sh dev

clean:
	rm -rf .venv runs dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
