"""The benchmark: what its lines hold, break-even and growth on numbers made up for it, marks, refusals and mistakes."""

import importlib.util
import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from anyformer.cli import bench as verb
from anyformer.cli import main as cli
from anyformer.compare import bench as driver
from anyformer.compare.bench import Request, anchor, bench, predicted, setting_of
from anyformer.compare.bench_calls import Inputs, own_calls, refusal
from anyformer.compare.bench_chart import draw
from anyformer.compare.bench_peers import PEERS, peer_calls, peer_refusal
from anyformer.compare.bench_products import count, useful
from anyformer.compare.bench_race import Entry, Probe, Race, Turn, race
from anyformer.compare.bench_record import DENSE, RESULTS, Bench, Cell, Contender, Cost, Noise, Ratio, Run, append, read
from anyformer.compare.bench_summary import break_even, growth, summarise
from anyformer.compare.bench_table import tables
from anyformer.compare.chart import render
from anyformer.compare.process import Limits, Outcome, run
from anyformer.compare.record import Environment, Timing
from anyformer.compare.worker import Job
from anyformer.errors import SpecError, StoreError
from anyformer.pattern.read import pattern_of

SMALL = {"heads": 2, "head_dim": 8, "threads": 1}


def own(attention: str, position: str = "none") -> Contender:
    return Contender(role="own", attention=attention, position=position)


def timing(seconds: float) -> Timing:
    return Timing(median=seconds, low=seconds * 0.9, high=seconds * 1.1, min=seconds * 0.8, rounds=3)


def cell(contender: Contender, length: int, seconds: float, ratio: float | None, dense_from: int | None = None) -> Cell:
    found = None if ratio is None else Ratio(median=ratio, low=ratio, high=ratio)
    cost = Cost(time=timing(seconds), memory=1024 * length, rate=1e9, ratio=found)
    return Cell(
        contender=contender,
        name=contender.name,
        length=length,
        forward=cost,
        forward_backward=cost,
        dense_from=dense_from,
    )


def made_up() -> Bench:
    """Dense attention that grows with the square and is not timed at the longest, a window and a refused pair."""
    window, refused = own("local(16)"), own("fnet")
    cells, lengths = [], (1024, 2048, 4096)
    for n in lengths:
        known = 2048 if n == 4096 else None
        cells.append(cell(DENSE, n, (n / 1024) ** 2 * 1e-2, None, known))
        cells.append(cell(window, n, n / 1024 * 2e-2, n / 2048, known))
        cells.append(Cell(contender=refused, name="fnet + none", length=n, status="refused", reason="it is a mixer"))
    run = Run(
        setting=setting_of(SMALL), lengths=lengths, seconds=1.0, environment=Environment(fingerprint="x", cores=2)
    )
    summaries = [summarise(each, [one for one in cells if one.contender == each]) for each in (DENSE, window, refused)]
    noise = Noise(load=(0.5, 0.7), calibration=(1e-3, 2e-3, 1e-3))
    return Bench(run=run, cells=tuple(cells), summaries=tuple(summaries), noise=noise)


