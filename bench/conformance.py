"""Every admitted pair against every law, with the errors measured.

python -m bench.conformance                 measures what `results/conformance/laws.jsonl` lacks of this version; minutes to an hour
python -m bench.conformance --table         writes `results/conformance/table.md` from it
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import torch

from anyformer.testing import laws
from anyformer.testing.every import admitted
from experiments import _lines

FOLDER = Path(__file__).parents[1] / "results" / "conformance"
LINES, TABLE = FOLDER / "laws.jsonl", FOLDER / "table.md"


def measure(case: laws.Case) -> dict:
    """What every law says of one case."""
    torch.set_num_threads(1)
    found = {}
    for law in laws.ALL:
        each = _of_encoding(law, case.position, case.causal) if law.about == "encoding" else laws.apply(law, case)
        worst = each.worst
        found[law.name] = {
            "status": each.status,
            "error": None if worst is None else worst.error,
            "limit": None if worst is None else worst.limit,
            "note": each.note,
        }
    return {**_key(case), "verdict": case.verdict.kind, "laws": found}


def run() -> None:
    """Measure the cases that have no line yet; a line is written as soon as its case ends."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    done = [{name: line[name] for name in ("attention", "position", "causal")} for line in lines()]
    cases = [case for case in admitted() if _key(case) not in done]
    with ProcessPoolExecutor() as pool:
        found = _lines.appended(LINES, pool.map(measure, cases, chunksize=4))
        for number, line in enumerate(found, start=1):
            print(f"{number}/{len(cases)} {line['attention']} x {line['position']}", flush=True)


def lines() -> list[dict]:
    """What was measured so far."""
    return _lines.read(LINES)


def table() -> Iterator[str]:
    """A row an attention: its pairs, the laws that spoke, those broken, and the error nearest to its limit."""
    yield "| attention | pairs | laws that spoke | broken | nearest to its limit |"
    yield "|---|---|---|---|---|"
    by_attention: dict[str, list[dict]] = {}
    for line in lines():
        by_attention.setdefault(line["attention"], []).append(line)
    for attention, found in by_attention.items():
        spoke = [(line, name, law) for line in found for name, law in line["laws"].items() if law["status"] != "silent"]
        broken = sorted({f"{line['position']} {name}" for line, name, law in spoke if law["status"] == "broken"})
        nearest = max((each for each in spoke if each[2]["limit"]), key=_share)
        line, name, law = nearest
        where = f"{name} with {line['position']}: {law['error']:.1e} of {law['limit']:.0e}"
        text = attention.replace("|", "\\|")
        yield f"| `{text}` | {len(found)} | {len(spoke)} | {', '.join(broken) or 0} | {where} |"


@cache
def _of_encoding(law: laws.Law, position: str, causal: bool) -> laws.Result:
    return laws.apply(law, laws.Case("softmax", position, causal=causal))


def _key(case: laws.Case) -> dict:
    return {"attention": case.attention, "position": case.position, "causal": case.causal}


def _share(each: tuple[dict, str, dict]) -> float:
    return each[2]["error"] / each[2]["limit"]


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        TABLE.write_text("\n".join(table()) + "\n")
    else:
        run()
