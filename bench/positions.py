"""What each position encoding costs by itself, from 1k to 64k tokens: to build it, and seconds and memory of forward and backward.

python -m bench.positions           measures what `results/bench-positions/lines.jsonl` lacks; minutes
python -m bench.positions --draw    table and chart of the lines there are

An encoding's own cost is that of a Transformer of one block, causal, with softmax over the last 64 tokens, less the same without an
encoding, timed in turns: seconds of the processor on one thread, which other work on the machine hardly changes. Biases and terms
of scores thus pay for the pairs of a window, not for all. What runs step by step from one position to the next (`rnn`, `rnn_front`,
`floater`) stands out. A cell that would take too long has a line that says so.
"""

import argparse
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import anyformer as af
from anyformer.compare.fault import fault_of
from anyformer.compare.memory import peak_of
from anyformer.model.build import build_position, verdict
from anyformer.registry import names
from anyformer.site import Site
from experiments import _lines
from experiments._encodings import draw

FOLDER = Path(__file__).parents[1] / "results" / "bench-positions"
LENGTHS = (1024, 4096, 16384, 65536)
DIM, HEADS, CARRIER = 64, 4, "Local(64, 0)"
_HELD = 12 << 30  # bytes of a cell, beyond which it fails
_ROUNDS, _ENOUGH = 5, 1.5  # most rounds, and seconds after which no further one begins


