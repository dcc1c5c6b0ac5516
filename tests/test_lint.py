"""Each rule of the lint: the sabotaged program it must catch, and the healthy one it must let pass."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longtrain.config import resolve_mesh
from longtrain.ops.kernels import FORWARD_SCOPE
from longtrain.plan import lint, schedule
from longtrain.plan.lint import Audit, Finding, Shapes
from longtrain.plan.program import Program
from programs import toys
from programs.toys import MESH
from tiny import config

PROGRAMS = Path(__file__).parent / "programs"
VERSIONS = ["0.10.2", "0.12.0.1"]
TARGETS = [f"{kind}.{version}" for kind in ("GB200", "v5p") for version in VERSIONS]

TOKENS, WIDTH, VOCABULARY, CHUNK = 96, 32, 320, 16
SHAPES = Shapes(
    rows=1,
    tokens=TOKENS,
    sequence=4 * TOKENS,
    vocabulary=VOCABULARY,
    heads=2,
    widths=frozenset({WIDTH, VOCABULARY}),
    parameters=frozenset({WIDTH * WIDTH, WIDTH * VOCABULARY}),
    loss_chunk=CHUNK,
    smallest=1,
)
RATES = schedule.Rates(flops=1e15, memory=4e12, attention={FORWARD_SCOPE: 40e-6}, transfer=lambda c: c.bytes / 4e11)


def found(rule: str, program: Program, shapes: Shapes = SHAPES, backend: str = "auto") -> list[Finding]:
    audit = Audit(program, schedule.simulate(program, RATES), shapes, backend)
    return [finding for finding in lint.lint(audit) if finding.rule == rule]


def fixture(name: str, target: str) -> Program:
    text = (PROGRAMS / f"{name}.{target}.hlo").read_text(encoding="utf-8")
    return Program.read(text, MESH, "cuda" if target.startswith("GB200") else "tpu")


def compiled(function, *shapes: tuple[tuple[int, ...], P], out: P | None = None) -> Program:
    """A function of shards, compiled for eight simulated devices of fsdp 2 x context 4."""
    on = toys.mesh(jax.devices()[:8])
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(on, cut)) for shape, cut in shapes]
    specs = tuple(cut for _, cut in shapes)
    mapped = jax.shard_map(function, mesh=on, in_specs=specs, out_specs=out or P(), check_vma=False)
    return Program.read(jax.jit(mapped).lower(*arrays).compile().as_text(), MESH, "cpu")


SHARDED = P(("fsdp", "context"))
ROWS = ((8 * TOKENS, WIDTH), SHARDED)
HEAD = ((WIDTH, VOCABULARY), P())


@pytest.mark.parametrize("target", TARGETS)
def test_a_permute_behind_its_compute(target: str):
    (finding,) = found("permute-behind-compute", fixture("sabotaged_ring", target))
    assert "waits for the compute of its own step" in finding.message and "over context" in finding.message
    assert "attention.strategy=ring" in finding.message
    assert not found("permute-behind-compute", fixture("ring", target))


@pytest.mark.parametrize("target", TARGETS)
def test_a_permute_between_two_blocks_where_no_loop_is(target: str):
    (finding,) = found("permute-behind-compute", fixture("sabotaged_pair", target))
    assert "waits for the compute of its own step" in finding.message
    assert not found("permute-behind-compute", fixture("pair", target))


@pytest.mark.parametrize("target", TARGETS)
def test_a_permute_that_xla_scheduled_behind_compute_it_could_run_beside(target: str):
    """The healthy ring's text, with the permute's two lines moved to the end of the loop's body."""
    lines = (PROGRAMS / f"ring.{target}.hlo").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if " collective-permute-start(" in line)
    done = next(i for i, line in enumerate(lines) if " collective-permute-done(" in line)
    root = next(i for i, line in enumerate(lines) if i > done and line.startswith("  ROOT"))
    between = [i for i in range(start + 1, done) if "collective-permute" in lines[i]]
    assert not between
    # Whatever used the result in between is only a copy of it, and moves along.
    name = lines[done].split(" = ")[0].strip()
    late = [i for i in range(done + 1, root) if name in lines[i].split(" = ")[1]]
    order = [i for i in range(len(lines)) if i not in (start, done, *late)]
    at = order.index(root)
    moved = [lines[i] for i in [*order[:at], start, done, *late, *order[at:]]]
    text = "\n".join(moved)
    (finding,) = found("permute-behind-compute", Program.read(text, MESH, "cuda"))
    assert "scheduled behind the compute that could hide it" in finding.message
    assert "--xla_gpu_experimental_parallel_collective_overlap_limit=4" in finding.message
    (finding,) = found("permute-behind-compute", Program.read(text, MESH, "tpu"))
    assert "xla_gpu" not in finding.message and "attention.kernel=auto" in finding.message


