"""The schema of a line: what it keeps, what it refuses, in words."""

import json
import math

import pytest
import synthetic
from pydantic import ValidationError

from anyformer.compare.record import Cost, LineError, Quality, Score, from_line, key_of, to_line


@pytest.mark.parametrize("record", [*synthetic.default_run(), *synthetic.wide_run(1)], ids=lambda record: record.trial)
def test_a_line_gives_back_the_record(record) -> None:
    line = to_line(record)
    assert "\n" not in line
    assert from_line(line) == record
    assert from_line(line.encode()) == record


def test_every_line_has_what_a_reader_without_this_package_needs() -> None:
    for record in synthetic.wide_run(1):
        raw = json.loads(to_line(record))
        assert raw["schema"] == 1
        assert {"kind", "trial", "key", "task", "status"} <= raw.keys()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_survive_as_valid_json(value: float) -> None:
    quality = Quality(metric="loss", better="lower", scores=(Score(length=4, value=value, items=(value,)),))
    line = to_line(synthetic.trial("softmax", "none", quality=quality))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(line, parse_constant=refuse)
    back = from_line(line).quality.scores[0]
    assert repr(back.value) == repr(value)
    assert repr(back.items[0]) == repr(value)


def test_undecodable_file_names_do_not_break_a_line() -> None:
    name = b"caf\xe9.txt".decode("utf-8", "surrogateescape")
    line = to_line(synthetic.failed("softmax", "none", "error", f"cannot read {name}"))
    assert "caf\\udce9.txt" in from_line(line.encode()).reason


@pytest.mark.parametrize(
    "line, message",
    [
        (b"", "not JSON"),
        (b'{"schema": 1, "tri', "not JSON"),
        (b"\x00\x00\x00", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "it has no 'schema'"),
        (b'{"trial": "x"}', "it has no 'schema'"),
        (b'{"schema": 2}', "schema 2, this version reads schema 1: update anyformer"),
        (b'{"schema": 1, "kind": "trail"}', "kind"),
        (b'{"schema": 1, "kind": "trial"}', "trial: Field required"),
    ],
)
def test_a_line_that_is_no_record_says_why(line: bytes, message: str) -> None:
    with pytest.raises(LineError, match=message):
        from_line(line)


def test_an_unknown_field_is_refused() -> None:
    raw = json.loads(to_line(synthetic.trial("softmax", "none")))
    raw["steps_per_second"] = 3
    with pytest.raises(LineError, match="steps_per_second: Extra inputs are not permitted"):
        from_line(json.dumps(raw))


def test_what_failed_must_say_why_and_what_succeeded_must_have_a_quality() -> None:
    with pytest.raises(ValidationError, match="a line with status 'oom' needs a reason"):
        synthetic.failed("softmax", "none", "oom", "")
    with pytest.raises(ValidationError, match="a line with status 'ok' needs a quality"):
        synthetic.trial("softmax", "none", quality=None)
    with pytest.raises(ValidationError, match=r"a score with status 'ok' needs a value \(length 64\)"):
        Score(length=64)
    with pytest.raises(ValidationError, match=r"a score with status 'unsupported' needs a reason \(length 64\)"):
        Score(length=64, status="unsupported")
    with pytest.raises(ValidationError, match=r"a cost with status 'oom' needs a reason \(length 64\)"):
        Cost(length=64, status="oom")


@pytest.mark.parametrize("lengths", [(128, 64), (64, 64)])
def test_scores_come_in_order_of_length(lengths: tuple[int, ...]) -> None:
    scores = tuple(Score(length=length, value=1.0) for length in lengths)
    with pytest.raises(ValidationError, match="scores must come in order of length, each length once"):
        Quality(metric="loss", better="lower", scores=scores)


def test_a_key_depends_on_every_fact_and_on_where_one_ends() -> None:
    keys = {key_of("a"), key_of("b"), key_of("a", "b"), key_of("a", "b", ""), key_of("ab"), key_of("a", "c")}
    assert len(keys) == 6
    assert key_of("a", "b") == key_of("a", "b")
    assert key_of("attention=softmax") == "687d2a6ba41c262e4b5dde55", "a run must be resumable by the next version"


def test_the_name_is_the_label_or_both_specs() -> None:
    assert synthetic.trial("softmax", "rope").name == "softmax + rope"
    assert synthetic.trial("softmax", "rope", label="base").name == "base"
