"""What a model costs at each length: seconds in rounds interleaved over all models, and the memory of a training step."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from lightning_fabric import Fabric

from anyformer.attention._ways import ways
from anyformer.compare.clock import calibrate, seconds_of, timing
from anyformer.compare.environment import environment
from anyformer.compare.fault import fault_of
from anyformer.compare.memory import held_by, peak_of
from anyformer.compare.quality import loss_of, open_fabric, optimiser, take_step
from anyformer.compare.record import Cost, Environment
from anyformer.compare.trial import Plan
from anyformer.model.transformer import Transformer
from anyformer.task.base import Task

MEASURES = ("forward", "forward_backward", "step")
_ROUNDS = 7
_FEWEST = 2  # rounds, however long they take

Cell = tuple[str, str, str]
Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Measured:
    """Costs of each cell, the seconds of one fixed matrix product before each round, and the machine before the first."""

    costs: dict[Cell, tuple[Cost, ...]] = field(default_factory=dict)
    calibration: tuple[float, ...] = ()
    before: Environment | None = None


class Stand:
    """A model and its optimiser with a batch of the task's training data on it, ready to be measured.

    The learning rate is 0: a step costs the same, and the weights stay where they are however often it is taken.
    """

    def __init__(self, plan: Plan, task: Task, fabric: Fabric) -> None:
        self.plan, self.task, self.fabric = plan, task, fabric
        with fabric.init_module():
            model = Transformer(plan.config(task))
        self.model, self.optimizer = fabric.setup(model, optimiser(model, plan.sizes))
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0

    def calls(self, length: int) -> Calls:
        """Forward without gradients, forward and backward, and a whole training step, on the tokens of a step."""
        batch = self.task.batch("train", 0, size=self.plan.rows(length), length=length).to(self.fabric.device)

        def forward() -> None:
            self.model.eval()
            with torch.no_grad():
                loss_of(self.task, self.model, batch)

        def forward_backward() -> None:
            self.model.train()
            self.fabric.backward(loss_of(self.task, self.model, batch))
            self.optimizer.zero_grad()

        def step() -> None:
            self.model.train()
            take_step(self.fabric, self.task, self.model, self.optimizer, batch)

        return dict(zip(MEASURES, (forward, forward_backward, step), strict=True))

    def memory(self, length: int) -> Cost:
        """The memory of a warm training step; a step that fails is a cost with its status."""
        rows = self.plan.rows(length)
        try:
            step = self.calls(length)["step"]
            step()
            needed = peak_of(step, self.fabric.device)
        except Exception as error:  # whatever a method raises at a length is the result of that length
            status, reason = fault_of(error)
            return Cost(length=length, batch=rows, status=status, reason=reason)
        return Cost(length=length, batch=rows, memory=needed, peak=needed + held_by(self.model, self.optimizer))


def measure(
    plans: tuple[Plan, ...],
    build: Callable[[Plan], Task],
    device: str,
    seconds: float,
    notice: Callable[[str], None],
) -> Measured:
    """Time every plan's model at each of its lengths, round by round: one call of each model, then the next round.

    Args:
        plans: one a cell, with the lengths to be timed.
        build: the task of a plan.
        device: as `open_fabric` takes it.
        seconds: about how long it may take.
        notice: told what is being timed.
    """
    groups: dict[str, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(plan.task, []).append(plan)
    turns = [(text, length) for text, group in groups.items() for length in _lengths(group)]
    costs: dict[Cell, list[Cost]] = {plan.cell: [] for plan in plans}
    before = environment(open_fabric(device, "32-true").device)
    calibration: list[float] = []
    stands: list[Stand] = []
    for text, length in turns:
        if not stands or stands[0].plan.task != text:
            task, fabric = build(groups[text][0]), open_fabric(device, groups[text][0].precision)
            stands = [Stand(plan, task, fabric) for plan in groups[text]]
        notice(f"timing {text} at {length} tokens")
        taking_part = [stand for stand in stands if length in stand.plan.lengths]
        for cell, cost in _rounds(taking_part, length, seconds / len(turns), calibration):
            costs[cell].append(cost)
    return Measured({cell: tuple(found) for cell, found in costs.items()}, tuple(calibration), before)


def _lengths(plans: list[Plan]) -> list[int]:
    return sorted({length for plan in plans for length in plan.lengths})


def _rounds(stands: list[Stand], length: int, seconds: float, calibration: list[float]) -> Iterator[tuple[Cell, Cost]]:
    started = time.perf_counter()
    calls: dict[Cell, Calls] = {}
    way: dict[Cell, str] = {}
    for stand in stands:
        try:
            made = stand.calls(length)
            with ways() as seen:
                for name in ("forward", "step"):  # warm
                    made[name]()
            calls[stand.plan.cell], way[stand.plan.cell] = made, ", ".join(seen)
        except Exception as error:  # the others are timed without it
            status, reason = fault_of(error)
            yield stand.plan.cell, Cost(length=length, batch=stand.plan.rows(length), status=status, reason=reason)
    if not calls:
        return
    taken: dict[Cell, dict[str, list[float]]] = {cell: {name: [] for name in MEASURES} for cell in calls}
    for number in range(_ROUNDS):
        if number >= _FEWEST and time.perf_counter() - started > seconds:
            break
        calibration.append(calibrate(stands[0].fabric.device))
        for name in MEASURES:
            for cell, made in calls.items():
                taken[cell][name].append(seconds_of(made[name], stands[0].fabric.device))
    for cell, made in taken.items():
        rows = stands[0].plan.rows(length)
        forward, both, step = (timing(made[name]) for name in MEASURES)
        yield cell, Cost(length=length, batch=rows, forward=forward, forward_backward=both, step=step, way=way[cell])
