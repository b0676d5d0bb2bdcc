"""Laws about what survives: decoding, saving, left padding, dropout, and no memory between calls."""

import copy
import pickle
import random as python_random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anyformer.errors import IncompatibleError
from anyformer.model.transformer import Transformer
from anyformer.testing.case import HEADS, WIDTH, Case, gap, padding, random, spread, token_ids
from anyformer.testing.finding import Finding, Law


def step_by_step_equals_all_at_once(case: Case) -> list[Finding] | str:
    """Prefill, then chunks of 1, 3 and 5: the same logits as the whole at every position, and a copied cache goes on alike."""
    if not case.causal:
        return "both directions"
    found = []
    for kv_heads in (case.kv_heads, HEADS // 2):
        shared = case.with_(kv_heads=kv_heads)
        model = shared.model()
        try:
            model.new_cache(2)
        except IncompatibleError as error:
            return str(error)
        tokens = token_ids(2, 20)
        whole = model(tokens)
        for prefill in (0, 1, 12):
            for size in (1, 3, 5):
                cache, parts, at = model.new_cache(2), [], 0
                while at < 20:
                    step = prefill if at == 0 and prefill else size
                    parts.append(model(tokens[:, at : at + step], cache=cache))
                    at += step
                    if at == 12:
                        found.append(_continues_twice(model, tokens, cache, whole))
                found.append(Finding(gap(torch.cat(parts, dim=1), whole), 1e-9, f"prefill {prefill}, chunks of {size}"))
    return found


def the_state_does_not_grow(case: Case) -> list[Finding] | str:
    """A method that decodes from a state of fixed size keeps that size."""
    layer = case.layer()
    if not case.causal or layer.decodes != "state":
        return "keeps no state of fixed size"
    cache, sizes = layer.new_cache(1), []
    for _ in range(12):
        layer(random(1, 2, WIDTH), cache=cache)
        sizes.append(sum(tensor.numel() for tensor in (*cache.state.values(), *cache.slots.values())))
    return [Finding(float(max(sizes[1:]) - sizes[1]), 0.0, "numbers kept after 4 and after 24 tokens")]


def saved_and_loaded_is_the_same(case: Case) -> list[Finding] | str:
    """The same numbers from a state dict, from a folder, through meta devices, and as a copy."""
    model = case.model(torch.float32)
    tokens = token_ids(2, 11)
    if case.mixer.limit is not None and case.mixer.limit < 11:
        return "shorter than the test"
    out = model(tokens)
    found = []
    fresh = case.fed(spread(Transformer(model.config), seed=9).eval())
    fresh.load_state_dict(model.state_dict(), strict=True)
    found.append(Finding(gap(fresh(tokens), out), 0.0, "from a state dict"))
    with torch.device("meta"):
        empty = Transformer(model.config)
    empty = case.fed(empty.to_empty(device="cpu").eval())
    empty.load_state_dict(model.state_dict(), strict=True)
    found.append(Finding(gap(empty(tokens), out), 0.0, "through a meta device"))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder) / "model")
        read = case.fed(Transformer.from_pretrained(Path(folder) / "model"))
        found.append(Finding(gap(read(tokens), out), 0.0, "from a folder"))
    found.append(Finding(gap(copy.deepcopy(model)(tokens), out), 0.0, "deepcopy"))
    found.append(Finding(gap(pickle.loads(pickle.dumps(model))(tokens), out), 0.0, "pickle"))
    half = copy.deepcopy(model).to(torch.bfloat16).state_dict()
    found.append(Finding(0.0 if half.keys() == model.state_dict().keys() else 1.0, 0.0, "keys in bfloat16"))
    finite = all(
        bool(torch.isfinite(value).all()) for value in model.state_dict().values() if value.is_floating_point()
    )
    found.append(Finding(0.0 if finite else 1.0, 0.0, "finite buffers"))
    return found


def dropout_is_off_in_eval(case: Case) -> list[Finding] | str:
    """Eval ignores dropout; training draws anew and is right on average; a rate near 1 gives no NaN."""
    plain, dropped = case.layer(), case.layer(dropout=0.5)
    x = random(1, 6, WIDTH)
    out = plain(x)
    found = [Finding(gap(dropped(x), out), 0.0, "eval")]
    if case.encoding().draws:
        return found  # in training positions are random too, so the mean is another
    dropped.train()
    first, second = dropped(x), dropped(x)
    if torch.equal(first, second):
        if torch.equal(first, out):
            return "has no dropout of its own"
        found.append(Finding(1.0, 0.0, "training draws the same twice"))
    draws = torch.cat([dropped(x.expand(500, -1, -1)).detach() for _ in range(8)])
    error = (draws.mean(0) - out[0].detach()).abs() / (draws.std(0) / len(draws) ** 0.5 + 1e-12)
    found.append(Finding(float(error.max()), 5.0, "mean over 4000 draws, in standard errors (the largest of 192)"))
    dropped.eval()
    found.append(Finding(gap(dropped(x), out), 0.0, "eval again"))
    nearly = case.layer(dropout=1 - 1e-3).train()
    found.append(Finding(0.0 if bool(torch.isfinite(nearly(x)).all()) else 1.0, 0.0, "a rate of 0.999"))
    return found


