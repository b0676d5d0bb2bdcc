"""Every encoding of one number a token, with softmax, as a model of text trained on 256 bytes: what it loses on the same final
bytes as the text to their left grows to 4096.

    nice -n 10 python -m experiments.extrapolation      # trains what results/extrapolation/results.jsonl lacks, then draws
    python -m experiments.extrapolation --steps 10 --positions none rope --out FOLDER

Every model is the same but for the encoding: 2 blocks of width 64, 4 heads, one learning rate. A seed stands for the weights, the
order of the training windows and the windows that are scored: all encodings read the same ones. An encoding with a trained row for
each position has none beyond 256 and so no score there; what can be asked how far it is to go is told 4096. Encodings of a row and
a column are refused for text; they have a line that says so.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import anyformer as af
from anyformer.compare.fault import fault_of
from anyformer.compare.quality import open_fabric, train
from anyformer.compare.trial import Plan, Sizes, verdict_in_a_row
from anyformer.registry import names
from anyformer.site import Site
from anyformer.spec import parse
from anyformer.task.text import Text
from experiments import _lines
from experiments._encodings import draw

FOLDER = Path(__file__).parents[1] / "results" / "extrapolation"
TRAINED, LENGTHS = 256, (256, 512, 1024, 2048, 4096)
SIZES = Sizes(dim=64, depth=2, heads=4, tokens=1024, rate=5e-3)
FAR = {"floater", "randomized"}
"""Encodings that are built for the longest length: none of their rows stands for one position, but they ask how many there are."""
BESIDE = ("concatenated(source=sinusoidal)", "multiplicative(source=sinusoidal)")
"""Encodings with a source other than their own, which has no rows that end."""


def encodings() -> list[str]:
    """The specs to be compared, one a registered encoding and those with another source."""
    return [*names("position"), *BESIDE]


def rows(options: argparse.Namespace, present: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines that are missing, one for each seed and encoding, and one without a seed for each that is refused."""
    done = {(line["position"], line.get("seed")) for line in present}
    task = Text(length=TRAINED, score=TRAINED)
    site = Site(SIZES.dim, SIZES.heads, causal=True, max_length=TRAINED)
    judged = {position: verdict_in_a_row("softmax", position, site) for position in options.positions}
    for position, verdict in judged.items():
        if not verdict.runs and (position, None) not in done:
            yield {"position": position, "status": "refused", "reason": verdict.reason}
    for seed in range(options.seeds):
        for position in (position for position, verdict in judged.items() if verdict.runs):
            if (position, seed) not in done:
                yield trial(position, task, seed, options)


