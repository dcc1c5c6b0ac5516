"""Long texts in blocks that can be tokenized apart, so that memory does not grow with a document.

A tokenizer looks only some way to each side, so there are places where a text can be cut and its ids stay the same:
mostly a space between two words. A cut is taken only where the tokenizer itself shows it, on the characters around:
the ids of both sides end to end are those of the two together. Where a space is cut, some tokenizers (those that put
one in front of every text) need it left out; that is tried as well.

Blocks are a pure function of the text, however it comes in. And they are faster than whole documents: SentencePiece's
time grows a little more than its text.
"""

from collections.abc import Callable, Iterator

Encode = Callable[[str], list[int]]

_BLOCK = 1 << 15
_LARGEST_BLOCK = 1 << 20
_AROUND = 64
_TRIED = 32


class Blocks:
    """Cuts the stretches of one document after another. `forced` counts the cuts where no good place was found."""

    def __init__(self, encode: Encode):
        self._encode = encode
        self._rest = ""
        self.forced = 0

    def take(self, text: str, last: bool) -> Iterator[str]:
        """The blocks that the document's next stretch completes; with its last one, all that is left."""
        text = self._rest + text
        self._rest = ""
        start, size = 0, _BLOCK
        while True:
            left = len(text) - start
            if last and left <= size:
                if left:
                    yield text[start:]
                return
            if not last and left <= size + _AROUND:
                self._rest = text[start:]
                return
            cut = _last_cut(self._encode, text, start + size // 2, start + size)
            if cut is None and size < _LARGEST_BLOCK:
                size *= 2
                continue
            if cut is None:
                self.forced += 1
                cut = start + size, start + size
            yield text[start : cut[0]]
            start, size = cut[1], _BLOCK

    def drop(self) -> None:
        """Forget what is left of a document."""
        self._rest = ""


def _last_cut(encode: Encode, text: str, low: int, high: int) -> tuple[int, int] | None:
    """Where the block ends and where the next begins: the last good place in low..high, first between words."""
    place = high
    for _ in range(_TRIED):
        place = text.rfind(" ", low, place)
        if place < 0:
            break
        if text[place - 1].isalpha() and text[place + 1 : place + 2].isalpha() and (cut := _cut(encode, text, place)):
            return cut
    for place in range(high, low, -((high - low) // _TRIED)):
        if cut := _cut(encode, text, place):
            return cut
    return None


def _cut(encode: Encode, text: str, place: int) -> tuple[int, int] | None:
    before, after = text[place - _AROUND : place], text[place : place + _AROUND]
    whole, begin = encode(before + after), encode(before)
    if after.startswith(" ") and begin + encode(after[1:]) == whole:
        return place, place + 1
    return (place, place) if begin + encode(after) == whole else None
