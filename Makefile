# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo
SEED ?= 0
MINUTES ?= 20

.PHONY: help demo test install pytest coverage nightly soak frameworks launchers triton lowest lint bench headline \
  gpu wheels docs api dist clean
help:  ## show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Modules are compiled when they are first imported: compiling all of torch takes half a minute.
export PYTHONDONTWRITEBYTECODE :=

define install
	.ci/prerequisites $(PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  -c constraints.txt -e '.[$(1)]'
endef

# Everything a user of the library and the command line needs.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(call install,all)
	touch $@

# The same, and the tools of the checks.
$(VENV)/.dev: pyproject.toml constraints.txt
	$(call install,dev)
	touch $(VENV)/.demo $@

$(VENV)/.docs: $(VENV)/.demo
	$(call install,docs)
	touch $@

demo: $(VENV)/.demo  ## train digits under five strategies on 4 workers, about 2 minutes
	@link="$$($(BIN)/python -m offbeat_lab.launch.cluster 100Mbit/s)"; \
	set -- $(BIN)/offbeat compare digits --workers 4 --output $(DEMO) $$link \
	  -s bsp -s local:period=8 -s selsync:target_lssr=0.9 -s async:staleness=32 -s streaming; \
	echo "$$*"; "$$@"

test:  ## all checks: lint, types, tests
	@MAKE='$(MAKE)' .ci/timed install 'lint pytest'

install: $(VENV)/.dev

pytest: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not quiet and not nightly and not pages"

# Takes half as long again as `make pytest`: Python 3.11 has no cheap way to trace lines.
coverage: $(VENV)/.dev  ## the tests of `make test`, and the lines of src that they do not run
	rm -f .coverage .coverage.*
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -n 2 --dist worksteal \
	  -m "not quiet and not nightly and not pages"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=miss

# Measurements run one after the other. Collecting all files takes longer than running these.
nightly: $(VENV)/.dev  ## more cells, the tests of values on real processes, measured rates and times
	$(BIN)/python -m pytest -n 2 -m "not quiet" --world gloo --hypothesis-profile nightly
	$(BIN)/python -m pytest -m quiet $$(grep -rl mark.quiet tests)

soak: $(VENV)/.dev  ## random faults in trainings under `offbeat run`, for MINUTES=20, from SEED=0
	mkdir -p runs
	$(BIN)/python -m benchmarks.launched.soak --seed $(SEED) --minutes $(MINUTES) --output runs/launched.jsonl

# An environment of its own.
FRAMEWORKS := opacus peft pytorch-ignite skorch schedulefree pytorch_optimizer torchao bitsandbytes \
  mlflow-skinny
frameworks:  ## the tests with the real frameworks: Trainer, Lightning, Accelerate and others
	test -x .venv-frameworks/bin/python || $(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  -c constraints.txt -e '.[transformers,lightning,wandb]' $(FRAMEWORKS) pytest pytest-timeout
	.venv-frameworks/bin/python -m pytest tests/frameworks

# An environment of its own. Namespaces need root; Slurm needs its packages, which `try` names.
LAUNCHERS := examples/launchers
launchers:  ## try torchrun on two machines, Slurm, Ray, Kubernetes' manifests
	test -x .venv-launchers/bin/python || $(PYTHON) -m venv .venv-launchers
	.venv-launchers/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  -c constraints.txt -e '.[lab]' 'ray[train]' kubernetes kubeflow-training pyyaml
	.venv-launchers/bin/python $(LAUNCHERS)/kubernetes/check.py $(LAUNCHERS)/kubernetes/*.yaml
	.venv-launchers/bin/python $(LAUNCHERS)/ray/train.py
	.venv-launchers/bin/python $(LAUNCHERS)/ray/elastic.py --kill 10
	.venv-launchers/bin/python $(LAUNCHERS)/torchrun/two_machines.py
	PATH="$$PWD/.venv-launchers/bin:$$PATH" $(LAUNCHERS)/slurm/try

# An environment of its own. Triton's interpreter and its compiler need no GPU.
triton:  ## the Triton kernels in Triton's interpreter, and a look at what the compiler makes of them
	test -x .venv-triton/bin/python || $(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  -c constraints.txt -e '.[fast]' pytest pytest-timeout pytest-xdist hypothesis
	.venv-triton/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.7.1
	TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest tests/quantization/test_triton.py
	.venv-triton/bin/python -m pytest tests/quantization/test_triton_compiled.py

# An environment of its own, with the torch of the machine. Without a network there, run `make wheels`
# first on a machine that has one, and copy the folder.
GPU_PACKAGES := pytest pytest-timeout hypothesis sortedcontainers iniconfig pluggy packaging pygments
wheels:  ## fetch the packages of `make gpu` for Python 3.12 into wheels/
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 -d wheels $(GPU_PACKAGES)

gpu:  ## on a machine with a GPU: tests of values and costs of a step, at most ten minutes
	test -x .venv-gpu/bin/python || $(PYTHON) -m venv --system-site-packages .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  $(if $(wildcard wheels),--no-index --no-deps --find-links wheels) $(GPU_PACKAGES)
	.venv-gpu/bin/python -c "import torch; exit(0 if torch.cuda.is_available() else 'make gpu: torch sees no GPU')"
	PYTHONPATH=src timeout 240 .venv-gpu/bin/python -m pytest -q -m cuda tests/device
	PYTHONPATH=src timeout 340 .venv-gpu/bin/python -m benchmarks gpu

# The torch of that version on PyPI is the one with CUDA, for Linux: some gigabytes.
# click and pyparsing are those of the time: newer ones warn of the calls of these.
LOWEST := torch==2.9.0 numpy==1.26.0 typing-extensions==4.10.0 typer==0.19.2 rich==13.0.0 \
  click==8.1.8 jinja2==3.1.0 matplotlib==3.8.0 pyparsing==3.1.0
CORE := tests/cli/test_cli_lists.py tests/averaging tests/simulate \
  tests/strategies/test_conformance.py tests/training/test_attach.py \
  tests/checkpoint/test_checkpoints.py tests/training/test_clipping.py tests/training/test_ddp.py \
  tests/training/test_hooks.py tests/training/test_optimizers.py
lowest:  ## the core of the tests with the lowest versions that pyproject.toml allows
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  -e . $(LOWEST) pytest pytest-timeout pytest-xdist hypothesis
	.venv-lowest/bin/python -m pytest -m "not quiet and not nightly" $(CORE)

lint: $(VENV)/.dev  ## ruff, mypy and codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

bench: $(VENV)/.dev  ## every benchmark, as ratios; appends to benchmarks/results
	$(BIN)/python -m benchmarks

headline: $(VENV)/.dev  ## tuned comparisons in virtual time, half an hour for each of CELLS="cnn 50Mbit"; resumes
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.race.run headline $(CELLS)

docs: $(VENV)/.docs $(VENV)/.dev  ## run the code on the pages, build the documentation into site/
	$(BIN)/python -m pytest -n 2 -m "pages and not nightly" tests/docs tests/benchmarking
	$(BIN)/mkdocs build --strict

api: $(VENV)/.dev  ## record the public names and signatures, after an intended change
	$(BIN)/python tests/public_api.py

dist: $(VENV)/.dev  ## build wheel and sdist into dist/, check both, and train with the wheel
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/check-wheel dist/*.whl
	.ci/try-wheel $(BIN)/python dist/*.whl

clean:  ## remove what the other targets made, results of runs excepted
	rm -rf $(VENV) .venv-frameworks .venv-launchers .venv-triton .venv-lowest .venv-gpu wheels site .pytest_cache .mypy_cache .ruff_cache .hypothesis
