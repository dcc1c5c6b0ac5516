"""Sources: what is read, in what order, under what name; and hostile files, each one clear message."""

import gzip
import json
import os
import sys

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from array_record.python import array_record_module

from longtrain.data import examples, jobs, readers
from longtrain.data.readers import WHOLE, Bad, Fields, Part, Text, read
from longtrain.data.sources import PYTHON_STDLIB, list_files
from longtrain.errors import ConfigError, DataError


def documents(path, text_field: str = "text", part: Part = WHOLE) -> list[tuple[str, str]]:
    """(name, text) of each document; a bad one raises."""
    found, text = [], ""
    for file in list_files(str(path)):
        for event in read(file, Fields(text_field), part):
            if isinstance(event, Bad):
                raise DataError(event.reason)
            assert isinstance(event, Text)
            text += event.text
            if event.last:
                found.append((event.name, text))
                text = ""
    return found


def test_a_text_file_is_one_document_kept_to_the_byte(tmp_path):
    text = "\ufefftabs\tand\r\nCRLF, NUL \0, emoji 😀, \u2028 and no end of line"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert documents(tmp_path / "a.txt") == [("a.txt", text)]


def test_a_folder_is_read_in_order_of_names(tmp_path):
    for name in ("b/z.txt", "b/a.txt", "a.txt", ".hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [name for name, _ in documents(tmp_path)] == ["a.txt", "b/a.txt", "b/z.txt"]
    assert [name for name, _ in documents(tmp_path / "*/*.txt")] == ["b/a.txt", "b/z.txt"]
    assert [name for name, _ in documents(tmp_path / "**/a.txt")] == ["a.txt", "b/a.txt"]


def test_a_name_with_a_globs_letters_is_a_name(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert documents(tmp_path / "a[1].txt") == [("a[1].txt", "x")]


def packed(name: str, data: bytes) -> bytes:
    """`data` as a file of that name holds it; zstandard in two frames."""
    if name.endswith(".zst"):
        compressor = zstandard.ZstdCompressor()
        return compressor.compress(data[:50]) + compressor.compress(data[50:])
    return gzip.compress(data) if name.endswith(".gz") else data


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson.zst"])
def test_json_lines(tmp_path, name):
    lines = [{"body": "one\nline", "id": 1}, {"body": ""}, {"body": "two \u2028 \x85"}]
    data = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode() + b"\r\n\r\n"
    (tmp_path / name).write_bytes(packed(name, data))
    expected = [(f"{name}:1", "one\nline"), (f"{name}:2", ""), (f"{name}:3", "two \u2028 \x85")]
    assert documents(tmp_path / name, "body") == expected


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.md.zst"])
def test_a_text_file_of_many_blocks(tmp_path, monkeypatch, name):
    text = "é\u2028😀\r\n" * 99
    (tmp_path / name).write_bytes(packed(name, text.encode()))
    for size in (1, 2, 3, 7, 4096):
        monkeypatch.setattr(readers, "_BLOCK_BYTES", size)
        assert documents(tmp_path / name) == [(name, text)]


@pytest.mark.parametrize("block", [3, 1 << 20])
def test_lines_that_begin_in_a_part(tmp_path, monkeypatch, block):
    """However a file is cut, each line is read once, under its own number."""
    monkeypatch.setattr(readers, "_BLOCK_BYTES", block)
    lines = [json.dumps({"text": "é" * (number % 7)}) for number in range(40)]
    for end in ("\n", ""):
        (tmp_path / "a.jsonl").write_text("\n".join(lines) + end)
        whole = documents(tmp_path / "a.jsonl")
        [file] = list_files(str(tmp_path / "a.jsonl"))
        for every in (1, 10, 64, 1000):
            firsts = jobs.scan(file, every).first_lines
            parts = [
                Part(start, min(start + every, file.size), firsts[number])
                for number, start in enumerate(range(0, file.size, every))
            ]
            assert [found for part in parts for found in documents(tmp_path / "a.jsonl", part=part)] == whole


def test_parquet(tmp_path):
    texts = [f"text {number} \0é" for number in range(200)]
    table = pyarrow.table({"id": list(range(200)), "body": texts, "ids": [[number, 5] for number in range(200)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=30)
    expected = [(f"a.parquet:{number}", text) for number, text in enumerate(texts, 1)]
    assert documents(tmp_path / "a.parquet", "body") == expected
    [file] = list_files(str(tmp_path / "a.parquet"))
    read_bytes = []
    events = list(read(file, Fields("text", "ids"), tell=read_bytes.append))
    assert [(event.name, event.ids.tolist(), event.last) for event in events[:2]] == [
        ("a.parquet:1", [0, 5], True),
        ("a.parquet:2", [1, 5], True),
    ]
    assert 0 < sum(read_bytes) <= file.size


def array_record(path, records: list[bytes]) -> None:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:4")
    for record in records:
        writer.write(record)
    writer.close()


def test_array_record_of_texts_and_of_examples(tmp_path):
    array_record(tmp_path / "a.arrayrecord", [f"text {number} é".encode() for number in range(100)])
    expected = [(f"a.arrayrecord:{number + 1}", f"text {number} é") for number in range(100)]
    assert documents(tmp_path / "a.arrayrecord") == expected

    def example(text: bytes, ids: list[int]) -> bytes:
        message = examples._message()()
        message.features.feature["body"].bytes_list.value.append(text)
        message.features.feature["ids"].int64_list.value.extend(ids)
        return message.SerializeToString()

    array_record(tmp_path / "b.array_record", [example("é".encode(), [1, 2]), example(b"two", [3])])
    expected = [("b.array_record:1", "é"), ("b.array_record:2", "two")]
    assert documents(tmp_path / "b.array_record", "body") == expected
    [file] = list_files(str(tmp_path / "b.array_record"))
    assert [event.ids.tolist() for event in read(file, Fields("body", "ids"))] == [[1, 2], [3]]
    array_record(tmp_path / "c.array_record", [example(b"a", [1]), b"text"])
    with pytest.raises(DataError, match=r"c.array_record, record 2: not a tf.train.Example, as the file's first"):
        documents(tmp_path / "c.array_record", "body")
    with pytest.raises(DataError, match=r"record 1: no feature as in .* 'text'; the features are 'body', 'ids'"):
        documents(tmp_path / "b.array_record")


def test_an_object_store_lists_and_reads_the_same(tmp_path):
    """fsspec's own file system in memory stands for one."""
    store = fsspec.filesystem("memory")
    for name, text in (("b/z.txt", "z"), ("b/a.jsonl", '{"text": "a"}\n{"text": "b"}\n'), (".hidden", "h")):
        store.pipe_file(f"/corpus{tmp_path}/{name}", text.encode())
    url = f"memory://corpus{tmp_path}"
    expected = [("b/a.jsonl:1", "a"), ("b/a.jsonl:2", "b"), ("b/z.txt", "z")]
    assert documents(url) == expected
    assert documents(f"{url}/*/*.txt") == [("b/z.txt", "z")]
    assert documents(f"{url}/b/z.txt") == [("z.txt", "z")]
    [file] = list_files(f"{url}/b/z.txt")
    assert (file.size, file.remote) == (1, True)
    store.pipe_file(f"/corpus{tmp_path}/b/z.txt", b"zz")
    with pytest.raises(DataError, match=r"z.txt: changed while it was read"):
        list(read(file, Fields("text")))
    for path, message in ((f"{url}/none", "none"), (f"{url}/*.md", "no file is there"), ("nowhere://x", "nowhere")):
        with pytest.raises(DataError, match=message):
            list_files(path)


def test_an_empty_file_is_a_document_of_no_text(tmp_path):
    (tmp_path / "a.txt").touch()
    assert documents(tmp_path) == [("a.txt", "")]


def test_the_standard_library_is_its_own_text_alone():
    files = list_files(PYTHON_STDLIB)
    names = [file.name for file in files]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py"} <= set(names)
    left_out = {"site-packages", "dist-packages", "__pycache__"}
    assert not [name for name in names if left_out.intersection(name.split("/")) or not name.endswith(".py")]
    [ast] = [file for file in files if file.name == "ast.py"]
    [event] = read(ast, Fields("text"))
    assert event.text == sys.modules["ast"].__loader__.get_data(ast.path).decode()


ZSTANDARD = zstandard.ZstdCompressor().compress(b'{"text": "a"}\n' * 1000)
HOSTILE = {
    "latin.txt": (b"good\nbad \xe9\n", r"latin.txt, line 2: not valid UTF-8"),
    "late.txt": (b"good\n" * 10**6 + b"\xe9\n", r"late.txt, line 1000001: not valid UTF-8"),
    "cut.txt": ("é".encode()[:1], r"cut.txt, line 1: not valid UTF-8: unexpected end"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 10**5)[:-20], r"cut.jsonl.gz, line \d{5}: damaged compression"),
    "cut.txt.gz": (gzip.compress(b"abc\n" * 10**6)[:-20], r"cut.txt.gz, line \d+ or after it: damaged compression"),
    "flipped.jsonl.gz": (gzip.compress(b'{"text": "a"}\n', mtime=0)[:12] + b"\xff" * 30, r"damaged compression"),
    "not.jsonl.gz": (b'{"text": "a"}\n', r"not.jsonl.gz, line 1: damaged compression"),
    "cut.jsonl.zst": (ZSTANDARD[:-5], r"cut.jsonl.zst, line \d+: damaged compression: the file ends before"),
    "not.txt.zst": (b"text", r"not.txt.zst, at its begin or after it: damaged compression"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', r"broken.jsonl, line 2: not valid JSON"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}\n', r"latin.jsonl, line 2: not valid UTF-8"),
    "other.jsonl": (b'{"body": "a"}\n', r"line 1: no field as in data.sources text_field = 'text'; .* 'body'"),
    "number.jsonl": (b'{"text": 7}\n', r"line 1: text expected .* found int"),
    "null.jsonl": (b'{"text": null}\n', r"line 1: text expected"),
    "list.jsonl": (b"[1]\n", r"line 1: an object with .* expected, found list"),
    "half.jsonl": (b'{"text": "\\ud800"}\n', r"line 1: half a surrogate pair"),
    "deep.jsonl": (b"[" * 200_000 + b"\n", r"line 1: not valid JSON"),
    "not.parquet": (b"PAR1", r"not.parquet, row 1 or after it: "),
    "not.arrayrecord": (b"text" * 50_000, r"not.arrayrecord, record 1 or after it: "),
    "not.npy": (b"text", r"not.npy: not an array of numpy"),
    "table.parquet.gz": (b"", r"table.parquet.gz: this kind of file is not read"),
    "all.json": (b"[]", r"all.json: this kind of file is not read"),
}


def test_hostile_records_of_tables(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match=r"other.parquet: no column as in .* 'text'; the columns are 'body'"):
        documents(tmp_path / "other.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "null.parquet")
    with pytest.raises(DataError, match=r"null.parquet, row 2: text expected .* found NoneType"):
        documents(tmp_path / "null.parquet")
    array_record(tmp_path / "latin.arrayrecord", [b"a", b"\xe9"])
    with pytest.raises(DataError, match=r"latin.arrayrecord, record 2: not valid UTF-8"):
        documents(tmp_path / "latin.arrayrecord")
    np.save(tmp_path / "floats.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"floats.npy: ids .* of an integer type expected, found float64 \(3,\)"):
        documents(tmp_path / "floats.npy")


def test_what_is_no_list_of_ids(tmp_path):
    [*bad] = ("7", '"text"', "[1.5]", "[[1]]", "[true]", "null")
    (tmp_path / "a.jsonl").write_text("".join(f'{{"ids": {value}}}\n' for value in bad))
    [file] = list_files(str(tmp_path))
    events = list(read(file, Fields("text", "ids")))
    for number, event in enumerate(events, 1):
        assert isinstance(event, Bad) and f"line {number}: a list of whole numbers expected in" in event.reason
    assert len(events) == len(bad)


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
        list(read(file, Fields("text")))


def test_a_library_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.txt.zst").touch()
    [file] = list_files(str(tmp_path))
    with pytest.raises(ConfigError, match=r"data.sources path = .*a.txt.zst.*zstandard.*longtrain\[data\]"):
        readers.check(file)
