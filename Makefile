# The commands of developers; CI runs the same ones: .ci/run.
# They use .venv if there is one. Choose another Python with `make PYTHON=...`.
export PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

.PHONY: format check test test-examples test-fast test-dist test-shapes test-lightning test-windows test-lowest test-everything docs bench

format:  ## format the code with ruff
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

check:  ## ruff, and mypy against the installed wheel
	bash .ci/check

test:  ## the tests of the library, on two processes
	$(PYTHON) -m pytest -n 2 --dist loadfile

test-examples:  ## the code of the documents, notebooks, examples and the papers' configs, on two processes
	$(PYTHON) -m pytest -n 2 --dist worksteal tests/examples

test-fast:  ## the tests of the library without the slow ones, on two processes, as README's test command
	$(PYTHON) -m pytest -n 2 --dist loadfile -m "not slow"

test-dist:  ## the tests that run in several processes
	$(PYTHON) -m pytest -m distributed

test-shapes:  ## losses, ranking, metrics and chunked backward with every shape and type checked at run time
	bash .ci/shapes

test-lightning:  ## a training and a command, with the package lightning
	bash .ci/either_lightning

test-windows:  ## tests in processes that behave as on Windows
	bash .ci/windows

test-lowest:  ## the main example, losses, metrics, callbacks and data modules, with the oldest versions of setup.cfg
	bash .ci/lowest

test-everything: test test-examples test-windows  ## all tests in all ways, as in each night
	bash .ci/shapes everything
	bash .ci/either_lightning everything
	bash .ci/lowest everything

docs:  ## build the documentation into site/
	$(PYTHON) -m mkdocs build --strict

bench:  ## speed and memory: each benchmark prints a table
	$(PYTHON) benchmarks/losses.py
	$(PYTHON) benchmarks/metrics.py
	$(PYTHON) benchmarks/large_batch.py
	$(PYTHON) benchmarks/detection.py
	$(PYTHON) benchmarks/ddp.py
	$(PYTHON) benchmarks/gradient_sum.py
	$(PYTHON) benchmarks/step.py
	$(PYTHON) benchmarks/samplers.py
	$(PYTHON) benchmarks/images.py
	$(PYTHON) benchmarks/search.py
