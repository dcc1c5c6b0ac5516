"""`ensure`: tokenizes once, finds it again, and takes nothing half-written or altered for data."""

import errno
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
from longtrain.data import disklock, jobs, pool, readers, request, shards, tokenizing
from longtrain.data import prepared as prepared_format
from longtrain.data.packing import PACKINGS
from longtrain.data.prepare import ensure
from longtrain.data.prepared import Prepared
from longtrain.data.rows import RowIndex
from longtrain.errors import ConfigError, DataError

FILES = ["manifest.json", "tokens-00000.bin", "names.bin"]
FILES += [f"{table}.npy" for table in ("offsets", "source_of", "keys", "name_offsets")]
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
    counts = prepared.manifest["counts"]
    assert counts["text_bytes"] == sum(len(text.encode()) for text in TEXTS.values())
    assert (counts["empty"], counts["bad"], counts["inexact"]) == (1, 0, 0)
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
    assert [name.startswith(".") for name in folders(corpus)] == [True, True]  # a lock and a partial folder
    prepared, said = messages(config)
    assert folders(corpus) == [prepared.folder.name]
    assert sorted(os.listdir(prepared.folder)) == sorted(FILES)


def test_bad_input_leaves_nothing_behind(corpus):
    (corpus / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"bad.txt, line 1: not valid UTF-8"):
        messages(config_of(corpus))
    assert folders(corpus) == []
    assert os.listdir(corpus.parent / "prepared" / "requests") == []


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
    tokens = [whole.tokens(document).tolist() for document in range(3)]
    monkeypatch.setattr(jobs, "_SMALLEST_JOB_BYTES", 8)
    shutil.rmtree(whole.folder)
    cut, _ = messages(config_of(corpus))
    assert len(cut.manifest["shards"]) == 3
    assert cut.fingerprint == whole.fingerprint
    for document in range(3):
        assert cut.tokens(document).tolist() == tokens[document]


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
    assert prepared.manifest["counts"]["inexact"] == 1


def test_of_several_processes_one_prepares(corpus):
    config = config_of(corpus)
    said: list[str] = []
    found: list[Prepared] = []

    def start(process_index: int) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: found.append(ensure(config, said.append, process_index=process_index))
        )
        thread.start()
        return thread

    for thread in [start(number) for number in range(4)]:
        thread.join()
    assert len({prepared.folder for prepared in found}) == 1
    assert len(found) == 4
    assert sum("data: preparing" in line for line in said) == 1


def test_a_folder_that_cannot_be_written(corpus, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data.prepared_dir = .*file"):
        messages(config_of(corpus, prepared_dir=str(tmp_path / "file")))


def many_files(corpus, count: int = 12) -> None:
    for number in range(count):
        (corpus / f"{number:03d}.jsonl").write_text(
            "".join(json.dumps({"text": f"document {number} {line} " * 9}) + "\n" for line in range(20))
        )


def test_any_number_of_processes_makes_the_same(corpus, monkeypatch):
    many_files(corpus)
    monkeypatch.setattr(jobs, "_SMALLEST_JOB_BYTES", 5000)
    made = []
    for cores in (1, 3):
        monkeypatch.setattr(pool, "cores", lambda cores=cores: cores)
        prepared, said = messages(config_of(corpus))
        assert "243 documents" in said.splitlines()[-2], said
        made.append({name: (prepared.folder / name).read_bytes() for name in os.listdir(prepared.folder)})
        shutil.rmtree(prepared.folder)
    assert made[0] == made[1]
    assert sum(name.startswith("tokens-") for name in made[0]) > 8


def test_a_killed_run_goes_on_after_its_finished_shards(corpus, monkeypatch):
    many_files(corpus)
    monkeypatch.setattr(jobs, "_SMALLEST_JOB_BYTES", 5000)
    monkeypatch.setattr(pool, "cores", lambda: 1)
    trained = {"train": "sentencepiece", "vocab_size": 300}
    whole, _ = messages(config_of(corpus, tokenizer=trained))
    expected = {name: (whole.folder / name).read_bytes() for name in os.listdir(whole.folder)}
    shutil.rmtree(whole.folder)

    program = (
        "import os, signal, sys\n"
        "sys.path[:0] = ['tests', '.']\n"
        "import test_data_prepare as t, longtrain.data.prepare as p, longtrain.data.shards as s, pathlib\n"
        "t.jobs._SMALLEST_JOB_BYTES = 5000; t.pool.cores = lambda: 1\n"
        "extend = s.ShardWriter.extend\n"
        "def kill(self, ids):\n"
        "    extend(self, ids)\n"
        "    self._number == 5 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "s.ShardWriter.extend = kill\n"
        f"p.ensure(t.config_of(pathlib.Path(sys.argv[1]), tokenizer={trained!r}), print)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(corpus)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr

    made = []
    monkeypatch.setattr(pool, "tokenize", lambda *a: (made.append(a[1]), tokenizing.tokenize(*a)))
    monkeypatch.setattr(request.jobs, "scan", lambda *_: pytest.fail("the sources are read again"))
    prepared, said = messages(config_of(corpus, tokenizer=trained))
    assert f"5 of {len(prepared.manifest['shards'])} shards are finished" in said
    assert "training a tokenizer" not in said
    assert made == list(range(5, len(prepared.manifest["shards"])))
    assert {name: (prepared.folder / name).read_bytes() for name in os.listdir(prepared.folder)} == expected
    assert folders(corpus) == [prepared.folder.name]


def test_a_full_disk_keeps_what_is_finished(corpus, monkeypatch):
    many_files(corpus)
    monkeypatch.setattr(jobs, "_SMALLEST_JOB_BYTES", 5000)
    monkeypatch.setattr(pool, "cores", lambda: 1)
    finish = shards.ShardWriter.finish

    def full(self, counts):
        if self._number == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._unfinished))
        finish(self, counts)

    monkeypatch.setattr(shards.ShardWriter, "finish", full)
    with pytest.raises(DataError, match=r"tokens-00004.bin.*: No space left on device; .* are kept"):
        messages(config_of(corpus))
    [partial] = folders(corpus)
    assert not [name for name in os.listdir(corpus.parent / "prepared" / partial) if name.startswith(".")]
    monkeypatch.setattr(shards.ShardWriter, "finish", finish)
    _, said = messages(config_of(corpus))
    assert "data: going on" in said and ": 4 of " in said


