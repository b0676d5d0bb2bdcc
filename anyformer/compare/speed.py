"""What a model costs at each length: seconds in rounds interleaved over all models, and the step's memory."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from anyformer.compare.memory import peak_of
from anyformer.compare.quality import optimiser
from anyformer.compare.record import Cost, Timing
from anyformer.compare.trial import Plan, build_task
from anyformer.errors import SpecError
from anyformer.model.transformer import Transformer
from anyformer.task.base import Task

_ROUNDS = 7
_CALIBRATION = 512  # side of the matrix product that shows how busy the machine is


@dataclass(frozen=True)
class Measured:
    """Costs of each cell, and the seconds of one fixed matrix product before each round."""

    costs: dict[tuple[str, str, str], tuple[Cost, ...]]
    calibration: tuple[float, ...]


class Stand:
    """A model with a batch of random tokens on it, ready to be timed."""

    def __init__(self, plan: Plan, task: Task, device: torch.device) -> None:
        self.plan, self.task, self.device = plan, task, device
        self.model = Transformer(plan.config(task)).to(device)
        self.optimizer = optimiser(self.model, plan.sizes)

    def calls(self, length: int) -> dict[str, Callable[[], object]]:
        """Forward without gradients, forward and backward, and a whole training step, on the tokens of a step."""
        rows = max(1, self.plan.sizes.tokens // length)
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(self.task.vocab, (rows, length), generator=generator).to(self.device)

        def forward() -> None:
            self.model.eval()
            with torch.no_grad():
                self.model(tokens)

        def forward_backward() -> None:
            self.model.train()
            _loss(self.model, tokens).backward()
            self.optimizer.zero_grad()

        def step() -> None:
            self.model.train()
            _loss(self.model, tokens).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        return {"forward": forward, "forward_backward": forward_backward, "step": step}

    def memory(self, length: int) -> int:
        """Bytes that a warm training step needs beyond weights and optimiser state."""
        step = self.calls(length)["step"]
        step()
        return peak_of(step, self.device)


def measure(plans: list[Plan], device: torch.device, seconds: float, notice: Callable[[str], None]) -> Measured:
    """Time every plan's model at each of its lengths, round by round: one call of each model, then the next round.

    Args:
        plans: one a cell.
        seconds: about how long it may take.
        notice: told what is being timed.
    """
    costs: dict[tuple[str, str, str], list[Cost]] = {plan.cell: [] for plan in plans}
    calibration: list[float] = []
    by_task: dict[str, list[Plan]] = {}
    for plan in plans:
        by_task.setdefault(plan.task, []).append(plan)
    share = seconds / sum(len(group[0].lengths) for group in by_task.values())
    for text, group in by_task.items():
        task = build_task(text)
        stands = [Stand(plan, task, device) for plan in group]
        for length in group[0].lengths:
            notice(f"timing {text} at {length} tokens")
            timed, refused = _rounds(stands, length, share, calibration)
            for stand in stands:
                cell, rows = stand.plan.cell, max(1, stand.plan.sizes.tokens // length)
                if cell in refused:
                    costs[cell].append(Cost(length=length, batch=rows, status="unsupported", reason=refused[cell]))
                else:
                    costs[cell].append(Cost(length=length, batch=rows, **timed[cell]))
    return Measured({cell: tuple(found) for cell, found in costs.items()}, tuple(calibration))


def memories(plan: Plan, task: Task, device: torch.device) -> dict[int, int]:
    """The step's memory at each length that the model takes."""
    stand, found = Stand(plan, task, device), {}
    for length in plan.lengths:
        try:
            found[length] = stand.memory(length)
        except SpecError:  # a length beyond a table has no memory; its cost line says why
            continue
    return found


def _rounds(
    stands: list[Stand], length: int, seconds: float, calibration: list[float]
) -> tuple[dict[tuple, dict[str, Timing]], dict[tuple, str]]:
    calls, refused = {}, {}
    for stand in stands:
        made = stand.calls(length)
        try:
            for call in made.values():  # warm, and find out whether it runs
                call()
            calls[stand.plan.cell] = made
        except SpecError as error:
            refused[stand.plan.cell] = str(error)
    taken: dict[tuple, dict[str, list[float]]] = {cell: {name: [] for name in made} for cell, made in calls.items()}
    started = time.perf_counter()
    for number in range(_ROUNDS):
        calibration.append(_calibrate(stands[0].device))
        for cell, name, call in _each(calls):
            taken[cell][name].append(_seconds(call, stands[0].device))
        if number >= 2 and time.perf_counter() - started > seconds:
            break
    return {cell: {name: _timing(each) for name, each in made.items()} for cell, made in taken.items()}, refused


def _each(calls: dict[tuple, dict[str, Callable]]) -> Iterator[tuple[tuple, str, Callable]]:
    for name in ("forward", "forward_backward", "step"):
        for cell, made in calls.items():
            yield cell, name, made[name]


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _timing(seconds: list[float]) -> Timing:
    low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    return Timing(median=float(median), low=float(low), high=float(high), min=min(seconds), rounds=len(seconds))


def _calibrate(device: torch.device) -> float:
    a = torch.ones(_CALIBRATION, _CALIBRATION, device=device)
    return _seconds(lambda: a @ a, device)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).float().square().mean()