def test_a_synchronous_permute():
    ring = Program.read(toys.lowered(jax.devices()[:8])["ring"].compile().as_text(), MESH, "cpu")
    (finding,) = found("synchronous-permute", ring)
    assert "3 a step" in finding.message
    for target in TARGETS:
        assert not found("synchronous-permute", fixture("ring", target))


def test_a_small_permute_is_let_pass():
    ring = Program.read(toys.lowered(jax.devices()[:8])["ring"].compile().as_text(), MESH, "cpu")
    assert not found("synchronous-permute", ring, dataclasses.replace(SHAPES, smallest=1 << 30))


def test_gathered_activations():
    def layer(x, w, wanted):
        whole = lax.all_gather(w, ("fsdp", "context"), axis=0, tiled=True)
        y = jnp.tanh(x @ whole)
        return y if wanted else lax.all_gather(y, "context", axis=0, tiled=True)

    weights = ((WIDTH, WIDTH), SHARDED)
    (finding,) = found("gathered-activations", compiled(lambda x, w: layer(x, w, False), ROWS, weights))
    assert f"f32[{TOKENS},{WIDTH}]" in finding.message and "parallel/sharding.py" in finding.message
    assert not found("gathered-activations", compiled(lambda x, w: layer(x, w, True), ROWS, weights, out=SHARDED))


def test_an_all_reduce_where_a_part_is_wanted():
    gradient = ((WIDTH, VOCABULARY), P())
    whole = compiled(lambda g: lax.psum(g, ("fsdp", "context")), gradient)
    (finding,) = found("all-reduce-for-reduce-scatter", whole)
    assert f"f32[{WIDTH},{VOCABULARY}]" in finding.message

    def scattered(g):
        return lax.psum_scatter(g, ("fsdp", "context"), scatter_dimension=0, tiled=True)

    assert not found("all-reduce-for-reduce-scatter", compiled(scattered, gradient, out=SHARDED))


def test_another_backend_than_asked():
    ring = fixture("ring", "GB200.0.12.0.1")
    (finding,) = found("backend", ring, backend="nvshmem")
    assert "carried by nccl and not by nvshmem" in finding.message
    assert "communication.backend=auto" in finding.message
    assert not found("backend", ring, backend="nccl")
    assert not found("backend", ring, backend="auto")


def test_a_buffer_of_all_scores():
    def attend(q, k):
        scores = jax.nn.softmax(q @ k.T)
        return scores @ k

    def in_tiles(q, k):
        return lax.map(lambda tile: attend(tile, k), q.reshape(-1, 8, WIDTH)).reshape(q.shape)

    keys = ((4 * TOKENS, WIDTH), P())
    (finding, *_) = found("square-buffer", compiled(attend, ROWS, keys, out=SHARDED))
    assert f"f32[{TOKENS},{4 * TOKENS}]" in finding.message and "attention.kernel" in finding.message
    assert not found("square-buffer", compiled(in_tiles, ROWS, keys, out=SHARDED))


def test_logits_that_are_made_whole():
    def losses(x, head):
        return jax.nn.logsumexp(x @ head, axis=-1)

    def in_chunks(x, head):
        return lax.map(lambda chunk: losses(chunk, head), x.reshape(-1, CHUNK, WIDTH)).reshape(-1)

    (finding, *_) = found("whole-logits", compiled(losses, ROWS, HEAD, out=SHARDED))
    assert f"f32[{TOKENS},{VOCABULARY}]" in finding.message and f"memory.loss_chunk={CHUNK}" in finding.message
    assert not found("whole-logits", compiled(in_chunks, ROWS, HEAD, out=SHARDED))


