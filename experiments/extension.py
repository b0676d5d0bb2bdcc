"""Taking trained models to longer inputs by each method of `extend`: loss and retrieval at 1, 2, 4 and 8 times the trained length.

    nice -n 10 python -m experiments.extension        # trains what results/extension/results.jsonl lacks, then draws
    python -m experiments.extension --steps 20 --out FOLDER

For each task (bytes of text; a passkey in filler) and each encoding (learned, rope) one model of 2 blocks of width 64 is trained on
128 tokens. Each method takes it to 1024 tokens at once; it is scored as it is, and again after a short training on 1024 tokens. The
same final bytes are scored at every length. The factors of longrope are searched for on validation rows of 1024 tokens. dynamic_ntk
is not trained further: with frequencies of each query's own a step at that length takes as long as all of the rest.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import anyformer as af
from anyformer.compare.quality import loss_of, open_fabric, optimiser, take_step, train
from anyformer.compare.style import COLOURS, FAINT, GRID
from anyformer.compare.trial import Plan, Sizes
from anyformer.task.base import Task
from anyformer.task.text import Text
from experiments import _lines
from experiments._passkey import Passkey

FOLDER = Path(__file__).parents[1] / "results" / "extension"
TRAINED, TIMES = 128, (1, 2, 4, 8)
TO = TRAINED * TIMES[-1]
METHODS = {
    "learned": ("random_rows", "stretch", "hierarchical"),
    "rope": ("plain", "interpolate", "ntk", "dynamic_ntk", "yarn", "longrope", "llama3"),
}
UNTUNED = {"dynamic_ntk"}
_AT_ONCE = 16384  # tokens scored in one forward
_LATER = 1 << 20  # training rows of the short training are none of those before
_SEARCHED = 12  # mutations of longrope's factors


def rows(options: argparse.Namespace, present: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines that are missing, one for each (seed, task, encoding, method, short training or not)."""
    known = {name_of(line) for line in present}
    for seed in range(options.seeds):
        for task in tasks():
            for position, methods in METHODS.items():
                wanted = [
                    (seed, task.name, position, method, tuned)
                    for method in methods
                    for tuned in tunings(method, options)
                ]
                lacking = [name for name in wanted if name not in known]
                base = trained(task, position, seed, options) if lacking else None
                for method in dict.fromkeys(method for *_, method, _ in lacking):
                    assert base is not None
                    made = extended(base, task, method, (seed, task.name, position, method), options)
                    yield from (line for line in made if name_of(line) in lacking)


def tasks() -> list[Task]:
    return [Text(length=TRAINED), Passkey(length=TRAINED)]


def tunings(method: str, options: argparse.Namespace) -> tuple[int, ...]:
    """Steps of the short training after which a method is scored."""
    return (0,) if method in UNTUNED else (0, options.tune)


def name_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["seed"], line["task"], line["position"], line["method"], line["tuned"]


def plan_of(task: Task, position: str, seed: int, steps: int, tokens: int) -> Plan:
    sizes = Sizes(tokens=tokens, rate=5e-3)
    return Plan(
        attention="softmax", position=position, task=task.name, sizes=sizes, lengths=(TRAINED,), steps=steps, seed=seed
    )


def trained(task: Task, position: str, seed: int, options: argparse.Namespace) -> af.Transformer:
    """The model that all methods begin with."""
    plan = plan_of(task, position, seed, options.steps, options.tokens)
    model = af.Transformer(plan.config(task))
    started = time.perf_counter()
    _, curve = train(plan, task, model, open_fabric("cpu", "32-true"), lambda step, loss: None)
    print(
        f"{task.name} {position}: {options.steps} steps, {time.perf_counter() - started:.0f} s, loss {curve[-1][1]:.3f}",
        flush=True,
    )
    return model.eval()


