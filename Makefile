# make run: the main job. make test: every test. Both create .venv on first use.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP = $(PY) -m pip --quiet --disable-pip-version-check
ARGS ?= method=snapkv+think ratio=0.4
KILLS ?= 100

# for test-newest, test-oldest and test-5.23: the torch, the tests, and the releases that are not the newest
TORCH ?= torch==2.13.0
TESTS ?= tests
RELEASES_oldest = $(shell $(PYTHON) scripts/oldest.py)
RELEASES_5.23 = 'transformers==5.23.*'

# threads that spin long while they wait slow a shared machine down (make bench-shared)
export GOMP_SPINCOUNT ?= 2000

# without compiled files each of the many processes that tests start would compile kvbench anew
unexport PYTHONDONTWRITEBYTECODE

DATA ?= $(or $(KVBENCH_DATA),data)
REAL ?= smollm2-135m-q4_1
SECOND := gemma3-270m-q4_k_m
# the folders of measured suites: those with rows
SUITES = $(patsubst %/results.jsonl,%,$(shell find results/suite -name results.jsonl 2>/dev/null))
WITHOUT ?=

.PHONY: help run run-real test test-skipped test-fast test-newest test-oldest test-5.23 packages-newest packages-oldest packages-5.23 test-peers torture check smoke bench-overhead bench-tables bench-memory bench-resident bench-shared bench-reading bench-growth bench-speed bench-bytes bench-time bench-decode bench-tiny verify-tables verify-suite verify-docs mutants docs card tables tables-real tables-quick tables-formats claims claims-real report audit clean

help:  ## what there is to make
	@awk -F ':.*## ' '/^##@/ { print "\n" substr($$0, 5) } /^[a-z0-9.-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.ready  ## the main job, a minute; another one with ARGS="method=full,h2o kv_size=64,128"
	$(PY) -m kvbench run $(ARGS)

run-real: $(VENV)/.ready  ## a pretrained model on LongBench's prompts, fetched once (DATA=folder REAL=model); six minutes
	$(PY) -m kvbench model fetch $(REAL)
	@test -e $(DATA)/longbench_mini || $(PY) -m kvbench data fetch longbench_mini data.root=$(DATA)
	$(PY) -m kvbench run model=$(REAL) method=snapkv+think,snapkv,h2o,streamingllm ratio=0.4 prompt=longbench max_length=2000 limit=16 \
	  dataset=longbench_mini/multifieldqa_en,longbench_mini/2wikimqa,longbench_mini/triviaqa,longbench_mini/samsum,longbench_mini/lcc \
	  data.root=$(DATA)

test: $(VENV)/.ready  ## all tests, one process a core
	$(PY) -m pytest -n logical --dist worksteal

test-skipped: $(VENV)/.ready  ## the tests that the last run skipped, now that the model, data or a package is there
	$(PY) -m pytest -n logical --dist worksteal --skipped

test-fast: $(VENV)/.ready  ## tests of single parts: no whole runs, processes or pictures
	$(PY) -m pytest -n logical --dist worksteal -m "not e2e"

check: $(VENV)/.ready  ## lint, format, types, and imports that go down only
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

docs: $(VENV)/.ready  ## the documentation site, in site/; strict: no broken link
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build  # --quiet would also silence strict

##@ Tables, claims and pages

tables-quick: $(VENV)/.ready  ## one paper's table on the tiny model, in a minute or two
	$(PY) -m kvbench table uncomp/2 limit=8

tables: $(VENV)/.ready  ## the papers' tables on the tiny model (results/tiny); 17 minutes on two cores
	$(PY) scripts/paper_tables.py

tables-real: $(VENV)/.ready  ## the same on a pretrained model and the papers' data (DATA=folder; results/tables); hours
	$(PY) -m kvbench model fetch $(REAL)
	KVBENCH_DATA=$(DATA) $(PY) scripts/paper_tables.py --model $(REAL)

claims: $(VENV)/.ready  ## what the papers claim, tested on the tiny model (results/claims)
	$(PY) scripts/paper_claims.py

claims-real: $(VENV)/.ready  ## the same on a pretrained model and the papers' data (DATA=folder); hours
	$(PY) -m kvbench model fetch $(REAL)
	KVBENCH_DATA=$(DATA) $(PY) scripts/paper_claims.py --model $(REAL)

audit: $(VENV)/.ready  ## where the papers' printed numbers contradict themselves
	$(PY) -m kvbench audit all

report: $(VENV)/.ready  ## everything on one HTML page, report.html
	$(PY) -m kvbench report papers=true samples=1

tables-formats: $(VENV)/.ready  ## what each cache format keeps of the answers, on both models (DATA=folder); two hours
	KVBENCH_DATA=$(DATA) $(PY) scripts/format_tables.py

bench-tiny: $(VENV)/.ready  ## measure the committed tables of the tiny suite (results/tiny)
	$(PY) scripts/tiny_table.py

card: $(VENV)/.ready  ## recompute the tiny model's card
	$(PY) scripts/train_tiny.py --card-only

##@ Checks of what is committed

smoke: $(VENV)/.ready  ## the main job on two examples a task
	$(PY) -m kvbench run $(ARGS) limit=2

verify-tables: $(VENV)/.ready  ## make committed tables again from samples (DATA=folder; WITHOUT=data,model may be missing)
	$(PY) -m kvbench model fetch $(REAL) $(SECOND) || true  # the tables that need one that cannot be had are named
	$(if $(wildcard $(DATA)),KVBENCH_DATA=$(DATA)) $(PY) scripts/verify_tables.py --without "$(WITHOUT)"

