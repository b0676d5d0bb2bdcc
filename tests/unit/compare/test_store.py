"""The run folder: bad input is refused before anything is written; a kill loses nothing that was acknowledged."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic

from anyformer.compare import store as store_module
from anyformer.compare.record import to_line
from anyformer.compare.store import Store, StoreError, read

A = synthetic.trial("softmax", "none")
B = synthetic.trial("softmax", "rope", index=1)
OOM = synthetic.failed("linear", "rope", "oom", "asked for 9 GiB", index=2)
REFUSED = synthetic.failed("linear", "t5", "refused", "no form", index=3)


def lines(folder: Path) -> list[str]:
    return (folder / "results.jsonl").read_text().splitlines()


def test_a_new_folder_is_made_and_its_records_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    with Store.open(folder) as store:
        assert store.records == ()
        for record in (A, B, OOM):
            store.append(record)
    assert read(folder).records == (A, B, OOM)
    assert read(folder).notices == ()
    with Store.open(folder) as store:
        assert store.records == (A, B, OOM)
        store.append(REFUSED)
    assert read(folder).records == (A, B, OOM, REFUSED)


def test_an_empty_folder_that_exists_is_fine(tmp_path: Path) -> None:
    (tmp_path / ".hidden").touch()
    with Store.open(tmp_path) as store:
        store.append(A)
    assert read(tmp_path).records == (A,)


def test_the_last_line_of_a_key_holds(tmp_path: Path) -> None:
    retried = OOM.model_copy(update={"reason": "again"})
    with Store.open(tmp_path) as store:
        for record in (OOM, A, retried):
            store.append(record)
        assert store.records == (retried, A)
    assert read(tmp_path).records == (retried, A)
    assert len(lines(tmp_path)) == 3


def test_finished_trials_are_done_and_failed_ones_only_until_a_retry_is_asked(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        for record in (A, OOM, REFUSED):
            store.append(record)
        assert store.done() == {A.key, OOM.key, REFUSED.key}
        assert store.done(retry_failed=True) == {A.key, REFUSED.key}


@pytest.mark.parametrize(
    "tail",
    [to_line(B)[:-1], to_line(B)[:9], "{", "\0" * 40, to_line(B)[:50] + "\0" * 9],
    ids=["whole", "start", "one", "zeros", "mixed"],
)
def test_a_torn_last_line_is_moved_aside_and_the_next_one_starts_clean(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(to_line(A) + "\n" + tail)
    before = path.read_bytes()
    run = read(tmp_path)
    assert run.records == (A,)
    assert "is torn" in run.notices[0]
    assert path.read_bytes() == before, "reading changes nothing"
    with Store.open(tmp_path) as store:
        assert store.records == (A,)
        assert store.notices == (
            "the last line of results.jsonl was torn (the writer was killed); it was moved to results.jsonl.torn",
        )
        store.append(B)
    assert lines(tmp_path) == [to_line(A), to_line(B)]
    assert (tmp_path / "results.jsonl.torn").read_text() == tail + "\n"


def test_a_second_torn_line_does_not_overwrite_the_first(tmp_path: Path) -> None:
    for tail in ('{"schema":1,"first', '{"schema":1,"second'):
        with (tmp_path / "results.jsonl").open("a") as file:
            file.write(tail)
        Store.open(tmp_path).close()
    assert (tmp_path / "results.jsonl.torn").read_text() == '{"schema":1,"first\n{"schema":1,"second\n'


def test_a_complete_line_without_its_end_is_kept(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(to_line(A))
    with Store.open(tmp_path) as store:
        assert store.notices == ()
        store.append(B)
    assert lines(tmp_path) == [to_line(A), to_line(B)]


def test_an_unreadable_line_in_the_middle_is_reported_and_left_alone(tmp_path: Path) -> None:
    content = f"{to_line(A)}\nnonsense\n\n{to_line(B)}\n"
    (tmp_path / "results.jsonl").write_text(content)
    with Store.open(tmp_path) as store:
        assert store.records == (A, B)
        assert "line 2 of results.jsonl could not be read and was left out: not JSON" in store.notices[0]
    assert (tmp_path / "results.jsonl").read_text() == content


@pytest.mark.parametrize(
    "content", ['{"loss": 3}\n', '{"loss": 3}', "loss\n3\n", '{"schema": 7, "trial": "x"}\n', "\x7fELF"]
)
def test_a_results_file_of_something_else_is_refused_and_untouched(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.jsonl").write_text(content)
    for use in (read, Store.open):
        with pytest.raises(StoreError, match="holds no record this version can read"):
            use(tmp_path)
    assert (tmp_path / "results.jsonl").read_text() == content
    assert not (tmp_path / "results.jsonl.torn").exists()


def test_a_newer_schema_says_so(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"schema": 2}\n')
    with pytest.raises(StoreError, match="schema 2, this version reads schema 1: update anyformer"):
        read(tmp_path)


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(StoreError, match=r"notes\.txt is a file\. Expected a folder"):
        Store.open(file)
    with pytest.raises(StoreError, match=r"notes\.txt is a file\. Expected a folder"):
        read(file)
    with pytest.raises(StoreError, match=r"is not a run: it holds notes\.txt but no results\.jsonl"):
        Store.open(tmp_path)
    with pytest.raises(StoreError, match=r"is not a run: it has no results\.jsonl"):
        read(tmp_path)
    with pytest.raises(StoreError, match="no such folder"):
        read(tmp_path / "nothing")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]
    assert file.read_text() == "mine"


def test_a_results_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"is a folder\. Expected a file"):
        Store.open(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="cannot write to /proc/anyformer"):
        Store.open("/proc/anyformer")

    def read_only(path, flags, *rest, real=os.open):
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest)

    monkeypatch.setattr(store_module.os, "open", read_only)
    with pytest.raises(StoreError, match=r"Read-only file system\. Give --out a folder you may write to"):
        Store.open(tmp_path)


def test_two_writers_are_refused_until_the_first_closes(tmp_path: Path) -> None:
    first = Store.open(tmp_path)
    with pytest.raises(StoreError, match="another process is writing to"):
        Store.open(tmp_path)
    first.close()
    first.close()
    Store.open(tmp_path).close()


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path)
    store.append(A)

    def full(handle: int, data: bytes, real=os.write) -> int:
        if len(data) < len(to_line(B)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data[:100])

    with monkeypatch.context() as patch:
        patch.setattr(store_module.os, "write", full)
        with pytest.raises(StoreError, match="No space left on device"):
            store.append(B)
    assert store.records == (A,)
    store.append(OOM)
    store.close()
    assert lines(tmp_path) == [to_line(A), to_line(OOM)]


def test_other_data_is_refused_unless_forced(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.append(A)
        store.expect_data("text", A.data.fingerprint)
        store.expect_data("mqar", "other")
        with pytest.raises(StoreError, match=r"holds 'text' on other data \(fingerprint 9f2c41d07a, now other\)"):
            store.expect_data("text", "other")
        store.expect_data("text", "other", force=True)


WRITER = """
import sys
sys.path.insert(0, {here!r})
import synthetic
from anyformer.compare.store import Store

store = Store.open({folder!r})
print("resumed", len(store.records), flush=True)
for place in range(len(store.records), 100_000):
    store.append(synthetic.trial("softmax", "none", seed=place, quality=synthetic.trial("softmax", "none").quality))
    print(place, flush=True)
"""


def test_kill_nine_loses_no_acknowledged_record_and_repeats_none(tmp_path: Path) -> None:
    code = WRITER.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    seen = 0
    for stop in (3, 1, 7):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        acknowledged = int(writer.stdout.readline().split()[1])
        assert acknowledged >= seen
        for _ in range(stop):
            acknowledged = int(writer.stdout.readline()) + 1
        writer.send_signal(signal.SIGKILL)
        rest = [int(line) for line in writer.stdout.read().splitlines() if line.strip()]
        writer.wait()
        writer.stdout.close()
        acknowledged = max([acknowledged, *(place + 1 for place in rest[:-1])])
        records = read(tmp_path).records
        assert len(records) >= acknowledged
        assert [record.seed for record in records] == list(range(len(records)))
        seen = acknowledged
    Store.open(tmp_path).close()
    assert len({record.key for record in read(tmp_path).records}) == len(lines(tmp_path))
