# make quickstart   set up what the main job needs, and run it: demonstrations -> imitation -> PPO, success before and after
# make setup        every simulator, logger and tool
# make test         set up and run the tests
SEED ?= 0
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt
STAMP := $(VENV)/.installed
LIGHT := $(VENV)/.quickstart

.PHONY: setup python system vulkan quickstart test lint docs clean

setup: python system $(STAMP) vulkan

python:
	@bash requirements/python.sh $(if $(wildcard $(PY)),$(PY),$(PYTHON))

system: python
	@bash requirements/system.sh

vulkan: $(STAMP)
	@bash requirements/vulkan.sh $(VENV)

$(STAMP): pyproject.toml constraints.txt | python
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[metaworld,calvin,maniskill,ray,dev]'
	@touch $@ $(LIGHT)

# Where everything is installed already, it is kept up to date as a whole.
$(LIGHT): pyproject.toml constraints.txt | python
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[quickstart]'
	@touch $@

quickstart: python system $(if $(wildcard $(STAMP)),$(STAMP),$(LIGHT))
	$(VENV)/bin/rlinf quickstart --seed $(SEED)

test: setup lint
	$(PY) -m pytest -q -n 2 --dist loadgroup -m "not slow and not gpu"

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(VENV)/bin/codespell rlinf tests docs benchmarks tools requirements examples docker *.md
	$(VENV)/bin/vulture
	$(VENV)/bin/shellcheck -s bash -S warning requirements/*.sh requirements/envs/*.sh examples/embodiment/*.sh docker/switch_env
	$(VENV)/bin/hadolint docker/Dockerfile

docs: $(STAMP)
	$(PY) -m rlinf.metrics.names > docs/metrics.md
	$(PY) -m rlinf.commands.key_reference > docs/config.md
	$(PY) -m rlinf.commands.compat_page docs/compat.md
	$(PY) -m rlinf.commands.results_page results docs

clean:
	rm -rf $(VENV) build *.egg-info
