# Two commands do everything on a fresh machine with Python 3.11 or newer and make: `make lab` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
CHECK := 'import sys; old = sys.version_info < (3, 11); \
	sys.exit(old and "Python 3.11 or newer is needed, this is " + sys.version + "; make PYTHON=... names another")'
# Stored outputs are compared strictly on the pinned Python; elsewhere only the cells that ask for it are compared.
STRICT = $(shell $(BIN)/python -c 'import sys; print(sys.version_info[:2] == (3, 11))')
NBVAL = $(if $(filter True,$(STRICT)),--nbval,--nbval-lax)

.PHONY: lab test lint unit notebooks browser gpu store site benchmark clean

lab: .venv/installed
	$(BIN)/jupyter lab notebooks

test: lint unit notebooks browser

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

unit: .venv/installed
	$(BIN)/python -m pytest tests

notebooks: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(NBVAL) --nbval-sanitize-with tests/nbval_sanitize.cfg --nbval-cell-timeout 240 notebooks

browser: .venv/installed  ## every notebook in JupyterLab in Chromium; without one this is said, and CI fails
	@if command -v chromium > /dev/null; then OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --maxschedchunk 1 tests/browser; \
	else echo "make browser: NOT RUN, there is no chromium on the PATH"; test "$$CI" != true; fi

gpu: .venv/installed  ## what only a CUDA machine can test; not part of test
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make gpu needs a CUDA GPU")'
	$(BIN)/python -m pytest tests/gpu

store: .venv/installed  ## run every notebook from a clean kernel and store its outputs
	$(BIN)/jupyter nbconvert --to notebook --inplace --execute --ExecutePreprocessor.record_timing=False \
		--ExecutePreprocessor.timeout=240 notebooks/0*.ipynb notebooks/beyond/0*.ipynb
	$(BIN)/jupyter nbconvert --to notebook --inplace --CoalesceStreamsPreprocessor.enabled=True \
		notebooks/0*.ipynb notebooks/beyond/0*.ipynb  # within one command it would come before there is an output

site: .venv/installed  ## the notebooks as web pages, as they are stored
	$(BIN)/python notebooks/build_site.py site

benchmark: .venv/installed
	$(BIN)/python -m mhar_minimal.benchmark --out notebooks/results/cpu_benchmark.json

clean:  ## the environment and the tools' caches; runs/ (trained models) and built corpora stay
	rm -rf .venv *.egg-info .pytest_cache .ruff_cache .hypothesis

# A .venv that is there already, say with another build of PyTorch, is kept.
.venv/installed: requirements.txt pyproject.toml
	test -x $(BIN)/python || { $(PYTHON) -c $(CHECK) && $(PYTHON) -m venv .venv; }
	$(BIN)/python -c $(CHECK)
	@echo "Installing into .venv, quietly; it takes some minutes."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@
