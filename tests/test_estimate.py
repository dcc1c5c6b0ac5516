"""The plan's formulas against figures worked out by hand, and against the shardings of the real state."""

import dataclasses
from pathlib import Path

import jax
import pytest

import tiny
from longtrain import flops, hardware
from longtrain.build import build
from longtrain.config import Config, load, with_overrides
from longtrain.errors import ConfigError
from longtrain.ops import kernels
from longtrain.ops.kernels import cudnn_internals
from longtrain.ops.kernels.workload import Workload
from longtrain.plan import alternatives, assumptions, report
from longtrain.plan import kernels as plan_kernels
from longtrain.plan.estimate import Plan, plan, replanned
from longtrain.plan.links import link
from longtrain.plan.traffic import Transfer

GIB = 2**30


def shipped(name: str, *overrides: str) -> Config:
    return load(Path(__file__).parents[1] / "configs" / f"{name}.yaml", overrides)


def assumed(tmp_path: Path, **entries: float) -> Path:
    path = tmp_path / "assumed.yaml"
    path.write_text("\n".join(f"{name}: {value}" for name, value in entries.items()))
    return path


def sent(planned: Plan, kind: str, what: str) -> Transfer:
    (transfer,) = [t for t in planned.timing.transfers if (t.kind, t.what) == (kind, what)]
    return transfer


@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [
        ({}, "adamw"),
        ({"fsdp": 4}, "lion"),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "adamw"),
        ({"context": 2, "tensor": 4}, "sgd"),  # fewer key/value heads than tensor shards
    ],
    ids=str,
)
def test_parameters_and_moments_are_what_a_device_is_given(mesh: dict[str, int], optimizer: str):
    overrides = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    config = tiny.config(f"optimizer.name={optimizer}", *overrides)
    planned = plan(config, "H100")
    state = build(config, jax.devices()[: planned.share.devices]).state

    def held(tree: object) -> int:
        return sum(
            leaf.dtype.itemsize * _size(leaf.sharding.shard_shape(leaf.shape))
            for leaf in jax.tree.leaves(tree)
            if leaf.ndim
        )

    kinds = planned.memory.by_kind
    assert (kinds["parameters"], kinds["optimizer"]) == (held(state.parameters), held(state.optimizer))


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


def test_parameters_and_moments_are_the_same_in_every_phase():
    """An update that is the peak is made of gradients: it adds nothing to what the state holds."""
    large, small = (
        plan(shipped("llama3_8b", "batch.accumulation=1", "batch.sequences=8", f"sequence_length={length}"), "H100")
        for length in (65536, 64)
    )
    assert (large.memory.phase, small.memory.phase) == ("the MLP's backward pass", "the update")
    for kind, bytes_a_parameter in (("parameters", 4), ("optimizer", 8)):
        assert large.memory.by_kind[kind] == small.memory.by_kind[kind] == bytes_a_parameter * large.share.parameters


