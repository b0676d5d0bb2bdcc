"""Training one model and scoring it, at the trained length and beyond."""

import math
from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from anyformer.compare.record import Score
from anyformer.compare.trial import Plan, Sizes
from anyformer.errors import SpecError, TaskError
from anyformer.task.base import Batch, Task

_EVAL_TOKENS = 16384  # tokens scored in one forward


class DivergedError(ValueError):
    """Training came to a loss that is no number."""


def optimiser(model: nn.Module, sizes: Sizes) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    rest = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=sizes.rate, betas=(0.9, 0.98))


def rate_at(step: int, steps: int) -> float:
    """Share of the highest rate: a linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def run_model(model: nn.Module, batch: Batch) -> Tensor:
    """Logits of a batch."""
    return model(batch.tokens, attention_mask=batch.attention_mask)


def train(
    plan: Plan, task: Task, model: nn.Module, fabric: Fabric, progress: Callable[[int, float], None]
) -> tuple[nn.Module, tuple[tuple[int, float], ...]]:
    """Train for `plan.steps` steps.

    Args:
        progress: called with the number of finished steps and the loss, at most once in a hundredth of the steps.

    Returns:
        The trained model and the loss curve as (step, loss) points, in nats.

    Raises:
        DivergedError: the loss is no number.
    """
    model, optimizer = fabric.setup(model, optimiser(model, plan.sizes))
    model.train()
    curve: list[tuple[int, float]] = []
    every = max(1, plan.steps // 100)
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.sizes.rate * rate_at(step, plan.steps)
        batch = task.batch("train", step, size=plan.rows(task), seed=plan.seed).to(fabric.device)
        loss = task.loss(run_model(model, batch), batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0 or step + 1 == plan.steps:
            value = float(loss.detach())
            if not math.isfinite(value):
                raise DivergedError(f"the training loss is {value} at step {step + 1} of {plan.steps}")
            curve.append((step + 1, round(value, 5)))
            progress(step + 1, value)
    return model, tuple(curve)


def scores(plan: Plan, task: Task, model: nn.Module, device: torch.device) -> tuple[Score, ...]:
    """The headline metric at each length; a length the model or the task refuses is a score with that reason."""
    model.eval()
    return tuple(_score(plan, task, model, device, length) for length in plan.lengths)


@torch.no_grad()
def _score(plan: Plan, task: Task, model: nn.Module, device: torch.device, length: int) -> Score:
    held = task.items("test")
    wanted = plan.items if held is None else min(plan.items, held)
    # whole batches, so that every length scores the same items
    size = max(each for each in range(1, wanted + 1) if wanted % each == 0 and each <= max(1, _EVAL_TOKENS // length))
    totals: dict[str, float] = {}
    items: list[float] = []
    try:
        for index in range(wanted // size):
            batch = task.batch("test", index, size=size, length=length).to(device)
            logits = run_model(model, batch)
            for name, value in task.metrics(logits, batch).items():
                totals[name] = totals.get(name, 0.0) + value
            items += task.item_scores(logits, batch).tolist()
    except (SpecError, TaskError) as error:
        return Score(length=length, status="unsupported", reason=str(error))
    except RuntimeError as error:
        if "alloc" not in str(error) and "out of memory" not in str(error):
            raise
        return Score(length=length, status="oom", reason=str(error).splitlines()[0])
    return Score(length=length, value=task.finish(totals)[task.metric], items=tuple(items))
