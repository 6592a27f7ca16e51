# make quickstart   set up and run the main job: demonstrations -> imitation -> PPO, with success before and after
# make test         set up and run the tests
SEED ?= 0
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: setup system vulkan quickstart test lint docs clean

setup: system $(STAMP) vulkan

system:
	@bash requirements/system.sh

vulkan: $(STAMP)
	@bash requirements/vulkan.sh $(VENV)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[metaworld,calvin,maniskill,ray,dev]'
	@touch $@

quickstart: setup
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

clean:
	rm -rf $(VENV) build *.egg-info
