"""Against transformers' Llama, on the CPU in float32: config, logits, loss, every gradient, a step of AdamW; both ways.

It needs the extra `parity`.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import steps
import tiny
from longtrain import convert, hf, model
from longtrain.build import Build, build
from longtrain.config import ModelConfig, huggingface
from longtrain.generate import generate
from longtrain.ops.rope import amplitude, inverse_frequencies

WHY = "needs torch and transformers: pip install 'longtrain[parity]'"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

pytestmark = pytest.mark.slow

LENGTH = 96
ORIGINAL = 32
"""Tokens of the context the model would have been trained on: most positions are beyond it."""

ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 500000.0},
    "abf": {"rope_type": "default", "rope_theta": 15.3e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 50.0,
        "factor": 3.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 3.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn, another temperature": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 3.0,
        "attention_factor": 1.3,
        "original_max_position_embeddings": ORIGINAL,
    },
}
# (rope, key/value heads of 4, tied)
MODELS = [
    ("plain", 2, False),
    ("abf", 1, True),
    ("linear", 4, False),
    ("llama3", 2, True),
    ("yarn", 2, False),
    ("yarn, another temperature", 4, True),
]


def theirs(rope: str, kv_heads: int, tied: bool) -> Any:
    """A random Llama of theirs."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
        rope_parameters=ROPES[rope],
        attn_implementation="eager",
        initializer_range=0.2,  # attention that looks somewhere
    )
    return transformers.LlamaForCausalLM(config)


@functools.cache
def pair(*of: Any) -> tuple[Any, Build, Any, Path]:
    """Their model, our build and parameters of the folder that they saved."""
    import tempfile

    folder = Path(tempfile.mkdtemp())
    llama = theirs(*of)
    llama.save_pretrained(folder)
    config = tiny.config(
        "model.preset=null",
        f"checkpoint.init_from=hf:{folder}",
        f"sequence_length={LENGTH}",
        "batch.sequences=2",
        "mesh.context=2",
        "optimizer.learning_rate=1e-2",
        "optimizer.weight_decay=0.1",
        "optimizer.decay=constant",
        "optimizer.clip_norm=null",
    )
    built = build(config, steps.devices(config))
    vocabulary = huggingface.model_keys(folder)["vocab_size"]
    weights = hf.Weights(folder, hf.shapes_of(built.state.parameters), vocabulary)
    return llama, built, weights.parameters(built.state.parameters), folder


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 264, (2, LENGTH + 1))


def rows() -> dict[str, np.ndarray]:
    drawn = tokens()
    return {
        "tokens": drawn[:, :-1].astype(np.int32),
        "targets": drawn[:, 1:].astype(np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1)),
        "segments": np.ones((2, LENGTH), np.int32),
        "weights": np.ones((2, LENGTH), np.float32),
    }


def their_loss(llama: Any) -> Any:
    logits = llama(torch.tensor(tokens()[:, :-1])).logits
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 264), torch.tensor(tokens()[:, 1:]).reshape(-1))


def in_our_names(llama: Any, built: Build, of: Any) -> dict[str, np.ndarray]:
    """What `of` gives for each of their parameters, stacked and turned as ours."""
    named = dict(llama.named_parameters())
    shapes = hf.shapes_of(built.state.parameters)
    found: dict[str, np.ndarray] = {}
    for tensor in hf.tensors(shapes):
        array = of(named[tensor.name]).detach().numpy()
        # Not by Tensor.view, which is what is tested.
        name = tensor.path[-1]
        if name in ("q_DNH", "k_DKH", "v_DKH"):
            array = array.reshape(*tensor.ours[1:], -1).transpose(2, 0, 1)
        elif name == "out_NHD":
            array = array.reshape(-1, *tensor.ours[:2]).transpose(1, 2, 0)
        elif array.ndim == 2 and name != "embed_VD":
            array = array.T
        key = ".".join(tensor.path)
        if tensor.layer is None:
            found[key] = array
        else:
            found.setdefault(key, np.empty(shapes[tensor.path], np.float32))[tensor.layer] = array
    return found


@pytest.mark.parametrize("of", MODELS, ids=str)
def test_logits(of):
    """At every position, two thirds of them beyond the original context."""
    llama, built, parameters, _ = pair(*of)

    def logits(parameters, batch):
        ours = nnx.merge(built.graph, parameters)
        x_BSD = ours.hidden(batch["tokens"], batch["positions"], batch["segments"], built.how)
        return jnp.einsum("bsd,dv->bsv", x_BSD, ours.head())

    found = np.asarray(jax.jit(logits)(parameters, built.place(rows())))
    found = found[:, np.argsort(built.how.deal.order(LENGTH))]
    with torch.no_grad():
        expected = llama(torch.tensor(tokens()[:, :-1])).logits.numpy()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("of", MODELS, ids=str)
