"""What is timed: the calls of our own pairs and of peers, what they need, and what is counted as useful."""

import importlib.util
from pathlib import Path

import pytest
import torch
from benches import SMALL, own

from anyformer.compare import bench as driver
from anyformer.compare.bench import Request, bench, setting_of
from anyformer.compare.bench_calls import Inputs, own_calls, refusal
from anyformer.compare.bench_peers import PEERS, peer_calls, peer_refusal
from anyformer.compare.bench_products import useful
from anyformer.compare.bench_race import Entry, Turn, race
from anyformer.compare.bench_record import DENSE, Contender
from anyformer.compare.process import Limits, run
from anyformer.compare.worker import Job
from anyformer.errors import SpecError


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
    assert linformer == {"forward": 8 * 8 * 6 * 100 * 4, "forward_backward": 24 * 8 * 6 * 100 * 4}
    linear = 4 * 8**2 * 6 * 100
    assert useful(own("linear"), setting, 100) == {"forward": linear, "forward_backward": 3 * linear}
    unit = useful(own("gru"), setting.model_copy(update={"what": "layer"}), 100)
    assert unit is not None
    assert unit["forward"] == 2 * 3 * 100 * (6 * 16 * 32 + 2 * 16**2)
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
    whole = "hf-fnet is a whole layer, without queries and keys to hand over; time it with --what layer"
    assert peer_refusal("hf-fnet", setting) == whole


RUNS = [
    (name, what, causal)
    for name, peer in sorted(PEERS.items())
    for what in ("attention", "layer")
    for causal in sorted(peer.causal)
    if peer.form != "layer" or what == "layer"
]


@pytest.mark.parametrize(("name", "what", "causal"), RUNS)
def test_peers_run(name: str, what: str, causal: bool) -> None:
    """The maps that are subtracted are all that the peer has; as a layer there is nothing to subtract."""
    setting = setting_of(SMALL | {"what": what, "causal": causal})
    assert peer_refusal(name, setting) == ""
    length = max(PEERS[name].multiple, PEERS[name].least, 16)
    calls = peer_calls(name, setting, length, Inputs(setting))
    calls.forward()
    calls.forward_backward()
    assert (calls.less is not None) == (PEERS[name].form == "core" and what == "attention")
    if calls.less is not None:
        calls.less.forward()
        calls.less.forward_backward()


def test_our_longformer_has_the_global_token_of_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyformer.mixer.longformer import Longformer

    given = []
    monkeypatch.setattr(Longformer, "mix", lambda self, x, context: given.append(context.keys.flags) or x)
    setting = setting_of(SMALL | {"what": "layer"})
    own_calls(own("longformer(window=4)"), setting, 16, Inputs(setting)).forward()
    assert given[0].nonzero().tolist() == [[0, 0]]


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


def test_memory_is_what_the_call_needs() -> None:
    """Four tensors of a MiB each forward and backward: the output and three gradients; one forward."""
    setting = setting_of({"heads": 2, "head_dim": 64, "threads": 1})
    job = Job("probe", threads=1, turn=Turn(setting, (Entry(DENSE, 2048),)))
    found = run(job, Limits(), lambda message: None).values["probe"]
    one = 2 * 2048 * 64 * 4
    assert one <= found.memory["forward"] < 3 * one
    assert 4 * one <= found.memory["forward_backward"] < 10 * one
    assert 0 < found.seconds["forward"] < found.both
