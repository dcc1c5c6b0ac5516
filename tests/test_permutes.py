"""Collectives among groups of a mesh axis, and the self-test that would notice when a permute loses data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import tiny
from longtrain import trainer
from longtrain.errors import ClusterError
from longtrain.parallel import selftest
from longtrain.parallel.group import Group
from longtrain.parallel.mesh import make_mesh


def mesh_of(**sizes: int):
    shape = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | sizes
    return make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values())))])


# The shards of context that make up each group.
GROUPS = {
    Group("context", 8): [[0, 1, 2, 3, 4, 5, 6, 7]],
    Group("context", 2): [[0, 1], [2, 3], [4, 5], [6, 7]],
    Group("context", 4, stride=2): [[0, 2, 4, 6], [1, 3, 5, 7]],
    Group("context", 2, stride=2): [[0, 2], [1, 3], [4, 6], [5, 7]],
}


@pytest.mark.parametrize(("group", "members"), GROUPS.items(), ids=str)
def test_what_a_group_does_is_among_its_members(group, members):
    """Each shard starts with 10 + its number, and for sums and exchanges with that times 1, 10, 100, ..."""

    def on_shard(x):
        many = x * 10.0 ** jnp.arange(group.size)
        parts = group.index(), group.shift(x), group.shift(x, -1), group.all_gather(x), group.join(x, 0)
        return jax.tree.map(
            lambda y: y.reshape(1, -1), (*parts, group.sum_and_part(many, 0), group.exchange(many[:, None], 0, 1))
        )

    mapped = jax.shard_map(on_shard, mesh=mesh_of(context=8), in_specs=P("context"), out_specs=P("context"))
    index, on, back, gathered, joined, summed, exchanged = jax.jit(mapped)(10.0 + jnp.arange(8))
    for shards in members:
        own = [10.0 + shard for shard in shards]
        for place, shard in enumerate(shards):
            assert index[shard] == place
            assert on[shard] == own[place - 1] and back[shard] == own[(place + 1) % len(own)]
            assert gathered[shard].tolist() == joined[shard].tolist() == own
            assert summed[shard] == sum(own) * 10.0**place
            assert exchanged[shard].tolist() == [number * 10.0**place for number in own]


MESHES = [{"context": 8}, {"data": 2, "context": 4}, {"fsdp": 2, "context": 2, "tensor": 2}]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_permutes_that_keep_everything_pass(sizes):
    selftest.check_permutes(mesh_of(**sizes), ulysses_degree=2, two_way=True, message=100)


def one_cycle_at_most(x, axis, pairs):
    """The known miscompile: of the receivers that close a cycle, all but the last get zeros."""
    closing = [target for source, target in pairs if target <= source]
    lost = jnp.isin(lax.axis_index(axis), jnp.array(closing[:-1], int))
    return jnp.where(lost, 0, PERMUTE(x, axis, pairs))


def the_wrong_way(x, axis, pairs):
    return PERMUTE(x, axis, [(target, source) for source, target in pairs])


def half_of_a_message(x, axis, pairs):
    return jnp.concatenate((PERMUTE(x, axis, pairs)[: (len(x) + 1) // 2], x[(len(x) + 1) // 2 :]))


PERMUTE = lax.ppermute


@pytest.mark.parametrize(
    ("broken", "sizes", "degree", "words"),
    [
        (one_cycle_at_most, {"context": 8}, 2, r"axis context \(4 in a ring, 2 apart\): after 1 shift.*hold 7 in"),
        (the_wrong_way, {"context": 4}, 1, r"axis context \(4 in a ring\).* device 0 .*should hold 4 .* holds 2 to 2"),
        (the_wrong_way, {"data": 4, "context": 2}, 1, "axis data"),
        (half_of_a_message, {"fsdp": 2, "context": 2}, 1, "axis context.*in all 100 places and holds 1 to 2"),
    ],
)
def test_permutes_that_lose_data_are_told_by_axis_and_device(broken, sizes, degree, words, monkeypatch):
    monkeypatch.setattr(lax, "ppermute", broken)
    with pytest.raises(ClusterError, match=words) as told:
        selftest.check_permutes(mesh_of(**sizes), ulysses_degree=degree, two_way=False, message=100)
    assert told.value.exit_code == 6


def test_a_run_ends_before_anything_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(lax, "ppermute", the_wrong_way)
    monkeypatch.setattr(trainer, "ensure_everywhere", lambda *_, **__: pytest.fail("data was prepared"))
    config = tiny.config(f"run.output_dir={tmp_path}", "mesh.context=4", "mesh.data=2")
    with pytest.raises(ClusterError, match="self-test of permutes"):
        trainer.train(config)
