"""Records as a real comparison would write them, from a formula instead of training."""

import math
import random

from anyformer.compare.record import (
    Cost,
    Data,
    Environment,
    Parameters,
    Quality,
    Record,
    Reference,
    Score,
    Timing,
    Trial,
    key_of,
)

LENGTHS = (256, 512, 1024, 2048)
FAMILIES = {
    "softmax": ("full",),
    "local(64)": ("human-made pattern", "window"),
    "bigbird(block=64)": ("human-made pattern", "combined"),
    "strided(32)": ("human-made pattern", "strided"),
    "reformer": ("clustering", "hashing"),
    "linear": ("order of the product", "kernel"),
    "linformer(rank=64)": ("fewer keys", "projection"),
    "gru": ("attention-free", "recurrence"),
    "none": ("none",),
    "rope": ("relative", "rotation"),
    "alibi": ("relative", "bias"),
    "t5": ("relative", "bias"),
    "sinusoidal": ("absolute", "fixed"),
    "learned": ("absolute", "trained"),
}
DEFAULT = [("softmax", "none"), ("softmax", "rope"), ("softmax", "alibi"), ("linear", "rope"), ("local(64)", "rope")]
# bits per byte at 256 and the loss added by each doubling of the context, as small models of this kind show them
BYTES = {
    "none": (3.33, 0.04),
    "rope": (2.17, 0.9),
    "alibi": (2.87, 0.0),
    "t5": (2.35, 0.1),
    "sinusoidal": (2.7, 1.1),
    "learned": (2.65, 0.0),
}
TEXT_DATA = Data(
    name="standard library of Python 3.11", fingerprint="9f2c41d07a", note="477 files, 8.3 MB train, 0.55 MB held out"
)
MQAR_DATA = Data(name="mqar", fingerprint="0a11ce55", note="generated, 64 tokens, 8 pairs")


def environment(**changes) -> Environment:
    facts = {
        "fingerprint": "e1d0",
        "device": "cpu",
        "processor": "Intel Xeon Platinum 8481C",
        "cores": 2,
        "threads": 2,
        "memory": 8 << 30,
        "platform": "Linux 6.1 x86_64",
        "versions": {"python": "3.11.7", "torch": "2.13.0", "anyformer": "0.1.0"},
        "notes": {"instruction sets": "AVX-512, AMX"},
        "load": 0.2,
        "calibration": (0.0101, 0.0104, 0.0102),
    }
    return Environment.model_validate({**facts, **changes})


def trial(
    attention: str, position: str, *, task: str = "text", seed: int = 0, index: int = 0, steps: int = 400, **changes
) -> Trial:
    text = f"attention={attention} position={position} task={task} model=dim64,depth2,heads2 seed={seed} steps={steps}"
    rng = random.Random(text)
    facts = {
        "trial": text,
        "key": key_of(text),
        "task": task,
        "status": "ok",
        "attention": attention,
        "position": position,
        "seed": seed,
        "attention_family": FAMILIES.get(attention, ("new framework", "other")),
        "position_family": FAMILIES.get(position, ("other",)),
        "index": index,
        "model": "dim64,depth2,heads2",
        "steps": steps,
        "batch": 16,
        "data": TEXT_DATA if task == "text" else MQAR_DATA,
        "quality": text_quality(attention, position, rng)
        if task == "text"
        else recall_quality(attention, position, rng),
        "parameters": Parameters(
            total=116_224 + (16_384 if position == "learned" else 0),
            position=16_384 if position == "learned" else 0,
            embedding=16_384,
        ),
        "curve": [(step, 2.0 + 3.5 * math.exp(-step / 90) + rng.gauss(0, 0.03)) for step in range(0, steps + 1, 10)],
        "costs": costs(attention, rng),
        "tokens_per_second": 78_000 + rng.gauss(0, 3000),
        "seconds": 31 + rng.random() * 9,
        "finished": f"2025-11-30T09:{30 + index % 30:02d}:00Z",
        "impl": {"attention": "dense" if attention == "softmax" else "tile"},
        "environment": environment(),
        "command": "anyformer compare --attention softmax linear --position none rope alibi --task text",
    }
    return Trial.model_validate({**facts, **changes})


def text_quality(attention: str, position: str, rng: random.Random) -> Quality:
    start, rise = BYTES.get(position, (2.9, 0.3))
    start += {"linear": 1.1, "gru": 0.2, "linformer(rank=64)": 0.6, "reformer": 0.35}.get(attention, 0.0) + rng.gauss(
        0, 0.03
    )
    windowed = attention in ("local(64)", "gru")
    level = random.Random("items")
    hardness = [level.gauss(0, 0.5) for _ in range(60)]
    scores = []
    for doubling, length in enumerate(LENGTHS):
        if position == "learned" and length > 256:
            scores.append(
                Score(length=length, status="unsupported", reason="beyond the learned table of 256 positions")
            )
            continue
        mean = start if windowed else start + rise * doubling
        items = [max(0.05, mean + hard + rng.gauss(0, 0.15)) for hard in hardness]
        scores.append(Score(length=length, value=sum(items) / len(items), items=tuple(items)))
    return Quality(metric="bits per byte", better="lower", train_length=256, scores=tuple(scores), chance=8.0)


