"""The reader of compiled programs, against programs whose every collective and product can be counted by hand.

Those of `tests/programs` were compiled for GB200 and v5p by two versions of XLA (`make.py` there); the CPU's are
compiled here.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longtrain.errors import ConfigError
from longtrain.plan import groups, hlo
from longtrain.plan.program import Program
from longtrain.plan.targets import target
from programs import toys
from programs.toys import LAYERS, MESH, TOKENS, WIDTH

PROGRAMS = Path(__file__).parent / "programs"
VERSIONS = ["0.10.2", "0.12.0.1"]
TARGETS = [f"{kind}.{version}" for kind in ("GB200", "v5p") for version in VERSIONS]
PLATFORMS = {"GB200": "cuda", "v5p": "tpu", "cpu": "cpu"}

BLOCK = TOKENS * WIDTH * 2
"""Bytes of a device's block."""


@functools.cache
def program(name: str, target: str) -> Program:
    kind = target.split(".")[0]
    text = on_cpu(name) if kind == "cpu" else (PROGRAMS / f"{name}.{target}.hlo").read_text(encoding="utf-8")
    return Program.read(text, MESH, PLATFORMS[kind])


@functools.cache
def lowered() -> dict[str, jax.stages.Lowered]:
    return toys.lowered(jax.devices()[:8])


def on_cpu(name: str) -> str:
    return lowered()[name].compile().as_text()


def counted(read: Program) -> list[tuple]:
    return sorted((c.kind, c.axes, c.devices, c.times, c.bytes) for c in read.collectives)


@pytest.mark.parametrize("target", [*TARGETS, "cpu"])
@pytest.mark.parametrize("name", ["ring", "sabotaged_ring"])
def test_a_ring_shifts_once_less_than_there_are_shards(name: str, target: str):
    # The CPU computes and sends bfloat16 as float32.
    width = 2 if target == "cpu" and program(name, target).collectives[0].arrays[0].dtype == "f32" else 1
    assert counted(program(name, target)) == [("collective-permute", ("context",), 4, 3, width * BLOCK)]
    assert program(name, target).flops == 4 * 2 * 2 * TOKENS * TOKENS * WIDTH


@pytest.mark.parametrize("target", TARGETS)
def test_every_kind_of_collective_over_its_own_axes(target: str):
    read = program("layers", target)
    weights = WIDTH * WIDTH * 2 // 8
    assert counted(read) == [
        ("all-gather", ("fsdp", "context"), 8, LAYERS, 7 * weights),
        ("all-reduce", ("context",), 4, LAYERS, 2 * BLOCK * 3 // 4),
        ("all-to-all", ("fsdp",), 2, 1, BLOCK // 4 // 2),
        ("reduce-scatter", ("context",), 4, 1, BLOCK * 3 // 4),
    ]
    assert read.flops == LAYERS * 2 * TOKENS * WIDTH * WIDTH


@pytest.mark.parametrize("target", TARGETS)
def test_who_carries_a_collective_and_whether_anything_runs_beside_it(target: str):
    (permute,) = program("ring", target).collectives
    assert permute.backend == ("nccl" if target.startswith("GB200") else "ici")
    assert permute.asynchronous
    assert permute.scope.endswith("ppermute")
    assert re.fullmatch(r"toys\.py:\d+", permute.source)
    line = (PROGRAMS / "toys.py").read_text(encoding="utf-8").splitlines()[int(permute.source.split(":")[1]) - 1]
    assert "lax.ppermute" in line


def test_collectives_on_the_cpu_are_synchronous():
    assert not any(c.asynchronous for c in program("ring", "cpu").collectives)


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        ('"backend":"DEFAULT"', "nccl"),
        ('"backend":"NVSHMEM"', "nvshmem"),
        ('"backend":"DEFAULT","collectives_mode":"COLLECTIVES_SYMMETRIC_MEMORY"', "nccl_symmetric"),
    ],
)
def test_the_backend_is_read_from_the_instruction(config: str, backend: str):
    text = (PROGRAMS / "ring.GB200.0.12.0.1.hlo").read_text(encoding="utf-8")
    start = next(line for line in text.splitlines() if " collective-permute-start(" in line)
    changed = re.sub(r'"backend":"DEFAULT","collectives_mode":"\w+"', config, start)
    assert ("NVSHMEM" in changed or "SYMMETRIC" in changed) == (backend != "nccl")
    (permute,) = Program.read(text.replace(start, changed), MESH, "cuda").collectives
    assert permute.backend == backend


FOUR = {"data": 1, "fsdp": 2, "context": 2, "tensor": 1}


@pytest.mark.parametrize(
    ("text", "axes", "devices"),
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", ("context",), 2),
        ("replica_groups={{1,0},{3,2}}", ("context",), 2),
        ("replica_groups={{0,2},{1,3}}", ("fsdp",), 2),
        ("replica_groups={}, to_apply=%add", ("fsdp", "context"), 4),
        ("replica_groups=[2,2]<=[4], use_global_device_ids=true", ("context",), 2),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ("fsdp",), 2),
        ("replica_groups=[1,4]<=[4]", ("fsdp", "context"), 4),
        ("replica_groups=mesh['data'=1,'fsdp'=2,'context'=2,'tensor'=1] {'context'}, dimensions={0}", ("context",), 2),
        ("replica_groups=mesh['data'=1,'fsdp'=2,'context'=2] {'fsdp','context'}", ("fsdp", "context"), 4),
        ("replica_groups=mesh['axis_0'=4] {'axis_0':(1)2}", ("fsdp",), 2),
        ("replica_groups=mesh['axis_0'=4] {'axis_0':(2)2}", ("context",), 2),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ("fsdp",), 2),
        ("replica_groups={{0},{1},{2},{3}}", (), 1),
        ("replica_groups={{0,3},{1,2}}", (groups.UNKNOWN,), 2),
        ("channel_id=1, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}, metadata={}", ("context",), 2),
        ("source_target_pairs={{0,2},{2,0}}", ("fsdp",), 2),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", ("fsdp", "context"), 4),
    ],
)
def test_groups_in_every_form_that_xla_writes(text: str, axes: tuple, devices: int):
    instruction = hlo.Instruction("x", "all-gather", (), (), f", {text}", False, "")
    assert groups.axes(instruction, FOUR) == (axes, devices)


