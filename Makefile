# Everything runs from .venv, which need not be activated.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# cpu or cuda: which build of FBGEMM to install. `make install FLAVOUR=cuda` overrides what is found.
FLAVOUR ?= $(shell if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then echo cuda; else echo cpu; fi)

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
STAMP := $(VENV)/installed-$(FLAVOUR)
# FBGEMM's other flavour, which would overwrite files of this one.
OTHER_FBGEMM := $(if $(filter cuda,$(FLAVOUR)),fbgemm-gpu-cpu,fbgemm-gpu)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all coverage format docs lock clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-10s  %s\n' "$$name" "$$text"; done

install: $(STAMP) ## Set up .venv (FLAVOUR=cpu or cuda; found by nvidia-smi)

$(STAMP): pyproject.toml $(wildcard requirements/*.txt) $(wildcard autoshard/planners/hybrid/compiled/*.[ch])
	@case "$(FLAVOUR)" in cpu|cuda) ;; *) echo "FLAVOUR is cpu or cuda, not '$(FLAVOUR)'" >&2; exit 2;; esac
	@if ! $(PIP) --version >/dev/null 2>&1; then \
		"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
			|| { echo "Python 3.11 or newer is needed: make install PYTHON=/path/to/python3.11" >&2; exit 2; }; \
		rm -f $(VENV)/bin/python*; "$(PYTHON)" -m venv $(VENV); fi
	@if [ -n "$$($(PIP) list --format freeze 2>/dev/null | tr _ - | grep -i '^$(OTHER_FBGEMM)==')" ]; then \
		$(PIP) uninstall --yes fbgemm-gpu fbgemm-gpu-cpu; fi
	$(PIP) install -r requirements/$(FLAVOUR).txt -r requirements/dev.txt
	$(PIP) install --no-deps -r requirements/no-deps.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/installed-*
	@touch $@

demo: install ## Show what it does, on a small example (writes demo/)
	scripts/demo

test: install ## Run every check: ruff, mypy, import-linter, pytest
	scripts/test

test-all: install ## Run every check and every test, also those that take minutes
	scripts/test -m "slow or not slow"

coverage: install ## Measure which branches the tests take, also in the processes that they start
	scripts/coverage

format: install ## Format the code and apply ruff's safe fixes
	$(VENV)/bin/python -m ruff check --fix-only .
	$(VENV)/bin/python -m ruff format .

docs: install ## Write the generated pages and pictures of docs/, the compiled search's header, and the site into site/
	$(VENV)/bin/python -m scripts.reference_pages
	$(VENV)/bin/python -m scripts.compiled_header
	$(VENV)/bin/python -m scripts.drawings
	$(PIP) install -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

lock: ## Remake the lock files in requirements/ from pyproject.toml (UPGRADE=1: newest versions)
	scripts/lock $(if $(UPGRADE),--upgrade) "$(PYTHON)"

clean: ## Remove .venv, caches and build outputs
	rm -rf $(VENV) build dist demo site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f autoshard/planners/hybrid/compiled/_search*.so
