"""Text: what is read, how it is split, what is scored, what is refused."""

import math
import os
from pathlib import Path

import pytest
import torch
from texts import document, write

from anyformer.errors import TaskError
from anyformer.task import _corpus
from anyformer.task._corpus import standard_library, user_files
from anyformer.task.base import SPLITS
from anyformer.task.text import Text

torch.set_num_threads(1)


@pytest.fixture(params=["lm", "mlm"])
def text(request, folder):
    return Text(objective=request.param, data=folder, length=64, score=32)


def places(corpus):
    """The splits in which a word of each document lies; its words begin with its number."""
    found = {each.name: set() for each in corpus.documents}
    for split, stream in corpus.streams().items():
        numbers = {word.split(b".")[0].decode() for word in stream.tobytes().replace(b"\0", b" ").split()}
        for name, splits in found.items():
            if name.split("/")[-1].removesuffix(".txt") in numbers:
                splits.add(split)
    return found


# what is read


def test_the_default_is_the_interpreters_library_without_tests(library):
    names = [each.name for each in standard_library().documents]
    assert "json/decoder.py" in names
    assert all(name.endswith(".py") for name in names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}
    assert not any(name.startswith("_sysconfigdata") for name in names)
    assert min(library.sizes.values()) > 100_000
    assert library.sizes["train"] > 4_000_000
    assert library.rule == "by hash of the file name"
    assert library.eval_lengths == (256, 512, 1024, 2048)
    assert (library.vocab, library.outputs, library.head, library.causal) == (256, 256, "lm", True)


def test_masked_text_has_one_more_id_and_looks_both_ways(folder):
    text = Text(objective="mlm", data=folder, length=64, score=32)
    assert (text.vocab, text.outputs, text.head, text.causal) == (257, 256, "mlm", False)
    assert text.metric == "masked bits/byte"


def test_a_folder_gives_its_text_files_once_each(tmp_path):
    write(tmp_path, 3)
    (tmp_path / "copy.txt").write_text(document(0))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("secret")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(tmp_path / "pipe")
    corpus = user_files([str(tmp_path)])
    assert [each.name for each in corpus.documents] == ["copy.txt", "part1/1.txt", "part2/2.txt"]
    assert corpus.skipped == ("empty.txt: empty", "image.png: binary")


def test_a_file_that_cannot_be_read_is_counted_in_a_folder_and_refused_alone(tmp_path, monkeypatch):
    write(tmp_path, 3)
    read = Path.read_bytes

    def refuse(path):
        if path.name == "1.txt":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert user_files([str(tmp_path)]).skipped == ("part1/1.txt: Permission denied",)
    with pytest.raises(TaskError, match=r"expected a readable file, got '.*1.txt': Permission denied; check its perm"):
        user_files([str(tmp_path / "part1" / "1.txt")])


