#!/usr/bin/env bash
# The benchmarks of this folder, on a quiet machine: `bash results/attentions/commands.sh`, then
# `python -m bench.attentions > results/attentions/table.md`. Names after it choose some of them; LENGTHS, SECONDS_A_LENGTH and KEEP
# may be set for a trial.
set -euo pipefail
cd "$(dirname "$0")/../.."
read -ra lengths <<<"${LENGTHS:-1024 4096 16384}"
seconds=${SECONDS_A_LENGTH:-8}
slow=${SECONDS_A_LENGTH:-20} # where one call may take seconds
many=${SECONDS_A_LENGTH:-45} # where many are timed in turn
keep=${KEEP:-results/attentions}
chosen=" $* "
bench() {
  name=$1
  shift
  [[ $chosen == "  " || $chosen == *" $name "* ]] || return 0
  rm -rf "runs/attentions/$name"
  .venv/bin/anyformer bench --threads 2 --heads 4 --head-dim 64 --lengths "${lengths[@]}" --seconds "$seconds" "$@" --out "runs/attentions/$name"
  mkdir -p "$keep/$name"
  cp "runs/attentions/$name/bench.jsonl" "$keep/$name/"
}
bench patterns --seconds "$slow" --attention "local(256)" "Local(256)|Global([0])" bigbird "strided(64)" "dilated(64,64,4)" "block_local(256)" "global_tokens([0])" \
  "random(16)" "per_head((Local(64),2),(Strided(64),2))" "Local(64)|Strided(64)|Global([0])|Random(3,seed=0)" \
  --peer lucidrains-local hf-longformer hf-bigbird
bench both --seconds "$many" --attention linformer nystrom inducing compressed efficient linear performer rfa cosformer taylor reformer routing sinkhorn learned_blocks \
  --peer lucidrains-linformer lucidrains-nystrom lucidrains-linear lucidrains-performer lucidrains-reformer hf-reformer lucidrains-routing lucidrains-sinkhorn
bench pairs --seconds "$slow" --attention topk threshold entmax aft --peer lucidrains-topk
bench causal --seconds "$many" --causal --attention "local(255,0)" sparse_transformer linear performer rfa cosformer taylor retention gated_linear delta compressed efficient reformer \
  routing sinkhorn learned_blocks \
  --peer lucidrains-local lucidrains-linear lucidrains-performer lucidrains-reformer lucidrains-routing lucidrains-sinkhorn
bench layers --seconds "$slow" --what layer --attention longformer fnet gmlp amlp mlp_mixer synthesizer complex --peer hf-longformer hf-fnet lucidrains-gmlp lucidrains-amlp
bench layers-causal --seconds "$slow" --causal --what layer --attention mla gru conv gmlp synthesizer --peer hf-mla lucidrains-gmlp