def test_what_a_256k_ring_sends():
    """16K tokens, 4 kv heads of 128 a device: 32 MiB of keys and values, 64 MiB of their float32 gradients, in each of
    32 layers and 16 micro-batches, round 16 shards."""
    planned = plan(shipped("llama3_8b_256k"), "GB200")
    calls = 32 * 16
    kv, d_kv = sent(planned, "permute", "keys and values"), sent(planned, "permute", "their gradients, float32")
    assert (kv.count, kv.bytes) == (calls * (15 + 15), calls * (15 + 15) * 32 * 2**20)
    assert (d_kv.count, d_kv.bytes) == (calls * 16, calls * 16 * 64 * 2**20)
    # A layer's 218 M weights, halved by tensor, in bfloat16: all but a sixteenth arrives, twice.
    weights = sent(planned, "all-gather", "weights")
    assert weights.bytes == calls * 2 * (218_103_808 // 2 * 2) * 15 / 16
    assert sent(planned, "reduce-scatter", "gradients of weights").bytes == weights.bytes / 2
    # Four sums over tensor of 16K tokens' stream, and one more for what is computed again.
    assert sent(planned, "all-reduce", "residual stream").count == calls * 5


def test_what_the_other_strategies_send():
    base = plan(shipped("llama3_8b_64k"), "H100")  # 16K tokens a device, 4 shards, 8 micro-batches
    choices = {str(choice): choice for choice in alternatives.strategies(base)}
    assert list(choices) == ["ring", "ring over ulysses groups of 2", "all_gather", "ulysses"]
    kv, calls = 2 * 16384 * 8 * 128 * 2, 32 * 8

    # Head by head: in each pass 8 times the keys and values of one head, of which a device lacks three quarters.
    moved = {t.kind: (t.count, t.bytes) for t in choices["all_gather"].transfers}
    assert moved == {
        "all-gather": (calls * 2 * 8, calls * 2 * 3 * kv),
        "reduce-scatter": (calls * 8, calls * 3 * 2 * kv),
    }

    q, statistics = 16384 * 32 * 128, 16384 * 32
    exchanged = 2 * (q + 2 * q + q + q) + 3 * kv + 4 * 5 * statistics
    (whole,) = choices["ulysses"].transfers
    assert whole.bytes == calls * 0.75 * exchanged
    assert whole.exposed == whole.seconds

    # In pairs first, then a ring of two: one shift forward, one of keys and two of gradients backward.
    pairs, keys, gradients = choices["ring over ulysses groups of 2"].transfers
    assert pairs.bytes == calls * 0.5 * exchanged
    assert (keys.count, keys.bytes) == (calls * 2, calls * 2 * kv)
    assert (gradients.count, gradients.bytes) == (calls * 2, calls * 2 * 2 * kv)


def test_two_ways_round_use_both_directions_of_a_torus():
    for kind, faster in (("v5p", 2), ("H100", 1)):
        one, two = (plan(shipped("llama3_8b_64k", f"attention.two_way={way}"), kind) for way in ("false", "true"))
        kv, kv_two = (sent(planned, "permute", "keys and values") for planned in (one, two))
        latency = kv.count * one.assumed["collective_latency"]
        assert kv.bytes == kv_two.bytes
        assert kv.seconds - latency == pytest.approx(faster * (kv_two.seconds - latency))


def test_what_all_gather_waits_for(tmp_path: Path):
    """The first gather of each pass and the last scatter; everything, where nothing is computed beside it."""
    config = shipped("llama3_8b_64k", "attention.strategy=all_gather")
    slow = plan(
        config,
        "H100",
        assumptions_file=assumed(tmp_path, attention_forward_efficiency=0.001, attention_backward_efficiency=0.001),
    )
    for transfer, part in (
        (sent(slow, "all-gather", "keys and values"), 8),
        (sent(slow, "reduce-scatter", "their gradients, float32"), 8),
    ):
        assert transfer.exposed == pytest.approx(transfer.seconds / part)
    fast = plan(config, "H100", assumptions_file=assumed(tmp_path, link_efficiency=1e-6, network_efficiency=1e-6))
    gather = sent(fast, "all-gather", "keys and values")
    assert gather.exposed == pytest.approx(gather.seconds, rel=1e-3)


def test_what_offload_copies_to_the_host(tmp_path: Path):
    """16K tokens a device, of 32 heads of 128 in bfloat16 and two float32 statistics, 32 layers and 8 micro-batches."""
    config = shipped("llama3_8b_64k", "memory.offload=attention")
    held, calls = 16384 * 32 * (128 * 2 + 8), 32 * 8
    for kind, bandwidth in (("H100", 64e9), ("GB200", 225e9), ("v5p", 15e9)):
        planned, kept = plan(config, kind), plan(shipped("llama3_8b_64k"), kind)
        copies = sent(planned, "copy", "attention's output and statistics, to the host and back")
        assert (copies.count, copies.bytes) == (2 * calls, 2 * calls * held)
        assert copies.seconds == pytest.approx(copies.bytes / (0.8 * bandwidth))
        # What is in the host's memory is not in the device's, but for one of 32 layers.
        assert kept.memory.total - planned.memory.total == 31 * held
        assert planned.timing.step - kept.timing.step == pytest.approx(copies.exposed, abs=1e-9)
    hides_nothing = plan(config, "H100", assumptions_file=assumed(tmp_path, host_hidden_share=0))
    copies = sent(hides_nothing, "copy", "attention's output and statistics, to the host and back")
    assert copies.exposed == pytest.approx(copies.seconds)
    hides_all = plan(config, "H100", assumptions_file=assumed(tmp_path, host_hidden_share=1))
    assert sent(hides_all, "copy", "attention's output and statistics, to the host and back").exposed == 0


def test_offload_is_tried_where_there_is_a_host():
    tight = plan(shipped("llama3_8b_64k", "batch.accumulation=4"), "A100-40GB")
    assert "memory.offload=attention" in [str(change) for change in alternatives.savings(tight)]
    simulated = plan(shipped("llama3_8b_64k", "batch.accumulation=4", "mesh.simulate_devices=auto"), "A100-40GB")
    assert not any("offload" in str(change) for change in alternatives.savings(simulated))
    assert "memory.offload=attention" in [str(change) for change in alternatives.search(tight)]
    assert not any("offload" in str(change) for change in alternatives.search(simulated))


def test_a_strategy_that_cannot_serve_says_why():
    choices = {str(choice): choice for choice in alternatives.strategies(plan(shipped("llama3_8b_256k"), "H100"))}
    assert choices["ulysses"].plan is None and "key/value heads" in choices["ulysses"].refusal


def test_the_ring_hides_where_the_links_are_fast(tmp_path: Path):
    """What is waited for falls to the last shift of each backward ring as compute gets slower."""
    config = shipped("llama3_8b_256k")
    slow = plan(config, "GB200", assumptions_file=assumed(tmp_path, attention_forward_efficiency=0.01))
    assert sent(slow, "permute", "keys and values").exposed == 0
    gradients = sent(slow, "permute", "their gradients, float32")
    assert gradients.exposed == pytest.approx(gradients.seconds / 16)
    starved = plan(config, "GB200", assumptions_file=assumed(tmp_path, link_efficiency=0.0001))
    kv = sent(starved, "permute", "keys and values")
    assert kv.exposed > 0.9 * kv.seconds


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("attention_saved", 134_217_728), ("full", 159_383_552)])
def test_the_time_of_the_products(tmp_path: Path, remat: str, again: int):
    """6 FLOPs a weight and token, 2 more for those computed again: of a layer's, by remat; of the head's, always."""
    config = shipped("llama3_8b", f"memory.remat={remat}")
    perfect = assumed(tmp_path, matmul_efficiency=1, attention_forward_efficiency=1, attention_backward_efficiency=1)
    planned = plan(config, "H100", assumptions_file=perfect)
    tokens = 128 * 8192 / 8
    linear = tokens * (6 * flops.matmul_parameters(config.model) + 2 * (32 * again + 4096 * 128256))
    assert planned.timing.matmul == pytest.approx(linear / 989.5e12)
    # Seven products a pair, of which the formula counts six.
    assert planned.timing.attention == pytest.approx(tokens * 7 / 6 * 6 * 32 * 4096 * 8192 / 989.5e12)
    assert planned.timing.step == pytest.approx(
        planned.timing.matmul + planned.timing.attention + planned.timing.memory + planned.timing.exposed
    )