FUSED = """HloModule m, is_scheduled=true

%all-reduce-scatter.3 (input: f32[64,32]) -> f32[8,32] {
  %input = f32[64,32]{1,0} parameter(0)
  %all-reduce.1 = f32[64,32]{1,0} all-reduce(%input), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %part = f32[8,32]{1,0} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={8,32}
}

ENTRY %main (x: f32[64,32]) -> f32[8,32] {
  %x = f32[64,32]{1,0} parameter(0)
  ROOT %fusion.1 = f32[8,32]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
}
"""


def test_a_reduce_scatter_as_tpu_fuses_one():
    """The form that v6e programs have (names shortened)."""
    assert counted(Program.read(FUSED, MESH, "tpu")) == [
        ("reduce-scatter", ("fsdp", "context"), 8, 1, 64 * 32 * 4 * 7 // 8)
    ]


def test_groups_that_cannot_be_read_are_an_error():
    instruction = hlo.Instruction("x", "all-gather", (), (), ", replica_groups=new<form>", False, "")
    with pytest.raises(ValueError, match="groups of x cannot be read: new<form>"):
        groups.axes(instruction, FOUR)


def read_on_cpu(function, *arguments) -> Program:
    return Program.read(jax.jit(function).lower(*arguments).compile().as_text(), {"data": 1}, "cpu")


def test_loops_count_as_often_as_they_run_and_branches_in_equal_shares():
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    product = 2 * 64**3

    def loops(x, n):
        x = lax.fori_loop(0, 5, lambda i, x: lax.fori_loop(2, 9, lambda j, x: jnp.tanh(x @ x), x), x)
        x = lax.cond(n > 0, lambda x: x @ x @ x, lambda x: x, x)
        return lax.while_loop(lambda c: c[1] < n, lambda c: (jnp.tanh(c[0] @ c[0]), c[1] + 1), (x, 0))

    read = read_on_cpu(loops, square, jax.ShapeDtypeStruct((), jnp.int32))
    # 5 * 7 in the loops, half of 2 in the branches, and one for the loop whose length the data say.
    assert read.flops == (35 + 1 + 1) * product


def test_trip_counts_are_read_from_the_condition_where_xla_states_none():
    for version in VERSIONS:
        text = (PROGRAMS / f"ring.v5p.{version}.hlo").read_text(encoding="utf-8")
        assert "known_trip_count" not in text
    stated = (PROGRAMS / "layers.GB200.0.12.0.1.hlo").read_text(encoding="utf-8")
    unstated = re.sub(r'"known_trip_count":\{"n":"\d+"\},', "", stated)
    assert unstated != stated
    assert counted(Program.read(unstated, MESH, "cuda")) == counted(Program.read(stated, MESH, "cuda"))


UNROLLED = """HloModule m, is_scheduled=true

%grow (given: s32[]) -> s32[] {{
  %given = s32[] parameter(0)
  %by = s32[] constant({by})
  ROOT %sum = s32[] add(%given, %by)
}}

%body (carried: (f32[4,4], s32[])) -> (f32[4,4], s32[]) {{
  %carried = (f32[4,4]{{1,0}}, s32[]) parameter(0)
  %x = f32[4,4]{{1,0}} get-tuple-element(%carried), index=0
  %i = s32[] get-tuple-element(%carried), index=1
  %product = f32[4,4]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %next = s32[] fusion(%i), kind=kLoop, calls=%grow
  %one = s32[] constant(1)
  %then = s32[] add(%one, %next)
  ROOT %out = (f32[4,4]{{1,0}}, s32[]) tuple(%product, %then)
}}

%condition (given: (f32[4,4], s32[])) -> pred[] {{
  %given = (f32[4,4]{{1,0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%given), index=1
  %limit = s32[] constant({limit})
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {{
  %x = f32[4,4]{{1,0}} parameter(0)
  %start = s32[] constant({start})
  %begin = s32[] copy(%start)
  %all = (f32[4,4]{{1,0}}, s32[]) tuple(%x, %begin)
  %loop = (f32[4,4]{{1,0}}, s32[]) while(%all), condition=%condition, body=%body
  ROOT %out = f32[4,4]{{1,0}} get-tuple-element(%loop), index=0
}}
"""


@pytest.mark.parametrize(
    ("start", "limit", "by", "trips"), [(0, 8, 0, 8), (0, 8, 1, 4), (2, 8, 1, 3), (0, 7, 1, 4), (3, 3, 1, 0)]
)
def test_a_loop_that_the_compiler_unrolled_runs_less_often(start: int, limit: int, by: int, trips: int):
    read = Program.read(UNROLLED.format(start=start, limit=limit, by=by), {"data": 1}, "tpu")
    assert read.flops == trips * 2 * 4**3


@pytest.mark.parametrize(
    ("shapes", "expression"),
    [
        (((3, 8, 5), (3, 5, 7)), "bij,bjk->bik"),
        (((4, 6, 8), (8, 2, 3)), "abd,dnh->abnh"),
        (((4, 6, 2, 3), (2, 3, 8)), "abnh,nhd->abd"),
    ],
)
def test_products_of_any_shape(shapes: tuple, expression: str):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    letters = dict(zip("".join(expression.split("->")[0].split(",")), shapes[0] + shapes[1], strict=True))
    flops = 2.0
    for size in letters.values():
        flops *= size
    assert read_on_cpu(lambda x, y: jnp.einsum(expression, x, y), *arguments).flops == flops


def test_taps_on_padding_are_no_work():
    """A one-dimensional convolution of 3 inputs and 2 taps, padded by 1: 4 outputs, which meet 1, 2, 2 and 1 inputs."""
    line = (
        "ENTRY %main (a: f32[5,3,1], b: f32[1,2,7]) -> f32[5,4,7] {\n"
        "  %a = f32[5,3,1]{2,1,0} parameter(0)\n  %b = f32[1,2,7]{2,1,0} parameter(1)\n"
        "  ROOT %c = f32[5,4,7]{2,1,0} convolution(%a, %b), window={size=2 pad=1_1}, dim_labels=b0f_i0o->b0f\n}\n"
    )
    read = Program.read(f"HloModule m, is_scheduled=true\n\n{line}", {"data": 1}, "tpu")
    assert read.flops == 2 * 5 * 7 * (1 + 2 + 2 + 1)


def test_the_mesh_of_the_program_is_the_one_it_was_compiled_on():
    on = toys.mesh(jax.devices()[:8])
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(on, P(("fsdp", "context"))))
    whole = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(on, P("fsdp"))).lower(x).compile().as_text()
    (gather,) = Program.read(whole, MESH, "cpu").collectives
    assert (gather.kind, gather.axes, gather.bytes) == ("all-gather", ("context",), 3 * 16 * 4)


@pytest.mark.slow
@pytest.mark.ahead_of_time
@pytest.mark.parametrize("kind", ["GB200", "v5p"])
def test_what_the_installed_compilers_write_is_read_alike(kind: str, tmp_path: Path):
    try:
        target(kind, 8)
    except ConfigError as error:
        pytest.skip(str(error))
    environment = os.environ | {"PYTHONPATH": str(PROGRAMS.parents[1])}
    subprocess.run([sys.executable, PROGRAMS / "make.py", kind, tmp_path], check=True, env=environment)
    for file in sorted(tmp_path.glob("*.hlo")):
        read = Program.read(file.read_text(encoding="utf-8"), MESH, PLATFORMS[kind])
        known = program(file.name.split(".")[0], f"{kind}.{VERSIONS[-1]}")
        assert (counted(read), read.flops) == (counted(known), known.flops)


def test_what_is_no_scheduled_program_is_refused():
    with pytest.raises(ValueError, match="no scheduled HLO text"):
        hlo.parse(lowered()["ring"].as_text())
