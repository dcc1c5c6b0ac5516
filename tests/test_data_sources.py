"""Sources: what is read, in what order, under what name; and hostile files, each one clear message."""

import gzip
import json
import os
import sys

import pytest

from longtrain.data.sources import PYTHON_STDLIB, Document, Skipped, list_files, read
from longtrain.errors import DataError


def documents(path, text_field: str = "text", skipped: Skipped | None = None) -> list[Document]:
    skipped = skipped or Skipped()
    return [document for file in list_files(str(path)) for document in read(file, text_field, skipped)]


def test_a_text_file_is_one_document_kept_to_the_byte(tmp_path):
    text = "\ufefftabs\tand\r\nCRLF, NUL \0, emoji 😀, \u2028 and no end of line"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert documents(tmp_path / "a.txt") == [Document("a.txt", text)]


def test_a_folder_is_read_in_order_of_names(tmp_path):
    for name in ("b/z.txt", "b/a.txt", "a.txt", ".hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [document.name for document in documents(tmp_path)] == ["a.txt", "b/a.txt", "b/z.txt"]
    assert [document.name for document in documents(tmp_path / "*/*.txt")] == ["b/a.txt", "b/z.txt"]
    assert [document.name for document in documents(tmp_path / "**/a.txt")] == ["a.txt", "b/a.txt"]


def test_a_name_with_a_globs_letters_is_a_name(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert documents(tmp_path / "a[1].txt") == [Document("a[1].txt", "x")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_json_lines(tmp_path, name):
    lines = [{"body": "one\nline", "id": 1}, {"body": ""}, {"body": "two \u2028 \x85"}]
    data = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode() + b"\r\n\r\n"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    skipped = Skipped()
    expected = [Document(f"{name}:1", "one\nline"), Document(f"{name}:3", "two \u2028 \x85")]
    assert documents(tmp_path / name, "body", skipped) == expected
    assert skipped == Skipped(empty=1)


def test_an_empty_file_is_left_out_and_counted(tmp_path):
    (tmp_path / "a.txt").touch()
    skipped = Skipped()
    assert documents(tmp_path, skipped=skipped) == []
    assert skipped.empty == 1


def test_the_standard_library_is_its_own_text_alone():
    files = list_files(PYTHON_STDLIB)
    names = [file.name for file in files]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py"} <= set(names)
    left_out = {"site-packages", "dist-packages", "__pycache__"}
    assert not [name for name in names if left_out.intersection(name.split("/")) or not name.endswith(".py")]
    [ast] = [file for file in files if file.name == "ast.py"]
    assert next(read(ast, "text", Skipped())).text == sys.modules["ast"].__loader__.get_data(ast.path).decode()


HOSTILE = {
    "latin.txt": (b"good\nbad \xe9\n", r"latin.txt, line 2: not valid UTF-8"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 1000)[:-20], r"cut.jsonl.gz: damaged gzip"),
    "flipped.jsonl.gz": (gzip.compress(b'{"text": "a"}\n', mtime=0)[:12] + b"\xff" * 30, r"damaged gzip"),
    "not.jsonl.gz": (b'{"text": "a"}\n', r"not.jsonl.gz: damaged gzip"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', r"broken.jsonl, line 2: not valid JSON"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}\n', r"latin.jsonl, line 2: not valid UTF-8"),
    "other.jsonl": (
        b'{"body": "a"}\n',
        r"line 1: text expected in data.sources text_field = 'text', found .*'body'",
    ),
    "number.jsonl": (b'{"text": 7}\n', r"line 1: text expected .* found int"),
    "null.jsonl": (b'{"text": null}\n', r"line 1: text expected"),
    "list.jsonl": (b"[1]\n", r"line 1: text expected .* found no object"),
    "half.jsonl": (b'{"text": "\\ud800"}\n', r"line 1: half a surrogate pair"),
    "deep.jsonl": (b"[" * 200_000 + b"\n", r"line 1: not valid JSON"),
    "table.parquet": (b"PAR1", r"table.parquet: this kind of file is not read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bad_input_is_refused_by_file_and_line(tmp_path, name):
    data, message = HOSTILE[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        documents(tmp_path / name)


def test_paths_that_hold_nothing_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in (
        ("none.txt", "No such file"),
        ("empty", "no file is there"),
        ("*.txt", "no file is there"),
    ):
        with pytest.raises(DataError, match=message) as refusal:
            documents(tmp_path / path)
        assert str(tmp_path / path) in str(refusal.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DataError, match=r"a.txt: Permission denied"):
        documents(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    [file] = list_files(str(tmp_path))
    (tmp_path / "a.txt").write_text("xy")
    with pytest.raises(DataError, match=r"a.txt: changed while it was read"):
        list(read(file, "text", Skipped()))


def test_going_on_after_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "b.txt").write_bytes(b"b")
    skipped = Skipped()
    read_on = [doc for file in list_files(str(tmp_path)) for doc in read(file, "text", skipped, keep_going=True)]
    assert read_on == [Document("b.txt", "b")]
    assert skipped == Skipped(not_utf8=1)