def test_the_contiguous_layout_waits_for_its_busiest_shard(tmp_path: Path):
    dealt = plan(shipped("llama3_8b_64k"), "H100")
    contiguous = plan(shipped("llama3_8b_64k", "attention.layout=contiguous"), "H100")
    assert contiguous.timing.attention == pytest.approx(7 / 4 * dealt.timing.attention)


def test_an_axis_lies_on_the_links_that_its_devices_share(tmp_path: Path):
    h100 = plan(shipped("llama3_8b_256k"), "H100")  # context 16 x tensor 2 on nodes of 8
    tensor, context = (link(h100.share.mesh, (axis,), h100.assumed) for axis in ("tensor", "context"))
    assert tensor.fast and not context.fast
    assert context.inside == 4
    assert context.shift == pytest.approx(50e9 * 0.85)
    assert context.collective == pytest.approx(4 * 50e9 * 0.85)
    gb200 = plan(shipped("llama3_8b_256k"), "GB200")  # one NVLink domain of 72
    assert link(gb200.share.mesh, ("context",), gb200.assumed).fast
    trays = plan(shipped("llama3_8b_256k"), "GB200", assumptions_file=assumed(tmp_path, domain_devices=4))
    assert link(trays.share.mesh, ("context",), trays.assumed).inside == 2
    v5p = plan(shipped("llama3_8b_256k"), "v5p")  # a ring takes one of a chip's six links
    assert link(v5p.share.mesh, ("context",), v5p.assumed).shift == pytest.approx(100e9 * 0.8)


