#!/usr/bin/env bash
# Measures stock scan, presets and forebay's plan on the accelerator there is: numbers, step time, peak memory.
#
#     benchmarks/gpu/overlap.sh [OUTPUT_FOLDER]
#
# Needs a Python with forebay, its extra `train` and jax for the device ($PYTHON, by default .venv/bin/python after
# `uv sync --extra train --extra cuda13`). About ten minutes on one GPU. `SMOKE=1` runs it all on a CPU, small.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/gpu}
python=${PYTHON:-.venv/bin/python}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
# all but what the system needs of the host's memory for pinned buffers; XLA's own default is 64
total_gib=$(awk '/MemTotal/ {print int($2 / 2^20)}' /proc/meminfo)
export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=${XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB:-$((total_gib * 3 / 4))}
export FOREBAY_CACHE_DIR=${FOREBAY_CACHE_DIR:-$(mktemp -d)}  # so that numbers are compared here and now
exec "$python" benchmarks/gpu/overlap.py --out "$out" ${SMOKE:+--smoke}