def printed(found: Bench, width: int = 144) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(tables(found, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real benchmark at two lengths: a window, a mixer that is refused, and a peer."""
    where = tmp_path_factory.mktemp("bench") / "run"
    request = Request(
        attentions=("local(8)", "fnet"),
        peers=("lucidrains-linear",),
        lengths=(128, 96, 96),
        setting=setting_of(SMALL),
        seconds=0.05,
        command="anyformer bench",
    )
    told: list[str] = []
    bench(request, where, told.append)
    assert told[-1] == "128 tokens: 3 contenders in turn"
    return where


def test_a_cell_has_a_line_with_every_figure(folder: Path) -> None:
    found = read(folder)
    assert found.run.lengths == (96, 128)
    assert found.run.environment.threads == 1
    assert found.run.command == "anyformer bench"
    assert [each.name for each in found.contenders] == ["dense", "Local(8) + none", "fnet + none", "lucidrains-linear"]
    for line in found.of(own("softmax(pattern=Local(8))")):
        for cost in (line.forward, line.forward_backward):
            assert cost is not None
            assert cost.time.rounds >= 3
            assert 0 < cost.time.min <= cost.time.low <= cost.time.median <= cost.time.high
            assert cost.ratio is not None
            assert 0 < cost.ratio.low <= cost.ratio.median <= cost.ratio.high
            assert cost.memory is not None
            assert cost.memory > 0
        operations = useful(line.contender, found.run.setting, line.length)
        assert operations is not None
        assert line.forward is not None
        assert line.forward.rate == pytest.approx(operations["forward"] / line.forward.time.median)
    dense = found.of(DENSE)
    assert all(line.forward is not None and line.forward.ratio is None for line in dense)
    assert len(found.summaries) == 4
    assert found.summaries[1].forward.time is not None
    assert found.summaries[1].forward.time.short
    assert found.noise is not None
    assert len(found.noise.calibration) >= 6


def test_what_cannot_be_timed_is_a_line_too(folder: Path) -> None:
    found = read(folder)
    assert {line.reason for line in found.of(own("fnet"))} == {
        "fnet is a mixer, without queries and keys to hand over; time it with --what layer"
    }
    peer = found.of(Contender(role="peer", attention="lucidrains-linear"))
    assert [line.status for line in peer] == ["unsupported", "ok"]
    assert peer[0].reason == "lucidrains-linear takes lengths that are multiples of 64 tokens"
    text = printed(found)
    assert "! fnet + none: refused: fnet is a mixer" in text
    assert "! lucidrains-linear at 96: unsupported" in text
    assert "fitted below 1024 tokens" in text


def test_a_finished_benchmark_is_not_written_over(folder: Path) -> None:
    request = Request(attentions=("local(8)",), lengths=(64,), setting=setting_of(SMALL))
    with pytest.raises(StoreError, match="holds a benchmark already; give --out another folder"):
        bench(request, folder)


def test_a_folder_that_holds_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"holds no benchmark: it has no bench\.jsonl"):
        read(tmp_path)
    (tmp_path / RESULTS).write_text('{"kind":"noise"}\n')
    with pytest.raises(StoreError, match="it has no line of kind 'run'"):
        read(tmp_path)
    (tmp_path / RESULTS).write_text('{"kind":"run","schema":2}\n')
    with pytest.raises(StoreError, match=r"line 1 of .* is not one that this version reads"):
        read(tmp_path)
    (tmp_path / "file").touch()
    request = Request(attentions=("local(8)",), lengths=(64,), setting=setting_of(SMALL))
    with pytest.raises(StoreError, match="cannot write to"):
        bench(request, tmp_path / "file" / "inside")


def test_a_cell_that_failed_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        Cell(contender=DENSE, name="dense", length=1, status="oom")


@pytest.mark.parametrize(
    ("ratios", "verdict", "length", "text"),
    [
        ([0.5, 2.0], "between", math.sqrt(1024 * 2048), "1448"),
        ([0.25, 0.5, 4.0], "between", 2048 * 2 ** (1 / 3), "2580"),
        ([1.1, 3.0], "first", 1024, "faster from the first (1024)"),
        ([0.2, 0.9], "never", 2048, "slower at all measured lengths"),
        ([1.5, 0.9], "lost", 2048, "slower again at 2048"),
        ([1.5, 0.5, 2.0], "between", 2048 * math.sqrt(2), "2896"),
        ([1.0], "never", 1024, "slower at all measured lengths"),
        ([2.0], "first", 1024, "faster from the first (1024)"),
        ([], "unknown", None, "unknown"),
    ],
)
def test_break_even(ratios: list[float], verdict: str, length: float | None, text: str) -> None:
    cells = [cell(own("local(8)"), 1024 * 2**place, 1.0, ratio) for place, ratio in enumerate(ratios)]
    found = break_even(cells[::-1], "forward")
    assert found.verdict == verdict
    assert found.length == (None if length is None else pytest.approx(length))
    assert str(found) == text
    assert not found.extrapolated


def test_a_break_even_that_leans_on_extrapolated_seconds_is_marked() -> None:
    cells = [cell(own("local(8)"), n, 1.0, n / 3000, 1024 if n > 2048 else None) for n in (1024, 2048, 4096, 8192)]
    found = break_even(cells, "forward_backward")
    assert found.extrapolated
    assert str(found) == "≈3000"
    assert not break_even(cells[:2], "forward").extrapolated


def test_growth_is_fitted_over_the_largest_doublings() -> None:
    curve = [(n, 5.0 + (n / 1024) ** 2) for n in (512, 16384, 32768, 65536, 131072)]
    found = growth(curve)
    assert found is not None
    assert found.slope == pytest.approx(2, abs=0.03)
    assert found.lengths == (16384, 32768, 65536, 131072)
    assert str(found) == f"{found.slope:.2f}"
    assert growth([(1024, 1.0)]) is None
    short = growth([(64, 1.0), (128, 2.0)])
    assert short is not None
    assert str(short) == "1.00†"


def test_extrapolated_seconds_of_dense_attention_are_no_points_of_its_growth() -> None:
    dense = made_up().summaries[0].forward
    assert dense.time is not None
    assert dense.time.lengths == (1024, 2048)
    assert dense.time.slope == pytest.approx(2)
    assert dense.break_even.verdict == "unknown"


def test_dense_attention_is_timed_where_it_fits() -> None:
    assert anchor(4096, 1024, 0.1, 10.0) == 4096  # 4 calls of 1.6 s
    assert anchor(8192, 1024, 0.1, 10.0) == 4096
    assert anchor(65536, 1024, 0.1, 10.0) == 4096
    assert anchor(65536, 1024, 100.0, 10.0) == 1024  # never from less
    assert anchor(100, 100, 100.0, 10.0) == 100


def test_seconds_are_predicted_from_shorter_lengths() -> None:
    assert predicted([], 4096) == 0
    assert predicted([(1024, 0.5)], 4096) == pytest.approx(2)
    assert predicted([(512, 0.1), (1024, 0.4)], 2048) == pytest.approx(1.6)
    assert predicted([(512, 0.4), (1024, 0.1)], 2048) == pytest.approx(0.2)  # never less than in proportion


def test_dense_attention_timed_at_another_length_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "anchor", lambda length, *_: -(-length // 2))
    setting = setting_of(SMALL | {"causal": True})
    found = bench(Request(attentions=("local(8)",), lengths=(130,), setting=setting, seconds=0.02), tmp_path / "run")
    (dense,) = found.of(DENSE)
    assert dense.dense_from == 65
    assert dense.forward is not None
    assert dense.forward.memory is None
    assert all(line.dense_from for line in found.cells)
    text = printed(found)
    assert "≈" in text.split("130 tokens")[1].splitlines()[1]
    assert "so quadratically: 130 from 65 tokens." in " ".join(text.split())


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every probe takes a millisecond, and every race dies."""

    def alone(self: driver._Driver, contender: Contender, length: int) -> Probe:
        self.known.setdefault(contender, []).append((length, 2e-3))
        return Probe({}, {"forward": 1e-3, "forward_backward": 1e-3}, Environment(fingerprint="x"))

    monkeypatch.setattr(driver._Driver, "_probe", alone)
    monkeypatch.setattr(driver, "run", lambda *_: Outcome("oom", reason="the process was ended by SIGKILL"))


@pytest.mark.usefixtures("pretended")
def test_what_is_too_slow_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_LEAST", 0.0)
    request = Request(attentions=("local(8)",), lengths=(66, 130), setting=setting_of(SMALL), seconds=1e-3)
    slow = bench(request, tmp_path / "run").of(own("softmax(pattern=Local(8))"))
    late = "a warm call and 3 rounds would take 8.00 ms, more than 1.00 ms; raise --seconds"
    assert [(line.status, line.reason) for line in slow] == [
        ("timeout", late),
        ("timeout", f"not tried, since 66 tokens ended so: {late}"),
    ]


@pytest.mark.usefixtures("pretended")
def test_a_race_that_dies_is_told_in_every_line(tmp_path: Path) -> None:
    request = Request(attentions=("local(8)",), lengths=(64,), setting=setting_of(SMALL))
    found = bench(request, tmp_path / "run")
    assert [(line.status, line.reason) for line in found.cells] == [("oom", "the process was ended by SIGKILL")] * 2
    assert "Nothing was timed." in [text.get_text() for text in draw(found).texts]
    assert "oom" in printed(found)


@pytest.mark.parametrize(("what", "more"), [("attention", 16), ("layer", 4 + 12 * 1024 / (1024 + 2 * 16))])
def test_extrapolated_seconds_and_ratios(tmp_path: Path, what: str, more: float) -> None:
    """Four times the length: attention costs 16 times as much, projections four times; ratios are those of the same round."""
    window = own("local(8)")
    request = Request(attentions=("local(8)",), lengths=(4096,), setting=setting_of(SMALL | {"what": what}))
    probe = Probe(
        {"forward": 7, "forward_backward": 8}, {"forward": 1.0, "forward_backward": 1.0}, Environment(fingerprint="")
    )
    rounds = {DENSE: [2.0, 4.0, 6.0], window: [1.0, 4.0, 2.0]}
    raced = Race({(each, "forward"): seconds for each, seconds in rounds.items()})
    raced.seconds.update({(each, "forward_backward"): seconds for each, seconds in rounds.items()})
    one = driver._Driver(request, (DENSE, window), {}, tmp_path / RESULTS, lambda text: None)
    probes = {DENSE: probe, window: probe}
    dense, found = (one._costs(each, 4096, 1024, raced, probes) for each in (DENSE, window))
    assert isinstance(dense, dict)
    assert isinstance(found, dict)
    assert dense["forward"].time.median == pytest.approx(4 * more)
    assert dense["forward"].memory is None
    ratio = found["forward"].ratio
    assert ratio is not None
    assert ratio.median == pytest.approx(2 * more)  # the middle of 2, 1 and 3, not 4 over 2
    assert (found["forward"].memory, found["forward_backward"].memory) == (7, 8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "Local(5)",
        "Local(70, 3) | Global([0])",
        "bigbird(block=16, random=2)",
        "Strided(7)",
        "~Local(3)",
        "Random(3, seed=1)",
        "PerHead((Local(5), 1), (Strided(7), 1))",
    ],
)
def test_pairs_are_counted_exactly(text: str, causal: bool) -> None:
    pattern = pattern_of(text)
    for n in (1, 63, 200):
        allowed = pattern.dense(n, heads=2, causal=causal)
        assert count(pattern, n, 2, causal=causal) == int(allowed.sum()) * 2 // len(allowed)


def test_useful_operations() -> None:
    setting = setting_of({"heads": 2, "head_dim": 8, "batch": 3})
    dense = 4 * 8 * 6 * 100**2
    assert useful(DENSE, setting, 100) == {"forward": dense, "forward_backward": 3.5 * dense}
    assert useful(own("softmax"), setting, 100) == useful(DENSE, setting, 100)
    window = useful(own("local(2, 0)"), setting, 100)
    assert window is not None
    assert window["forward"] == 4 * 8 * 6 * (3 * 100 - 3)
    causal = useful(DENSE, setting.model_copy(update={"causal": True}), 100)
    assert causal is not None
    assert causal["forward"] == 4 * 8 * 6 * 5050
    layer = useful(DENSE, setting.model_copy(update={"what": "layer"}), 100)
    projections = 2 * 4 * 3 * 100 * 16**2
    assert layer == {"forward": dense + projections, "forward_backward": 3.5 * dense + 3 * projections}
    linformer = useful(own("linformer(rank=4)"), setting, 100)
    assert linformer == {"forward": 8 * 8 * 6 * 100 * 4, "forward_backward": 26 * 8 * 6 * 100 * 4}
    linear = 4 * 8**2 * 6 * 100
    assert useful(own("linear"), setting, 100) == {"forward": linear, "forward_backward": 3 * linear}
    assert useful(own("fnet"), setting, 100) is None
    assert useful(Contender(role="peer", attention="hf-longformer"), setting, 100) is None


def test_own_calls_are_what_they_say() -> None:
    """The gradient call reaches inputs and weights, and the attention is that of the spec."""
    setting = setting_of(SMALL)
    inputs = Inputs(setting)
    assert inputs.heads(16)[0] is inputs.heads(16)[0]
    for what, pair in (("attention", own("local(3)", "t5")), ("layer", own("local(3)", "rope")), ("layer", DENSE)):
        calls = own_calls(pair, setting.model_copy(update={"what": what}), 16, inputs)
        calls.forward()
        calls.forward_backward()
        assert calls.less is None
    asked = []
    original = torch.autograd.grad
    try:
        torch.autograd.grad = lambda *given, **options: asked.append(original(*given, **options))  # type: ignore[assignment]
        own_calls(own("local(3)", "t5"), setting, 16, inputs).forward_backward()
    finally:
        torch.autograd.grad = original
    (gradients,) = asked
    assert len(gradients) == 4  # q, k, v and the table of biases
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_refusals_say_what_to_type() -> None:
    setting = setting_of(SMALL)
    assert refusal(own("local(8)", "alibi"), setting, 64) == ""
    assert "time it with --position none" in refusal(own("local(8)", "sinusoidal"), setting, 64)
    assert "rope_2d reads a row and a column for each token" in refusal(own("softmax", "rope_2d"), setting, 64)
    assert "linformer cannot use alibi" in refusal(own("linformer", "alibi"), setting, 64)
    assert refusal(own("fnet"), setting_of(SMALL | {"what": "layer"}), 64) == ""
    causal = setting_of(SMALL | {"causal": True})
    assert peer_refusal("hf-longformer", causal) == "hf-longformer has no causal form; leave --causal out"
    assert peer_refusal("lucidrains-local", causal) == ""


@pytest.mark.parametrize("what", ["attention", "layer"])
@pytest.mark.parametrize("name", sorted(PEERS))
def test_peers_run(name: str, what: str) -> None:
    """The maps that are subtracted are all that the peer has; as a layer there is nothing to subtract."""
    setting = setting_of(SMALL | {"what": what})
    length = max(PEERS[name].multiple, PEERS[name].least)
    calls = peer_calls(name, setting, length, Inputs(setting))
    calls.forward()
    calls.forward_backward()
    projects = name.startswith("hf-")
    assert (calls.less is not None) == (projects and what == "attention")
    if calls.less is not None:
        calls.less.forward()
        calls.less.forward_backward()


def test_a_core_is_the_layer_without_its_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyformer.compare import bench_race

    taken = iter(range(10_000))
    monkeypatch.setattr(bench_race, "seconds_of", lambda call, device: float(next(taken)) ** 2)
    peer = Contender(role="peer", attention="hf-bigbird")
    found = race(Turn(setting_of(SMALL), (Entry(DENSE, 32), Entry(peer, 768))))
    assert not found.faults
    # six clock readings a round: dense, layer and maps for each kind of call; the second round begins with the peer
    assert found.seconds[peer, "forward"][0] == 1**2 - 2**2
    assert found.seconds[peer, "forward_backward"][0] == 4**2 - 5**2
    assert found.seconds[DENSE, "forward"][:2] == [0**2, 8**2]
    assert len(found.seconds[peer, "forward"]) == 3


def test_a_core_that_cannot_be_told_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unclear(driver._Driver):
        def _race(self, length, entries):
            raced, fault = super()._race(length, entries)
            for key in raced.seconds:
                if key[0].role == "peer":
                    raced.seconds[key][0] = -1.0
            return raced, fault

    monkeypatch.setattr(driver, "_Driver", Unclear)
    request = Request(
        attentions=(), peers=("lucidrains-linear",), lengths=(64,), setting=setting_of(SMALL), seconds=0.01
    )
    found = bench(request, tmp_path / "run")
    assert found.cells[1].status == "error"
    assert "too short a length to tell its core" in found.cells[1].reason


def test_faults_inside_a_race_leave_the_others_alone() -> None:
    peer = Contender(role="peer", attention="lucidrains-linear")
    found = race(Turn(setting_of(SMALL), (Entry(DENSE, 32), Entry(peer, 33))))
    assert found.faults == {peer: ("unsupported", "lucidrains-linear takes lengths that are multiples of 64 tokens")}
    assert len(found.seconds[DENSE, "forward"]) == 3


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else real(name, *a)
    )
    request = Request(attentions=(), peers=("hf-bigbird",), lengths=(64,), setting=setting_of(SMALL))
    with pytest.raises(SpecError, match=r"--peer hf-bigbird needs the package transformers.*anyformer\[hf\]"):
        bench(request, tmp_path / "run")
    assert not (tmp_path / "run").exists()