def padding_on_the_left(case: Case) -> list[Finding] | str:
    """Only the mask is given: each row equals its unpadded run, on either side, in one pass and while decoding 5 tokens more."""
    model = case.model()
    if not case.mixer.takes_mask:
        return "takes no mask"
    lengths, found = [6, 10, 3], []
    rows = [token_ids(1, length, seed=length) for length in lengths]
    more = token_ids(3, 5, seed=99)
    alone = [model(row) for row in rows]
    longer = [model(torch.cat([row, more[at : at + 1]], dim=1)) for at, row in enumerate(rows)]
    for side in ("left", "right"):
        keep = padding(lengths, 10, side)
        batch = torch.zeros(3, 10, dtype=torch.int64)
        batch[keep] = torch.cat(rows, dim=1)[0]
        out = model(batch, attention_mask=keep)
        pooled = case.head == "classifier"
        by_row = [out[at] if pooled else out[at][keep[at]] for at in range(3)]
        found += [Finding(gap(by_row[at], alone[at][0]), 1e-9, f"{side}, row {at}") for at in range(3)]
        if not case.causal or not _decodes(model):
            continue
        cache = model.new_cache(3)
        model(batch, attention_mask=keep, cache=cache)
        for step in range(5):
            keep = torch.cat([keep, keep.new_ones(3, 1)], dim=1)
            out = model(more[:, step : step + 1], attention_mask=keep, cache=cache)
            right = torch.stack([longer[at][0, lengths[at] + step] for at in range(3)])
            found.append(Finding(gap(out[:, 0], right), 1e-9, f"{side}, token {step + 1} more"))
    positions = case.at(torch.arange(6)[None])
    found.append(Finding(gap(model(rows[0], positions=positions), alone[0]), 1e-9, "the same positions, given"))
    return found


def no_memory_between_calls(case: Case) -> list[Finding] | str:
    """A call leaves no trace: not in later results, weights, configuration, or the global random state."""
    model = case.model(torch.float32)
    long, short = token_ids(2, 23), token_ids(1, 3, seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = _random_states()
    first = model(long)
    model(short)
    with torch.no_grad():
        found = [Finding(gap(model(long), first), 0.0, "long, short, long")]
    try:
        model(torch.zeros(2, 5, 2, dtype=torch.int64))
    except Exception:  # a bad shape may raise whatever it likes; only what it leaves behind counts
        found.append(Finding(gap(model(long), first), 0.0, "after an error"))
    with ThreadPoolExecutor(2) as pool:
        found += [Finding(gap(out, first), 0.0, "two threads") for out in pool.map(model, [long, long])]
    same = [each == before for each, before in zip(_random_states(), states, strict=True)]
    found += [Finding(0.0 if each else 1.0, 0.0, "global random state") for each in same]
    after = model.state_dict()
    found.append(Finding(max(gap(after[name], value) for name, value in before.items()), 0.0, "weights and buffers"))
    return found


def _random_states() -> list[bytes]:
    """What the global generators of torch, Python and NumPy would draw next."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002  # the global one is what must not move
    return [pickle.dumps(state) for state in (torch.get_rng_state().tolist(), python_random.getstate(), numpy_state)]


def _continues_twice(model: Transformer, tokens: Tensor, cache: object, whole: Tensor) -> Finding:
    copies = [cache.copy(), cache.copy()]  # type: ignore[attr-defined]
    outs = [model(tokens[:, 12:], cache=each) for each in copies]
    return Finding(max(gap(out, whole[:, 12:]) for out in outs), 1e-9, "a copied cache, continued twice")


def _decodes(model: Transformer) -> bool:
    try:
        model.new_cache(1)
    except IncompatibleError:
        return False
    return True


LAWS = (
    Law("D07", "step by step equals all at once", step_by_step_equals_all_at_once),
    Law("D07s", "the state does not grow", the_state_does_not_grow),
    Law("D09", "saved and loaded is the same", saved_and_loaded_is_the_same),
    Law("D10", "dropout is off in eval", dropout_is_off_in_eval),
    Law("D13", "padding on the left", padding_on_the_left),
    Law("D15", "no memory between calls", no_memory_between_calls),
)
