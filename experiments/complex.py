"""Four text classifiers over complex numbers beside their real twins with as many parameters, on order alone and on real text.

    nice -n 10 python -m experiments.complex

writes `results/complex/results.jsonl`, one line a trial as it ends, and `table.md` from these lines. A trial that has a line is not
run again.
"""

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from anyformer.classify.base import Classifier, Number
from anyformer.classify.cnn import CNNClassifier
from anyformer.classify.fasttext import FastTextClassifier
from anyformer.classify.lstm import LSTMClassifier
from anyformer.classify.transformer import TransformerClassifier
from anyformer.compare.quality import open_fabric, train
from anyformer.compare.trial import Plan, Sizes
from anyformer.task.base import Task
from experiments._order import Order
from experiments._packages import Packages

OUT = Path(__file__).parents[1] / "results" / "complex"
COMMAND = "nice -n 10 python -m experiments.complex"
SEEDS = (0, 1, 2)
TOLERATED = 0.02  # share by which the parameters of twins may differ
_SCORED = 64  # test items scored at once


@dataclass(frozen=True)
class Kind:
    """One kind of numbers and positions that a model is trained with.

    Args:
        label: what the table calls it.
        number: "real" or "complex".
        position: spec of the encoding.
        conjugate: of the Transformer's queries.
    """

    label: str
    number: Number
    position: str
    conjugate: bool = True


COMPLEX = Kind("complex, complex_order", "complex", "complex_order")
KINDS = (
    Kind("real, none", "real", "none"),
    Kind("real, sinusoidal", "real", "sinusoidal"),
    Kind("real, complex_order", "real", "complex_order"),
    Kind("complex, none", "complex", "none"),
    COMPLEX,
)
AS_PUBLISHED = Kind("complex, complex_order, no conjugate", "complex", "complex_order", conjugate=False)

Build = Callable[[Task, Kind, int, int], Classifier]
"""A model for a task and a kind of numbers, of a size that may be chosen, with a seed."""

DIM = 64


def _given(task: Task, kind: Kind, dim: int, seed: int) -> dict[str, Any]:
    shared = {"vocab": task.vocab, "outputs": task.outputs, "max_length": task.train_length}
    return {**shared, "dim": dim, "number": kind.number, "position": kind.position, "seed": seed}


def _fasttext(task: Task, kind: Kind, size: int, seed: int) -> Classifier:
    return FastTextClassifier(**_given(task, kind, 2 * size, seed))


def _lstm(task: Task, kind: Kind, size: int, seed: int) -> Classifier:
    return LSTMClassifier(**_given(task, kind, DIM, seed), width=2 * size)


def _cnn(task: Task, kind: Kind, size: int, seed: int) -> Classifier:
    return CNNClassifier(**_given(task, kind, DIM, seed), filters=2 * size)


def _transformer(task: Task, kind: Kind, size: int, seed: int) -> Classifier:
    dim = (4 if kind.number == "complex" else 2) * size  # 2 heads
    return TransformerClassifier(**_given(task, kind, dim, seed), depth=1, heads=2, conjugate=kind.conjugate)


MODELS: dict[str, tuple[Build, int, tuple[Kind, ...]]] = {
    "FastText": (_fasttext, 32, KINDS),
    "LSTM": (_lstm, 32, KINDS),
    "CNN": (_cnn, 32, KINDS),
    "Transformer": (_transformer, 17, (*KINDS, AS_PUBLISHED)),
}
"""For each model how it is built, the size of the complex one, and what is trained."""

TASKS: dict[str, tuple[Callable[[], Task], Sizes, int, int]] = {
    "order of two": (partial(Order, marks=2), Sizes(tokens=1024, rate=3e-3), 300, 1024),
    "order of three": (partial(Order, marks=3), Sizes(tokens=1024, rate=3e-3), 300, 1024),
    "packages": (Packages, Sizes(tokens=2048, rate=5e-3), 300, 1024),
}
"""For each task how it is made, the optimiser's settings, the training steps and the test items."""


def count(model: torch.nn.Module) -> int:
    """Number of parameters."""
    return sum(each.numel() for each in model.parameters())


def size_of(model: str, task: Task, kind: Kind) -> int:
    """The size at which a model has as many parameters as the complex one, to within 2 %.

    Raises:
        ValueError: there is none.
    """
    build, own, _ = MODELS[model]

    def parameters(kind: Kind, size: int) -> int:
        with torch.device("meta"):
            return count(build(task, kind, size, 0))

    wanted = parameters(COMPLEX, own)
    if kind.number == "complex":
        return own
    best = min(range(1, 4 * own), key=lambda size: abs(parameters(kind, size) - wanted))
    if abs(parameters(kind, best) / wanted - 1) > TOLERATED:
        raise ValueError(f"{model}: the closest twin of {wanted} parameters has {parameters(kind, best)}")
    return best


