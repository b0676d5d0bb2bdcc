#!/usr/bin/env bash
# The benchmarks of this folder, on a quiet machine: `bash results/engine/commands.sh`, then `python -m bench.engine > results/engine/table.md`.
set -euo pipefail
cd "$(dirname "$0")/../.."
bench() {
  name=$1
  shift
  rm -rf "runs/engine/$name"
  .venv/bin/anyformer bench --threads 2 --heads 8 --head-dim 64 "$@" --out "runs/engine/$name"
  mkdir -p "results/engine/$name"
  cp "runs/engine/$name/bench.jsonl" "results/engine/$name/"
}
bench short --attention "local(64)" --lengths 1024 --seconds 5
bench bigbird --attention bigbird --lengths 1024 2048 --seconds 8
bench terms --attention "local(256)" --position none t5 alibi --lengths 4096 --seconds 10
bench dense --attention "local(256)" --lengths 2048 4096 16384 65536 --seconds 20
bench causal --causal --attention "local(255,0)" linear --peer lucidrains-local lucidrains-linear --lengths 4096 16384 --seconds 25
bench alibi --causal --attention softmax --position none alibi --lengths 4096 16384 --seconds 60
bench peers-4096 --attention "Local(256)|Global([0])" bigbird --peer hf-longformer hf-bigbird --lengths 4096 --seconds 12
bench peers-16384 --attention "Local(256)|Global([0])" bigbird --peer hf-longformer hf-bigbird --lengths 16384 --seconds 100
bench layers --what layer --attention softmax "local(64)" bigbird "strided(16)" "Local(16)|Strided(16)|Global([0])|Random(2,seed=0)" --lengths 128 256 512 --seconds 4
.venv/bin/python -m bench.million --threads 2 | tee results/engine/million.txt
