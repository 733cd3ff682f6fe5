# requant: `make demo` and `make test` need git, make and Python 3.11+; each makes .venv by itself.

PYTHON   ?= python3
VENV     ?= .venv
DEMO_OUT ?= out/demo
JOBS     ?= 2

BIN       := $(VENV)/bin
INSTALL   := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
DEMO_ENV  := $(VENV)/.stamp-demo
DEV_ENV   := $(VENV)/.stamp-dev
EVAL_VENV := $(VENV)-eval
EVAL_ENV  := $(EVAL_VENV)/.stamp-eval
SERVE_VENV := $(VENV)-serve
SERVE_ENV := $(SERVE_VENV)/.stamp-serve
LOADER_VENV := $(VENV)-transformers
LOADER_ENV := $(LOADER_VENV)/.stamp-transformers
RAY_ENV   := $(VENV)/.stamp-ray
OBJECTS_ENV := $(VENV)/.stamp-objects
MODEL     := $(DEMO_OUT)/SmolLM2-135M-Instruct

.DEFAULT_GOAL := help
.PHONY: help demo test test-ray test-objects test-eval test-serve transformers lint types pytest format build clean

help:
	@echo 'make demo     SmolLM2-135M: BF16 -> MXFP4 -> NVFP4, each signed off (downloads 93 MB once)'
	@echo 'make test     lint, types, tests, README commands, wheel + sdist + editable install: what CI runs'
	@echo 'make test-ray the engine ray on clusters of several nodes (installs Ray, 240 MB)'
	@echo 'make test-objects  sources and outputs on an S3 server (installs s3fs, gcsfs and moto, 300 MB)'
	@echo 'make test-eval  the tests that need transformers, in .venv-eval'
	@echo 'make transformers  .venv-transformers, with which make test loads outputs in transformers, too'
	@echo 'make test-serve  the tests that start a real server, in .venv-serve'
	@echo 'make lint | types | pytest | format | build | clean'
	@echo 'PYTHON=$(PYTHON) VENV=$(VENV) DEMO_OUT=$(DEMO_OUT) JOBS=$(JOBS)'

# The main job on real weights. The folder is made anew each time; the download is cached.
demo: $(DEMO_ENV)
	rm -rf $(DEMO_OUT)
	$(BIN)/python -m requant.convert.smollm2 $(MODEL)
	REQUANT_OUT=$(DEMO_OUT) $(BIN)/convert manifests/examples/smollm2-mxfp4.yaml
	REQUANT_OUT=$(DEMO_OUT) $(BIN)/convert manifests/examples/smollm2-nvfp4.yaml

# pytest comes last, so that its summary closes the output.
test: lint types pytest

lint: $(DEV_ENV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_ENV)
	$(BIN)/basedpyright --pythonpath $(BIN)/python

pytest: $(DEV_ENV)
	$(BIN)/pytest -n $(JOBS) --dist loadgroup $(ARGS)

# Apart from `test`: Ray takes 240 MB, and its clusters ten minutes.
test-ray: $(RAY_ENV)
	$(BIN)/pytest -m ray tests/ray $(ARGS)

# Apart from `test`: the S3 server is an AWS of its own, and what breaks is waited out.
test-objects: $(OBJECTS_ENV)
	$(BIN)/pytest -m objects tests/objects $(ARGS)

# Models that run: an environment of its own, since transformers changes often and brings much.
test-eval: $(EVAL_ENV)
	$(EVAL_VENV)/bin/python -m pytest tests/model $(ARGS)

# transformers and compressed-tensors on the PyTorch of the tests, for the tests that load what was written:
# REQUANT_TRANSFORMERS_PYTHON=.venv-transformers/bin/python make test
transformers: $(LOADER_ENV)

# A real server under a real load: `transformers serve` and guidellm, in an environment of their own.
test-serve: $(SERVE_ENV)
	$(SERVE_VENV)/bin/python -m pytest tests/serve $(ARGS)

format: $(DEV_ENV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: $(DEV_ENV)
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) $(EVAL_VENV) $(SERVE_VENV) $(LOADER_VENV) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'requant needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(DEMO_ENV): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[demo]'
	@touch $@

$(DEV_ENV): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev]'
	@touch $@

$(RAY_ENV): $(DEV_ENV)
	$(INSTALL) '.[dev,ray,objects,objects-test]'
	@touch $@

$(OBJECTS_ENV): $(DEV_ENV)
	$(INSTALL) '.[dev,objects,objects-test]'
	@touch $@

$(EVAL_ENV): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(EVAL_VENV)
	$(EVAL_VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[eval,demo]' 'pytest>=8.3' 'hypothesis>=6.130'
	@touch $@

$(LOADER_ENV): $(DEV_ENV)
	$(BIN)/python -m venv $(LOADER_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(LOADER_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	$(LOADER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  'transformers>=5.24' 'compressed-tensors>=0.20' 'accelerate>=1.15'
	@touch $@

$(SERVE_ENV): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SERVE_VENV)
	$(SERVE_VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[serve,demo]' 'transformers[serving]>=5.24' 'pytest>=8.3' 'hypothesis>=6.130'
	@touch $@