@torch.no_grad()
def score(task: Task, model: torch.nn.Module, items: int) -> float:
    """The headline metric on the first test items."""
    model.eval()
    totals: dict[str, float] = {}
    for index in range(items // _SCORED):
        batch = task.batch("test", index, size=_SCORED)
        for name, value in task.metrics(model(batch.tokens), batch).items():
            totals[name] = totals.get(name, 0.0) + value
    return task.finish(totals)[task.metric]


def run(name: str, task: Task, model: str, kind: Kind, seed: int) -> dict[str, Any]:
    """Train and score one model: the line of its trial."""
    _, sizes, steps, items = TASKS[name]
    size = size_of(model, task, kind)
    built = MODELS[model][0](task, kind, size, seed)
    plan = Plan(
        attention=model,
        position=kind.position,
        task=name,
        sizes=sizes,
        lengths=(task.train_length,),
        steps=steps,
        seed=seed,
        items=items,
    )
    start = time.process_time()
    trained, curve = train(plan, task, built, open_fabric("cpu", "32-true"), lambda step, loss: None)
    return {
        "trial": title(name, model, kind, seed),
        "status": "ok",
        "task": name,
        "model": model,
        "kind": kind.label,
        "seed": seed,
        "parameters": count(built),
        "size": size,
        "steps": steps,
        "rows": plan.rows(task.train_length),
        "items": items,
        task.metric: score(task, trained, items),
        "loss": curve[-1][1],
        "processor_seconds": round(time.process_time() - start, 1),
        "fingerprint": task.fingerprint,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def title(task: str, model: str, kind: Kind, seed: int) -> str:
    """The text of a trial: equal texts are the same trial."""
    _, sizes, steps, items = TASKS[task]
    return (
        f"task={task} model={model} kind={kind.label} {sizes.tokens} tokens a step, rate {sizes.rate}, {steps} steps, "
        f"{items} items, seed={seed}"
    )


def table(lines: Sequence[Mapping[str, Any]], tasks: Mapping[str, Task]) -> str:
    """The page that people read, from the lines of all trials."""
    text = ["# Complex classifiers and their real twins", "", f"Made by `{COMMAND}`. One thread, float32.", ""]
    for name, task in tasks.items():
        _, sizes, steps, items = TASKS[name]
        rows = max(1, sizes.tokens // task.train_length)
        text += [
            f"## {name}: {task.summary}",
            "",
            f"{task.train_length} tokens a row, {steps} steps of {rows} rows, {items} test rows; accuracy, mean and standard "
            f"deviation over the seeds in the last column. "
            f"Drawing test rows alone: +- {_error(items):.3f} (one standard error at 0.5).",
            "",
            "| model | numbers, positions | parameters | accuracy | spread | each seed |",
            "|---|---|---|---|---|---|",
        ]
        for model, (_, _, kinds) in MODELS.items():
            for kind in kinds:
                own = [
                    each for each in lines if (each["task"], each["model"], each["kind"]) == (name, model, kind.label)
                ]
                if own:
                    values = [each[task.metric] for each in sorted(own, key=lambda each: each["seed"])]
                    spread = f"{statistics.stdev(values):.3f}" if len(values) > 1 else "-"
                    text.append(
                        f"| {model} | {kind.label} | {own[0]['parameters']} | {statistics.mean(values):.3f} | {spread} | "
                        f"{', '.join(f'{value:.3f}' for value in values)} |"
                    )
        references = task.reference_lines(items)
        text += ["", *(f"* {each.name}: {each.value:.3f} ({each.note})" for each in references), ""]
    return "\n".join(text)


def _error(items: int) -> float:
    return math.sqrt(0.25 / items)


@cache
def _task(name: str) -> Task:
    return TASKS[name][0]()


def main() -> None:
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "results.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    done = {each["trial"] for each in lines}
    for seed in SEEDS:
        for name in TASKS:
            for model, (_, _, kinds) in MODELS.items():
                for kind in kinds:
                    if title(name, model, kind, seed) in done:
                        continue
                    line = run(name, _task(name), model, kind, seed)
                    lines.append(line)
                    with path.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    print(line["trial"], line["accuracy"], flush=True)
    (OUT / "table.md").write_text(table(lines, {name: _task(name) for name in TASKS}))


if __name__ == "__main__":
    main()