def test_a_worker_that_is_killed_is_told_and_what_it_finished_kept(corpus, monkeypatch):
    many_files(corpus)
    monkeypatch.setattr(jobs, "_SMALLEST_JOB_BYTES", 5000)
    monkeypatch.setattr(pool, "cores", lambda: 2)
    monkeypatch.setattr(pool, "_job", _killed_at_four)
    with pytest.raises(DataError, match="a process that tokenizes was killed.*goes on"):
        messages(config_of(corpus))
    monkeypatch.undo()
    _, said = messages(config_of(corpus))
    assert "data: going on" in said


def _killed_at_four(number, job):
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    _job(number, job)


_job = pool._job


def test_another_corpus_takes_a_killed_runs_remains_away(corpus):
    partial = corpus.parent / "prepared" / ".0123456789abcdef.partial"
    (partial / "parts").mkdir(parents=True)
    prepared, _ = messages(config_of(corpus))
    assert folders(corpus) == [prepared.folder.name]


def test_bad_records_are_left_out_and_counted_where_asked(corpus):
    (corpus / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n{"body": "x"}\n{"text": "too"}\n')
    (corpus / "latin.txt").write_bytes(b"a long begin\n" * 200_000 + b"\xe9")
    with pytest.raises(DataError, match=r"bad.jsonl, line 2: not valid JSON.*data.on_bad_record = skip"):
        messages(config_of(corpus))
    assert folders(corpus) == []
    prepared, said = messages(config_of(corpus, on_bad_record="skip"))
    assert "left out 3 bad records; the first is" in said and "bad.jsonl, line 2: not valid JSON" in said
    names = [prepared.name(document) for document in range(prepared.manifest["documents"])]
    assert names == ["a.txt", "b/c.txt", "bad.jsonl:1", "bad.jsonl:4", "z.txt"]
    assert prepared.tokens(4).tolist() == [256, *b"zz" * 500, 257]
    assert prepared.manifest["counts"]["bad"] == 3


def test_documents_that_are_tokenized_already(corpus):
    np.save(corpus / "one.npy", np.array([256, 7, 8], np.int32))
    np.save(corpus / "two.npy", np.array([[1, 2, 257], [3, 4, 5]], np.uint16))
    (corpus / "ids.jsonl").write_text('{"ids": [9, 10]}\n{"ids": []}\n')
    prepared, _ = messages(config_of(corpus, sources=[{"path": str(corpus), "tokens_field": "ids"}]))
    found = {prepared.name(d): prepared.tokens(d).tolist() for d in range(prepared.manifest["documents"])}
    assert found["one.npy"] == [256, 7, 8, 257]
    assert found["two.npy:1"] == [256, 1, 2, 257]
    assert found["two.npy:2"] == [256, 3, 4, 5, 257]
    assert found["ids.jsonl:1"] == [256, 9, 10, 257]
    assert found["a.txt"] == [256, *b"alpha\n", 257]
    assert prepared.manifest["counts"]["empty"] == 2


def test_an_id_outside_of_the_vocabulary_is_refused(corpus):
    np.save(corpus / "ids.npy", np.array([[1, 2], [3, 299]], np.int64))
    with pytest.raises(DataError, match=r"ids.npy, record 2: id 299 is outside of 0 to model.vocab_size - 1 = 257"):
        messages(config_of(corpus, "model.vocab_size=258"))
    messages(config_of(corpus, "model.vocab_size=300"))
    with pytest.raises(ConfigError, match=r"model.vocab_size = 299: must be at least 300: .* holds the id 299"):
        messages(config_of(corpus, "model.vocab_size=299"))
    np.save(corpus / "ids.npy", np.array([-1]))
    with pytest.raises(DataError, match=r"ids.npy: id -1 is outside"):
        messages(config_of(corpus))
    kept, said = messages(config_of(corpus, on_bad_record="skip"))
    assert "left out 1 bad records" in said
    assert kept.manifest["documents"] == 3


def test_a_long_document_of_ids_is_left_out_whole(corpus, monkeypatch):
    monkeypatch.setattr(readers, "_IDS_AT_ONCE", 4)
    np.save(corpus / "ids.npy", np.array([*range(6), 10**6, *range(9)], np.int64))
    prepared, _ = messages(config_of(corpus, on_bad_record="skip"))
    assert prepared.manifest["documents"] == 3
    np.save(corpus / "ids.npy", np.arange(10))
    prepared, _ = messages(config_of(corpus, on_bad_record="skip"))
    [ids] = [document for document in range(4) if prepared.name(document) == "ids.npy"]
    assert prepared.tokens(ids).tolist() == [256, *range(10), 257]


def test_a_tokenizer_is_not_trained_for_given_ids(corpus):
    np.save(corpus / "ids.npy", np.arange(10))
    with pytest.raises(ConfigError, match=r"data.tokenizer = .*tokenized already need the tokenizer"):
        messages(config_of(corpus, tokenizer={"train": "sentencepiece", "vocab_size": 300}))


def test_verify_reads_all_when_asked(corpus, monkeypatch):
    prepared, _ = messages(config_of(corpus))
    monkeypatch.setattr(prepared_format, "_CHECKSUMMED_BYTES", 0)
    shard = prepared.folder / "tokens-00000.bin"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    prepared.verify()
    with pytest.raises(DataError, match="its checksum"):
        prepared.verify(whole=True)


def test_data_of_others_that_one_may_only_read(corpus, monkeypatch):
    prepared, _ = messages(config_of(corpus))
    shutil.rmtree(prepared.folder.parent / "requests")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(disklock, "held", lambda *_: pytest.fail("writes a lock"))
    _, said = messages(config_of(corpus))
    assert "data: reusing" in said
    assert not (prepared.folder.parent / "requests").exists()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("whole", [True, False])
def test_documents_of_121_5_and_30_tokens_in_rows_of_60(tmp_path, packing, whole):
    """BOS and EOS are two of the tokens, or are not there."""
    (tmp_path / "corpus").mkdir()
    texts = {}
    for number, size in enumerate((121, 5, 30)):
        texts[f"{number}.txt"] = bytes(33 + (7 * number + place) % 90 for place in range(size - 2 * whole))
        (tmp_path / "corpus" / f"{number}.txt").write_bytes(texts[f"{number}.txt"])
    config = config_of(
        tmp_path / "corpus",
        "sequence_length=60",
        packing=packing,
        add_bos=whole,
        add_eos=whole,
        repeat=False,
    )
    index = RowIndex.of(config, ensure(config, print), "train")
    seen: dict[str, dict[int, int]] = {name: {} for name in texts}
    targets = 0
    rows_of_the_long_one = 0
    for number in range(index.rows_per_epoch):
        row = index.row(number)
        place = 0
        for piece in row.pieces:
            for token in range(piece.start, piece.end):
                assert token not in seen[piece.document]
                seen[piece.document][token] = int(row.tokens[place])
                place += 1
        targets += int(row.weights.sum())
        rows_of_the_long_one += any(piece.document == "0.txt" for piece in row.pieces)
    for name, text in texts.items():
        expected = [256, *text, 257] if whole else [*text]
        assert [seen[name][token] for token in range(len(expected))] == expected
    assert targets == 120 + 4 + 29
    assert rows_of_the_long_one == 3
    assert index.rows_per_epoch == {"concat": 3, "best_fit": 3, "one": 5}[packing]
