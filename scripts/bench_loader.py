"""Measures the loader on this machine: `python scripts/bench_loader.py`.

Tokens a second that batches reach on one simulated device, for rows of 8K, 128K and 1M tokens of documents of lengths
as corpora have them (log-normal), with threads and with worker processes; and what a process of a ring of 8 reads, that
holds one of the 8 shards of each row. Then the memory of this process over 10,000 rows, and the time and memory of the
row index of 10 million documents.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import AxisType

from longtrain.config import from_mapping
from longtrain.data.loader import Batches
from longtrain.data.packing import PACKINGS
from longtrain.data.prepare import ensure
from longtrain.data.prepared import Prepared
from longtrain.data.rows import RowIndex
from longtrain.data.rowsource import RowSource
from longtrain.layout import Deal

TOKENS = 1 << 26
LENGTHS = {"8K": 1 << 13, "128K": 1 << 17, "1M": 1 << 20}
INDEXED_DOCUMENTS = 10_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000, help="rows over which memory is watched (default: 10,000)")
    parser.add_argument("--index", choices=PACKINGS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.index:
        measure_index(arguments.index)
        return
    with tempfile.TemporaryDirectory() as folder:
        prepared = corpus(Path(folder))
        for name, length in LENGTHS.items():
            for workers in (0, 2):
                batches = batches_of(prepared, length, workers)
                rate = tokens_per_second(batches, length)
                print(f"rows of {name:>4}, {workers} workers: {rate / 1e6:7.1f} M tokens/s", flush=True)
        source = RowSource(index_of(prepared, LENGTHS["1M"]), Deal("dealt", 8), 0, 1, (0,), (3,))
        started = time.perf_counter()
        count = 8
        for item in range(count):
            source[item]
        rate = count * LENGTHS["1M"] / (time.perf_counter() - started)
        print(f"rows of   1M, one of 8 shards, one thread: {rate / 1e6:7.1f} M tokens/s of the whole row", flush=True)
        watch_memory(prepared, arguments.rows)
    for packing in PACKINGS:
        command = [sys.executable, __file__, "--index", packing]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="", flush=True)


def lengths_of(documents: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.clip(np.exp(random.normal(6.5, 1.6, documents)).astype(np.int64), 2, 2_000_000)


def corpus(folder: Path) -> Prepared:
    """Documents of random ids, prepared."""
    random = np.random.default_rng(1)
    (folder / "corpus").mkdir()
    total = 0
    for number, length in enumerate(lengths_of(100_000).tolist()):
        if total > TOKENS:
            break
        np.save(folder / "corpus" / f"{number:06d}.npy", random.integers(0, 256, length, np.uint16))
        total += length
    config = from_mapping(
        {
            "run": {"steps": 1},
            "model": {"preset": "tiny"},
            "sequence_length": 64,
            "batch": {"sequences": 1},
            "optimizer": {"learning_rate": 1e-3},
            "data": {
                "sources": [{"path": str(folder / "corpus")}],
                "tokenizer": "bytes",
                "prepared_dir": str(folder / "prepared"),
            },
        }
    )
    return ensure(config, log=lambda line: None)


def index_of(prepared: Prepared, length: int) -> RowIndex:
    return RowIndex(prepared, packing="best_fit", sequence_length=length, seed=0)


def batches_of(prepared: Prepared, length: int, workers: int) -> Batches:
    names = ("data", "fsdp", "context", "tensor")
    mesh = jax.make_mesh((1, 1, 1, 1), names, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[:1])
    settings = {"deal": Deal("contiguous", 1), "sequences": 1, "accumulation": 1, "first_row": 0, "prefetch": 4}
    return Batches(index_of(prepared, length), mesh=mesh, workers=workers, **settings)


def tokens_per_second(batches: Batches, length: int) -> float:
    count = max(8, min(400, (1 << 25) // length))
    for _ in range(4):
        next(batches)
    started = time.perf_counter()
    for _ in range(count):
        jax.block_until_ready(next(batches))
    seconds = time.perf_counter() - started
    batches.close()
    return count * length / seconds


def watch_memory(prepared: Prepared, rows: int) -> None:
    batches = batches_of(prepared, LENGTHS["8K"], 0)
    for row in range(rows + 1):
        next(batches)
        if row and row % max(1, rows // 5) == 0:
            print(f"after {row:>6,} rows of 8K: {resident_megabytes()} MB resident", flush=True)
    batches.close()


def resident_megabytes() -> int:
    """Of memory that is this process's own: mapped files are the system's to give back."""
    with open("/proc/self/status") as file:
        anonymous = next(line for line in file if line.startswith("RssAnon"))
    return int(anonymous.split()[1]) * 1024 // 10**6


class Lengths:
    """A corpus of lengths alone."""

    sources = ("a",)
    fingerprint = "lengths"

    def __init__(self, count: int):
        self.lengths = lengths_of(count)
        self.source_of = np.zeros(count, np.uint16)
        self.keys = np.arange(count, dtype=np.uint64)


def measure_index(packing: str) -> None:
    documents = Lengths(INDEXED_DOCUMENTS)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, length in LENGTHS.items():
        started = time.perf_counter()
        index = RowIndex(documents, packing=packing, sequence_length=length, seed=0, eval_fraction=0.01)
        index.spans(0)
        seconds = time.perf_counter() - started
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024 // 10**6
        print(
            f"index of {INDEXED_DOCUMENTS:,} documents, {packing}, rows of {name}: {seconds:.1f} s, "
            f"at most {peak} MB above the lengths, {index.rows_per_epoch:,} rows"
        )


if __name__ == "__main__":
    main()