FAULTS = {
    "bench --attention local(8) --peer hf-longfomer": "there is no peer named 'hf-longfomer'; did you mean 'hf-longformer'",
    "bench --attention locl(8)": "there is no attention named 'locl'; did you mean 'local'",
    "bench --attention local(8) --position rop": "there is no position named 'rop'; did you mean 'rope'",
    "bench --attention local(8) --what model": "--what: expected 'attention' or 'layer', got 'model'",
    "bench --attention local(8) --dtype float16": "--dtype: expected 'float32' or 'bfloat16', got 'float16'",
    "bench --attention local(8) --seconds 0": "more than 0 seconds, got 1024 and 0",
    "bench --attention local(8) --seconds nan": "more than 0 seconds, got 1024 and nan",
    "bench --attention local(8) --seconds inf": "more than 0 seconds, got 1024 and inf",
}


@pytest.mark.parametrize("given", FAULTS)
def test_a_mistake_is_one_message(
    given: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(given.split())
    assert stop.value.code == 2
    assert FAULTS[given] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("attentions", "lengths", "message"),
    [
        (("local(8)",), (), "expected at least one length, got none; for example --lengths 1024 2048 4096"),
        (("local(8)",), (0,), "expected lengths of at least 1 token"),
        ((), (64,), "expected something to time, got no --attention and no --peer"),
    ],
)
def test_nothing_to_time(tmp_path: Path, attentions: tuple[str, ...], lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        bench(Request(attentions=attentions, lengths=lengths, setting=setting_of(SMALL)), tmp_path / "run")


def test_dense_attention_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver._Driver, "_probe", lambda *_: ("oom", "no memory"))
    request = Request(attentions=("local(8)",), lengths=(64,), setting=setting_of(SMALL))
    for _ in range(2):  # the folder is still free
        with pytest.raises(SpecError, match=r"dense attention itself failed at 64 tokens \(oom\): no memory"):
            bench(request, tmp_path / "run")