@pytest.mark.parametrize("kind", hardware.DEVICES)
def test_every_kind_of_hardware_is_planned(kind: str):
    for config in (shipped("quickstart"), shipped("llama3_8b_64k")):
        planned = plan(config, kind)
        assert planned.timing.step > 0 and planned.memory.total > 0
        assert planned.mfu_causal is None or 0 < planned.mfu_causal < 1


@pytest.mark.parametrize(
    "change",
    [
        ("memory.remat=full", "memory.remat=none"),
        ("memory.mlp_chunk=2048", "memory.mlp_chunk=null"),
        ("sequence_length=32768", "sequence_length=65536"),
        ("optimizer.name=sgd", "optimizer.name=adamw"),
        ("model.param_dtype=bfloat16", "model.param_dtype=float32"),
    ],
)
def test_less_is_less(change: tuple[str, str]):
    less, more = (plan(shipped("llama3_8b_64k", override), "H100").memory.total for override in change)
    assert less < more


def test_what_does_not_fit_is_told_what_would():
    planned = plan(shipped("llama3_8b_64k", "batch.accumulation=4"), "A100-40GB")
    assert not planned.fits
    changes = alternatives.savings(planned)
    assert any(change.plan.fits for change in changes)
    for change in changes:
        assert change.plan.memory.total < planned.memory.total
        devices = change.plan.share.devices
        again = plan(with_overrides(planned.config, *str(change).split()), "A100-40GB", devices=devices)
        assert (again.memory, again.timing) == (change.plan.memory, change.plan.timing)


def test_the_reserve_is_kept(tmp_path: Path):
    planned = plan(shipped("llama3_8b_256k"), "H100")
    tight = dataclasses.replace(
        planned, assumed=assumptions.load(_of(planned.memory.total / 0.9), "xla", assumed(tmp_path, memory_reserve=0.1))
    )
    assert tight.usable_bytes == pytest.approx(planned.memory.total, abs=2)
    assert tight.fits == (tight.memory.total <= tight.usable_bytes)


def _of(memory_bytes: float) -> hardware.Device:
    return dataclasses.replace(hardware.DEVICES["H100"], memory_bytes=int(memory_bytes))


def test_devices_are_the_meshs_or_told():
    free = shipped("llama3_8b", "mesh.fsdp=-1")
    with pytest.raises(ConfigError, match="--devices N"):
        plan(free, "H100")
    assert plan(free, "H100", devices=4).share.mesh.fsdp == 4
    assert plan(with_overrides(free, "mesh.simulate_devices=2"), "H100").share.devices == 2
    with pytest.raises(ConfigError, match="takes 8 devices, there are 4"):
        plan(shipped("llama3_8b"), "H100", devices=4)


