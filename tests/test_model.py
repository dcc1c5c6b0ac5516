"""The model against an independent Llama in float64; its first values; what its backward pass computes again."""

import functools
import re
from collections import Counter

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import reference_llama
import steps
import tiny
from longtrain import flops, model, state
from longtrain.build import build
from longtrain.config import ModelConfig
from longtrain.config.reading import preset_names

SMALL = "model.vocab_size=264 model.embed_dim=32 model.mlp_dim=48 model.head_dim=8 sequence_length=32 batch.sequences=2"

# Together: grouped, multi-query and plain heads, one head; one and more layers; both heads; each kind of scaling.
MODELS = {
    "grouped-query": {},
    "multi-query, llama3 scaling": {
        "model.num_kv_heads": "1",
        "model.num_layers": "1",
        "model.rope.theta": "50",
        "model.rope.scaling": "{type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_length: 64}",
    },
    "plain heads, tied, yarn": {
        "model.num_kv_heads": "4",
        "model.num_layers": "1",
        "model.tie_embeddings": "true",
        "model.rope.theta": "100",
        "model.rope.scaling": "{type: yarn, factor: 4, original_length: 256, beta_fast: 8, beta_slow: 1}",
    },
    "one wide head, three layers, linear scaling": {
        "model.num_heads": "1",
        "model.num_kv_heads": "1",
        "model.head_dim": "20",
        "model.num_layers": "3",
        "model.norm_eps": "0.1",
        "model.rope.scaling": "{type: linear, factor: 3}",
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_reference(name):
    config = tiny.config(*SMALL.split(), *(f"{key}={value}" for key, value in MODELS[name].items()))
    built = build(config, steps.devices(config))
    batch = steps.packed_rows([[9, 17], [32]], length=32, vocabulary=264)
    values = steps.parameters(config.model)
    exact = jax.tree.map(np.float64, values)

    def loss(parameters, batch):
        losses_BS = nnx.merge(built.graph, parameters).losses(batch, built.how)
        return (losses_BS * batch["weights"]).sum() / batch["weights"].sum(), losses_BS

    step = jax.jit(jax.grad(loss, has_aux=True)).lower(values, batch).compile(steps.QUICK)
    gradients, losses_BS = step(values, batch)
    real = batch["segments"] > 0
    expected_BS = reference_llama.losses(exact, config.model, batch)
    np.testing.assert_allclose(np.asarray(losses_BS)[real], expected_BS[real], rtol=1e-5)

    # A dense random direction meets every entry of a tensor; the largest entry alone says where an error would be.
    random = np.random.default_rng(0)
    gradients = steps.flat(gradients)
    for name, value in steps.flat(values).items():
        largest = np.zeros_like(value)
        largest.flat[np.abs(gradients[name]).argmax()] = 1
        for direction in (*random.standard_normal((2, *value.shape)), largest):
            along = jax.tree_util.tree_map_with_path(
                lambda path, leaf, name=name, direction=direction: (
                    direction if ".".join(key.key for key in path) == name else np.zeros(leaf.shape)
                ),
                exact,
            )
            expected = reference_llama.derivative(exact, along, config.model, batch)
            got = (gradients[name].astype(np.float64) * direction).sum()
            scale = np.linalg.norm(gradients[name])
            assert scale > 0
            assert abs(got - expected) < 1e-5 * scale, f"{name}: {got} for {expected}"


@pytest.mark.parametrize("preset", preset_names())
def test_the_abstract_model_allocates_nothing_and_counts_its_parameters(preset):
    config = tiny.config(f"model.preset={preset}").model
    before = len(jax.live_arrays())
    _, parameters = model.abstract(config)
    leaves = jax.tree.leaves(parameters)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert len(jax.live_arrays()) == before
    assert sum(leaf.size for leaf in leaves) == flops.parameters(config)


def test_tied_embeddings_have_no_head():
    config = tiny.config("model.tie_embeddings=true").model
    parameters = model.abstract(config)[1]
    assert "head_DV" not in parameters
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == flops.parameters(config)


CUBE = ("mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2")


@functools.cache
def first_state(*overrides: str) -> state.State:
    config = tiny.config("optimizer.name=adamw", *overrides)
    return build(config, steps.devices(config)).initial_state()


def parts(name: str, dims: str, kv_heads: int, tensor: int) -> list[int]:
    """In how many parts each dim is cut on a mesh with fsdp 2 and context 2, by the words of the design."""
    heads = tensor if kv_heads >= tensor else 1
    by_dim = {"L": 1, "D": 4, "N": tensor, "K": heads, "H": 1, "F": tensor, "V": tensor}
    return [by_dim[dim] for dim in ("L" if name.startswith("layers") else "") + dims]


def assert_cut(tree, mesh_tensor: int, kv_heads: int) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if not names:
            continue  # a counter
        name = ".".join(names)
        cut = parts(name, names[-1].rsplit("_", 1)[1], kv_heads, mesh_tensor)
        expected = tuple(size // part for size, part in zip(leaf.shape, cut, strict=True))
        shards = leaf.addressable_shards
        assert len(shards) == 8
        assert {shard.data.shape for shard in shards} == {expected}, name
        assert np.prod(expected) < leaf.size, f"{name} is whole on a device"


def test_parameters_and_moments_are_born_in_shards():
    born = first_state(*CUBE)
    assert_cut(born.parameters, mesh_tensor=2, kv_heads=2)
    assert_cut(born.optimizer, mesh_tensor=2, kv_heads=2)
    assert len(jax.tree.leaves(born.optimizer)) == 2 * len(jax.tree.leaves(born.parameters)) + 1


def test_kv_heads_fewer_than_tensor_shards_are_still_cut_over_the_other_axes():
    config = tiny.config("mesh.fsdp=2", "mesh.context=2", "mesh.tensor=2", "model.num_kv_heads=1")
    shardings = model.shardings(model.abstract(config.model)[1], build(config).mesh)
    assert shardings["layers"]["k_DKH"].shard_shape((2, 64, 1, 16)) == (2, 16, 1, 16)


def test_nothing_is_whole_on_the_way_to_the_first_state():
    """The largest array anywhere in a device's program is the largest shard, not a whole matrix."""
    config = tiny.config(*CUBE)
    built = build(config)
    cuts = jax.tree.map(lambda leaf: leaf.sharding, built.state)
    make = functools.partial(state.initial, config, built.optimizer)
    program = jax.jit(make, out_shardings=cuts).lower(0).compile(steps.QUICK).as_text()
    sizes = [np.prod([int(size) for size in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", program)]
    largest_shard = max(np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(built.state))
    assert max(sizes) == largest_shard
    assert "all-gather" not in program


def test_first_values_are_the_same_bits_on_every_mesh():
    one, many = (steps.flat(first_state(*mesh).parameters) for mesh in ((), CUBE))
    for name, value in one.items():
        np.testing.assert_array_equal(many[name], value, err_msg=name)


def test_first_values_have_the_deviations_they_should():
    config = tiny.config().model
    for name, value in steps.flat(first_state().parameters).items():
        if "norm" in name:
            assert (value == 1).all()
            continue
        residual = 1 / np.sqrt(2 * config.num_layers)
        expected = {
            "embed_VD": 1.0,
            "layers.out_NHD": residual / np.sqrt(config.num_heads * config.head_dim),
            "layers.down_FD": residual / np.sqrt(config.mlp_dim),
        }.get(name, 1 / np.sqrt(config.embed_dim))
        assert abs(value.std() / expected - 1) < 0.05, name
        assert abs(value.mean()) < 0.05 * expected, name
    # Layers, and matrices of one shape, are drawn apart.
    q_LDNH = first_state().parameters["layers"]["q_DNH"]
    assert abs(np.corrcoef(q_LDNH[0].ravel(), q_LDNH[1].ravel())[0, 1]) < 0.1
    gate, up = (np.ravel(first_state().parameters["layers"][name]) for name in ("gate_DF", "up_DF"))
    assert abs(np.corrcoef(gate, up)[0, 1]) < 0.1


def gradient_step(*overrides: str):
    """The jitted gradient of a loss on context 4, and abstract arguments for it."""
    config = tiny.config("mesh.context=4", *overrides)
    built = build(config, steps.devices(config))

    def loss(parameters, batch):
        return nnx.merge(built.graph, parameters).losses(batch, built.how).sum()

    return jax.jit(jax.grad(loss)), (built.state.parameters, built.batch(config.batch.sequences))


def primitives(jaxpr) -> Counter[str]:
    """How often each primitive stands in a traced program, inner ones included."""
    counts: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += 1
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, (jax.extend.core.ClosedJaxpr,))
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                counts += primitives(inner)
    return counts


def ring_and_kernels(remat: str) -> tuple[int, int]:
    """Transfers of the ring, and loops of the kernel, in the traced forward and backward pass."""
    step, arguments = gradient_step(f"memory.remat={remat}")
    counts = primitives(step.trace(*arguments).jaxpr.jaxpr)
    return counts["ppermute"], counts["while"]


def test_no_remat_policy_runs_the_ring_again(monkeypatch):
    without = ring_and_kernels("none")
    assert without[0] > 0
    assert without[1] > 0
    assert ring_and_kernels("attention_saved") == without
    assert ring_and_kernels("full") == without
    # That the count would tell: with nothing saved, the forward ring is there twice.
    monkeypatch.setitem(model.REMAT_KEEPS, "full", ())
    assert ring_and_kernels("full") > without


@pytest.mark.slow
def test_no_remat_policy_runs_the_ring_again_in_the_compiled_program():
    def permutes(remat: str) -> int:
        step, arguments = gradient_step(f"memory.remat={remat}")
        return step.lower(*arguments).compile(steps.QUICK).as_text().count(" collective-permute(")

    without = permutes("none")
    assert without > 0
    assert permutes("attention_saved") == without
    assert permutes("full") == without


def test_a_shard_that_does_not_fit_is_refused_with_its_dim():
    config = ModelConfig(**(tiny.config().model.model_dump() | {"mlp_dim": 50}))
    built = build(tiny.config("mesh.tensor=4"), jax.devices()[:4])
    with pytest.raises(ValueError, match=r"dim F of size 50 cannot be cut into 4 parts"):
        model.shardings(model.abstract(config)[1], built.mesh)


def test_compute_in_bfloat16_stays_near_the_reference():
    config = tiny.config(*SMALL.split(), "model.compute_dtype=bfloat16", "model.num_layers=1")
    built = build(config, steps.devices(config))
    batch = steps.packed_rows([[9, 17], [32]], length=32, vocabulary=264)

    def loss(parameters, batch):
        return (nnx.merge(built.graph, parameters).losses(batch, built.how) * batch["weights"]).sum()

    values = steps.parameters(config.model)
    total, gradients = jax.jit(jax.value_and_grad(loss)).lower(values, batch).compile(steps.QUICK)(values, batch)
    assert total.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    expected = reference_llama.loss(jax.tree.map(np.float64, values), config.model, batch)
    error = abs(total / batch["weights"].sum() / expected - 1)
    assert 1e-6 < error < 5e-3
