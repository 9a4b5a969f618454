PYTHON ?= python3
# Another Python has an environment of its own, such as .venv-usr-bin-python3.11.
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(subst /,-,$(PYTHON:/%=%)))

.PHONY: install lint test bench chaos

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,lint]'
	touch $(VENV)/installed

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/basedpyright --pythonpath $(VENV)/bin/python

test: install
	$(VENV)/bin/python -m pytest

bench: install
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	$(VENV)/bin/python -m benchmarks

chaos: install
	$(VENV)/bin/python -m tests.chaos
