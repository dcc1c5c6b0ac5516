"""A JSON object too long to be held: its text field, in stretches, as the line is read.

The grammar is RFC 8259's. The line is read once from front to back; of what is not the field only the end is looked
for, so a mistake within another value may pass, while one in the field, in a key or between them is found.
"""

import json
import re
from collections.abc import Callable, Iterator

_NO_SPACE = re.compile(rb"[^ \t\r\n]")
_STRING_END = re.compile(rb'["\\]')
_NEST = re.compile(rb'["{}\[\]]')
_PLAIN_END = re.compile(rb"[,}\s]")
_FIRST_OF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_STRETCH_BYTES = 1 << 20
_KEY_BYTES = 1 << 16
"""No field's name is longer."""


class NotJson(ValueError):
    """The line is not an object, or not one with such a text."""


class _Line:
    """Bytes of a line, read as they are needed. `read` gives the next ones; none, or a line end, is its end."""

    def __init__(self, begin: bytes, read: Callable[[], bytes]):
        self.bytes, self.at, self._read = begin, 0, read

    def more(self) -> bool:
        """Read on, forgetting what is done with."""
        new = b"" if self.bytes.endswith(b"\n") else self._read()
        self.bytes, self.at = self.bytes[self.at :] + new, 0
        return bool(new)

    def peek(self) -> bytes:
        """The next byte that is no space, or nothing at the line's end."""
        while not (match := _NO_SPACE.search(self.bytes, self.at)):
            self.at = len(self.bytes)
            if not self.more():
                return b""
        self.at = match.start()
        return match[0]

    def expect(self, wanted: bytes) -> None:
        found = self.peek()
        if found != wanted:
            raise NotJson(f"{wanted.decode()!r} expected, found {found.decode(errors='replace') or 'the end'!r}")
        self.at += 1

    def find(self, pattern: re.Pattern[bytes]) -> bytes:
        """Go behind the pattern's next match, which is one byte; it, or nothing at the line's end."""
        while not (match := pattern.search(self.bytes, self.at)):
            self.at = len(self.bytes)
            if not self.more():
                return b""
        self.at = match.end()
        return match[0]

    def skip_string(self) -> None:
        """Go behind a string, from behind its first quote."""
        while (found := self.find(_STRING_END)) != b'"':
            if not found or (self.at == len(self.bytes) and not self.more()):
                raise NotJson("a string does not end")
            self.at += 1  # what a backslash escapes

    def skip_value(self) -> None:
        """Go behind a value of any kind."""
        first = self.peek()
        if first == b'"':
            self.at += 1
            self.skip_string()
        elif first in (b"{", b"["):
            depth = 0
            while True:
                found = self.find(_NEST)
                if not found:
                    raise NotJson("a value does not end")
                if found == b'"':
                    self.skip_string()
                    continue
                depth += 1 if found in b"{[" else -1
                if not depth:
                    return
        else:
            if not self.find(_PLAIN_END):
                raise NotJson("a value does not end")
            self.at -= 1

    def string(self) -> Iterator[str]:
        """A string's text in stretches, from behind its first quote on."""
        most = _STRETCH_BYTES
        while True:
            end = min(len(self.bytes), self.at + most)
            match = _STRING_END.search(self.bytes, self.at, end)
            while match and match[0] == b"\\":
                match = _STRING_END.search(self.bytes, match.end() + 1, end)
            stop = match.start() if match else _whole_characters(self.bytes, self.at, end)
            try:
                text = json.loads(b'"' + self.bytes[self.at : stop] + b'"')
                text.encode()
            except UnicodeDecodeError as error:
                raise NotJson(f"not valid UTF-8: {error.reason}") from error
            except UnicodeEncodeError as error:
                raise NotJson("half a surrogate pair") from error
            except ValueError as error:
                raise NotJson(f"not valid JSON: {error}") from error
            # Where no place for a cut was found, the next try is with more.
            most = _STRETCH_BYTES if stop > self.at else 2 * most
            self.at = stop
            if text:
                yield text
            if match:
                self.at += 1
                return
            if end == len(self.bytes) and not self.more():
                raise NotJson("a string does not end")


def text_of(begin: bytes, read: Callable[[], bytes], field: str) -> Iterator[str]:
    """The text of an object's field, in stretches. `begin`: the line's first bytes; `read`: gives the next ones.

    Raises NotJson, perhaps after the last stretch, as the whole line is read.
    """
    line = _Line(begin, read)
    line.expect(b"{")
    seen: list[str] = []
    if line.peek() == b"}":
        line.at += 1
    else:
        while True:
            line.expect(b'"')
            key = ""
            for stretch in line.string():
                key += stretch
                if len(key) > _KEY_BYTES:
                    raise NotJson("a field's name is too long")
            line.expect(b":")
            if key == field:
                if key in seen:
                    raise NotJson(f"the field {field!r} is there twice")
                if line.peek() != b'"':
                    raise NotJson(f"text expected in {field!r}")
                line.at += 1
                yield from line.string()
            else:
                line.skip_value()
            seen.append(key)
            if line.peek() == b",":
                line.at += 1
                continue
            line.expect(b"}")
            break
    if line.peek():
        raise NotJson("more behind the object")
    if field not in seen:
        raise NotJson(f"no field {field!r}; the fields are {', '.join(map(repr, seen)) or 'none'}")


def _whole_characters(data: bytes, start: int, stop: int) -> int:
    """Where to cut a string, at `stop` or before, so that no character is cut: neither UTF-8's, nor an escape, nor a
    pair of them. Its last characters may be left to the next stretch."""
    # An escape is at most 6 bytes, a pair of them 12: the cut is before the first backslash within that reach.
    escape = data.find(b"\\", max(start, stop - 12), stop)
    if escape >= 0:
        stop = escape
        if _FIRST_OF_PAIR.fullmatch(data, max(start, stop - 6), stop):
            stop -= 6
        while stop > start and data[stop - 1 : stop] == b"\\":  # of several in a row only their begin is sure
            stop -= 1
    while stop > start and data[stop - 1] & 0xC0 == 0x80:
        stop -= 1
    if stop > start and data[stop - 1] >= 0xC0:
        stop -= 1
    return stop
