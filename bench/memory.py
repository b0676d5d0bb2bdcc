"""Every admitted pair but dense softmax at 8192 tokens, forward and backward: the largest tensor that is made, in the model and
inside our own operators. None may reach n x n numbers.

nice -n 10 python -m bench.memory           measures what `results/memory/lines.jsonl` lacks, then writes `table.md`; minutes
python -m bench.memory --only "Local(64)"   the cases whose text has this in it
python -m bench.memory --table              writes the table of the lines there are

A case is a Transformer of one block, two heads of width 4, on one row of tokens. Where the formula of a method's own equation asks
for an eighth of n x n numbers or more, and grows like n^2, a pair has a line that says so and is not run. An encoding that is added
to tokens, at the embedding or to queries, keys and values, leaves an attention as it is: it runs with one of them.
"""

import argparse
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import anyformer as af
from anyformer.compare.memory import peak_of
from anyformer.forms import Form
from anyformer.model.build import build_mixer, build_position, verdict
from anyformer.registry import names
from anyformer.site import Site
from anyformer.testing.largest import Largest
from experiments import _lines

FOLDER = Path(__file__).parents[1] / "results" / "memory"
N, DIM, HEADS = 8192, 8, 2
COLUMNS = 91  # of the grid that an encoding of rows and columns reads: the least square that holds so many tokens
CARRIER = "Local(64)"
"""The attention that an encoding of the embedding runs with."""
FITTED = {"mla": "mla(latent=8, content=4)", "vit_learned": f"vit_learned(rows={COLUMNS}, columns={COLUMNS})"}
"""One spec a name where the default does not fit the width, or the number of tokens."""
PATTERNS = (
    CARRIER,
    "strided(128)",
    "dilated(32, 0, 4)",
    "block_local(64)",
    "global_tokens([0, 3])",
    "random(1, seed=1)",
    "per_head((Local(64), 1), (Strided(128) | Global([0]), 1))",
    "Local(64) | Strided(128) | Global([0]) | RandomBlocks(64, 2, seed=0)",
)
_ON_TOKENS = (((Form.EMBED,),), ((Form.SHIFT,),))
_SHARE = 1 / 8  # of n x n numbers, from which a formula counts all pairs
_HELD = 6 << 30  # bytes of a case, beyond which it is broken


def cases() -> Iterator[tuple[str, str, bool]]:
    """Every admitted pair of an attention, mixer or pattern with an encoding, in both directions; without dense softmax."""
    attentions = [FITTED.get(name, name) for kind in ("attention", "mixer", "pattern") for name in names(kind)]
    for causal in (False, True):
        site = Site(DIM, HEADS, causal=causal, max_length=N)
        for position in (FITTED.get(name, name) for name in names("position")):
            for attention in (*attentions, *PATTERNS):
                if attention != "softmax" and verdict(attention, position, site).runs:
                    yield attention, position, causal


