"""The loader: whatever the mesh, layout, workers and first row, the index's rows in the layout's order."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import types
import zlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from documents import Documents
from longtrain import layout as layouts
from longtrain import step
from longtrain.data.hashing import from_limbs, hash_row
from longtrain.data.loader import Batches
from longtrain.data.rows import RowIndex
from longtrain.data.rowsource import SEQUENCE_KEYS
from longtrain.errors import DataError

LENGTHS = [121, 5, 30, 64, 200, 1, 63, 65]


class Broken(Documents):
    """Documents whose tokens cannot be read."""

    def tokens(self, document: int, start: int, end: int) -> np.ndarray:
        raise DataError("shard 7 is gone")


class Deadly(Documents):
    """Documents that kill whoever reads them, as the system does with a worker that takes too much memory."""

    def tokens(self, document: int, start: int, end: int) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def mesh_of(data: int = 1, fsdp: int = 1, context: int = 1, tensor: int = 1) -> Mesh:
    shape = (data, fsdp, context, tensor)
    names = ("data", "fsdp", "context", "tensor")
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: int(np.prod(shape))])


def index_of(documents: Documents | None = None, **options) -> RowIndex:
    return RowIndex(documents or Documents(LENGTHS), packing="best_fit", sequence_length=64, seed=0, **options)


def batches_of(index: RowIndex, mesh: Mesh, layout: str = "dealt", **options) -> Batches:
    deal = layouts.Deal(layout, mesh.shape["context"])
    settings = {"deal": deal, "sequences": 4, "accumulation": 1, "first_row": 0, "prefetch": 2, "workers": 0} | options
    return Batches(index, mesh=mesh, **settings)


@pytest.fixture
def closing():
    """Closes what a test makes."""
    made: list[Batches] = []
    yield lambda batches: made.append(batches) or batches
    for batches in made:
        batches.close()


MESHES = [
    {},
    {"data": 2},
    {"context": 2},
    {"fsdp": 2, "context": 2},
    {"tensor": 4},
    {"data": 2, "context": 4},
]
MESHES += [{"data": 2, "fsdp": 2, "context": 2}, {"context": 8}]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_a_batch_is_the_indexs_rows_in_the_layouts_order(sizes, layout, closing):
    index, mesh = index_of(), mesh_of(**sizes)
    order = layouts.order(layout, 64, mesh.shape["context"])
    batches = closing(batches_of(index, mesh, layout=layout))
    for first in (0, 4, 8):  # beyond the epoch's border, at row 9
        batch, rows = next(batches), [index.row(row) for row in range(first, first + 4)]
        for name in SEQUENCE_KEYS:
            assert np.array_equal(batch[name], [getattr(row, name)[order] for row in rows])
            assert batch[name].dtype == (np.float32 if name == "weights" else np.int32)
            local = batch[name].addressable_shards[0].data.shape
            assert local == (4 // (mesh.shape["data"] * mesh.shape["fsdp"]), 64 // mesh.shape["context"])


@pytest.mark.parametrize(
    ("sizes", "accumulation"),
    [
        ({"data": 4}, 1),
        ({"data": 2, "context": 2}, 1),
        ({"data": 2, "context": 2}, 2),
        ({"context": 4}, 1),
        ({"context": 4}, 2),
        ({"context": 4}, 4),
    ],
    ids=str,
)
def test_row_stats_count_rows_and_the_busiest_of_those_computed_together(sizes, accumulation, closing, monkeypatch):
    """With tables of work made up, each row's with its own busiest members."""
    index, mesh = index_of(Documents(list(range(50, 59)))), mesh_of(**sizes)

    def work(deal: layouts.Deal, segments_S: np.ndarray) -> np.ndarray:
        random = np.random.default_rng(zlib.crc32(segments_S.tobytes()))
        return random.integers(0, 1000, (deal.members, deal.members))

    monkeypatch.setattr(layouts.Deal, "work", work)
    deal = layouts.Deal("dealt", mesh.shape["context"])
    batches = closing(batches_of(index, mesh, deal=deal, accumulation=accumulation))
    parts = np.asarray(next(batches)["row_stats"])
    assert parts.dtype == np.uint32 and parts.shape == (4, mesh.shape["context"], 7)
    assert not parts[:, 1:, 4:].any()
    stats = parts.sum(axis=1)
    works = [deal.work(index.row(number).segments) for number in range(4)]
    for number in range(4):
        row = index.row(number)
        arrays = [getattr(row, name) for name in SEQUENCE_KEYS]
        assert from_limbs(stats[number, :4]) == hash_row(number, *arrays)
        assert stats[number, [4, 6]].tolist() == [len(row.pieces), works[number].sum()]

    # Which rows a device has at once, asked of the step itself; who waits, step by step.
    how = types.SimpleNamespace(mesh=mesh)
    numbers = jax.device_put(np.tile(np.arange(4)[:, None], 64), NamedSharding(mesh, P(("data", "fsdp"), "context")))
    parts = step._micro_batches(dict.fromkeys(SEQUENCE_KEYS, numbers), accumulation, how)["tokens"]
    at_once = {tuple(part[:, 0]) for shard in parts.addressable_shards for part in np.asarray(shard.data)}
    assert sorted(sum(at_once, ())) == [0, 1, 2, 3]
    waited = 0
    for rows in at_once:
        for ring_step in range(len(works[0])):
            waited += max(sum(works[row][ring_step, member] for row in rows) for member in range(deal.members))
    assert stats[:, 5].sum() == waited


