"""A Hugging Face tokenizer.json: as Llama 3 has it, read without its library's surprises."""

import inspect
import json
import pickle
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from longtrain.data import tokenizers
from longtrain.errors import ConfigError, DataError

# The published pattern of Llama 3's pre-tokenizer (its tokenizer.json).
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def llama3_like() -> Tokenizer:
    """A byte-level BPE with Llama 3's pre-tokenizer and special pieces, trained on a little text."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([inspect.getsource(inspect)], trainer)
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in (begin, end)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tokenizer = llama3_like()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_ids_are_the_librarys_without_what_it_adds_or_cuts(folder):
    library = llama3_like()
    for given in (folder, folder / "tokenizer.json"):
        ours = tokenizers.load(given)
        for text in ("def f(x):\n    return x  # comment\n" * 9, "  two 😀 é\r\n\0 12345", ""):
            ids = ours.encode(text)
            assert ids == library.encode(text, add_special_tokens=False).ids
            assert ours.decode([ours.bos_id, *ids, ours.eos_id]) == text
        assert ours.vocab_size == library.get_vocab_size(with_added_tokens=True)
        assert ours.bos_id == library.token_to_id("<|begin_of_text|>")
        assert ours.eos_id == library.token_to_id("<|end_of_text|>")


def test_special_pieces_in_a_text_are_text(folder):
    ours = tokenizers.load(folder)
    text = "before <|end_of_text|> after <|begin_of_text|>"
    ids = ours.encode(text)
    assert not {ours.bos_id, ours.eos_id} & set(ids)
    assert ours.decode(ids) == text


def test_it_goes_to_another_process_and_to_disk(folder):
    ours = tokenizers.load(folder)
    for again in (pickle.loads(pickle.dumps(ours)), tokenizers.restore(ours.kind, ours.files)):
        assert again.fingerprint == ours.fingerprint
        assert again.encode("def f") == ours.encode("def f")
        assert again.bos_id == ours.bos_id


def test_without_its_config_it_has_no_begin_and_end(folder, tmp_path):
    shutil.copy(folder / "tokenizer.json", tmp_path)
    bare = tokenizers.load(tmp_path)
    assert (bare.bos_id, bare.eos_id) == (None, None)
    assert bare.fingerprint != tokenizers.load(folder).fingerprint


def test_what_is_none_is_refused(tmp_path, monkeypatch):
    for text in ("", "{}", "[1]", '{"model": 4}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(DataError, match=r"data.tokenizer = .*: not a Hugging Face tokenizer: "):
            tokenizers.load(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"none.json: No such file"):
        tokenizers.load(tmp_path / "none.json")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"a folder without a tokenizer.json or tokenizer.model"):
        tokenizers.load(tmp_path)
    llama3_like().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"not a Hugging Face tokenizer: "):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"data.tokenizer .*tokenizers.*longtrain\[hf\]"):
        tokenizers.load(tmp_path)
