"""Batches on their devices: Grain reads rows ahead, in threads or processes; the next batch is placed early.

No iterator has a state worth saving: the batches from any row on are `Batches(..., first_row=row)`.
"""

import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import grain.python as grain
import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longtrain.data.processes import before_workers, start_worker
from longtrain.data.rows import RowIndex
from longtrain.data.rowsource import ROW_STATS, SEQUENCE_KEYS, RowSource, computed_together, row_stats
from longtrain.errors import DataError
from longtrain.layout import Deal

Batch = dict[str, jax.Array]


class Batches:
    """An iterator of global batches, each process loading only the rows, and of them the places, that its devices hold.

    A batch has `tokens`, `targets`, `positions`, `segments` (int32) and `weights` (float32), [B, S], dealt along S, and
    `row_stats` (uint32 [B, C, 7] over C context shards, see rowsource.ROW_STATS), all sharded over
    ((data, fsdp), context).

    `next` raises DataError where a row cannot be made, a worker died, or the rows are used up (on all
    processes at the same batch, whichever rows are theirs). After that, or when done, call `close`.
    """

    def __init__(
        self,
        index: RowIndex,
        *,
        mesh: Mesh,
        deal: Deal,
        sequences: int,
        accumulation: int,
        first_row: int,
        prefetch: int,
        workers: int,
    ):
        """`sequences`: rows of a batch, over all processes. `accumulation`: micro-batches it is computed in.
        `prefetch`: batches read ahead. `workers`: processes that read; 0 for threads of this one."""
        self.mesh = mesh
        self._index, self._sequences, self._next_row = index, sequences, first_row
        length = index.sequence_length
        self._sharding = NamedSharding(mesh, P(("data", "fsdp"), "context"))
        indices = self._sharding.addressable_devices_indices_map((sequences, length)).values()
        held = [index for index in indices if index is not None]
        local = length // mesh.shape["context"]
        self._places = sorted({place for rows, _ in held for place in range(sequences)[rows]})
        self._shards = tuple(sorted({range(length)[places].start // local for _, places in held}))
        self._together = computed_together(sequences, mesh.shape["data"] * mesh.shape["fsdp"], accumulation)
        source = RowSource(index, deal, first_row, sequences, tuple(self._places), self._shards)
        self._rows = _read_ahead(source, prefetch * len(self._places), workers)
        self._placer = ThreadPoolExecutor(1, thread_name_prefix="place-batch")
        self._placed: Future[Batch] = self._placer.submit(self._place_next)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = self._placed.result()
        self._placed = self._placer.submit(self._place_next)
        return batch

    def close(self) -> None:
        """End the threads and processes; may be called more than once."""
        self._placer.shutdown(wait=True, cancel_futures=True)
        if self._rows is not None:
            self._rows.close()
        self._rows = None  # Grain's iterators complain when the interpreter ends with one still alive

    def _place_next(self) -> Batch:
        self._index.check(self._next_row, self._sequences)
        try:
            rows = {place: next(self._rows) for place in self._places}
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"the data loader failed: {error}") from error
        self._next_row += self._sequences
        for place, stats in row_stats(rows, self._together, self._shards).items():
            rows[place]["row_stats"] = stats
        return {name: self._place(rows, name) for name in (*SEQUENCE_KEYS, "row_stats")}

    def _place(self, rows: dict[int, Any], name: str) -> jax.Array:
        """The global array of which this process's devices get their part of `rows` (by place in the batch)."""
        shards, length = self.mesh.shape["context"], self._index.sequence_length
        shape = (self._sequences, shards, ROW_STATS) if name == "row_stats" else (self._sequences, length)
        each = shape[1] // shards

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # jax asks for parts of the devices of this process alone
            shard = self._shards.index(range(shape[1])[index[1]].start // each)
            held = [rows[place][name][shard] for place in range(self._sequences)[index[0]]]
            return np.stack(held).reshape(len(held), each, *shape[2:])

        return jax.make_array_from_callback(shape, self._sharding, part)


def _read_ahead(source: RowSource, rows: int, workers: int) -> grain.DatasetIterator:
    """The items of `source` in order, with `rows` of them made ahead."""
    dataset = grain.MapDataset.source(source)
    if workers == 0:
        threads = min(rows, os.cpu_count() or 1)
        return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=rows)))
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain hands absl's flags to its processes; nothing here uses them
    before_workers()
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=math.ceil(rows / workers))
    one_at_a_time = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return iter(one_at_a_time.mp_prefetch(options, worker_init_fn=start_worker))