@pytest.mark.parametrize("kind", [None, "H1000", "cpu"])
def test_hardware_that_is_not_known_is_refused_with_what_is(kind: str | None):
    with pytest.raises(ConfigError, match="A100-40GB.*GB200.*v6e"):
        plan(shipped("quickstart"), kind)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("matmul_eficiency: 1", "no such assumption; legal: matmul_efficiency"),
        ("matmul_efficiency: fast", "must be a number above 0 and at most 1, or such by name with a default"),
        ("matmul_efficiency: 0", "above 0"),
        ("matmul_efficiency: 1.1", "at most 1"),
        ("matmul_efficiency: true", "at most 1"),
        ("matmul_efficiency: {value: {GB200: 1}}", "default"),
        ("matmul_efficiency: {default: 1, GB200: 2}", "at most 1"),
        ("matmul_efficiency: {default: 1, GB20: 1}", "GB20: neither hardware nor kernel; legal: A100-40GB"),
        ("matmul_efficiency: {value: 1, wyh: so}", "a mapping of value and why"),
        ("matmul_efficiency: {value: 1, why: [so]}", "why must be text"),
        ("memory_reserve: null", "a number of at least 0 and below 1"),
        ("memory_reserve: 1", "below 1"),
        ("hidden_share: 1.5", "from 0 to 1"),
        ("collective_latency: -1", "from 0 to 60"),
        ("collective_latency: 1e999", "from 0 to 60"),
        ("domain_devices: 0", "a whole number >= 1, or null"),
        ("domain_devices: 2.5", "a whole number"),
        ("domain_devices: 1e999", "a whole number"),
        ("[1]", "--assumptions = "),
        ("a: [", "--assumptions = "),
    ],
)
def test_a_bad_assumption_is_refused(tmp_path: Path, text: str, says: str):
    path = tmp_path / "assumed.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="assumed.yaml.*refused") as refused:
        plan(shipped("quickstart"), "H100", assumptions_file=path)
    assert says in str(refused.value)


def test_assumptions_that_cannot_be_read_are_named_so(tmp_path: Path):
    for path in (tmp_path, tmp_path / "nowhere.yaml"):
        with pytest.raises(ConfigError, match="--assumptions = .*cannot be read"):
            plan(shipped("quickstart"), "H100", assumptions_file=path)


def test_every_shipped_assumption_is_in_its_range():
    table = assumptions.load(hardware.DEVICES["H100"], "xla").table
    assert table.keys() == assumptions.RANGES.keys()
    for name, entry in table.items():
        values = entry.given if isinstance(entry.given, dict) else {"default": entry.given}
        assert "default" in values and values.keys() <= set(assumptions.NAMES)
        assert all(assumptions.RANGES[name].holds(value) for value in values.values()), name


def test_an_assumption_without_a_reason_keeps_the_one_it_had(tmp_path: Path):
    entries = plan(shipped("quickstart"), "H100", assumptions_file=assumed(tmp_path, network_efficiency=0.5)).assumed
    assert entries.entries["network_efficiency"].why == "in place of 0.85: the same of the network"


def test_an_assumption_replaces_its_entry_alone(tmp_path: Path):
    path = tmp_path / "assumed.yaml"
    path.write_text("matmul_efficiency: {value: {default: 0.5, H100: 0.25}, why: measured}\n")
    planned = plan(shipped("llama3_8b"), "H100", assumptions_file=path)
    entry = planned.assumed.entries["matmul_efficiency"]
    assert (entry.value, entry.why, entry.source) == (0.25, "measured", str(path))
    base = plan(shipped("llama3_8b"), "H100")
    assert planned.timing.matmul == pytest.approx(base.timing.matmul * base.assumed["matmul_efficiency"] / 0.25)
    assert planned.timing.attention == base.timing.attention