def recall_quality(attention: str, position: str, rng: random.Random) -> Quality:
    level = {"linear": 0.16, "local(64)": 0.55, "gru": 0.2}.get(
        attention, 0.97 if position != "none" else 0.81
    ) + rng.gauss(0, 0.01)
    scores = []
    for doubling, length in enumerate((64, 128, 256)):
        items = [min(1.0, max(0.0, level * 0.8**doubling + rng.gauss(0, 0.1))) for _ in range(60)]
        scores.append(Score(length=length, value=sum(items) / len(items), items=tuple(items)))
    return Quality(metric="recall accuracy", better="higher", train_length=64, scores=tuple(scores), chance=0.125)


def costs(attention: str, rng: random.Random) -> tuple[Cost, ...]:
    found = []
    for length in (256, 512, 1024, 2048, 4096):
        quadratic = attention in ("softmax", "strided(32)")
        seconds = 1.6e-6 * 4 * length + (6e-10 * 4 * length**2 if quadratic else 1e-7 * 4 * length) + 2e-3
        memory = 4 * length * (9000 + rng.random() * 500) + (8 * length**2 * 4 if quadratic else 4e6)
        if attention == "reformer" and length > 1024:
            found.append(Cost(length=length, batch=4, status="oom", reason="asked for 9.1 GiB of 8 GiB"))
            continue
        found.append(
            Cost(
                length=length,
                batch=4,
                forward=timing(seconds * 0.3, rng),
                forward_backward=timing(seconds * 0.9, rng),
                step=timing(seconds, rng),
                memory=int(memory),
                peak=int(memory + 480_000),
            )
        )
    return tuple(found)


def timing(seconds: float, rng: random.Random) -> Timing:
    median = seconds * (1 + 0.04 * rng.random())
    return Timing(median=median, low=median * 0.97, high=median * 1.06, min=median * 0.95, rounds=7)


def references() -> list[Reference]:
    found = []
    for name, value, note in (
        ("unigram", 4.44, "order 0 counts"),
        ("bigram", 3.36, "order 1 counts"),
        ("trigram", 2.47, "order 2 counts"),
        ("xz", 1.68, "xz -9 on the held-out bytes"),
    ):
        quality = Quality(metric="bits per byte", better="lower", scores=(Score(length=256, value=value),), chance=8.0)
        text = f"reference={name} task=text"
        found.append(
            Reference(
                trial=text,
                key=key_of(text),
                task="text",
                status="ok",
                name=name,
                note=note,
                data=TEXT_DATA,
                quality=quality,
            )
        )
    return found


def failed(attention: str, position: str, status: str, reason: str, **changes) -> Trial:
    facts = {
        "status": status,
        "reason": reason,
        "quality": None,
        "costs": (),
        "curve": (),
        "parameters": None,
        "tokens_per_second": None,
    }
    if status == "refused":
        facts |= {"environment": None, "data": None}
    return trial(attention, position, **{**facts, **changes})


def default_run(seeds: int = 1) -> list[Record]:
    """The grid of ``make compare``: five methods on two tasks."""
    grid = [(task, method) for task in ("text", "mqar") for method in DEFAULT]
    found: list[Record] = list(references())
    for seed in range(seeds):
        for index, (task, (attention, position)) in enumerate(grid):
            found.append(trial(attention, position, task=task, seed=seed, index=index))
    return found


def wide_run(seeds: int = 3) -> list[Record]:
    """Nine methods with every kind of ending."""
    grid = [*DEFAULT, ("bigbird(block=64)", "rope"), ("reformer", "rope"), ("softmax", "learned"), ("softmax", "t5")]
    found: list[Record] = list(references())
    for seed in range(seeds):
        for index, (attention, position) in enumerate(grid):
            found.append(trial(attention, position, seed=seed, index=index))
        found += [
            failed("linear", "t5", "refused", "linear has no form for t5", seed=seed, index=20),
            failed(
                "linformer(rank=64)",
                "alibi",
                "refused",
                "linformer mixes keys before they meet queries: a bias per pair has no place",
                seed=seed,
                index=21,
            ),
            failed("strided(32)", "none", "timeout", "stopped after 300 s", seed=seed, index=22),
        ]
    found[-1] = failed(
        "gru",
        "none",
        "error",
        "RuntimeError: shape mismatch",
        details="Traceback ...\nRuntimeError: <shapes> [2, 3] & [4]",
        index=23,
    )
    found.append(failed("softmax", "sinusoidal", "diverged", "the loss was NaN at step 210", index=24))
    return found


def crowd(methods: int = 40) -> list[Record]:
    """Many methods whose circles lie close together."""
    attentions = [name for name in FAMILIES if name not in BYTES and name != "none"]
    grid = [
        (f"{attention[:-1]}, window={place})" if attention.endswith(")") else attention, position)
        for place, attention in enumerate(attentions)
        for position in BYTES
    ]
    return [
        *references(),
        *(trial(attention, position, index=index) for index, (attention, position) in enumerate(grid[:methods])),
    ]
