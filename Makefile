# Firnline: `make demo` shows it, `make test` proves it; both install what they need into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo demo-cdc test lint bench proof coverage docs dist install clean

help:  ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt scripts/ensure_java.sh
	@bash scripts/ensure_java.sh
	@echo "installing into $(VENV) (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench,docs,kafka,mysql,openlineage,otel,postgres,redis,serve]'
	@echo "preparing the decoder and Spark (once)"
	@$(BIN)/firnline prepare
	@touch $@

install: $(STAMP)  ## Install Firnline and its tools into .venv

demo: $(STAMP)  ## Ingest 200,000 records, kill the pipeline in mid-run, resume, count
	@$(BIN)/firnline demo

demo-cdc: $(STAMP)  ## Capture a PostgreSQL database that is being written, kill the pipeline twice, compare
	@bash scripts/ensure_servers.sh postgres
	@$(BIN)/python scripts/demo_cdc.py

test: $(STAMP)  ## Run all tests
	@$(BIN)/python scripts/run_tests.py

lint: $(STAMP)  ## Check style, types and imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(STAMP)  ## Measure, side by side with Spark Structured Streaming + Delta; writes bench-results.json
	@$(BIN)/python -m benchmarks

proof: $(STAMP)  ## The long versions of the searches, kills and soaks; records them in docs/how-it-is-tested.md
	@FIRNLINE_PROOF=1 $(BIN)/python scripts/run_tests.py --record --timeout 3600

coverage: $(STAMP)  ## Branch coverage of what needs no Spark
	@$(BIN)/coverage run --branch --source src/firnline -m pytest tests -m 'not spark' -q
	@$(BIN)/coverage report --skip-covered

docs: $(STAMP)  ## Build the docs into site/; a broken link or a page without a place fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html; with search: $(BIN)/python -m http.server -d site 8000"

dist: $(STAMP)  ## Build wheel and sdist into dist/
	@$(BIN)/python -m hatchling build

clean:  ## Remove what was installed and generated
	rm -rf $(VENV) demo demo-cdc site dist bench-results.json .pytest_cache .mypy_cache .ruff_cache .hypothesis
