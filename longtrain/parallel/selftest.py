"""A self-test of permutes on the run's own mesh, before anything is trained with them.

XLA has a pass for GPUs that gets permutes of more than one cycle wrong: most of the shards that should receive what
closes a cycle receive zeros, and nothing says so (openxla/xla, issue 45222). A ring along one axis of a mesh with
several is such a permute. Flags turn the pass on, and another says from which size of message: so the test sends
messages as large as the run's.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from longtrain.errors import ClusterError
from longtrain.parallel.group import Group

CULPRITS = ("--xla_gpu_enable_pipelined_p2p", "--xla_gpu_experimental_pipeline_parallelism_opt_level")
"""The flags that turn that pass on."""


@dataclasses.dataclass(frozen=True)
class Round:
    """A way round the groups of an axis, with float32 messages of so many numbers."""

    group: Group
    way: int
    numbers: int

    def received(self, mesh: Mesh) -> jax.Array:
        """float32 [devices, shifts, 2]: the least and the greatest number each device holds after each shift.

        A device begins with its own number throughout, from 1; after as many shifts as the group is large, it has that
        again. The shifts are a loop, as a ring's are.
        """

        def on_device(number_1: jax.Array) -> jax.Array:
            def shift(message: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
                message = self.group.shift(message, self.way)
                return message, jnp.stack((message.min(), message.max()))

            message = jnp.broadcast_to(number_1, (self.numbers,))
            return lax.scan(shift, message, None, length=self.group.size)[1][None]

        spec = P(mesh.axis_names)
        numbers = jnp.arange(1, mesh.size + 1, dtype=jnp.float32)
        return jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(numbers)

    def expected(self, mesh: Mesh) -> np.ndarray:
        """[devices, shifts]: the number that each device should hold after each shift."""
        size, stride = self.group.size, self.group.stride
        axis = mesh.axis_names.index(self.group.axis)
        numbers = np.arange(1, mesh.size + 1).reshape(mesh.devices.shape)
        lines = np.moveaxis(numbers, axis, -1)
        members = lines.reshape(*lines.shape[:-1], -1, size, stride)
        shifted = [np.roll(members, self.way * (shift + 1), axis=-2).reshape(lines.shape) for shift in range(size)]
        return np.stack([np.moveaxis(line, -1, axis).reshape(-1) for line in shifted], axis=1)


def check_permutes(mesh: Mesh, *, ulysses_degree: int, two_way: bool, message: int) -> None:
    """Shifts known numbers round every axis of more than one device, and compares what came.

    Each process looks at its own devices, and all end where one of them must. The ring over `context` is the run's:
    over groups of `ulysses_degree` shards, both ways where it is `two_way`, with messages of `message` float32 numbers.

    Raises:
      ClusterError: naming the axis, the device, what it should have and what it has.
    """
    rounds = [Round(Group(axis, size), 1, 1) for axis, size in mesh.shape.items() if size > 1 and axis != "context"]
    if (members := mesh.shape["context"] // ulysses_degree) > 1:
        ring = Group("context", members, ulysses_degree)
        rounds += [Round(ring, way, message) for way in ((1, -1) if two_way else (1,))]
    if not rounds:
        return
    results = jax.jit(lambda: [sent.received(mesh) for sent in rounds])()
    found = _first_wrong(mesh, rounds, results)
    if jax.process_count() > 1 and multihost_utils.process_allgather(np.array(found is not None)).any():
        found = found or "the self-test of permutes failed in another process, which says how"
    if found:
        raise ClusterError(found)


def _first_wrong(mesh: Mesh, rounds: list[Round], results: list[jax.Array]) -> str | None:
    """What is wrong on one of this process's devices, in words; None where nothing is."""
    for sent, received in zip(rounds, results, strict=True):
        expected = sent.expected(mesh)
        for shard in received.addressable_shards:
            [device] = range(mesh.size)[shard.index[0]]
            held = np.asarray(shard.data)[0]
            wrong = (held != expected[device, :, None]).any(axis=1)
            if wrong.any():
                shifts = int(np.argmax(wrong))
                return _told(mesh, sent, device, shifts + 1, expected[device, shifts], held[shifts])
    return None


def _told(mesh: Mesh, sent: Round, device: int, shifts: int, wanted: int, held: np.ndarray) -> str:
    group = sent.group
    apart = f", {group.stride} apart" if group.stride > 1 else ""
    least, greatest = held.tolist()
    return (
        f"the self-test of permutes failed on mesh axis {group.axis} ({group.size} in a ring{apart}): after {shifts} "
        f"shift(s) by {sent.way:+d}, device {device} of the mesh ({mesh.devices.flat[device]}) should hold {wanted} in "
        f"all {sent.numbers} places and holds {least:g} to {greatest:g}. Training would go on with wrong numbers. The "
        f"GPU cycle decomposer of XLA is known to do this (openxla/xla, issue 45222): take {' and '.join(CULPRITS)}, "
        "which turn it on, out of communication.xla_flags and XLA_FLAGS. Without them: another jaxlib, or a broken link"
    )