def test_the_fingerprint_is_of_names_and_contents_not_of_the_place(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = (user_files([write(tmp_path / name, 3)]).fingerprint() for name in ("one", "two"))
    assert one == two
    (tmp_path / "two" / "part1" / "1.txt").rename(tmp_path / "two" / "part1" / "9.txt")
    assert user_files([str(tmp_path / "two")]).fingerprint() != one
    (tmp_path / "one" / "part1" / "1.txt").write_text(document(1) + "!")
    assert user_files([str(tmp_path / "one")]).fingerprint() != one


def test_one_path_may_be_a_plain_text(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text(document(0, words=3000))
    one, other = (Text(data=data, length=64, score=32) for data in (str(path), (str(path),)))
    assert one.fingerprint == other.fingerprint
    assert one.rule == "inside each file: first 14/16, next 1/16, last 1/16"


# how it is split


def test_documents_lie_whole_in_one_split_and_more_of_them_move_none(tmp_path):
    before = places(user_files([write(tmp_path, 150)]))
    assert all(len(splits) == 1 for splits in before.values())
    assert {split for splits in before.values() for split in splits} == set(SPLITS)
    after = places(user_files([write(tmp_path, 30, start=150)]))
    assert len(after) == 180
    assert {name: after[name] for name in before} == before
    for each in tmp_path.glob("*/*.txt"):
        each.write_text(each.read_text() + " more")
    changed = places(user_files([str(tmp_path)]))
    assert {name: changed[name] for name in after} == after


def test_few_files_are_cut_into_three_pieces_that_do_not_overlap(tmp_path):
    contents = [bytes(range(1, 256)) * 4, document(1).encode() * 5]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_bytes(content)
    streams = user_files([str(tmp_path)]).streams()
    pieces = {split: streams[split].tobytes().split(b"\0")[:-1] for split in SPLITS}
    for number, content in enumerate(contents):
        assert b"".join(pieces[split][number] for split in SPLITS) == content
        assert len(pieces["test"][number]) == pytest.approx(len(content) / 16, abs=1)


# what a batch holds


def test_training_windows_are_pieces_of_the_training_text(folder):
    text = Text(data=folder, length=64, score=32)
    ring = user_files([folder]).streams()["train"].tobytes() * 2
    batch = text.batch("train", 0, size=20)
    assert batch.keep.all()
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    for tokens, last in zip(batch.tokens, batch.targets[:, -1], strict=True):
        assert bytes([*tokens.tolist(), int(last)]) in ring


def test_training_windows_end_anywhere(folder):
    text = Text(data=folder, length=4, score=4)
    stream, drawn = user_files([folder]).streams()["train"], text.batch("train", 0, size=4000).targets[:, -1]
    share = (stream == ord(" ")).mean()
    assert abs((drawn == ord(" ")).double().mean() - share) < 3 * math.sqrt(share * (1 - share) / 4000)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_evaluation_scores_every_byte_once(folder, split):
    text = Text(data=folder, length=64, score=32)
    batch = text.batch(split, 0, size=10**6)
    stream = user_files([folder]).streams()[split]
    assert len(batch.tokens) == text.items(split) == len(stream) // 32
    scored = batch.targets[batch.keep].reshape(-1, 32)
    assert (batch.keep.sum(-1) == 32).all()
    expected = stream[: len(stream) // 32 * 32].reshape(-1, 32)
    assert sorted(scored.tolist()) == sorted(expected.tolist())
    assert scored[:5].tolist() != expected[:5].tolist()  # in an order that makes the first items a fair sample


def test_the_same_bytes_are_scored_at_every_length(text):
    longest = text.batch("test", 0, size=8, length=512)
    for length in (32, 64, 65, 128, 256):
        batch = text.batch("test", 0, size=8, length=length)
        for one, other in (
            (batch.tokens, longest.tokens),
            (batch.targets, longest.targets),
            (batch.keep, longest.keep),
        ):
            assert torch.equal(one, other[:, -length:])
        assert torch.equal(batch.targets[batch.keep], longest.targets[longest.keep])
        assert not batch.keep[:, :-32].any()


def test_masks_hide_what_is_scored_and_nothing_else(folder):
    for span, masked in ((1, 0.15), (4, 0.15), (3, 0.5)):
        text = Text(objective="mlm", data=folder, length=256, score=128, span=span, masked=masked)
        batch = text.batch("train", 0, size=200)
        hidden = batch.tokens == 256
        assert torch.equal(hidden, batch.keep)
        assert torch.equal(batch.tokens[~hidden], batch.targets[~hidden])
        spans = 200 * 256 / span
        assert abs(hidden.double().mean() - masked) < 4 * math.sqrt(masked * (1 - masked) / spans) + span / 256
        drawn = ["".join("x" if each else " " for each in row.tolist()).strip("x").split() for row in hidden]
        assert min(len(run) for runs in drawn for run in runs) == span


def test_a_window_always_has_a_masked_byte(folder):
    text = Text(objective="mlm", data=folder, length=4, score=1, masked=0.01)
    short, long = (text.batch("test", 0, size=500, length=length) for length in (4, 16))
    assert (short.keep.sum(-1) == 1).all()
    assert torch.equal(short.tokens, long.tokens[:, -4:])


# what is refused


def test_bad_paths_are_refused(tmp_path):
    binary, empty, folder = tmp_path / "a.bin", tmp_path / "b.txt", tmp_path / "c"
    binary.write_bytes(b"text\0text")
    empty.write_bytes(b"")
    folder.mkdir()
    cases = [
        (
            (),
            r"expected at least one path, got an empty list of data; .* type --data PATH, in Python text\(data=PATH\)",
        ),
        (
            (str(tmp_path / "no"),),
            "expected a file or folder of text, got '.*no': there is no such file or folder; check",
        ),
        ((str(binary),), r"expected a file of text, got '.*a.bin', which is binary \(it holds a zero byte\); .* UTF-8"),
        ((str(empty),), "expected a file of text, got '.*b.txt', which is empty; .* type --data PATH"),
        ((str(folder),), "expected a folder with text files, got '.*c': it holds no files; .* type --data PATH"),
    ]
    for data, message in cases:
        with pytest.raises(TaskError, match="text: " + message):
            Text(data=data)
    (folder / "d.bin").write_bytes(b"\0")
    with pytest.raises(TaskError, match="it holds 1 files, all binary, empty or unreadable"):
        Text(data=str(folder))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TaskError, match=r"got '.*pipe': it is neither a file nor a folder; check the path"):
        Text(data=str(tmp_path / "pipe"))


def test_an_interpreter_without_sources_is_told_to_give_data(tmp_path, monkeypatch):
    monkeypatch.setattr(_corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(
        TaskError, match=r"expected the standard library's .py sources in .*, found none; .* --data PATH"
    ):
        Text()


def test_too_little_text_is_refused_with_what_would_do(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 999)
    message = (
        r"expected at least 257 bytes in each split \(one window of length=256\), but train has 875, valid has 63, "
        r"test has 64, split inside each file: .*; give about 4112 bytes of text or more, or type text\(length=62, "
    )
    with pytest.raises(TaskError, match=message):
        Text(data=str(path))
    assert Text(data=str(path), length=62, score=62).eval_lengths == (62,)
    path.write_text("x")
    with pytest.raises(TaskError, match=r"test has 2, split inside each file: .* 4112 bytes of text or more"):
        Text(data=str(path))


def test_bad_lengths_are_refused(folder):
    with pytest.raises(
        TaskError, match=r"score <= length, got score=128 and length=64; type text\(length=64, score=64\)"
    ):
        Text(data=folder, length=64)
    text = Text(data=folder, length=64, score=32)
    size = text.sizes["test"]
    for length in (31, size):
        message = (
            rf"expected a length of 32 to {size - 1} for test \(score=32, {size} bytes\), got length={length}; use one"
        )
        with pytest.raises(TaskError, match=message):
            text.batch("test", 0, size=1, length=length)
    assert text.batch("test", 0, size=1, length=size - 1).tokens.shape == (1, size - 1)