def reason_not_to_run(attention: str, position: str, causal: bool) -> str:
    """Why a case has a line without a measurement; "" where it is run."""
    found, half = (numbers(attention, causal, n) for n in (N, N // 2))
    if found >= _SHARE * N * N and found > 3 * half:
        return "all pairs by its equation"
    with torch.device("meta"):
        forms = build_position(position, Site(DIM, HEADS, causal=causal, max_length=N)).forms
    return "added to tokens, not to pairs" if forms in _ON_TOKENS and attention != CARRIER else ""


@cache
def numbers(attention: str, causal: bool, n: int) -> int:
    """How many numbers a method's equation makes of n tokens between its inputs and outputs; 0 where it does not say."""
    with torch.device("meta"):
        cost = build_mixer(attention, "none", Site(DIM, HEADS, causal=causal, max_length=n)).cost()
    return 0 if cost is None else cost.numbers(n)


def measure(attention: str, position: str, causal: bool) -> dict[str, Any]:
    """The line of one case."""
    torch.manual_seed(0)
    config = af.ModelConfig(
        vocab=8,
        dim=DIM,
        depth=1,
        heads=HEADS,
        attention=attention,
        position=position,
        head="lm" if causal else "mlm",
        causal=causal,
        max_length=N,
    )
    model = af.Transformer(config)
    tokens, places = torch.randint(8, (1, N)), torch.arange(N)
    two = build_position(position, config.site()).axes == 2
    positions = torch.stack([places // COLUMNS, places % COLUMNS], dim=-1)[None] if two else None
    largest, started = Largest(), time.process_time()

    def call() -> None:
        with largest:
            model(tokens, positions=positions).sum().backward()

    peak = peak_of(call, tokens.device)
    return {
        "status": "ok" if largest.most < N * N else "broken",
        "largest": largest.most,
        "maker": largest.maker,
        "peak": peak,
        "seconds": round(time.process_time() - started, 2),
    }


def line(attention: str, position: str, causal: bool, seconds: float) -> dict[str, Any]:
    """A case with what came of it."""
    key = {"attention": attention, "position": position, "causal": causal, "tokens": N}
    if reason := reason_not_to_run(attention, position, causal):
        return {**key, "status": "not run", "reason": reason}
    try:
        return {**key, **within(seconds, lambda: measure(attention, position, causal))}
    except TimeoutError:
        return {**key, "status": "late", "reason": f"took longer than {seconds:g} s"}
    except (RuntimeError, ValueError, MemoryError) as error:
        return {**key, "status": "error", "reason": str(error).splitlines()[0]}


def within(seconds: float, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a call gives, or TimeoutError after so many seconds of the processor."""

    def ring(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """What broke, then a row an attention with its heaviest case."""
    ran = [each for each in lines if each["status"] in ("ok", "broken")]
    failed = [each for each in lines if each["status"] not in ("ok", "not run")]
    head = (
        f"# The largest tensor at {N} tokens\n\n"
        f"Forward and backward of a Transformer of one block, {HEADS} heads of width {DIM // HEADS}, one row: the most numbers in "
        "any tensor that was made,\ninside our own operators too, in units of n d (d: width of the model). "
        f"A tensor of all pairs has {N // DIM} of them.\n{len(ran)} cases ran, {len(failed)} failed. Made by "
        "`python -m bench.memory` from `lines.jsonl`.\n\n"
    )
    told = [f"* {each['attention']} x {each['position']}, {_way(each)}: {_fault(each)}" for each in failed]
    rows = ["| attention | encodings | largest, in n d | with | peak memory, MiB |", "|---|---|---|---|---|"]
    for attention in dict.fromkeys(each["attention"] for each in ran):
        same = [each for each in ran if each["attention"] == attention]
        worst, heaviest = (max(same, key=lambda each: each[name]) for name in ("largest", "peak"))
        encodings = len({each["position"] for each in same})
        rows.append(
            f"| `{_escaped(attention)}` | {encodings} | {worst['largest'] / N / DIM:.1f} | {worst['position']}, {_way(worst)} | "
            f"{heaviest['peak'] / 2**20:.0f} ({heaviest['position']}) |"
        )
    quadratic = dict.fromkeys(each["attention"] for each in lines if each.get("reason") == "all pairs by its equation")
    tail = f"\n\nAll pairs by their own equation, and so not run: {', '.join(map('`{}`'.format, map(_escaped, quadratic)))}.\n"
    return (
        head
        + "".join(f"{each}\n" for each in (*told, "" if told else None) if each is not None)
        + "\n".join(rows)
        + tail
    )


def _way(each: dict[str, Any]) -> str:
    return "causal" if each["causal"] else "both directions"


def _fault(each: dict[str, Any]) -> str:
    if each["status"] == "broken":
        return f"{each['largest'] / N / N:.2f} n^2 numbers in {each['maker']}"
    return f"{each['status']}, {each['reason']}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="text of the cases to measure")
    parser.add_argument("--seconds", type=float, default=60.0, help="longest time of the processor for a case")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (_HELD, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "lines.jsonl"
    lines = _lines.read(file)
    done = {(each["attention"], each["position"], each["causal"]) for each in lines}
    wanted = (
        [] if options.table else [each for each in cases() if each not in done and options.only in " x ".join(each[:2])]
    )
    fresh = (line(*case, options.seconds) for case in wanted)
    for number, each in enumerate(_lines.appended(file, fresh), start=1):
        lines.append(each)
        print(f"{number}/{len(wanted)} {each}", flush=True)
    if lines:
        (options.out / "table.md").write_text(table(lines))
    return int(any(each["status"] not in ("ok", "not run") for each in lines))


if __name__ == "__main__":
    raise SystemExit(main())
