"""Lines of JSON that are read as they come: the text is json's own, however the bytes arrive."""

import json
import random

import pytest

from longtrain.data import longlines, readers
from longtrain.data.longlines import NotJson, text_of
from longtrain.data.readers import Bad, Fields, Text, read
from longtrain.data.sources import list_files

TEXTS = [
    "",
    "plain",
    'quotes " and \\ backslashes \\\\ and \\" both',
    "\\" * 41,
    "\u00e9\u6f22\U0001f600" * 9,
    "\0\x01\x1f\x7f\u2028\ufeff\n\r\t/",
    "\U0001f600" * 30 + "a",
    "a\U0001f600b\\\U0001f600" * 11,
]


def arriving(line: bytes, sizes: random.Random, most: int):
    """The line in pieces of random sizes: the first, and what reads the next."""
    pieces = []
    while line:
        size = sizes.randint(1, most)
        pieces.append(line[:size])
        line = line[size:]
    begin, rest = pieces[0], iter(pieces[1:])
    return begin, lambda: next(rest, b"")


@pytest.mark.parametrize("stretch", [2, 1 << 20])
@pytest.mark.parametrize("ascii_", [True, False], ids=["escaped", "utf-8"])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_text_is_jsons(text, ascii_, stretch, monkeypatch):
    monkeypatch.setattr(longlines, "_STRETCH_BYTES", stretch)
    record = {
        "a": [1, {"text": "not this }]"}, "]\\\""],
        "b": {"x": "{", "y": [-1.5e3, None, True]},
        'k"\u00e9': 'v"\\',
        "text": text,
        "n": 7,
        "z": "",
    }
    sizes = random.Random(len(text))
    for order in range(3):
        items = list(record.items())
        random.Random(order).shuffle(items)
        for separators in ((",", ":"), (" , ", " : ")):
            line = json.dumps(dict(items), ensure_ascii=ascii_, separators=separators).encode() + b"\r\n"
            for most in (1, 3, 13, 10_000):
                begin, more = arriving(line, sizes, most)
                stretches = list(text_of(begin, more, "text"))
                assert "".join(stretches) == text
                for part in stretches:
                    part.encode()  # no pair is cut in two


BROKEN = {
    b'["text"]': "'{' expected",
    b'{"text": "a"': "expected, found 'the end'",
    b'{"text": "a': "does not end",
    b'{"text": "a\\': "does not end",
    b'{"text": 5}': "text expected",
    b'{"text": "a", "text": "b"}': "twice",
    b'{"body": "a", "n": 1}': "no field 'text'; the fields are 'body', 'n'",
    b"{}": "the fields are none",
    b'{"text": "a"} x': "more behind",
    b'{"text" "a"}': "':' expected",
    b'{"text": "\\x"}': "not valid JSON",
    b'{"text": "\xe9"}': "not valid UTF-8",
    b'{"text": "\\ud83d"}': "half a surrogate pair",
    b'{"text": "a\x01"}': "not valid JSON",
    b'{"a": [1, "text": "x"}': "does not end|expected",
    b'{"a": {"text": "x"': "a value does not end",
    b'{"a": "x': "does not end",
    b'{"a": 1': "does not end",
    b'{"text": "a",}': "expected",
}


@pytest.mark.parametrize("line", BROKEN, ids=[str(line) for line in BROKEN])
def test_what_is_no_such_object_is_refused(line):
    for most in (1, 5, 1000):
        begin, more = arriving(line, random.Random(most), most)
        with pytest.raises(NotJson, match=BROKEN[line]):
            list(text_of(begin, more, "text"))


def test_a_name_without_end_is_not_held(monkeypatch):
    monkeypatch.setattr(longlines, "_KEY_BYTES", 100)
    begin, more = arriving(b'{"' + b"x" * 1000 + b'": 1}', random.Random(0), 10)
    with pytest.raises(NotJson, match="name is too long"):
        list(text_of(begin, more, "text"))


def test_long_and_short_lines_of_a_file(tmp_path, monkeypatch):
    """Whether a line is held or not changes nothing, and neither does one that is bad."""
    texts = ["short", "long \U0001f600 \\ " * 40, "x", "long again" * 50, "end"]
    lines = [json.dumps({"id": number, "text": text}) for number, text in enumerate(texts)]
    lines.insert(2, json.dumps({"id": 9, "body": "y" * 400}))
    lines.insert(4, '{"text": "' + "z" * 300 + '\\ud83d"}')
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    [file] = list_files(str(tmp_path))

    def found() -> list:
        made, text = [], ""
        for event in read(file, Fields("text")):
            if isinstance(event, Bad):
                made.append((event.name, None))
                text = ""
            else:
                assert isinstance(event, Text)
                text += event.text
                if event.last:
                    made.append((event.name, text))
                    text = ""
        return made

    held = found()
    assert [text for _, text in held] == [*texts[:2], None, texts[2], None, *texts[3:]]
    assert [name for name, _ in held] == [f"a.jsonl:{number}" for number in range(1, 8)]
    for most in (32, 64, 200):
        monkeypatch.setattr(readers, "_LONG_LINE_BYTES", most)
        monkeypatch.setattr(readers, "_BLOCK_BYTES", 48)
        assert found() == held
    (tmp_path / "b.jsonl").write_text('{"ids": ' + json.dumps(list(range(500))) + "}\n" + '{"ids": [1]}\n')
    [_, file] = list_files(str(tmp_path))
    assert [event.ids.tolist() for event in read(file, Fields("text", "ids"))] == [list(range(500)), [1]]
