# Two commands on a fresh machine with Python >= 3.11: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check claims zoo lint bench docs clean

demo: .venv/installed  ## train one network on digits twice, lazily and richly, and write their report: a minute
	$(BIN)/richter demo

test: .venv/installed-dev  ## all tests but the long ones: about 8 minutes on two free cores
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: .venv/installed-dev lint  ## before a change is done: linters, long tests, every experiment (15 CPU-minutes) and its controls (more)
	SHAPES=all $(BIN)/python -m pytest -n 2 --dist worksteal -m "long or not long"
	$(BIN)/richter check --controls
	$(BIN)/richter check --start

claims: .venv/installed-dev  ## docs/claims.md from the records of the experiments: seconds
	$(BIN)/richter ledger -o docs/claims.md

zoo: .venv/installed-dev  ## docs/architectures.md from every architecture of the tests beside brute force: a minute
	$(BIN)/python docs/architectures.py

lint: .venv/installed-dev  ## ruff and mypy: a minute
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/mypy

bench: .venv/installed-dev  ## what it costs, as ratios within one run: about an hour and a half on two free cores
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/snapshot.py
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/memory.py
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/growth.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/growth.py observed --figure growth_observed.png
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/estimates.py
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/curvature.py
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[peers]'
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/slo.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/learners.py
	$(BIN)/python benchmarks/ofe.py
	$(BIN)/python benchmarks/agf.py
	$(BIN)/python benchmarks/parity.py

docs: .venv/installed-dev  ## docs/*.md and the reference as pages under site/, which need no server and no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dashboard]'
	touch $@

.venv/installed-dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ .venv/installed

clean:
	rm -rf .venv site build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
