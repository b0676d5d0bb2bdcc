#!/usr/bin/env bash
# Every attention on recall and on nested lists: `bash results/quality/commands.sh`, then
# `python -m bench.quality > results/quality/table.md`. It goes on where it stopped; sizes are an eighth to a quarter of the length.
set -euo pipefail
cd "$(dirname "$0")/../.."
attentions=(
  softmax "softmax(sink=True)" "local(8)" "strided(8)" "dilated(4, 4, 2)" "block_local(16)" "global_tokens([0])" "random(8)"
  "Local(4)|Strided(8)|Global([0])|Random(2, seed=0)" "per_head((Local(8), 1), (Strided(8) | Global([0]), 1))"
  "bigbird(block=8)" "bigbird(block=4, random=1)" "sparse_transformer(length=8, summary=2)" "longformer(window=8)"
  "topk(8)" threshold entmax "reformer(bucket=8, rounds=2)" "routing(clusters=8)" "sinkhorn(block=8)" "learned_blocks(group=8, keep=3)"
  "linformer(rank=32)" "linformer(rank=32, queries=16)" "compressed(stride=3)" "nystrom(landmarks=16)" "inducing(points=16)"
  linear efficient performer rfa cosformer taylor retention gated_linear delta
  "synthesizer(dense=full, random=full, dot=True)" "synthesizer(dense=full)" "synthesizer(random=full)"
  "synthesizer(dense=factorised, random=factorised)" aft fnet gmlp amlp mlp_mixer mla complex conv gru
)
compare() {
  .venv/bin/anyformer compare --attention "${attentions[@]}" --position cnn_padding --model "model(dim=64, depth=2, heads=2, tokens=1024)" \
    --steps 300 --seeds 3 --lengths 64 --threads 1 --timeout 10m "$@"
}
compare --task "mqar(vocab=64, length=64, pairs=8)" --items 200 --out results/quality/mqar
compare --task "listops(min_length=16, max_length=64, depth=5, arguments=5)" --items 400 --out results/quality/listops
