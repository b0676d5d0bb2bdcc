"""Every pair of a registered attention and a registered encoding that composes, in both directions, as small cases."""

from collections.abc import Iterator

from anyformer.registry import names
from anyformer.testing.case import Case

# One spec a name where the default suits no tiny model.
SMALL = {
    "bigbird": "bigbird(block=4)",
    "sparse_transformer": "sparse_transformer(length=4, summary=1)",
    "linformer": "linformer(rank=8)",
    "nystrom": "nystrom(landmarks=8, kernel=5)",
    "compressed": "compressed(stride=3)",
    "mla": "mla(latent=12, content=6)",
    "mlp_mixer": "mlp_mixer(hidden=9)",
    "synthesizer": "synthesizer(dense=factorised, random=factorised, rank=3, dot=True)",
    "amlp": "amlp(width=7, tiny=5)",
    "gmlp": "gmlp(width=7)",
    "aft": "aft(rank=5)",
    "inducing": "inducing(points=6)",
    "topk": "topk(3)",
    "learned_blocks": "learned_blocks(group=3, keep=2)",
    "routing": "routing(clusters=4)",
    "reformer": "reformer(bucket=3, rounds=2)",
    "sinkhorn": "sinkhorn(block=4, noise=0.0)",  # with noise, training is not right on average
    "threshold": "threshold(0.5)",
}
PATTERNS = (
    "local(3)",
    "strided(3)",
    "dilated(2, 1, 2)",
    "block_local(5)",
    "global_tokens([0, 3])",
    "random(2, seed=1)",
    "per_head((Local(2), 1), (Strided(2) | Global([0]), 3))",
    "Local(2) | Strided(5) | Global([0]) | Random(2, seed=0)",
)


def admitted() -> Iterator[Case]:
    """The cases that `check` admits, in the order of the names: attentions, mixers, patterns; every encoding; both directions."""
    attentions = [SMALL.get(name, name) for kind in ("attention", "mixer", "pattern") for name in names(kind)]
    for attention in (*attentions, *PATTERNS):
        for position in names("position"):
            for causal in (False, True):
                case = Case(attention, position, causal=causal)
                if case.verdict.runs:
                    yield case
