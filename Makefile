# The developers' doors. CI goes through the same ones: .ci/run.
# They use .venv where there is one; another Python with `make PYTHON=...`.
export PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

.PHONY: format check test test-dist test-shapes docs bench

format:  ## rewrite the code as ruff wants it
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

check:  ## ruff, and mypy against the installed wheel
	bash .ci/check

test:  ## all tests
	$(PYTHON) -m pytest

test-dist:  ## the tests that run in several processes
	$(PYTHON) -m pytest -m distributed

test-shapes:  ## the core's tests, with every shape and type checked at run time
	bash .ci/shapes

docs:  ## build the documentation into site/
	$(PYTHON) -m mkdocs build --strict

bench:  ## speed and memory, each one table
	$(PYTHON) benchmarks/losses.py
	$(PYTHON) benchmarks/metrics.py
	$(PYTHON) benchmarks/large_batch.py
	$(PYTHON) benchmarks/ddp.py
	$(PYTHON) benchmarks/samplers.py
	$(PYTHON) benchmarks/data.py
	$(PYTHON) benchmarks/search.py