def trial(position: str, task: Text, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One model trained and scored."""
    plan = Plan(
        attention="softmax",
        position=position,
        task="text",
        sizes=SIZES,
        lengths=LENGTHS,
        steps=options.steps,
        seed=seed,
    )
    longest = LENGTHS[-1] if parse(position).name in FAR else TRAINED
    torch.manual_seed(seed)  # what an encoding draws anew at each step
    model = af.Transformer(replace(plan.config(task), max_length=longest))
    started = time.perf_counter()
    model, curve = train(plan, task, model, open_fabric("cpu", "32-true"), lambda step, loss: None)
    trained = time.perf_counter() - started
    scores, reasons = scored(model.eval(), task, seed, options.items)
    return {
        "position": position,
        "seed": seed,
        "status": "ok",
        "metric": task.metric,
        "scores": scores,
        "reasons": reasons,
        "loss": curve[-1][1],
        "steps": options.steps,
        "tokens": SIZES.tokens,
        "items": options.items,
        "parameters": sum(each.numel() for each in model.parameters()),
        "seconds": [round(trained, 1), round(time.perf_counter() - started - trained, 1)],
        "data": task.fingerprint,
        "torch": torch.__version__,
    }


@torch.no_grad()
def scored(model: torch.nn.Module, task: Text, seed: int, items: int) -> tuple[dict[str, float], dict[str, str]]:
    """The task's metric at each length, on the items of this seed; where there is none, why."""
    found: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for length in LENGTHS:
        totals: dict[str, float] = {}
        try:
            for item in range(seed * items, (seed + 1) * items):  # one at a time: some make a tensor of all pairs
                batch = task.batch("test", item, size=1, length=length)
                for name, value in task.metrics(model(batch.tokens), batch).items():
                    totals[name] = totals.get(name, 0.0) + value
        except Exception as error:  # whatever an encoding raises at a length is the result of that length
            reasons[str(length)] = ": ".join(filter(None, fault_of(error)))
        else:
            found[str(length)] = round(float(task.finish(totals)[task.metric]), 5)
    return found, reasons


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Means over the seeds, least at the longest length first; below, what is refused and why scores are missing."""
    ran = [line for line in lines if line["status"] == "ok"]
    first, seeds = ran[0], len({line["seed"] for line in ran})
    head = (
        f"# Extrapolation: {first['metric']}\n\n"
        f"Softmax with every encoding, trained on {TRAINED} bytes ({first['steps']} steps of {first['tokens']} bytes), then "
        f"scored on the\nsame final {TRAINED} bytes of {first['items']} windows as the text to their left grows; mean over {seeds} "
        f"seed{'s' if seeds > 1 else ''}, each with windows\nof its own that all encodings share. The column before the seeds says"
        f" how much more is lost at {LENGTHS[-1]} than at {TRAINED},\n± the standard deviation over the seeds. Small models, "
        "trained briefly at one learning rate: read how a line goes on, not\nwho is lowest at its start. "
        "Made by `python -m experiments.extrapolation` from `results.jsonl`; drawn in `extrapolation.png`.\n\n"
        f"| encoding | {' | '.join(map(str, LENGTHS))} | {LENGTHS[-1]} less {TRAINED} | seeds | parameters |\n"
        f"|---|{'---|' * (len(LENGTHS) + 3)}\n"
    )
    body = [_row(position, [line for line in ran if line["position"] == position]) for position in ranked(ran)]
    return head + "\n".join(body) + "\n\n" + "\n".join(_notes(lines)) + "\n"


def ranked(ran: Sequence[dict[str, Any]]) -> list[str]:
    """The encodings, least at the longest length first; those without a score there last."""
    found = dict.fromkeys(line["position"] for line in ran)

    def order(position: str) -> tuple[bool, float]:
        means = curve(position, ran)
        return LENGTHS[-1] not in means, list(means.values())[-1] if means else math.inf

    return sorted(found, key=order)


def curve(position: str, ran: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Mean over the seeds at each length that has a score."""
    scores = [line["scores"] for line in ran if line["position"] == position]
    return {
        length: mean(each[str(length)] for each in scores)
        for length in LENGTHS
        if all(str(length) in each for each in scores)
    }


def _row(position: str, same: Sequence[dict[str, Any]]) -> str:
    means = curve(position, same)
    told = [f"{means[length]:.3f}" if length in means else "-" for length in LENGTHS]
    more = [line["scores"][str(LENGTHS[-1])] - line["scores"][str(TRAINED)] for line in same if LENGTHS[-1] in means]
    gained = f"{mean(more):+.3f} ± {stdev(more) if len(more) > 1 else 0.0:.3f}" if more else "-"
    return f"| {position} | {' | '.join(told)} | {gained} | {len(same)} | {same[0]['parameters']:,} |"


def _notes(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    for line in lines:
        if line["status"] == "refused":
            yield f"* {line['position']}: refused. {line['reason']}"
        elif line["reasons"] and line["seed"] == 0:
            length, reason = next(iter(line["reasons"].items()))
            yield f"* {line['position']}: no score from {length} on. {reason}"


def picture(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each kind of encoding, named in the order of the lines' ends, with the model without positions in all."""
    ran = [line for line in lines if line["status"] == "ok"]
    curves = {position: curve(position, ran) for position in ranked(ran)}
    draw(
        path,
        f"Trained on {TRAINED} bytes: bits a byte of the same final bytes as the text to their left grows",
        curves,
        {position: _label(position, found) for position, found in curves.items()},
        everywhere=[position for position in curves if position == "none"],
        unit=("bytes", ran[0]["metric"]),
        top=8.0,
    )


def _label(position: str, found: dict[int, float]) -> str:
    if not found:
        return f"{position}, no score"
    length, value = list(found.items())[-1]
    return f"{value:.2f}  {position}" if length == LENGTHS[-1] else f"{position}, ends at {length}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, then write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of training")
    parser.add_argument("--items", type=int, default=4, help="windows scored at each length, others for each seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--positions", nargs="+", default=encodings(), help="specs of encodings")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draw", action="store_true", help="train nothing; table and picture of the lines there are")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.jsonl"
    lines = _lines.read(file)
    for line in () if options.draw else _lines.appended(file, rows(options, list(lines))):
        lines.append(line)
        print(line["position"], line.get("seed"), line.get("scores", line["status"]), line.get("seconds"), flush=True)
    (options.out / "table.md").write_text(table(lines))
    picture(lines, options.out / "extrapolation.png")


if __name__ == "__main__":
    main()