def test_masks_that_a_loop_saves():
    """The trap itself: under jax.checkpoint a mask made from the axis index alone is known ahead of the loop."""

    def forward(q, k, barrier):
        me = lax.axis_index("context")
        me = lax.optimization_barrier((me, q[0]))[0] if barrier else me
        places = jnp.arange(TOKENS)

        def step(out, turn):
            mask = (me * TOKENS + places)[:, None] >= ((me - turn) % 4 * TOKENS + places)[None, :]
            return out + jax.nn.softmax(jnp.where(mask, q @ k.T, -1e9)) @ k, None

        return lax.scan(step, jnp.zeros_like(q), jnp.arange(4))[0]

    def gradient(q, k, barrier):
        attend = jax.custom_vjp(lambda q: forward(q, k, barrier))
        # Any backward pass will do: as in the ring, it is given q and nothing of the forward's loop.
        attend.defvjp(lambda q: (forward(q, k, barrier), q), lambda q, d_out: (d_out * q,))

        def layer(x, _):
            return jax.checkpoint(attend)(x), None

        return jax.grad(lambda q: jnp.sum(lax.scan(layer, q, length=3)[0] ** 2))(q)

    (finding, *_) = found("loop-saved-masks", compiled(lambda q, k: gradient(q, k, False), ROWS, ROWS, out=SHARDED))
    assert f"pred[4,{TOKENS},{TOKENS}]" in finding.message and "optimization_barrier" in finding.message
    assert not found("loop-saved-masks", compiled(lambda q, k: gradient(q, k, True), ROWS, ROWS, out=SHARDED))


def test_more_memory_than_there_is():
    ring = fixture("ring", "GB200.0.12.0.1")
    audit = Audit(ring, schedule.simulate(ring, RATES), SHAPES, "auto", needed=81 << 30, memory=80 << 30)
    assert [f.rule for f in lint.lint(audit) if f.rule == "memory"] == ["memory"]
    enough = dataclasses.replace(audit, needed=79 << 30)
    assert not [f for f in lint.lint(enough) if f.rule == "memory"]


def test_every_rule_has_been_seen_to_catch_something():
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{rule}"' in text for rule in lint.RULES)


def test_the_shapes_of_a_config():
    whole = config("mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2", "batch.sequences=8", "batch.accumulation=2")
    shapes = Shapes.of(whole, resolve_mesh(whole, 8))
    assert (shapes.rows, shapes.tokens, shapes.sequence, shapes.heads) == (2, 32, 64, 2)
    # Of the tiny preset, over two tensor shards: D 64, N 4, K 2, H 16, F 192, V 512.
    assert shapes.vocabulary == 256
    assert shapes.widths == {64, 2, 1, 16, 32, 96, 256}
    assert shapes.parameters == {64 * 32, 64 * 16, 64 * 96, 64 * 256, 64}


def test_the_exposed_time_of_a_shift_is_what_its_compute_leaves():
    """The ring's step computes 2 * 2 * T * T * H FLOPs, beside which its block is sent."""
    for seconds_to_send, hidden in ((1e-6, True), (1e-3, False)):
        rates = dataclasses.replace(RATES, memory=1e15, transfer=lambda c, seconds=seconds_to_send: seconds)
        (transfer,) = schedule.simulate(fixture("ring", "GB200.0.12.0.1"), rates).transfers
        products = 2 * 2 * toys.TOKENS**2 * toys.WIDTH / rates.flops
        assert transfer.beside == pytest.approx(products, rel=0.05)
        assert transfer.exposed == pytest.approx(0 if hidden else seconds_to_send - products, rel=0.01)
        assert transfer.exposed_seconds == 3 * transfer.exposed


def test_a_synchronous_transfer_is_exposed_whole():
    layers = schedule.simulate(fixture("layers", "v5p.0.12.0.1"), RATES)
    assert len(layers.transfers) == 4
    for transfer in layers.transfers:
        assert transfer.exposed == pytest.approx(transfer.seconds) and transfer.beside == 0
    # 3 layers' gathers and sums, one scatter, one exchange.
    sent = sum(t.collective.bytes * t.collective.times for t in layers.transfers)
    assert layers.exposed_seconds == pytest.approx(sent / 4e11)