def test_replanned_is_the_same_plan():
    planned = plan(shipped("llama3_8b", "mesh.fsdp=-1"), "H100", devices=8)
    assert (replanned(planned, {}).memory, replanned(planned, {}).timing) == (planned.memory, planned.timing)


def test_the_search_finds_what_fits_and_is_fastest():
    planned = plan(shipped("llama3_8b_64k", "mesh.context=16", "mesh.fsdp=1", "batch.accumulation=32"), "H100")
    found = alternatives.search(planned)
    steps = [change.plan.timing.step for change in found]
    assert steps == sorted(steps) and steps[0] < planned.timing.step
    assert all(change.plan.fits and change.plan.share.devices == 16 for change in found)
    meshes = [tuple(change.plan.share.mesh.axes.values()) for change in found]
    assert len(set(meshes)) == len(meshes) and (1, 1, 16, 1) in meshes
    again = plan(with_overrides(planned.config, *str(found[0]).split()), "H100")
    assert again.timing == found[0].plan.timing


def test_the_longest_row_fits_and_the_next_does_not():
    planned = plan(shipped("llama3_8b_64k"), "H100")
    longest = alternatives.longest_row(planned)
    assert longest is not None and longest.plan.fits
    length = longest.plan.config.sequence_length
    assert length > 65536 and longest.plan.document_tokens == length
    assert not plan(shipped("llama3_8b_64k", f"sequence_length={length + 4 * 1024}"), "H100").fits
    assert alternatives.longest_row(plan(shipped("llama3_8b", "mesh.fsdp=1"), "v5e")) is None


@pytest.mark.parametrize(("chunk", "a_device"), [(None, 1024), (1024, 1024), (512, 1024), (2560, 5120), (1500, 384000)])
def test_the_longest_row_is_of_whole_chunks(chunk: int | None, a_device: int):
    planned = plan(shipped("llama3_8b_64k", "sequence_length=6144000", f"memory.mlp_chunk={chunk or 'null'}"), "GB200")
    assert alternatives.row_step(planned) == 4 * a_device
    longest = alternatives.longest_row(planned)
    if chunk == 1500:  # two million tokens a row are too long
        assert longest is None
    else:
        assert longest is not None and longest.plan.config.sequence_length % (4 * a_device) == 0


def test_no_change_is_told_twice():
    """Of one key alone the strongest is what all together are."""
    chunks = ("memory.mlp_chunk=2048", "memory.loss_chunk=256", "mesh.simulate_devices=auto")
    planned = plan(shipped("llama3_8b_64k", "batch.accumulation=8", "memory.remat=none", *chunks), "A100-40GB")
    changes = [str(change) for change in alternatives.savings(planned)]
    assert changes[:2] == ["memory.remat=attention_saved", "memory.remat=full"]
    assert len(set(changes)) == len(changes)


@pytest.mark.parametrize(
    ("overrides", "way", "heading"),
    [
        ((), "ring", "attention ring"),
        (("attention.two_way=true",), "ring", "attention ring, two ways"),
        (("attention.ulysses_degree=2",), "ring over ulysses groups of 2", "attention ring over ulysses groups of 2"),
        (("attention.ulysses_degree=4",), "ulysses", "attention ring over ulysses groups of 4"),
        (("attention.strategy=ulysses",), "ulysses", "attention ulysses"),
        (("attention.strategy=all_gather",), "all_gather", "attention all_gather"),
        (("memory.offload=attention",), "ring", "remat attention_saved, offload attention"),
    ],
)
def test_the_way_that_is_taken_is_told(
    capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], way: str, heading: str
):
    report.show(plan(shipped("llama3_8b_64k", *overrides), "H100"))
    lines = capsys.readouterr().out.splitlines()
    (marked,) = [line for line in lines if "▶" in line]
    assert marked.split("▶")[1].strip().split("  ")[0] == way
    assert any(f"{heading}," in line or line.endswith(heading) for line in lines[:5])


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0, "0"),
        (1628.195, "1,630"),
        (999.6, "1,000"),
        (99.96, "100.0"),
        (8.815, "8.81"),
        (0.5834, "0.583"),
        (0.0004, "0.000"),
    ],
)
def test_seconds_have_three_digits(value: float, told: str):
    assert report.significant(value) == told


