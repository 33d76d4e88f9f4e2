# make demo: set up, then compare mechanisms on Python's own library for about five minutes, and write one page
# make test: set up, then check style, types, import directions, and every test
# make docs: set up, then build the documentation into site/
.PHONY: demo test docs style types layers tests compiled interpreted clean
.DEFAULT_GOAL := demo

python := .venv/bin/python
# one torch thread a worker: more would fight over the cores, and bits depend on their number;
# CI=true, as there: torch is stricter then (an operator that returns one tensor twice is an error, not a warning)
pytest := CI=true OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(python) -m pytest -n auto

demo:
	@tools/setup.sh run
	@rm -rf runs/demo
	@$(python) -m qkflow compare --arms standard,coupled,standard+affine,differential,gated-deltanet,qdelta,kuramoto,kuramoto:frustrated=True --seeds 3 --budget 6m --out runs/demo

test: style types layers tests compiled interpreted

style: .setup
	$(python) -m ruff format --check .
	$(python) -m ruff check .

types: .setup
	$(python) -m basedpyright

layers: .setup
	$(python) -c "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"

# with every shape annotation checked at run time
tests: .setup
	$(pytest) -m "not compiled and not interpreted" --jaxtyping-packages=qkflow,beartype.beartype

# without them: a check inside a graph would break it
compiled: .setup
	$(pytest) -m compiled tests

# kernels for GPUs, on a CPU
interpreted: .setup
	TRITON_INTERPRET=1 $(pytest) -m interpreted tests/laws tests/unit/ops

docs: .setup
	$(python) -m zensical build --clean --strict

.PHONY: .setup
.setup:
	@tools/setup.sh dev

clean:
	rm -rf .venv runs dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