def test_the_chart_shows_every_method_that_ran() -> None:
    found = made_up()
    figure = draw(found)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["dense", "Local(16) + none"]
    forward, _, memory = figure.axes
    dense, dashed, *_ = forward.lines
    assert list(dense.get_xdata()) == [1024, 2048]
    assert (list(dashed.get_xdata()), dashed.get_linestyle()) == ([2048, 4096], "--")
    assert dense.get_linewidth() > forward.lines[2].get_linewidth()
    assert (forward.get_xscale(), forward.get_yscale()) == ("log", "log")
    assert len(memory.lines) == 4
    assert render(figure, "png").startswith(b"\x89PNG")
    assert b"<svg" in render(figure, "svg")


@pytest.mark.parametrize(("width", "shown"), [(144, "16.0, 18.0–22.0"), (110, "GFLOP/s"), (80, "20.0 ms")])
def test_the_table_fits_the_terminal(width: int, shown: str) -> None:
    text = printed(made_up(), width)
    assert shown in text
    assert all(len(line) <= width for line in text.splitlines())
    assert "2.00×" in text
    assert "2048" in text
    assert "! fnet + none: refused: it is a mixer" in " ".join(text.split())
    assert "Times are that unsteady: trust ratios, not absolute times." in " ".join(text.split())


