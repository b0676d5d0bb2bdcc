"""How many steps a budget of seconds pays for: the same number for every trial, and so the same number of tokens."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from anyformer.compare.record import Cost
from anyformer.compare.trial import Plan

FEWEST = 20
"""Training steps, whatever the budget."""

START = 1.0
"""Seconds a trial takes beside its steps and its scoring."""


def affordable(seconds: float, seeds: int, cells: Sequence[tuple[Plan, int, Sequence[Cost]]]) -> int:
    """The steps that each trial can train so that all of them fit into `seconds`; below 1 where none fit.

        steps = (seconds - seeds * sum_cells (start + scoring)) / (seeds * sum_cells step)

    Args:
        seconds: for all trials of all seeds together.
        cells: each with the length it is trained at and its costs by length. One whose step could not be timed counts as
            its start alone: it will end as soon.
    """
    fixed = steps = 0.0
    for plan, trained, costs in cells:
        fixed += START
        for cost in costs:
            if cost.forward is not None:
                fixed += cost.forward.median * plan.items / cost.batch
            if cost.step is not None and cost.length == trained:
                steps += cost.step.median
    return 0 if not steps else math.floor((seconds - seeds * fixed) / (seeds * steps))


def rounded(steps: int) -> int:
    """A number of steps that is easy to say, and never below `FEWEST`."""
    return max(FEWEST, steps // 10 * 10)


class PlanFile:
    """`plan.json`: the steps that were planned for each budget, so that what a kill left unfinished is finished alike."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "plan.json"

    def known(self, budget: str) -> int | None:
        """The steps an earlier run planned for this budget.

        Raises:
            ValueError: the file is none of ours.
        """
        steps = self._read().get(budget)
        if steps is None or (isinstance(steps, int) and steps > 0):
            return steps
        raise ValueError(f"{self.path} plans {steps!r} steps")

    def keep(self, budget: str, steps: int) -> None:
        """Remember the steps; a kill leaves the old file or the new one."""
        try:
            plans = self._read()
        except ValueError:
            plans = {}
        temporary = self.path.with_name(f".{self.path.name}")  # one driver writes to a folder
        temporary.write_text(json.dumps({**plans, budget: steps}, indent=2) + "\n")
        os.replace(temporary, self.path)

    def _read(self) -> dict:
        if not self.path.is_file():
            return {}
        plans = json.loads(self.path.read_text())
        if not isinstance(plans, dict):
            raise ValueError(f"{self.path} holds no plans")
        return plans


def budget_text(seconds: float, seeds: int, setting: str, tasks: Iterable[str]) -> str:
    """What a plan depends on."""
    return f"budget={seconds:g}s seeds={seeds} {setting} tasks={', '.join(sorted(tasks))}"
