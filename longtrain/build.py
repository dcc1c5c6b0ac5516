"""From a config to everything that runs: mesh, abstract model, optimizer, shardings, compiled steps.

The one assembly that training, evaluation, generation and the checks call, so that none of them can differ.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longtrain import layout, model, optimizer, state
from longtrain.config import Config, resolve_mesh
from longtrain.data.rowsource import ROW_STATS, SEQUENCE_KEYS
from longtrain.errors import ConfigError, Problem
from longtrain.model import Execution, Llama
from longtrain.ops import kernels
from longtrain.ops.kernels.workload import Workload
from longtrain.parallel import selftest
from longtrain.parallel.mesh import AXES, make_mesh
from longtrain.parallel.sharding import ACTIVATION, spec
from longtrain.state import State
from longtrain.step import make_eval_step, make_train_step


@dataclasses.dataclass(frozen=True)
class Build:
    """What a config resolves to on a set of devices. `choices` says in words what each `auto` became, and why."""

    config: Config
    mesh: Mesh
    how: Execution
    choices: tuple[str, ...]
    graph: nnx.GraphDef[Llama]
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    state: State
    """The abstract state: shapes, dtypes and shardings."""

    def initial_state(self) -> State:
        """The state before the first step, every array born on the devices that hold it."""
        make = functools.partial(state.initial, self.config, self.optimizer)
        cuts = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        return jax.jit(make, out_shardings=cuts)(self.config.run.seed)

    def batch(self, sequences: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The abstract batch of this many rows."""
        rows = (sequences, self.config.sequence_length)
        cut = NamedSharding(self.mesh, spec("BS", ACTIVATION))
        batch = {
            key: jax.ShapeDtypeStruct(rows, jnp.float32 if key == "weights" else jnp.int32, sharding=cut)
            for key in SEQUENCE_KEYS
        }
        stats = (sequences, self.mesh.shape["context"], ROW_STATS)
        return batch | {"row_stats": jax.ShapeDtypeStruct(stats, jnp.uint32, sharding=cut)}

    def place(self, rows: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """A hand-made batch in document order, dealt as the layout says, on the devices; the data pipeline has its own.

        Its row statistics are zeros.

        Every process of a cluster gives all rows and places the parts of its own devices.
        """
        order_S = self.how.deal.order(self.config.sequence_length)
        placed: dict[str, jax.Array] = {}
        for key, leaf in self.batch(len(rows["tokens"])).items():
            array = np.zeros(leaf.shape, leaf.dtype) if key == "row_stats" else rows[key][:, order_S]
            placed[key] = jax.make_array_from_callback(leaf.shape, leaf.sharding, array.__getitem__)
        return placed

    @property
    def kv_numbers(self) -> int:
        """Numbers in a device's keys and values of one layer and micro-batch: what a step of the ring sends."""
        config, sizes = self.config, self.mesh.shape
        rows = config.batch.sequences // (config.batch.accumulation * sizes["data"] * sizes["fsdp"])
        heads = max(config.model.num_kv_heads // sizes["tensor"], 1)
        return 2 * rows * heads * (config.sequence_length // sizes["context"]) * config.model.head_dim

    def check_permutes(self) -> None:
        """Raises ClusterError where a permute on the mesh loses data: see `parallel/selftest.py`. Every process must
        call it."""
        how = self.how
        message = self.kv_numbers // (2 if how.two_way else 1)
        selftest.check_permutes(self.mesh, ulysses_degree=how.ulysses_degree, two_way=how.two_way, message=message)

    def with_optimizer(self, update: optax.GradientTransformation, schedule: optax.Schedule) -> "Build":
        """The build with another optimizer, and the state that it keeps."""
        born = _abstract_state(self.config, update, self.mesh)
        return dataclasses.replace(self, optimizer=update, schedule=schedule, state=born)

    def lowered_train_step(self) -> jax.stages.Lowered:
        """The train step of (state, batch, stop votes), traced but not yet compiled; the state is donated."""
        step = make_train_step(
            self.graph,
            self.how,
            self.optimizer,
            self.schedule,
            self.config.batch.accumulation,
            self.config.guard.spike_deviations,
        )
        # The state comes out as it went in, so that the next step takes it without a copy.
        cuts = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        votes = jax.ShapeDtypeStruct((self.mesh.size,), jnp.int32, sharding=NamedSharding(self.mesh, P(AXES)))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(cuts, None))
        return jitted.lower(self.state, self.batch(self.config.batch.sequences), votes)

    def train_step(self) -> jax.stages.Compiled:
        """The train step, compiled ahead: another shape or sharding is an error, never a second compilation."""
        return self.lowered_train_step().compile()

    def eval_step(self, sequences: int) -> jax.stages.Compiled:
        """The compiled eval step over this many rows, of (parameters, batch)."""
        step = make_eval_step(self.graph, self.how)
        return jax.jit(step).lower(self.state.parameters, self.batch(sequences)).compile()


def build(config: Config, devices: Sequence[jax.Device] | None = None) -> Build:
    """Assembles the config on `devices` (default: all of the cluster). Nothing is allocated yet.

    Raises:
      ConfigError: when the config does not fit the number of devices, or an explicit choice cannot serve.
    """
    devices = jax.devices() if devices is None else devices
    sizes = resolve_mesh(config, len(devices))
    mesh = make_mesh(sizes.axes, devices)
    if config.memory.offload != "none" and mesh.devices.flat[0].platform == "cpu":
        message = "must be none on the CPU, whose devices have no memory but the host's"
        raise ConfigError([Problem("memory.offload", config.memory.offload, message)])
    one_document = config.data.packing == "one"
    work = Workload.on(
        mesh.devices.flat[0],
        dtype=config.model.compute_dtype,
        head_dim=config.model.head_dim,
        q_heads=config.model.num_heads,
        kv_heads=config.model.num_kv_heads,
        tokens=config.sequence_length,
        context=sizes.context,
        tensor=sizes.tensor,
        strategy=config.attention.strategy,
        layout=config.attention.layout,
        one_document=one_document,
        ulysses_degree=config.attention.ulysses_degree,
    )
    try:
        kernel, kernel_reason = kernels.select(config.attention.kernel, work)
    except ValueError as error:
        raise ConfigError([Problem("attention.kernel", config.attention.kernel, str(error))]) from error
    order, layout_reason = layout.resolve(
        config.attention.layout,
        context=sizes.context,
        strategy=config.attention.strategy,
        packing=config.data.packing,
        kernel=kernel,
    )
    try:
        layout.block(order, config.sequence_length, sizes.context // config.attention.ulysses_degree)
    except ValueError as error:  # `auto` knows no lengths: zigzag needs an even number of tokens on each shard
        raise ConfigError([Problem("attention.layout", config.attention.layout, str(error))]) from error
    how = Execution(
        mesh=mesh,
        strategy=config.attention.strategy,
        layout=order,
        kernel=kernel,
        one_document=one_document,
        ulysses_degree=config.attention.ulysses_degree,
        two_way=config.attention.two_way,
        unroll=config.attention.unroll,
        remat=config.memory.remat,
        offload=config.memory.offload,
        loss_chunk=config.memory.loss_chunk,
        mlp_chunk=config.memory.mlp_chunk,
        compute_dtype=config.model.compute_dtype,
    )
    graph, _ = model.abstract(config.model)
    update = optimizer.make(config.optimizer)
    return Build(
        config=config,
        mesh=mesh,
        how=how,
        choices=(f"attention.kernel: {kernel} ({kernel_reason})", f"attention.layout: {order} ({layout_reason})"),
        graph=graph,
        optimizer=update,
        schedule=optimizer.schedule(config.optimizer, config.run.steps),
        state=_abstract_state(config, update, mesh),
    )


def _abstract_state(config: Config, update: optax.GradientTransformation, mesh: Mesh) -> State:
    shapes = jax.eval_shape(functools.partial(state.initial, config, update), 0)
    cuts = state.shardings(shapes, update, mesh)
    return jax.tree.map(lambda leaf, cut: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=cut), shapes, cuts)
