"""The benchmark: what its lines hold, marks, the command, its table and chart, and mistakes."""

from pathlib import Path

import pytest
from benches import SMALL, made_up, own, printed

from anyformer.cli import bench as verb
from anyformer.cli import main as cli
from anyformer.compare import bench as driver
from anyformer.compare.bench import Request, bench, setting_of
from anyformer.compare.bench_chart import draw
from anyformer.compare.bench_products import useful
from anyformer.compare.bench_race import Probe, Race
from anyformer.compare.bench_record import DENSE, RESULTS, Cell, Contender, append, read
from anyformer.compare.chart import render
from anyformer.compare.process import Outcome
from anyformer.compare.record import Environment
from anyformer.errors import SpecError, StoreError


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
