"""The costs of all cells: the memory of each in a process of its own, then the times of all that ran there, together."""

from collections.abc import Callable
from dataclasses import replace

from anyformer.compare.process import Outcome
from anyformer.compare.record import Cost
from anyformer.compare.speed import Measured
from anyformer.compare.trial import Plan
from anyformer.compare.worker import Kind


def measure_all(cells: list[Plan], ask: Callable[[Kind, tuple[Plan, ...]], Outcome]) -> tuple[Measured, str]:
    """Measure every cell at each of its lengths.

    What runs out of memory or time or ends its process when it is alone never meets the others, so that it cannot take their
    times away.

    Args:
        ask: has another process do a job.

    Returns:
        The costs, and a complaint where no times could be taken, else "".
    """
    alone = {plan.cell: _memory(plan, ask("memory", (plan,))) for plan in cells}
    sound = (
        replace(plan, lengths=tuple(n for n, cost in alone[plan.cell].items() if cost.status == "ok")) for plan in cells
    )
    ready = tuple(plan for plan in sound if plan.lengths)
    outcome = ask("speed", ready) if ready else Outcome("ok")
    timed: Measured = outcome.values.get("measured", Measured())
    for cell, costs in timed.costs.items():
        for cost in costs:
            held = alone[cell][cost.length]
            alone[cell][cost.length] = cost.model_copy(update={"memory": held.memory, "peak": held.peak})
    failed = outcome.status != "ok"
    complaint = f"timing failed ({outcome.status}): {outcome.reason}; results have no times" if failed else ""
    return replace(timed, costs={cell: tuple(costs.values()) for cell, costs in alone.items()}), complaint


def _memory(plan: Plan, outcome: Outcome) -> dict[int, Cost]:
    """A cost for each length; where the process ended, for that length and for those it never came to."""
    costs: dict[int, Cost] = {length: outcome.values[length] for length in plan.lengths if length in outcome.values}
    missing = [length for length in plan.lengths if length not in costs]
    for length in missing:
        never = f"not tried, since {missing[0]} tokens ended so: {outcome.reason}"
        reason = outcome.reason if length == missing[0] else never
        costs[length] = Cost(length=length, batch=plan.rows(length), status=outcome.status, reason=reason)
    return costs