@pytest.mark.parametrize("asked", kernels.KERNELS)
@pytest.mark.parametrize(("kind", "platform", "capability"), [("H100", "gpu", "9.0"), ("v5p", "tpu", None)])
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.packing=one",),
        ("data.packing=one", "attention.layout=dealt"),
        ("data.packing=one", "attention.layout=zigzag", "attention.strategy=all_gather"),
        ("data.packing=one", "model.compute_dtype=float32"),
        ("data.packing=one", "model.head_dim=100"),
        ("attention.strategy=ulysses", "model.head_dim=256"),
        ("model.head_dim=512",),
        ("model.num_kv_heads=1",),
        ("model.num_kv_heads=1", "model.head_dim=200"),  # a query head's blocks fit, 32 do not
        ("model.num_kv_heads=1", "model.head_dim=200", "mesh.tensor=4", "mesh.fsdp=1"),
        ("model.num_kv_heads=2", "model.compute_dtype=float32"),
        ("model.num_heads=38", "model.num_kv_heads=1"),  # the most that fit
        ("model.num_heads=39", "model.num_kv_heads=1"),
    ],
    ids=" ".join,
)
def test_the_kernel_is_the_one_that_will_run(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    platform: str,
    capability: str | None,
    overrides: tuple[str, ...],
    asked: str,
):
    """Where what the kernels need is installed: what `auto` takes, and of every kernel whether it can be asked for."""
    monkeypatch.setattr(cudnn_internals, "missing", lambda: None)
    config = shipped("llama3_8b_64k", *overrides)
    model, tensor = config.model, config.mesh.tensor
    work = Workload(
        platform=platform,
        device_kind=hardware.device_kind(hardware.DEVICES[kind]),
        capability=capability,
        dtype=model.compute_dtype,
        head_dim=model.head_dim,
        q_heads=model.num_heads // tensor,
        kv_heads=max(model.num_kv_heads // tensor, 1),
        tokens=config.sequence_length // 4,
        context=4,
        strategy=config.attention.strategy,
        layout=config.attention.layout,
        one_document=config.data.packing == "one",
        interpret=False,
    )
    automatic = kernels.select("auto", work)[0]
    assert plan(config, kind).share.kernel == automatic
    explicit = with_overrides(config, f"attention.kernel={asked}")
    try:
        kernels.select(asked, work)
    except ValueError:
        says = f"attention.kernel = '{asked}': cannot serve here: .*; auto would take {automatic}"
        with pytest.raises(ConfigError, match=says):
            plan(explicit, kind)
    else:
        assert plan(explicit, kind).share.kernel == asked


def test_the_plan_knows_every_kernel():
    assert plan_kernels.KERNELS == kernels.KERNELS


def test_other_meshes_get_the_kernel_that_serves_them():
    planned = plan(shipped("llama3_8b_64k", "model.num_heads=64", "model.num_kv_heads=1"), "v5p")
    cut = replanned(planned, {"mesh.tensor": 2, "mesh.fsdp": 2})
    assert (planned.share.kernel, cut.share.kernel) == ("xla", "mosaic")
    assert cut.assumed["attention_forward_efficiency"] > planned.assumed["attention_forward_efficiency"]


def test_a_backend_is_a_gpus():
    config = shipped("llama3_8b_64k", "communication.backend=nccl")
    assert plan(config, "H100").fits
    with pytest.raises(ConfigError, match="communication.backend = 'nccl': v5p has one backend; legal: auto"):
        plan(config, "v5p")
