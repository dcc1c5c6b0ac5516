"""`ensure`: tokenizes once, finds it again, and takes nothing half-written or altered for data."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import sentencepiece

import tiny
from longtrain.config import Config
from longtrain.data import prepared as prepared_format
from longtrain.data.prepare import ensure
from longtrain.data.prepared import Prepared, length_histogram
from longtrain.errors import ConfigError, DataError

TEXTS = {"a.txt": "alpha\n", "b/c.txt": "ça\t\0😀", "empty.txt": "", "z.txt": "zz" * 500}


@pytest.fixture
def corpus(tmp_path):
    for name, text in TEXTS.items():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return tmp_path / "corpus"


def config_of(corpus, *overrides: str, **data) -> Config:
    settings = {"sources": [{"path": str(corpus)}], "prepared_dir": str(corpus.parent / "prepared"), **data}
    return tiny.config(*(f"data.{key}={json.dumps(value)}" for key, value in settings.items()), *overrides)


def messages(config: Config, **options) -> tuple[Prepared, str]:
    lines: list[str] = []
    return ensure(config, lines.append, **options), "\n".join(lines)


def folders(corpus) -> list[str]:
    return sorted(name for name in os.listdir(corpus.parent / "prepared") if name != "requests")


def test_what_is_prepared(corpus):
    prepared, said = messages(config_of(corpus))
    names = [name for name in TEXTS if TEXTS[name]]
    assert [prepared.name(document) for document in range(3)] == names
    for document, name in enumerate(names):
        expected = [256, *TEXTS[name].encode(), 257]
        assert prepared.tokens(document).tolist() == expected
        assert prepared.tokens(document, 1, 3).tolist() == expected[1:3]
        assert prepared.lengths[document] == len(expected)
        assert prepared.tokenizer().decode(expected) == TEXTS[name]
    assert prepared.tokens(0).dtype == np.uint16
    assert prepared.manifest["documents"] == 3
    assert (
        prepared.manifest["tokens"] == prepared.lengths.sum() == sum(len(t.encode()) + 2 for t in TEXTS.values() if t)
    )
    assert prepared.manifest["text_bytes"] == sum(len(text.encode()) for text in TEXTS.values())
    assert prepared.manifest["skipped"] == {"empty": 1, "not_utf8": 0}
    assert prepared.manifest["length_histogram"] == {"8": 1, "16": 1, "1024": 1}
    assert "nothing is prepared yet" in said
    assert "left out 1 empty documents" in said


def test_begin_and_end_are_as_the_config_says(corpus):
    bare, _ = messages(config_of(corpus, add_bos=False, add_eos=False))
    assert bare.tokens(0).tolist() == list(b"alpha\n")
    ended, _ = messages(config_of(corpus, add_bos=False))
    assert ended.tokens(0).tolist() == [*b"alpha\n", 257]
    assert bare.fingerprint != ended.fingerprint


def test_prepared_once_and_used_again(corpus):
    first, _ = messages(config_of(corpus))
    again, said = messages(config_of(corpus))
    assert said == f"data: reusing {first.folder}: 3 documents, 1,021 tokens"
    assert again.fingerprint == first.fingerprint
    os.utime(corpus / "a.txt", (1, 1))  # looks changed, reads the same
    _, said = messages(config_of(corpus))
    assert "reusing" in said
    assert folders(corpus) == [first.folder.name]


def test_a_changed_source_is_prepared_anew_and_said(corpus):
    first, _ = messages(config_of(corpus))
    (corpus / "a.txt").write_text("alpho\n")
    second, said = messages(config_of(corpus))
    assert f"{corpus} changed (4 files" in said
    assert second.fingerprint != first.fingerprint
    (corpus / "new.txt").write_text("new")
    _, said = messages(config_of(corpus))
    assert "changed (4 files, 1,015 bytes then; 5 files, 1,018 bytes now)" in said
    (corpus / "new.txt").unlink()
    (corpus / "a.txt").write_text("alpha\n")
    back, said = messages(config_of(corpus))
    assert "reusing" in said
    assert back.fingerprint == first.fingerprint


def test_another_setting_is_prepared_beside(corpus):
    messages(config_of(corpus))
    _, said = messages(config_of(corpus, add_bos=False))
    assert "add_bos was True, is False" in said
    _, said = messages(config_of(corpus))
    assert "reusing" in said


def test_the_data_plan_knows_the_content_and_not_the_place(corpus, tmp_path):
    first, _ = messages(config_of(corpus))
    shutil.copytree(corpus, tmp_path / "moved")
    moved, _ = messages(config_of(tmp_path / "moved"))
    assert moved.folder != first.folder
    assert moved.fingerprint == first.fingerprint


def test_a_killed_run_leaves_nothing_that_is_taken_for_data(corpus):
    config = config_of(corpus)
    program = (
        "import os, signal, sys\n"
        "sys.path[:0] = ['tests', '.']\n"
        "import test_data_prepare as t, longtrain.data.prepare as p, pathlib\n"
        "p.os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "p.ensure(t.config_of(pathlib.Path(sys.argv[1])), print)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(corpus)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    [left] = folders(corpus)
    assert left.startswith(".")
    prepared, said = messages(config)
    assert "data: preparing" in said
    assert folders(corpus) == [prepared.folder.name]


def test_bad_input_leaves_nothing_behind(corpus):
    (corpus / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"bad.txt, line 1: not valid UTF-8"):
        messages(config_of(corpus))
    assert folders(corpus) == []


def test_nothing_but_empty_documents(corpus):
    with pytest.raises(DataError, match="no document with text"):
        messages(config_of(corpus / "empty.txt", prepared_dir=str(corpus.parent / "prepared")))


def test_altered_and_vanished_shards_are_refused(corpus):
    prepared, _ = messages(config_of(corpus))
    shard = prepared.folder / "tokens-00000.bin"
    data = shard.read_bytes()
    for altered, message in (
        (data[:-2], "has 2040 bytes, 2042 were written"),
        (b"\1" + data[1:], "its checksum"),
    ):
        shard.write_bytes(altered)
        with pytest.raises(DataError, match=rf"tokens-00000.bin was altered: .*{message}"):
            messages(config_of(corpus))
    shard.unlink()
    with pytest.raises(DataError, match=r"tokens-00000.bin: No such file"):
        messages(config_of(corpus))


def test_documents_lie_whole_in_shards(corpus, monkeypatch):
    whole, _ = messages(config_of(corpus))
    monkeypatch.setattr(prepared_format, "_SHARD_TOKENS", 16)
    shutil.rmtree(whole.folder)
    cut, _ = messages(config_of(corpus))
    assert len(cut.manifest["shards"]) == 3
    for document in range(3):
        assert np.array_equal(cut.tokens(document), whole.tokens(document))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(corpus, tmp_path):
    trained = {"train": "sentencepiece", "vocab_size": 300}
    (corpus / "text.txt").write_text("\n".join(f"line {number} of a text" for number in range(1000)))
    prepared, _ = messages(config_of(corpus, tokenizer=trained))
    model = str(prepared.folder / "tokenizer.model")
    assert prepared.tokenizer().decode(prepared.tokens(0).tolist()) == "alpha\n"
    with pytest.raises(ConfigError, match=r"model.vocab_size = 299: must be at least 300"):
        messages(config_of(corpus, "model.vocab_size=299", tokenizer=model))
    given, _ = messages(config_of(corpus, tokenizer=model))
    assert given.fingerprint == prepared.fingerprint


def test_a_tokenizer_without_begin_and_end_pieces(corpus, tmp_path):
    model = tmp_path / "bare.model"
    with open(model, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["some text"]),
            model_writer=file,
            vocab_size=10,
            bos_id=-1,
            eos_id=-1,
            model_type="char",
        )
    with pytest.raises(ConfigError, match=r"(?s)data.add_bos = True: must be false.*data.add_eos = True"):
        messages(config_of(corpus, tokenizer=str(model)))
    bare, _ = messages(config_of(corpus, tokenizer=str(model), add_bos=False, add_eos=False))
    assert bare.tokenizer().bos_id is None


def test_text_that_the_tokenizer_changes_is_told(corpus):
    (corpus / "text.txt").write_text("\n".join(f"line {number} of a text" for number in range(1000)))
    (corpus / "block.txt").write_text("a\u2581b")
    prepared, said = messages(config_of(corpus, tokenizer={"train": "sentencepiece", "vocab_size": 300}))
    assert "1 documents do not survive the tokenizer exactly; the first is block.txt" in said
    assert prepared.manifest["inexact_documents"] == 1


def test_other_processes_wait_for_the_first(corpus):
    config = config_of(corpus)
    with pytest.raises(DataError, match="process 0 did not prepare"):
        messages(config, process_index=1, wait_seconds=0.1)
    found: list[Prepared] = []
    waiting = threading.Thread(target=lambda: found.append(messages(config, process_index=1, wait_seconds=30)[0]))
    waiting.start()
    first, _ = messages(config)
    waiting.join()
    assert found[0].fingerprint == first.fingerprint


def test_a_folder_that_cannot_be_written(corpus, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data.prepared_dir = .*file"):
        messages(config_of(corpus, prepared_dir=str(tmp_path / "file")))


def test_length_histogram_bounds_are_upper_ones():
    assert length_histogram(np.array([1, 2, 3, 4, 5, 8, 9])) == {"1": 1, "2": 1, "4": 2, "8": 2, "16": 1}