def batch_hashes(batches: Batches, count: int) -> list[int]:
    return [from_limbs(np.asarray(next(batches)["row_stats"])[..., :4].sum(axis=(0, 1))) for _ in range(count)]


def test_the_batch_hash_is_the_same_on_every_mesh_and_layout(closing):
    index = index_of()
    plain = batch_hashes(closing(batches_of(index, mesh_of(), layout="contiguous")), 6)
    assert len(set(plain)) == 6
    assert batch_hashes(closing(batches_of(index, mesh_of(data=2, context=4), layout="zigzag")), 6) == plain
    halves = batch_hashes(closing(batches_of(index, mesh_of(context=2), sequences=2)), 12)
    assert [(a + b) % 2**64 for a, b in zip(halves[::2], halves[1::2], strict=True)] == plain


def test_going_on_from_any_row(closing):
    index, mesh = index_of(), mesh_of(context=2)
    straight = batch_hashes(closing(batches_of(index, mesh)), 9)
    resumed = [batch_hashes(closing(batches_of(index, mesh, first_row=4 * step)), 3) for step in (0, 3, 6)]
    assert sum(resumed, []) == straight


def test_worker_processes_give_the_same_and_end(closing):
    index, mesh = index_of(), mesh_of(context=2)
    batches = closing(batches_of(index, mesh, workers=2))
    assert batch_hashes(batches, 5) == batch_hashes(closing(batches_of(index, mesh)), 5)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    batches.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_goes_wrong_in_a_reader_is_a_data_error(workers, closing):
    batches = closing(batches_of(index_of(Broken(LENGTHS)), mesh_of(), workers=workers))
    with pytest.raises(DataError, match="shard 7 is gone"):
        next(batches)


def test_a_worker_that_is_killed_ends_the_run(closing):
    batches = closing(batches_of(index_of(Deadly(LENGTHS)), mesh_of(), workers=1))
    with pytest.raises(DataError, match=r"the data loader failed: .*exit code -9"):
        next(batches)


def test_data_that_ends_ends_after_its_last_whole_batch(closing):
    index = index_of(repeat=False)
    batches = closing(batches_of(index, mesh_of(data=2)))
    assert index.rows == 9
    assert len(batch_hashes(batches, 2)) == 2
    with pytest.raises(DataError, match="9 rows, 8 are taken, 1 left"):
        next(batches)
    with pytest.raises(DataError, match="exhausted"):
        next(closing(batches_of(index, mesh_of(), first_row=8)))


def test_closing_twice_and_unread(closing):
    batches = batches_of(index_of(), mesh_of())
    batches.close()
    batches.close()


PROGRAM = """
import sys
import jax
process, port, sizes = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
import test_data_loader as t
read = []
row = t.RowIndex.row
def reading(index, number, places):
    read.append((number % 4, places.tolist()))
    return row(index, number, places)
t.RowIndex.row = reading
batches = t.batches_of(t.index_of(), t.mesh_of(**sizes), layout="zigzag", prefetch=1)
everywhere = jax.sharding.NamedSharding(batches.mesh, jax.sharding.PartitionSpec())
total = jax.jit(lambda stats: stats.sum(axis=(0, 1)), out_shardings=everywhere)
hashes = [t.from_limbs(t.np.asarray(total(next(batches)["row_stats"]))[:4]) for _ in range(3)]
batches.close()
places = sorted({place for _, places in read for place in places})
print(hashes, sorted({row for row, _ in read}), places)
"""


# Of the zigzag layout's 4 shards, the first two hold both ends of a row and the others its middle.
EVERYWHERE, ENDS, MIDDLE = [*range(64)], [*range(16), *range(48, 64)], [*range(16, 48)]


@pytest.mark.parametrize(
    ("sizes", "reads"),
    [
        ({"data": 2, "context": 2}, [([0, 1], EVERYWHERE), ([2, 3], EVERYWHERE)]),
        ({"context": 4}, [([0, 1, 2, 3], ENDS), ([0, 1, 2, 3], MIDDLE)]),
    ],
    ids=str,
)
def test_two_processes_see_the_same_and_each_reads_what_its_devices_hold(sizes, reads, closing):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["tests", "."]), "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(number), port, repr(sizes)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    expected = batch_hashes(closing(batches_of(index_of(), mesh_of())), 3)
    for process, (rows, places) in zip(processes, reads, strict=True):
        said, errors = process.communicate(timeout=120)
        assert said.splitlines()[-1:] == [f"{expected} {rows} {places}"], errors