def extended(
    base: af.Transformer, task: Task, method: str, name: tuple[Any, ...], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The lines of one method, before and after a short training."""
    started = time.perf_counter()
    way = searched(base, task, name[0]) if method == "longrope" else method
    model = af.extend(base, to=TO, method=way)
    for tuned in tunings(method, options):
        if tuned:
            tune(model, task, name[0], options)
        yield {
            **dict(zip(("seed", "task", "position", "method"), name, strict=True)),
            "tuned": tuned,
            "spec": model.config.position,
            "metric": task.metric,
            "scores": scored(model, task, options.items),
            "steps": options.steps,
            "tokens": options.tokens,
            "items": options.items,
            "seconds": round(time.perf_counter() - started, 1),
            "torch": torch.__version__,
        }


def tune(model: af.Transformer, task: Task, seed: int, options: argparse.Namespace) -> None:
    """Some steps on rows of the new length, at a third of the rate of the training, rising over the first half."""
    plan, fabric = plan_of(task, "", seed, options.tune, options.tokens), open_fabric("cpu", "32-true")
    wrapped, optimizer = fabric.setup(model.train(), optimiser(model, plan.sizes))
    size = plan.rows(TO)
    for step in range(options.tune):
        for group in optimizer.param_groups:
            group["lr"] = plan.sizes.rate / 3 * min(1.0, 2 * (step + 1) / options.tune)
        batch = task.batch("train", _LATER // size + step, size=size, length=TO, seed=seed)
        take_step(fabric, task, wrapped, optimizer, batch)
    model.eval()


@torch.no_grad()
def scored(model: af.Transformer, task: Task, items: int) -> dict[str, float]:
    """The task's metric at each length, on the same items."""
    found = {}
    for length in (TRAINED * times for times in TIMES):
        size = max(each for each in range(1, items + 1) if items % each == 0 and each * length <= max(_AT_ONCE, length))
        totals: dict[str, float] = {}
        for index in range(items // size):
            batch = task.batch("test", index, size=size, length=length)
            for name, value in task.metrics(model(batch.tokens), batch).items():
                totals[name] = totals.get(name, 0.0) + value
        found[str(length)] = round(float(task.finish(totals)[task.metric]), 5)
    return found


@torch.no_grad()
def searched(base: af.Transformer, task: Task, seed: int) -> str:
    """longrope with the factors that lose least on validation rows: those of linear and ntk, then mutations of the best, which
    never fall from a faster pair to a slower one."""
    pairs, most = base.config.site().head_dim // 2, TO / TRAINED
    random = np.random.default_rng(seed)
    batch = task.batch("valid", 0, size=8, length=TO)

    def way(factors: np.ndarray) -> str:
        return f"longrope(short={[1.0] * pairs}, long={[round(float(each), 3) for each in factors]})"

    def loss(factors: np.ndarray) -> float:
        return float(loss_of(task, af.extend(base, to=TO, method=way(factors)), batch))

    starts = [np.full(pairs, most), most ** np.linspace(0, 1, pairs)]
    best = min(((loss(each), each) for each in starts), key=lambda each: each[0])
    for _ in range(_SEARCHED):
        mutant = np.maximum.accumulate(np.clip(best[1] * np.exp(0.4 * random.standard_normal(pairs)), 1.0, 2 * most))
        if (value := loss(mutant)) < best[0]:
            best = (value, mutant)
    return way(best[1])


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Means over seeds, a row for each method before and after the short training."""
    seeds = len({line["seed"] for line in lines})
    parts = [
        "# Context extension\n\n"
        f"Trained on {TRAINED} tokens, taken to {TO} at once by `anyformer.extend`, scored at 1, 2, 4 and 8 times the trained\n"
        f"length on the same items; {seeds} seed{'s' if seeds > 1 else ''}. Made by `python -m experiments.extension` from\n"
        "`results.jsonl`.\n"
    ]
    for task in dict.fromkeys(line["task"] for line in lines):
        mine = [line for line in lines if line["task"] == task]
        lengths = list(mine[0]["scores"])
        how = f"{mine[0]['steps']} steps of {mine[0]['tokens']} tokens, {mine[0]['items']} items"
        parts.append(f"\n## {task}: {mine[0]['metric']}\n\nTraining: {how}.\n")
        parts.append(
            f"| encoding | method | steps at {TO} | {' | '.join(lengths)} |\n|---|---|---|{'---|' * len(lengths)}"
        )
        for key in dict.fromkeys((line["position"], line["method"], line["tuned"]) for line in mine):
            same = [line["scores"] for line in mine if (line["position"], line["method"], line["tuned"]) == key]
            values = (f"{np.mean([each[length] for each in same]):.3f}" for length in lengths)
            parts.append(f"| {' | '.join(map(str, key))} | {' | '.join(values)} |")
    return "\n".join(parts) + "\n"


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each task and encoding; solid: as extended, dashed: after the short training."""
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    figure = Figure(figsize=(10, 3.6 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(tasks), len(METHODS), squeeze=False)
    for task, line_of_panels in zip(tasks, panels, strict=True):
        for position, axes in zip(METHODS, line_of_panels, strict=True):
            metric = _curves(axes, [line for line in lines if line["task"] == task and line["position"] == position])
            axes.set_title(f"{task}, {position}: {metric}", fontsize=10, loc="left")
    figure.savefig(path, dpi=110)


def _curves(axes: Any, lines: Sequence[dict[str, Any]]) -> str:
    methods = list(dict.fromkeys(line["method"] for line in lines))
    for colour, method in zip(COLOURS, methods, strict=False):
        for tuned in sorted({line["tuned"] for line in lines}):
            same = [line["scores"] for line in lines if line["method"] == method and line["tuned"] == tuned]
            if not same:
                continue
            lengths = list(map(int, same[0]))
            values = [np.mean([each[str(length)] for each in same]) for length in lengths]
            label = method if not tuned else None
            axes.plot(
                lengths, values, "--" if tuned else "-", color=colour, marker="o", markersize=3, label=label, lw=1.3
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([TRAINED * times for times in TIMES], [str(TRAINED * times) for times in TIMES])
    axes.axvline(TRAINED, color=FAINT, lw=0.8)
    axes.grid(color=GRID)
    axes.legend(fontsize=7, frameon=False)
    axes.set_xlabel(f"tokens; dashed: after {max(line['tuned'] for line in lines)} steps at {TO}", fontsize=8)
    return lines[0]["metric"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250, help="steps of training")
    parser.add_argument("--tune", type=int, default=8, help="steps of the short training")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--items", type=int, default=16, help="test items scored at each length")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draw", action="store_true", help="train nothing; table and picture of the lines there are")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.jsonl"
    lines = _lines.read(file)
    for line in () if options.draw else _lines.appended(file, rows(options, list(lines))):
        lines.append(line)
        print(name_of(line), line["scores"], f"{line['seconds']} s", flush=True)
    (options.out / "table.md").write_text(table(lines))
    draw(lines, options.out / "extension.png")


if __name__ == "__main__":
    main()
