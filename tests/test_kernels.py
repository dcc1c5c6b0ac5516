"""Which block kernel serves what: `auto`, explicit choices, refusals, and where they show."""

from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

import tiny
from longtrain.build import build
from longtrain.config.schema import AttentionConfig
from longtrain.errors import ConfigError
from longtrain.ops import kernels
from longtrain.ops.attention import attention
from longtrain.ops.kernels import cudnn_internals
from longtrain.ops.kernels.workload import Workload, interpreted, interpreting

H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")


def workload(device=H100, **changes) -> Workload:
    """Llama 3 8B's attention at 64K tokens over 8 shards."""
    facts = {
        "dtype": "bfloat16",
        "head_dim": 128,
        "q_heads": 32,
        "kv_heads": 8,
        "tokens": 65536,
        "context": 8,
        "tensor": 1,
        "strategy": "ring",
        "layout": "auto",
        "one_document": False,
    }
    return Workload.on(device, **(facts | changes))


def test_the_config_names_the_kernels_there_are():
    assert get_args(AttentionConfig.model_fields["kernel"].annotation) == ("auto", *kernels.KERNELS)


def test_a_workload_is_the_share_of_one_device():
    work = workload(tensor=4, kv_heads=2)
    assert (work.tokens, work.q_heads, work.kv_heads, work.capability) == (8192, 8, 1, "9.0")
    assert workload(jax.devices()[0]).platform == "cpu"
    of_group = workload(ulysses_degree=2)
    assert (of_group.tokens, of_group.context, of_group.q_heads, of_group.kv_heads) == (16384, 4, 16, 4)


def test_cpu_takes_the_blockwise_kernel():
    assert kernels.select("auto", workload(jax.devices()[0]))[0] == "xla"
    assert kernels.select("xla", workload(jax.devices()[0])) == ("xla", "asked for")


def test_auto_takes_the_first_kernel_of_the_platform_that_serves(monkeypatch):
    """With two kernels made up for the purpose."""
    made_up = {
        name: SimpleNamespace(limits=lambda work, name=name: None if name in served else f"{name} is out")
        for name in ("fast", "slow")
    }
    monkeypatch.setattr(kernels, "_MODULES", kernels._MODULES | made_up)
    monkeypatch.setattr(kernels, "KERNELS", (*kernels.KERNELS, *made_up))
    monkeypatch.setattr(kernels, "_FUSED", {"gpu": ("fast", "slow")})
    served = {"fast", "slow"}
    assert kernels.select("auto", workload())[0] == "fast"
    assert kernels.select("slow", workload()) == ("slow", "asked for")
    served = {"slow"}
    name, reason = kernels.select("auto", workload())
    assert name == "slow" and "not fast: fast is out" in reason
    with pytest.raises(ValueError, match="'fast' cannot serve here: fast is out; auto would take slow"):
        kernels.select("fast", workload())
    served = set()
    name, reason = kernels.select("auto", workload())
    assert name == "xla"
    assert "NO FUSED KERNEL SERVES" in reason and "fast is out" in reason and "slow is out" in reason


@pytest.fixture
def with_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn_internals, "missing", lambda: None)


@pytest.mark.parametrize(
    ("facts", "kernel", "reason"),
    [
        ({}, "triton", "not cudnn: it serves rows of one document each (data.packing one) only"),
        ({"one_document": True}, "cudnn", "the fused kernel"),
        ({"one_document": True, "layout": "dealt"}, "triton", "zigzag or contiguous"),
        ({"one_document": True, "layout": "zigzag"}, "cudnn", "the fused kernel"),
        ({"one_document": True, "dtype": "float32"}, "triton", "dtype float32: one of bfloat16, float16"),
        ({"one_document": True, "head_dim": 100}, "triton", "at most 128 and a multiple of 8"),
        ({"one_document": True, "head_dim": 256}, "xla", "NO FUSED KERNEL SERVES"),
        ({"dtype": "float64"}, "xla", "not triton: dtype float64"),
    ],
)
def test_a_gpu_takes_the_fused_kernel_that_serves(facts, kernel, reason, with_cudnn):
    assert kernels.select("auto", workload(**facts))[0] == kernel
    assert reason in kernels.select("auto", workload(**facts))[1]


@pytest.mark.parametrize("capability", ["7.0", "gfx942", None])
def test_another_gpu_is_told_that_no_fused_kernel_serves_it(capability):
    device = SimpleNamespace(platform="gpu", device_kind="a GPU", compute_capability=capability)
    name, reason = kernels.select("auto", workload(device, one_document=True))
    assert name == "xla" and "NO FUSED KERNEL SERVES" in reason and "not triton" in reason and "not cudnn" in reason


def test_what_is_missing_is_named(monkeypatch):
    work = workload(one_document=True)
    monkeypatch.setattr(cudnn_internals, "missing", lambda: "cuDNN is not installed here")
    assert kernels.select("auto", work) == (
        "triton",
        "the fused kernel for gpu that serves; not cudnn: cuDNN is not installed here",
    )
    with pytest.raises(ValueError, match="'cudnn' cannot serve here: cuDNN is not .*; auto would take triton"):
        kernels.select("cudnn", work)


@pytest.mark.parametrize(
    ("capability", "version", "kernel"),
    [("10.3", 91002, "triton"), ("10.3", 91100, "cudnn"), ("10.3", None, "cudnn"), ("10.0", 91002, "cudnn")],
)
def test_a_cudnn_too_old_for_the_gpu_is_refused(capability, version, kernel, with_cudnn, monkeypatch):
    plugin = version and SimpleNamespace(cudnn_get_version=lambda: version)
    monkeypatch.setattr(cudnn_internals.internals, "cuda_versions", plugin)
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA GB300", compute_capability=capability)
    name, reason = kernels.select("auto", workload(device, one_document=True))
    assert name == kernel
    if kernel == "triton":
        assert "compute capability 10.3 needs cuDNN 91100 (9.11) or later: here is 91002" in reason


@pytest.mark.parametrize("kernel", ["triton", "cudnn"])
def test_a_gpu_kernel_on_cpu_is_refused_as_a_config_and_as_a_call(kernel):
    message = rf"'{kernel}' cannot serve here: .*not for cpu; auto would take xla"
    with pytest.raises(ConfigError, match=rf"attention.kernel = '{kernel}': kernel {message}"):
        build(tiny.config(f"attention.kernel={kernel}"), jax.devices()[:1])
    tokens = jnp.ones((1, 16), jnp.int32)
    q = jnp.ones((1, 16, 2, 64))
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, positions_BS=tokens, segments_BS=tokens, kernel=kernel)


def test_interpretation_is_on_only_where_asked_for():
    assert not workload().interpret
    with interpreted():
        assert interpreting() and workload().interpret
    assert not interpreting()


def test_a_build_says_its_kernel_and_the_reason():
    choices = build(tiny.config(), jax.devices()[:1]).choices
    assert any(choice.startswith("attention.kernel: xla (the blockwise kernel") for choice in choices)


def test_the_promise_of_one_document_comes_from_the_packing():
    assert build(tiny.config("data.packing=one"), jax.devices()[:1]).how.one_document
    assert not build(tiny.config("data.packing=concat"), jax.devices()[:1]).how.one_document
