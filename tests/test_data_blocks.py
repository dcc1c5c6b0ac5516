"""Texts cut into blocks: their ids end to end are those of the whole text, whatever the tokenizer."""

import inspect
import io
import random
import sysconfig
from pathlib import Path

import pytest
import sentencepiece

from longtrain.data import blocks
from longtrain.data.blocks import Blocks, Encode
from longtrain.data.tokenizers import BytesTokenizer
from test_data_huggingface import llama3_like


def sentencepiece_model(**settings) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(inspect.getsource(inspect).split("\n")),
        model_writer=model,
        vocab_size=500,
        byte_fallback=True,
        minloglevel=2,
        **settings,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def llama3_encoder(tokenizer) -> Encode:
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


KEPT = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
ENCODERS = {
    "bytes": lambda: BytesTokenizer().encode,
    "bpe": lambda: sentencepiece_model(model_type="bpe", add_dummy_prefix=False, **KEPT).encode,
    "bpe with a space in front": lambda: sentencepiece_model(model_type="bpe", **KEPT).encode,
    "unigram that normalises": lambda: sentencepiece_model(model_type="unigram").encode,
    "llama 3": lambda: llama3_encoder(llama3_like()),
}
SPACE_IN_FRONT = {"bpe with a space in front", "unigram that normalises"}
MIXED = "naïve 漢字かな交じり文 — “quotes” … \t\t x=1;\r\n    indented   wide   \n\n😀"


def texts() -> list[str]:
    source = Path(sysconfig.get_path("stdlib"), "textwrap.py").read_text()
    return [source[:9000], MIXED * 60, "漢字かな交じり文です。" * 400, "a" * 3000, " " * 3000, "word " * 900, "", "x"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK", 512)
    monkeypatch.setattr(blocks, "_LARGEST_BLOCK", 4096)


@pytest.mark.parametrize("name", ENCODERS)
def test_ids_of_the_blocks_are_those_of_the_whole(small, name):
    encode = ENCODERS[name]()
    cuts = 0
    for text in texts():
        cutter = Blocks(encode)
        made = list(cutter.take(text, last=True))
        if cutter.forced:  # one that puts a space in front of every text does so in a text without any, and it is told
            assert name in SPACE_IN_FRONT and " " not in text
            continue
        assert [token for block in made for token in encode(block)] == encode(text), text[:40]
        assert all(0 < len(block) <= 4096 for block in made)
        cuts += max(0, len(made) - 1)
    assert cuts > 30


@pytest.mark.parametrize("name", ["bytes", "bpe with a space in front", "llama 3"])
def test_blocks_do_not_depend_on_how_the_text_comes(small, name):
    encode = ENCODERS[name]()
    random_ = random.Random(0)
    for text in texts():
        whole = list(Blocks(encode).take(text, last=True))
        for most in (150, 2000):
            cutter, made, place = Blocks(encode), [], 0
            while place < len(text):
                step = random_.randint(1, most)
                made += cutter.take(text[place : place + step], last=False)
                place += step
            made += cutter.take("", last=True)
            assert made == whole


def test_where_no_place_is_good_the_cut_is_counted(small):
    """An encoder whose every id depends on the whole text has none."""
    cutter = Blocks(lambda text: [len(text)])
    made = list(cutter.take("ab " * 5000, last=True))
    assert "".join(made) == "ab " * 5000
    assert cutter.forced == len(made) - 1 > 2


def test_a_dropped_document_leaves_nothing(small):
    cutter = Blocks(BytesTokenizer().encode)
    assert list(cutter.take("abc", last=False)) == []
    cutter.drop()
    assert list(cutter.take("d", last=True)) == ["d"]
