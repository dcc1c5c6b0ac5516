"""Tokenizers: text survives exactly, training is the same every time, ids are where they should be."""

import inspect
import json
import pickle

import numpy as np
import pytest
import sentencepiece

import tiny
from longtrain.data import tokenizer_training, tokenizers
from longtrain.data.prepare import ensure
from longtrain.data.rows import RowIndex
from longtrain.data.tokenizers import BytesTokenizer
from longtrain.errors import ConfigError, DataError

TEXTS = [
    "def f(x):\n    if x:\n        return x\n\n\n    \treturn\r\n",
    "  two in front, two behind  ",
    "emoji 😀, é and e\u0301, \u2028, \x85, \ufeff, 漢字",
    "NUL \0 and control \x01\x02",
    "<s></s><unk><0x0A> are text here",
    "\n",
    "\n\n\n\n     five",
    "",
    " ",
    "a" * 5000,
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [inspect.getsource(module) for module in (inspect, json, json.decoder, pytest)]


@pytest.fixture(scope="module")
def trained(texts):
    return tokenizer_training.train(texts, vocab_size=700, sample_bytes=10**6)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(trained, text):
    for tokenizer in (BytesTokenizer(), trained):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)


def test_a_tokenizer_goes_to_another_process_and_to_disk(trained):
    for tokenizer in (BytesTokenizer(), trained):
        for again in (pickle.loads(pickle.dumps(tokenizer)), tokenizers.restore(tokenizer.kind, tokenizer.files)):
            assert again.fingerprint == tokenizer.fingerprint
            assert again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_begin_and_end_are_no_text(trained):
    for tokenizer in (BytesTokenizer(), trained):
        assert tokenizer.bos_id != tokenizer.eos_id
        assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("x"), tokenizer.eos_id]) == "x"
        assert max(tokenizer.bos_id, tokenizer.eos_id) < tokenizer.vocab_size


def test_bytes_that_are_not_utf8_still_decode():
    assert BytesTokenizer().decode([0x61, 0xFF, 0x62]) == "a\ufffdb"


def test_indentation_is_a_piece(trained):
    assert trained.vocab_size == 700
    assert len(trained.encode("\n        ")) == 1
    assert len(trained.encode("\n            return")) <= 3


def test_training_gives_the_same_model_every_time(texts, trained):
    again = tokenizer_training.train(iter(texts), vocab_size=700, sample_bytes=10**6)
    assert again.fingerprint == trained.fingerprint
    other = tokenizer_training.train(texts, vocab_size=701, sample_bytes=10**6)
    assert other.fingerprint != trained.fingerprint


def test_the_sample_is_drawn_from_everywhere_and_no_larger_than_asked():
    texts = [chr(97 + number) * 100_000 for number in range(20)]
    sample = tokenizer_training._sample(texts, 500_000)
    assert 400_000 < sum(map(len, sample)) <= 500_000
    assert len({block[0] for block in sample}) >= 5
    assert sample == tokenizer_training._sample(texts, 500_000)
    assert "".join(tokenizer_training._sample(texts, 10**7)) == "".join(texts)


def test_a_vocabulary_the_text_cannot_give_is_refused(texts):
    for size, reason in ((290, "Vocabulary size is smaller"), (10**6, "Vocabulary size too high")):
        with pytest.raises(ConfigError, match=rf"data.tokenizer.vocab_size = {size}: .*{reason}"):
            tokenizer_training.train(texts, vocab_size=size, sample_bytes=10**6)


def test_a_model_file(tmp_path, trained):
    (tmp_path / "a.model").write_bytes(trained.model)
    assert tokenizers.load(tmp_path / "a.model").fingerprint == trained.fingerprint
    for name, data in (("empty.model", b""), ("text.model", b"no model")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}: not a SentencePiece model"):
            tokenizers.load(tmp_path / name)
    with pytest.raises(DataError, match="none.model: No such file"):
        tokenizers.load(tmp_path / "none.model")


def test_the_end_of_a_document_is_a_target_for_a_tokenizer_without_a_pad_piece(tmp_path, trained):
    """Padding is what has segment 0, and no id: an EOS that also stands for padding elsewhere keeps its loss."""
    model = sentencepiece.SentencePieceProcessor(model_proto=trained.model)
    assert model.pad_id() == -1
    (tmp_path / "a.model").write_bytes(trained.model)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "document {number} "}}\n' for number in range(9)))
    config = tiny.config(
        "model.vocab_size=700",
        f"data.tokenizer={tmp_path}/a.model",
        f"data.sources.0.path={tmp_path}/a.jsonl",
        f"data.prepared_dir={tmp_path}/prepared",
        "data.packing=one",
    )
    index = RowIndex.of(config, ensure(config, print), "train")
    for number in range(index.rows_per_epoch):
        row = index.row(number)
        last = int(np.flatnonzero(row.segments)[-1])
        assert row.tokens[last] == model.eos_id() and row.weights[last] == 0  # the document ends: nothing follows
        assert row.targets[last - 1] == model.eos_id() and row.weights[last - 1] == 1
        assert not row.weights[last:].any() and row.segments[last + 1 :].max() == 0
