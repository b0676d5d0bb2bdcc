"""Every law over the registry: in `make test` one position per form and one attention per family, in `make test-all` every pair."""

import pytest

from anyformer.model.build import verdict
from anyformer.registry import names
from anyformer.testing import laws

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
ATTENTIONS = [SMALL.get(name, name) for kind in ("attention", "mixer", "pattern") for name in names(kind)]
EVERY = [(a, p, causal) for a in (*ATTENTIONS, *PATTERNS) for p in names("position") for causal in (False, True)]
CHOSEN_POSITIONS = ("none", "rope")  # what every attention meets
FORMS_OF_LINEAR = ("sinusoidal", "rope_value", "floater", "fox", "pope")  # one a form that it reads in its own way


def _chosen(attention: str, position: str) -> bool:
    if attention == "softmax":
        return True
    return position in CHOSEN_POSITIONS or (attention == "linear" and position in FORMS_OF_LINEAR)


def _admitted() -> list:
    cases = []
    for attention, position, causal in EVERY:
        case = laws.Case(attention, position, causal=causal)
        if verdict(attention, position, case.site).runs:
            marks = [] if _chosen(attention, position) else [pytest.mark.slow]
            cases.append(pytest.param(case, id=str(case), marks=marks))
    return cases


@pytest.mark.parametrize("case", _admitted())
def test_every_law(case: laws.Case) -> None:
    results = list(laws.examine(case))
    broken = [
        f"{each.law.name} {each.law.title}: {each.note} {each.worst}" for each in results if each.status == "broken"
    ]
    assert not broken, "\n".join(broken)
    assert sum(each.status == "holds" for each in results) >= 6
