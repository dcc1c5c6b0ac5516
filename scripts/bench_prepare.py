"""Measures `data prepare` against its tokenizer alone, on all cores: `python scripts/bench_prepare.py`.

The tokenizer alone: as many processes as there are cores, each encoding its share of the documents, which are in
memory already. Preparing also reads and hashes the sources, proves that each document survives, and writes; it is to
reach 80 % of the tokenizer's tokens a second. The two take turns, so that a busy machine disturbs both alike.

`--memory` instead prepares corpora of a growing document and of growing number, each in a process of its own, and
prints the most memory that any process of it held.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from longtrain.config import Config, from_mapping
from longtrain.data import readers, sources, tokenizer_training, tokenizers
from longtrain.data.prepare import ensure
from longtrain.data.processes import cores

BAR = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", type=int, default=32_000, help="pieces of the model that is trained")
    parser.add_argument("--tokenizer", help="a .model or tokenizer.json, instead of one trained on the corpus")
    parser.add_argument("--copies", type=int, default=3, help="how often the corpus holds each document (default: 3)")
    parser.add_argument("--repeats", type=int, default=3, help="turns, of which the medians count (default: 3)")
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print(peak_megabytes(Path(arguments.peak_of)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.memory:
            measure_memory(Path(folder))
        else:
            measure_speed(Path(folder), arguments)


def config_of(source: Path, tokenizer: str, prepared: Path, pieces: int) -> Config:
    return from_mapping(
        {
            "run": {"steps": 1},
            "model": {"preset": "tiny", "vocab_size": pieces},
            "sequence_length": 64,
            "batch": {"sequences": 1},
            "optimizer": {"learning_rate": 1e-3},
            "data": {"sources": [{"path": str(source)}], "tokenizer": tokenizer, "prepared_dir": str(prepared)},
        }
    )


def measure_speed(folder: Path, arguments: argparse.Namespace) -> None:
    texts = [
        event.text
        for file in sources.list_files(sources.PYTHON_STDLIB)
        for event in readers.read(file, readers.Fields("text"))
        if isinstance(event, readers.Text) and event.text
    ]
    tokenizer_path = arguments.tokenizer
    if tokenizer_path is None:
        tokenizer_path = str(folder / "tokenizer.model")
        model = tokenizer_training.train(texts, vocab_size=arguments.pieces, sample_bytes=20_000_000).model
        Path(tokenizer_path).write_bytes(model)
    texts *= arguments.copies
    corpus = folder / "corpus.jsonl"
    with open(corpus, "w") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    vocab_size = tokenizers.load(tokenizer_path).vocab_size
    alone, preparing = [], []
    for turn in range(arguments.repeats):
        alone.append(encode_all(texts, tokenizer_path))
        started = time.perf_counter()
        config = config_of(corpus, tokenizer_path, folder / str(turn), vocab_size)
        prepared = ensure(config, log=lambda line: None)
        preparing.append(prepared.manifest["tokens"] / (time.perf_counter() - started))
    rates = [statistics.median(values) for values in (alone, preparing)]
    print(f"{sum(map(len, texts)) / 1e6:.0f} M characters, {len(texts):,} documents, {cores()} cores")
    print(f"the tokenizer alone {rates[0]:12,.0f} tokens/s")
    print(f"data prepare        {rates[1]:12,.0f} tokens/s")
    ratio = rates[1] / rates[0]
    print(f"ratio {ratio:.3f}  >= {BAR} {'met' if ratio >= BAR else 'MISSED'}")


def encode_all(texts: list[str], tokenizer: str) -> float:
    """Tokens a second of the tokenizer alone, from when all processes are ready to when the last is done."""
    shares = [texts[start :: cores()] for start in range(cores())]
    context = multiprocessing.get_context("fork")
    ready, results = context.Barrier(len(shares) + 1), context.SimpleQueue()
    processes = [context.Process(target=encode, args=(share, tokenizer, ready, results)) for share in shares]
    for process in processes:
        process.start()
    ready.wait()
    started = time.perf_counter()
    tokens = sum(results.get() for _ in processes)
    seconds = time.perf_counter() - started
    for process in processes:
        process.join()
    return tokens / seconds


def encode(texts: list[str], tokenizer: str, ready, results) -> None:
    encode_text = tokenizers.load(tokenizer).encode
    ready.wait()
    results.put(sum(len(encode_text(text)) for text in texts))


def measure_memory(folder: Path) -> None:
    line = "a line of some words, as there are many in a document that is long\n"
    for megabytes in (1, 200, 1000):
        path = folder / f"{megabytes}.txt"
        with open(path, "w") as file:
            for _ in range(megabytes):
                file.write(line * (1_000_000 // len(line)))
        print(f"one document of {megabytes:>5,} MB: {peak_of(path)} MB")
        path.unlink()
    for documents in (10_000, 1_000_000):
        path = folder / f"{documents}.jsonl"
        with open(path, "w") as file:
            for number in range(documents):
                file.write(f'{{"text": "document {number}: {line.strip()}"}}\n')
        print(f"{documents:,} documents: {peak_of(path)} MB")
        path.unlink()


def peak_of(source: Path) -> str:
    command = [sys.executable, __file__, "--peak-of", str(source)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def peak_megabytes(source: Path) -> int:
    with tempfile.TemporaryDirectory() as prepared:
        ensure(config_of(source, "bytes", Path(prepared), 258), log=lambda line: None)
    kilobytes = max(resource.getrusage(kind).ru_maxrss for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return kilobytes * 1024 // 10**6


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