class Stand:
    """A model and tokens on which it is measured; `seconds` is how long the encoding took to build."""

    def __init__(self, position: str, length: int) -> None:
        site = Site(DIM, HEADS, causal=True, max_length=length)
        started = time.process_time()
        axes = build_position(position, site).axes
        self.seconds = time.process_time() - started
        self.model = af.Transformer(
            af.ModelConfig(
                vocab=8, dim=DIM, depth=1, heads=HEADS, attention=CARRIER, position=position, max_length=length
            )
        )
        places, columns = torch.arange(length), math.isqrt(length)
        self.positions = torch.stack([places // columns, places % columns], dim=-1)[None] if axes == 2 else None
        self.tokens = torch.randint(8, (1, length))

    def forward(self) -> None:
        with torch.no_grad():
            self.model(self.tokens, positions=self.positions)

    def forward_backward(self) -> None:
        self.model.zero_grad()
        self.model(self.tokens, positions=self.positions).sum().backward()


def rows(options: argparse.Namespace, present: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines that are missing, one for each encoding and length, and one for each encoding that is refused."""
    known = {(line["position"], line["length"]): line for line in present}
    measure(Stand("none", LENGTHS[0]), Stand("none", LENGTHS[0]))  # buffers that stay
    for position in options.positions:
        judged = verdict(CARRIER, position, Site(DIM, HEADS, causal=True, max_length=LENGTHS[0]))
        if not judged.runs:
            if (position, 0) not in known:
                yield {"position": position, "length": 0, "status": judged.kind, "reason": judged.reason}
            continue
        before: dict[str, Any] = {}
        for length in options.lengths:
            line = known.get((position, length)) or cell(position, length, before, options.limit)
            if (position, length) not in known:
                yield line
            before = line


def cell(position: str, length: int, before: dict[str, Any], limit: float) -> dict[str, Any]:
    """The line of one encoding at one length, unless what it took at the length before says that it takes too long."""
    key = {"position": position, "length": length}
    if told := too_long(length, before, limit):
        return {**key, "status": "not tried", "reason": told}
    try:
        return {**key, "status": "ok", **measure(Stand(position, length), Stand("none", length))}
    except Exception as error:  # whatever an encoding raises at a length is the result of that length
        status, reason = fault_of(error)
        return {**key, "status": status, "reason": reason.splitlines()[0] if reason else ""}


def too_long(length: int, before: dict[str, Any], limit: float) -> str:
    """What at the length before says that this one takes more than `limit` seconds; "" where nothing does."""
    if not before:
        return ""
    if before["status"] != "ok":
        return f"{before['length']} tokens: {before['reason']}"
    taken = 2 * (before["forward"][0] + before["forward_backward"][0]) * length / before["length"]
    return f"about {taken:.0f} s, from those at {before['length']} tokens" if taken > limit else ""


def measure(with_: Stand, without: Stand) -> dict[str, Any]:
    """Seconds and bytes of both models. The first calls, whose memory is read, warm what is timed after them."""
    device = torch.device("cpu")
    memory = {
        name: [peak_of(getattr(each, name), device) for each in (with_, without)]
        for name in ("forward", "forward_backward")
    }
    taken: dict[str, list[list[float]]] = {name: [[], []] for name in memory}
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        for name, times in taken.items():
            for found, each in zip(times, (with_, without), strict=True):
                found.append(seconds_of(getattr(each, name)))
        if time.perf_counter() - began > _ENOUGH:
            break
    return {
        "build": round(with_.seconds, 6),
        **{name: [round(median(found), 6) for found in times] for name, times in taken.items()},
        "memory": memory,
        "rounds": len(taken["forward"][0]),
        "torch": torch.__version__,
    }


def seconds_of(call: Callable[[], None]) -> float:
    """Of the processor, in one call."""
    started = time.process_time()
    call()
    return time.process_time() - started


def own(line: dict[str, Any], what: str) -> float:
    """Seconds that the encoding adds; what is below a thousandth of the model without is lost in the noise and counts as that."""
    whole, without = line[what]
    return max(whole - without, without / 1000)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A row an encoding and, below, the cells that have no figures."""
    ran = [line for line in lines if line["status"] == "ok"]
    lengths = sorted({line["length"] for line in ran})
    bare = [f"{_told(_median(ran, length, 1))} at {length}" for length in lengths]
    times, sizes = (" | ".join(f"{length}, {unit}" for length in lengths) for unit in ("ms", "MiB"))
    head = (
        "# Costs of position encodings\n\n"
        f"A Transformer of one block, causal, width {DIM}, {HEADS} heads, softmax over the last 64 tokens, one row; one thread.\n"
        "Milliseconds of the processor that the encoding adds to forward + backward (forward alone in brackets), and MiB that it\n"
        "adds to the peak of forward + backward, at each number of tokens; last, the milliseconds to build it for the most. Below\n"
        f"a tenth of the model without an encoding, differences are mostly noise; that model takes {', '.join(bare)} ms.\n"
        "Made by `python -m bench.positions` from `lines.jsonl`; drawn in `positions.png`.\n\n"
        f"| encoding | {times} | {sizes} | build, ms |\n|---|{'---|' * (2 * len(lengths) + 1)}\n"
    )
    heaviest_first = sorted(
        {line["position"] for line in ran} - {"none"}, key=lambda name: _heaviest(name, ran), reverse=True
    )
    notes = [_note(line) for line in lines if line["status"] != "ok"]
    return head + "\n".join(_row(name, lengths, ran) for name in heaviest_first) + "\n\n" + "\n".join(notes) + "\n"


def _note(line: dict[str, Any]) -> str:
    where = f" at {line['length']}" if line["length"] else ""
    return f"* {line['position']}{where}: {line['status']}. {line['reason']}"


def _row(name: str, lengths: Sequence[int], ran: Sequence[dict[str, Any]]) -> str:
    mine = {line["length"]: line for line in ran if line["position"] == name}
    times, memory = [], []
    for length in lengths:
        line = mine.get(length)
        both, forward = (None, None) if line is None else (own(line, "forward_backward"), own(line, "forward"))
        times.append("-" if both is None or forward is None else f"{_told(both)} ({_told(forward)})")
        peaks = None if line is None else line["memory"]["forward_backward"]
        memory.append("-" if peaks is None else f"{max(0, peaks[0] - peaks[1]) / 2**20:.1f}")
    return f"| {name} | {' | '.join(times)} | {' | '.join(memory)} | {mine[max(mine)]['build'] * 1000:.1f} |"


def _told(seconds: float) -> str:
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:.0f}"


def _median(ran: Sequence[dict[str, Any]], length: int, which: int) -> float:
    return median(line["forward_backward"][which] for line in ran if line["length"] == length)


def _heaviest(name: str, ran: Sequence[dict[str, Any]]) -> tuple[int, float]:
    """The length an encoding came to, shorter ones first, and its cost there."""
    length, line = max((line["length"], line) for line in ran if line["position"] == name)
    return -length, own(line, "forward_backward")


def picture(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Milliseconds of forward and backward that each encoding adds, beside the model without one."""
    ran = [line for line in lines if line["status"] == "ok"]
    lengths = sorted({line["length"] for line in ran})
    curves = {"none": {length: 1000 * _median(ran, length, 1) for length in lengths}}
    for name in sorted(
        {line["position"] for line in ran} - {"none"}, key=lambda name: _heaviest(name, ran), reverse=True
    ):
        curves[name] = {
            line["length"]: 1000 * own(line, "forward_backward") for line in ran if line["position"] == name
        }
    labels = {name: f"{list(curve.values())[-1]:.3g} ms  {name}" for name, curve in curves.items()}
    labels["none"] = f"{list(curves['none'].values())[-1]:.3g} ms  the model without an encoding"
    draw(
        path,
        "What each encoding adds to forward + backward of one block with softmax over 64 tokens",
        curves,
        labels,
        everywhere=["none"],
        unit=("tokens", "milliseconds"),
        scale="log",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, then write the table and the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", nargs="+", default=names("position"), help="specs of encodings")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--limit", type=float, default=40.0, help="seconds beyond which a cell is not tried")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (_HELD, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "lines.jsonl"
    lines = _lines.read(file)
    for line in () if options.draw else _lines.appended(file, rows(options, list(lines))):
        lines.append(line)
        print(line, flush=True)
    (options.out / "table.md").write_text(table(lines))
    picture(lines, options.out / "positions.png")


if __name__ == "__main__":
    main()