verify-docs: $(VENV)/.ready  ## every number of README and results/README stands in a file that it links to
	$(PY) scripts/verify_docs.py

verify-suite: $(VENV)/.ready  ## check every folder below results/suite, number by number (DATA=folder; TEXTS=--without-texts without)
	$(if $(SUITES),$(if $(wildcard $(DATA)),KVBENCH_DATA=$(DATA)) $(PY) -m kvbench verify $(TEXTS) $(SUITES),@echo "no folder below results/suite")

mutants: $(VENV)/.ready  ## small mistakes put into the code, each of which a fast test must notice; six minutes
	$(PY) scripts/mutants.py

torture: $(VENV)/.ready  ## 100 kills and one full disk: nothing lost, nothing doubled; fewer with KILLS=10
	$(PY) scripts/torture.py --kills $(KILLS)

##@ Other releases and libraries

test-newest:  ## all tests and lm-eval's, with the newest release of all but torch; a part with TESTS=tests/cli
test-oldest:  ## the same with the oldest releases that pyproject.toml allows
test-5.23:  ## the same with the last transformers that calls a cache past_key_values
test-newest test-oldest test-5.23: test-%: packages-%
	.venv-$*/bin/python -m pytest -n logical --dist worksteal $(TESTS)

packages-newest packages-oldest packages-5.23: packages-%:
	test -e .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade --upgrade-strategy eager \
	  -e '.[dev,lm-eval]' '$(TORCH)' $(RELEASES_$*)

test-peers: .venv-peers/.ready  ## the same tokens as kvpress and scores as lm-eval, in an environment of its own
	.venv-peers/bin/python -m pytest tests/peers

.venv-peers/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev,peers,lm-eval]' '$(TORCH)'
	@touch $@

##@ Benchmarks, with nothing else running

bench-time: $(VENV)/.ready  ## time, throughput and peaks end to end; other rows with BENCH="method=full,h2o"
	$(PY) -m kvbench bench time $(BENCH)

bench-memory: $(VENV)/.ready  ## memory of a long prefill (H2O over SnapKV; every method by length) and of a long answer
	$(PY) scripts/bench/memory.py prefill
	$(PY) scripts/bench/memory.py decode
	$(PY) scripts/bench/memory.py long

bench-resident: $(VENV)/.ready  ## resident memory of 64 caches, idle and while they decode, against the accounted bytes
	$(PY) scripts/bench/resident.py
	$(PY) scripts/bench/resident.py --decode 256

bench-bytes: $(VENV)/.ready  ## bytes of every method beside its formula; another model with BENCH="model=llama2-7b n=4096"
	$(PY) -m kvbench bench memory $(BENCH)

bench-decode: $(VENV)/.ready  ## attention of one decode step by storage format, over the full cache's
	$(PY) scripts/bench/decode.py

bench-overhead: $(VENV)/.ready  ## cost of running through kvbench, as ratios
	$(PY) scripts/bench/tables.py --part overhead --examples 16 --repeats 5 --threads 1

bench-tables: $(VENV)/.ready .venv-peers/.ready  ## a whole table at once, over its rows one by one and over kvpress (DATA=folder)
	$(PY) scripts/bench/tables.py --peers .venv-peers/bin/python
	KVBENCH_DATA=$(DATA) $(PY) scripts/bench/real_table.py --peers .venv-peers/bin/python

bench-reading: $(VENV)/.ready  ## what statistics, bfloat16 and several prompts at once add to the pass over a prompt
	$(PY) scripts/bench/reading.py

bench-speed: $(VENV)/.ready .venv-peers/.ready  ## curves over rows, tokens and new tokens beside kvpress: results/figures/speed.png (DATA=folder)
	KVBENCH_DATA=$(DATA) $(PY) scripts/bench/speed_curves.py --peers .venv-peers/bin/python

bench-growth: $(VENV)/.ready  ## how time and memory of a run grow with methods, prompts, their length and new tokens
	$(PY) scripts/bench/growth.py

bench-shared: $(VENV)/.ready  ## a table beside a busy process, over the same alone
	$(PY) scripts/bench/shared.py

##@ Housekeeping

$(VENV)/.ready: pyproject.toml constraints.txt kernels/setup.py kernels/kvbench_kernels/packed.c
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else f"kvbench needs Python 3.11 to 3.13, {sys.executable} is {v.major}.{v.minor}: make run PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@# the C functions are compiled while the other packages are fetched; Python compiles the modules that are imported,
	@# and pip would compile all 20,000 files, which takes a minute
	@if command -v $${CC:-cc} > /dev/null; then \
	    $(PIP) wheel --no-deps --wheel-dir $(VENV)/wheels ./kernels & compiling=$$!; \
	    $(PIP) install --no-compile -c constraints.txt -e '.[dev]' && wait $$compiling && $(PIP) install --no-compile $(VENV)/wheels/*.whl; \
	  else \
	    $(PIP) install --no-compile -c constraints.txt -e '.[dev]' && \
	    echo 'no C compiler: kvbench-kernels, which speeds up decoding on a CPU, is left out'; \
	  fi
	@touch $@

clean:  ## remove the environment and caches; results stay
	rm -rf $(VENV) .venv-newest .venv-oldest .venv-5.23 .pytest_cache .mypy_cache .ruff_cache build dist