def test_loss_gradients_and_a_step_of_adamw(of):
    llama, built, parameters, _ = pair(*of)

    def loss(parameters, batch):
        losses_BS = nnx.merge(built.graph, parameters).losses(batch, built.how)
        return (losses_BS * batch["weights"]).sum() / batch["weights"].sum()

    value, gradients = jax.jit(jax.value_and_grad(loss))(parameters, built.place(rows()))
    llama.zero_grad()
    expected = their_loss(llama)
    expected.backward()
    np.testing.assert_allclose(float(value), expected.item(), rtol=1e-5)
    wanted = in_our_names(llama, built, lambda parameter: parameter.grad.clone())
    found = steps.flat(gradients)
    assert found.keys() == wanted.keys()
    for name in found:
        largest = np.abs(wanted[name]).max()
        assert largest > 0, name
        np.testing.assert_allclose(np.asarray(found[name]), wanted[name], rtol=1e-4, atol=1e-4 * largest, err_msg=name)

    # From the same gradients: Adam's first step is nearly their sign, and would magnify their rounding.
    section = built.config.optimizer
    state = built.optimizer.init(parameters)
    same = jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(wanted[".".join(key.key for key in path)]), parameters
    )
    updates, _ = built.optimizer.update(same, state, parameters)
    rate = float(built.schedule(0))
    after = steps.flat(jax.tree.map(lambda value, update: value - rate * update, parameters, updates))
    before = {name: parameter.detach().clone() for name, parameter in llama.named_parameters()}
    norms = [parameter for parameter in llama.parameters() if parameter.ndim == 1]
    matrices = [parameter for parameter in llama.parameters() if parameter.ndim == 2]
    groups = [{"params": norms, "weight_decay": 0}, {"params": matrices, "weight_decay": section.weight_decay}]
    torch.optim.AdamW(groups, lr=rate, betas=(section.beta1, section.beta2), eps=section.eps).step()
    moved = in_our_names(llama, built, lambda parameter: parameter.clone())
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            parameter.copy_(before[name])
    for name in moved:
        np.testing.assert_allclose(np.asarray(after[name]), moved[name], atol=1e-6, err_msg=name)
        assert np.abs(moved[name] - steps.flat(parameters)[name]).max() > rate / 2, name


@pytest.mark.parametrize("of", MODELS, ids=str)
def test_frequencies_and_temperature(of):
    """Phases far out are frequencies times positions: that ours are exact there, tests/test_rope.py shows."""
    llama, built, _, _ = pair(*of)
    theirs = llama.model.rotary_emb
    ours = inverse_frequencies(built.config.model.rope, 8)
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=1e-6)
    np.testing.assert_allclose(amplitude(built.config.model.rope), theirs.attention_scaling, rtol=1e-6)


@pytest.mark.parametrize("of", MODELS, ids=str)
def test_they_load_what_we_export(of, tmp_path):
    """The same tensors and settings, and the same logits, with no code of ours."""
    llama, _, _, folder = pair(*of)
    convert.from_hf(folder, tmp_path / "run", vocab_size=None, say=print)
    convert.to_hf(tmp_path / "run", None, tmp_path / "out", dtype=None, vocab_size=None, say=print)
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", dtype="auto"
    )
    assert not any(report.values()), report
    ours = dict(loaded.named_parameters())
    for name, parameter in llama.named_parameters():
        assert torch.equal(ours[name], parameter), name
    with torch.no_grad():
        given = torch.tensor(tokens()[:, :-1])
        assert torch.equal(loaded(given).logits, llama(given).logits)
    again = json.loads((tmp_path / "out/config.json").read_text())
    assert again["max_position_embeddings"] == LENGTH
    written, read = (ModelConfig.model_validate(huggingface.model_keys(at)) for at in (tmp_path / "out", folder))
    assert written == read


def test_a_mistral_that_is_a_llama(tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=8)
    config = transformers.MistralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=None, max_position_embeddings=LENGTH
    )
    mistral = transformers.MistralForCausalLM(config)
    mistral.save_pretrained(tmp_path / "hf")
    convert.from_hf(tmp_path / "hf", tmp_path / "run", vocab_size=None, say=print)
    convert.to_hf(tmp_path / "run", None, tmp_path / "out", dtype=None, vocab_size=None, say=print)
    llama = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    given = torch.tensor(tokens()[:, :-1])
    with torch.no_grad():
        np.testing.assert_allclose(llama(given).logits.numpy(), mistral(given).logits.numpy(), atol=1e-5)


def test_model_is_the_folders():
    """The sizes and the rest of `model` are read from what transformers itself writes."""
    _, built, _, _ = pair(*MODELS[3])
    section = built.config.model
    assert (section.vocab_size, section.num_layers, section.mlp_dim, section.num_kv_heads) == (264, 2, 48, 2)
    assert section.tie_embeddings and section.norm_eps == 1e-5
    assert section.rope.scaling is not None and section.rope.scaling.type == "llama3"
    assert "head_DV" not in model.abstract(section)[1]


def test_the_same_greedy_text():
    llama, built, parameters, _ = pair(*MODELS[4])
    prompt = tokens()[0, :40]
    found = list(generate(built, parameters, prompt.tolist(), tokens=8, vocabulary=264, stop=None))
    with torch.no_grad():
        expected = llama.generate(torch.tensor(prompt[None]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found == expected[0, 40:].tolist()