def test_a_benchmark_that_was_stopped_is_shown() -> None:
    found = made_up().model_copy(update={"summaries": (), "noise": None})
    assert "stopped before the end: there are no growth and no break-even." in printed(found)


def test_the_command(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    out = tmp_path / "run"
    sizes = "--heads 1 --head-dim 8 --threads 1 --seconds 0.01 --causal --what layer --dtype bfloat16"
    given = f"bench --attention local(8) --position none rope --lengths 32 --out {out} {sizes}"
    with pytest.raises(SystemExit) as stop:
        cli.main(given.split())
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "layer, batch 1, 1 head of 8, causal, bfloat16, 1 thread" in text
    assert "Local(8) + rope" in text
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in out.iterdir()} == {"bench.jsonl", "bench.png", "bench.svg"}
    assert read(out).run.setting.what == "layer"


@pytest.mark.parametrize("begun", [False, True])
def test_a_command_that_is_stopped(
    begun: bool, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(request: Request, folder: Path, notice: object) -> None:
        if begun:
            folder.mkdir()
            append(folder / RESULTS, made_up().run)
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "bench", stopped)
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "--out", str(tmp_path / "run")])
    assert stop.value.code == 130
    assert "stopped before " + ("the end" if begun else "anything was timed") in capsys.readouterr().out


def test_memory_is_what_the_call_needs() -> None:
    """Four tensors of a MiB each forward and backward: the output and three gradients; one forward."""
    setting = setting_of({"heads": 2, "head_dim": 64, "threads": 1})
    job = Job("probe", threads=1, turn=Turn(setting, (Entry(DENSE, 2048),)))
    found = run(job, Limits(), lambda message: None).values["probe"]
    one = 2 * 2048 * 64 * 4
    assert one <= found.memory["forward"] < 3 * one
    assert 4 * one <= found.memory["forward_backward"] < 10 * one
    assert 0 < found.seconds["forward"] < found.both
