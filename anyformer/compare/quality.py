"""Training one model and scoring it, at the trained length and beyond."""

import logging
import math
from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from anyformer.compare.fault import DivergedError, fault_of
from anyformer.compare.record import Score
from anyformer.compare.trial import Plan, Sizes
from anyformer.errors import SpecError
from anyformer.position.base import Position
from anyformer.side import grid
from anyformer.task.base import Batch, Task

_EVAL_TOKENS = 16384  # tokens scored in one forward


def open_fabric(device: str, precision: str) -> Fabric:
    """One device, as Lightning Fabric names it: "auto", "cpu", "cuda", "mps".

    Raises:
        SpecError: no such device or precision, or this machine cannot do it.
    """
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    try:
        if precision == "16-mixed" and Fabric(accelerator=device, devices=1).device.type == "cpu":
            raise SpecError("--precision 16-mixed is for GPUs; on a processor use bf16-mixed or 32-true")
        return Fabric(accelerator=device, devices=1, precision=precision)  # type: ignore[arg-type]  # checked by Fabric
    except SpecError:
        raise
    except (ValueError, RuntimeError) as error:
        raise SpecError(f"--device {device} --precision {precision}: {error}") from None


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


def loss_of(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    """The task's loss, in nats."""
    return task.loss(_logits(task, model, batch), batch)


def take_step(fabric: Fabric, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """One training step: forward, backward, gradients clipped to norm 1, AdamW. Returns the loss before it."""
    loss = loss_of(task, model, batch)
    fabric.backward(loss)
    # a norm that is no number makes the weights none, which the next look at the loss reports
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


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
    rows = plan.rows(task.train_length)
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.sizes.rate * rate_at(step, plan.steps)
        batch = task.batch("train", step, size=rows, seed=plan.seed).to(fabric.device)
        loss = take_step(fabric, task, model, optimizer, batch)
        if (step + 1) % every == 0 or step + 1 == plan.steps:
            value = float(loss)
            if not math.isfinite(value):
                raise DivergedError(f"the training loss is {value} at step {step + 1} of {plan.steps}")
            curve.append((step + 1, round(value, 5)))
            progress(step + 1, value)
    return model, tuple(curve)


def scores(plan: Plan, task: Task, model: nn.Module, device: torch.device) -> tuple[Score, ...]:
    """The headline metric at each length. A length that cannot be scored is a score with that reason, but for the trained one:
    there the error is the trial's."""
    model.eval()
    found: list[Score] = []
    for length in plan.lengths:
        try:
            found.append(_score(plan, task, model, device, length))
        except Exception as error:  # whatever a method raises at a length is the result of that length
            if length == task.train_length:
                raise
            status, reason = fault_of(error)
            found.append(Score(length=length, status=status, reason=reason))
    return tuple(found)


@torch.no_grad()
def _score(plan: Plan, task: Task, model: nn.Module, device: torch.device, length: int) -> Score:
    held = task.items("test")
    wanted = plan.items if held is None else min(plan.items, held)
    # whole batches, so that every length scores the same items
    most = max(1, _EVAL_TOKENS // length)
    size = max(each for each in range(1, wanted + 1) if wanted % each == 0 and each <= most)
    totals: dict[str, float] = {}
    items: list[float] = []
    for index in range(wanted // size):
        batch = task.batch("test", index, size=size, length=length).to(device)
        logits = _logits(task, model, batch)
        for name, value in task.metrics(logits, batch).items():
            totals[name] = totals.get(name, 0.0) + value
        items += task.item_scores(logits, batch).tolist()
    value = task.finish(totals)[task.metric]
    if not math.isfinite(value):
        raise DivergedError(f"{task.metric} is {value} at {length} tokens")
    return Score(length=length, value=value, items=tuple(items))


def _logits(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    positions = None
    if task.grid is not None and any(isinstance(part, Position) and part.axes == 2 for part in model.modules()):
        positions = grid(*task.grid, batch.tokens.device)
    return model(batch.tokens, attention_mask=batch.attention_mask, positions=positions)
