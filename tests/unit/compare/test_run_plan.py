"""What is planned: the grid, the text of a trial, and the steps that a budget pays for."""

from pathlib import Path

import pytest
from small import SIZES, plan_on

from anyformer.compare.budget import FEWEST, START, PlanFile, affordable, budget_text, rounded
from anyformer.compare.record import Cost, Timing
from anyformer.compare.trial import Plan, Sizes, grid, read_sizes
from anyformer.errors import SpecError


def cost(length: int, forward: float, step: float, batch: int = 4) -> Cost:
    times = [Timing(median=median, low=median, high=median, min=median, rounds=3) for median in (forward, step, step)]
    return Cost(length=length, batch=batch, forward=times[0], forward_backward=times[1], step=times[2])


def a_plan(**changes: object) -> Plan:
    plan = {
        "attention": "softmax",
        "position": "none",
        "task": "mqar",
        "sizes": SIZES,
        "lengths": (64, 128),
        "items": 96,
    }
    return Plan(**plan | changes)


def test_steps_fill_what_the_rest_leaves() -> None:
    cells = [
        (a_plan(), 64, (cost(64, 0.01, 0.05), cost(128, 0.02, 0.07, batch=2))),
        (a_plan(), 64, (cost(64, 0.1, 0.2),)),
    ]
    # 96 items in batches of 4, 2 and 4
    fixed = 2 * START + 24 * 0.01 + 48 * 0.02 + 24 * 0.1
    for seeds in (1, 3):
        steps = affordable(100.0, seeds, cells)
        assert seeds * (fixed + steps * 0.25) <= 100.0 < seeds * (fixed + (steps + 1) * 0.25)
    assert affordable(2 * START, 1, cells) < 1


def test_the_step_that_counts_is_the_one_at_the_trained_length() -> None:
    short = affordable(100.0, 1, [(a_plan(items=1), 64, (cost(32, 0.0, 9.0), cost(64, 0.0, 0.1), cost(128, 0.0, 9.0)))])
    assert short == int((100.0 - START) / 0.1)


def test_what_could_not_be_timed_buys_no_steps() -> None:
    failed = Cost(length=64, status="oom", reason="no memory")
    assert affordable(100.0, 1, [(a_plan(), 64, (failed,)), (a_plan(), 64, ())]) == 0
    alone = affordable(100.0, 1, [(a_plan(items=1), 64, (cost(64, 0.0, 0.1),))])
    beside = affordable(100.0, 1, [(a_plan(items=1), 64, (cost(64, 0.0, 0.1),)), (a_plan(), 64, (failed,))])
    assert beside == alone - START / 0.1


def test_rounding() -> None:
    assert [rounded(steps) for steps in (-5, 0, 19, 29, 30, 1234)] == [FEWEST, FEWEST, FEWEST, FEWEST, 30, 1230]


def test_plans_are_kept_for_each_budget(tmp_path: Path) -> None:
    file = PlanFile(tmp_path)
    first, second = (budget_text(180.0, seeds, str(SIZES), ["text", "mqar"]) for seeds in (1, 3))
    assert first == f"budget=180s seeds=1 {SIZES} tasks=mqar, text"
    assert file.known(first) is None
    file.keep(first, 400)
    file.keep(second, 130)
    assert (PlanFile(tmp_path).known(first), file.known(second)) == (400, 130)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"b": "many"}', '{"b": 0}'])
def test_a_file_of_something_else_is_no_plan(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ValueError, match=r"plan\.json|Expecting"):
        PlanFile(tmp_path).known("b")
    PlanFile(tmp_path).keep("b", 20)
    assert PlanFile(tmp_path).known("b") == 20


def test_the_text_of_a_trial_holds_what_determines_its_numbers() -> None:
    base = a_plan(steps=20, seed=1)
    assert base.text == (
        "attention=softmax position=none task=mqar model(dim=16, depth=1, heads=2, tokens=64, rate=0.003) "
        "steps=20 lengths=64,128 items=96 seed=1"
    )
    others = {"attention": "gru", "position": "rope", "task": "text", "sizes": Sizes(), "lengths": (64,), "items": 8}
    others |= {"steps": 21, "seed": 2, "precision": "bf16-mixed"}
    assert len({a_plan(**{"steps": 20, "seed": 1, name: value}).text for name, value in others.items()}) == len(others)
    assert all(
        a_plan(steps=20, seed=1, **{name: value}).text != base.text
        for name, value in others.items()
        if name not in ("steps", "seed")
    )
    assert a_plan(steps=20, seed=1, index=7, fingerprint="x").text == base.text
    assert a_plan(precision="bf16-mixed").setting.endswith(") precision=bf16-mixed")


def test_rows_keep_the_tokens_of_a_step() -> None:
    assert [a_plan().rows(length) for length in (16, 64, 65, 640)] == [4, 1, 1, 1]


def test_sizes_are_a_spec() -> None:
    sizes = read_sizes("model(dim=128, kv_heads=2, dropout=0.1)")
    assert sizes == Sizes(dim=128, kv_heads=2, dropout=0.1)
    assert read_sizes(str(sizes)) == sizes
    for text in ("model(dim=0)", "modal()", "model(width=3)"):
        with pytest.raises(SpecError):
            read_sizes(text)
    with pytest.raises(SpecError, match=r"^--model: kv_heads=3 must divide heads=4"):
        read_sizes("model(kv_heads=3)")


def test_a_grid_names_each_method_once_in_the_order_given() -> None:
    assert grid(["softmax", "linformer(rank=[4, 8])", "softmax()"], "attention") == [
        "softmax",
        "linformer(rank=4)",
        "linformer(rank=8)",
    ]
    assert grid(["local(8)", "Local(8)"], "attention") == ["softmax(pattern=Local(8))"]
    assert grid(["Local([3, 5])"], "attention") == ["softmax(pattern=Local(3))", "softmax(pattern=Local(5))"]
    assert grid(["Flagged(ids=[3, 7])", "Global(tokens=[0, 5])"], "attention") == [
        "softmax(pattern=Flagged([3, 7]))",
        "softmax(pattern=Global([0, 5]))",
    ]
    assert grid(["rope(base=[10, 100])"], "position") == ["rope(base=10.0)", "rope(base=100.0)"]
    assert plan_on(grid(["mqar(pairs=2, length=8, vocab=64)"], "task")[0]).fingerprint
