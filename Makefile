PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What a first run proposes: enough to see changes kept and turned down in a few minutes. The whole catalog takes longer.
DEMO := experts_gathered_cpu router_bf16 norm_residual_norm_cpu norm_float64 qk_norm_rope_cache_cpu \
        decode_attention_cpu prefill_attention_cpu
CODE := harness agents baselines kernel_candidates tests

.PHONY: run test check clean

run: $(STAMP)  ## a first run: the toy model on the CPU, offline
	$(BIN)/optimize run -w beam-tiny --agent catalog $(addprefix --only ,$(DEMO))

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
