"""The interpreter by itself: small kernels, and what it reports of wrong ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .conftest import Find
from .launches import (
    TILES,
    Conv,
    Heads,
    Product,
    Tile,
    attention,
    attention_linear,
    hopper,
    hopper_attention,
    rounded,
)
from .machine import Deadlock, Divergence, Launch, LaunchError, Tensors, pack
from .memory import AccessError
from .ptx import Kernel, parse, without
from .semantics import FLOAT8, float8_products, to_float8
from .tensormaps import Tiled
from .translate import UnknownInstruction

Array = np.ndarray[Any, np.dtype[Any]]
pytestmark = pytest.mark.interpreter


def kernel(body: str) -> Kernel:
    """Writes a kernel around a body; %rd1 is where a thread's %r1 goes in the end."""
    return parse(
        f"""
.version 8.5
.target sm_90a
.address_size 64
.visible .entry test(.param .u64 .ptr .align 4 test_param_0)
{{
    .reg .pred %p<8>;
    .reg .b16 %rs<8>;
    .reg .b32 %r<32>;
    .reg .b64 %rd<8>;
    .shared .align 16 .b8 shared[256];
    ld.param::entry.b64 %rd0, [test_param_0];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd1, %r0, 4;
    add.s64 %rd1, %rd0, %rd1;
{body}
    st.global.b32 [%rd1], %r1;
    ret;
}}
"""
    )


def run(body: str, threads: int = 32, words: int = 64, together: int = 1, seed: int = 0) -> Array:
    memory = Tensors()
    at = memory.add(np.zeros(words, np.int32))
    launch = Launch(
        kernel(body),
        [pack("Q", at)],
        memory,
        grid=(1,),
        threads=threads,
        together=together,
    )
    launch.run(seed)
    return memory.array(at, np.zeros(words, np.int32))[:threads]


LANES = np.arange(32)


def test_lanes_part_and_meet_again() -> None:
    got = run("""
    setp.lt.u32 %p1, %r0, 5;
    @%p1 bra $low;
    mul.lo.s32 %r1, %r0, 10;
    bra.uni $both;
$low:
    mov.b32 %r1, -1;
$both:
    shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
    add.s32 %r1, %r1, %r2;
    """)
    values = np.where(LANES < 5, -1, 10 * LANES)
    assert (got == values + values[LANES ^ 1]).all()


def test_loops_end_lane_by_lane() -> None:
    got = run("""
    mov.b32 %r1, 0;
    mov.b32 %r2, 0;
$again:
    add.s32 %r1, %r1, %r2;
    add.s32 %r2, %r2, 1;
    setp.le.u32 %p1, %r2, %r0;
    @%p1 bra $again;
    """)
    assert (got == LANES * (LANES + 1) // 2).all()


def test_guards() -> None:
    got = run("""
    setp.gt.u32 %p1, %r0, 20;
    mov.b32 %r1, 7;
    @%p1 mov.b32 %r1, 8;
    @!%p1 add.s32 %r1, %r1, 2;
    """)
    assert (got == np.where(LANES > 20, 8, 9)).all()


@pytest.mark.parametrize(
    ("how", "source"),
    [
        ("up.b32 %r1, %r0, 3, 0", np.where(LANES < 3, LANES, LANES - 3)),
        ("down.b32 %r1, %r0, 3, 31", np.where(LANES > 28, LANES, LANES + 3)),
        ("bfly.b32 %r1, %r0, 6, 31", LANES ^ 6),
        ("idx.b32 %r1, %r0, 5, 31", np.full(32, 5)),
        ("idx.b32 %r1, %r0, 2, 6175", LANES // 8 * 8 + 2),  # segments of 8: mask 0x18
    ],
)
def test_shuffles(how: str, source: Array) -> None:
    assert (run(f"shfl.sync.{how}, -1;") == source).all()


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("prmt.b32 %r1, 0x44332211, 0x88776655, 0x7531U", 0x88664422),
        ("prmt.b32.f4e %r1, 0x44332211, 0x88776655, 1", 0x55443322),
        ("mul.hi.u32 %r1, -1, 16", 15),
        ("mul.hi.s32 %r1, -2, 16", -1),
        ("div.s32 %r1, -7, 2", -3),
        ("rem.s32 %r1, -7, 2", -1),
        ("shr.s32 %r1, -8, 40", -1),
        ("shl.b32 %r1, 1, 32", 0),
        ("copysign.f32 %r1, 0fBF800000, 0f40000000", 0xC0000000),  # -2: the sign is the first's
        ("max.f32 %r1, 0f7FC00000, 0f3F800000", 0x3F800000),
        ("cvt.rn.bf16x2.f32 %r1, 0f3F800000, 0f3F808000", 0x3F803F80),
        ("cvt.rn.bf16x2.f32 %r1, 0f3F818000, 0f00000000", 0x3F820000),
        ("min.relu.s32 %r1, -3, 4", 0),
        ("rcp.approx.ftz.f32 %r1, 0fFF000000", 0x80000000),  # -2^-127
        ("rcp.approx.ftz.f32 %r1, 0f00000001", 0x7F800000),
        ("rcp.rn.f32 %r1, 0f7F000000", 0x00400000),
        ("ex2.approx.ftz.f32 %r1, 0fC2FE0000", 0),  # 2^-127
        ("ex2.approx.ftz.f32 %r1, 0f7F800000", 0x7F800000),
        ("cvt.pack.sat.s8.s32.b32 %r1, -300, -2, 0x12345", 0x234580FE),
        ("cvt.pack.sat.u8.s32.b32 %r1, 300, -2, 0", 0xFF00),
        ("cvt.rni.s32.f32 %r1, 0fC0200000", -2),  # -2.5
        ("cvt.rni.f32.f32 %r1, 0fC0200000", 0xC0000000),
        ("cvt.rni.s32.f32 %r1, 0f7F800000", 2**31 - 1),  # infinity
        ("cvt.rzi.s32.f32 %r1, 0fD0000000", -(2**31)),
        ("cvt.rni.s32.f32 %r1, 0f7FC00000", 0),  # NaN
        ("bfe.s32 %r1, 0x12F456, 8, 8", -12),
        ("bfe.u32 %r1, 0x12F456, 8, 8", 0xF4),
        # 1.0625 and 1.1875 are midway between numbers of e4m3, and 1000 is beyond the largest, 448.
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, 0f3F880000, 0f3F980000; cvt.u32.u16 %r1, %rs1", 0x383A),
        ("cvt.rn.satfinite.e4m3x2.f32 %rs1, 0fC47A0000, 0f3A800000; cvt.u32.u16 %r1, %rs1", 0xFE00),
        ("mov.b16 %rs1, 0x7ED3; cvt.rn.f16x2.e4m3x2 %r1, %rs1", 0x5F00C980),
    ],
)
def test_instructions(line: str, want: int) -> None:
    assert (run(line + ";") == np.uint32(want & 0xFFFFFFFF).view(np.int32)).all()


@pytest.mark.parametrize(
    ("kinds", "start", "want"),
    [
        ("s8.s8", 2**31 - 1, -(2**31) + 31),
        ("u8.s8", -(2**31), 2**31 - 32 * 255),
        ("s8.u8", -(2**31), 2**31 - 32 * 255),
    ],
)
def test_sums_of_integers_wrap(kinds: str, start: int, want: int) -> None:
    body = f"""
    mov.u32 %r2, shared;
    shl.b32 %r3, %r0, 2;
    add.s32 %r3, %r3, %r2;
    and.b32 %r3, %r3, 0xFF;
    st.shared.b32 [%r3], -1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    shr.u32 %r2, %r2, 4;
    cvt.u64.u32 %rd2, %r2;
    mov.b32 %r1, {start};
    setp.eq.u32 %p0, %r0, %r0;
    wgmma.mma_async.sync.aligned.m64n8k32.s32.{kinds} {{%r1, %r4, %r5, %r6}}, %rd2, %rd2, %p0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    """
    assert (run(body, threads=128, words=128) == want).all()
    ones = body.replace("], -1;", "], 0x01010101;")
    assert (
        run(ones, threads=128, words=128) == np.array(start + 32, "int64").astype("int32")
    ).all()
    unfenced = re.sub(r"fence\.proxy.*", "", ones)  # bytes of NaN are -1
    assert (run(unfenced, threads=128, words=128) == want).all()


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_barrier_orders_warps(together: int, seed: int) -> None:
    body = """
    shl.b32 %r3, %r0, 2;
    mov.b32 %r4, shared;
    add.s32 %r5, %r4, %r3;
    st.shared.b32 [%r5], %r0;
    bar.sync 0;
    xor.b32 %r3, %r3, 128;
    add.s32 %r5, %r4, %r3;
    ld.shared.b32 %r1, [%r5];
    """
    assert (run(body, 64, together=together, seed=seed) == (np.arange(64) ^ 32)).all()


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        ("ld.global.b32 %r1, [%rd1+256];", AccessError, "load of 4 bytes .*256 bytes long"),
        ("ld.global.b32 %r1, [%rd1+-4];", AccessError, "outside every buffer"),
        ("ld.global.b32 %r1, [%rd1+2];", AccessError, "not aligned"),
        ("st.shared.b32 [%r0+400], %r0;", AccessError, "store of 4 bytes"),
        ("bar.sync 0, 64;", Deadlock, r"bar.sync 0, 64"),
        ("frobnicate.b32 %r1, %r0;", UnknownInstruction, "frobnicate"),
        (
            "setp.lt.u32 %p1, %r0, 4;\n@%p1 bra $a;\nshfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;\n"
            "bra.uni $b;\n$a:\nshfl.sync.bfly.b32 %r1, %r0, 2, 31, -1;\n$b:",
            Divergence,
            "shfl.sync.bfly",
        ),
        (
            "mbarrier.init.shared::cta.b64 [%r0], 1;",
            AccessError,
            "mbarrier at .*not aligned",
        ),
    ],
)
def test_wrong_kernels_are_reported(body: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run(body)


def test_a_struct_that_has_changed_is_reported() -> None:
    with pytest.raises(LaunchError, match=r"parameters of \[8\] bytes, but \[16\] were given"):
        Launch(kernel(""), [bytes(16)], Tensors(), grid=(1,), threads=32)


def test_too_much_shared_memory_is_reported() -> None:
    with pytest.raises(LaunchError, match="232448 bytes of shared memory are too many"):
        Launch(kernel(""), [bytes(8)], Tensors(), grid=(1,), threads=32, shared_bytes=227 << 10)


@pytest.mark.parametrize(("columns", "box"), [(130, (64, 64)), (136, (300, 64))])
def test_a_map_that_the_driver_refuses_is_reported(columns: int, box: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"multiples of 16 bytes|at most 256 numbers"):
        Tiled(np.zeros((400, columns), np.uint16), box)


def test_a_store_before_the_tensor_is_reported() -> None:
    box = Tiled(np.zeros((8, 64), np.uint16), (4, 64))
    with pytest.raises(ValueError, match="negative coordinate"):
        box.write((0, -1), np.zeros((4, 128), np.uint8))


def test_sums_of_8_bit_floats_lose_less_than_their_rounding() -> None:
    """Of the longest sum of a ResNet: the float32 sums of every 128 products would gain nothing."""
    rng, e4m3 = np.random.default_rng(0), "float8_e4m3fn"
    x, w = np.maximum(rng.standard_normal((16, 4608)), 0), rng.standard_normal((16, 4608))
    x, w = (a * 448 / np.abs(a).max() for a in (x, w))
    a, b = (FLOAT8[e4m3][to_float8(each, e4m3)] for each in (x, w))
    whole, exact, rough = x @ w.T, a @ b.T, float8_products(a, b)
    rounding, lost = (np.linalg.norm(each - exact) for each in (whole, rough))
    print(
        f"rounding {rounding / np.linalg.norm(exact):.4f}, sums {lost / np.linalg.norm(exact):.5f}"
    )
    assert 0 < lost < rounding / 20


# Kernels of the project with instructions taken out: what the interpreter is for.


@pytest.mark.parametrize("pattern", ["cp.async.wait_group", "bar.sync", "nothing"])
def test_attention_needs_its_waits(find: Find, pattern: str) -> None:
    rng, g = np.random.default_rng(1), Heads(1, 40, 200, 1, 64)
    shapes = ((1, 40, 64), (1, 200, 64), (1, 200, 64))
    q, key, v = (rounded(rng.standard_normal(shape), "bfloat16") for shape in shapes)
    whole = find("attention_flash_64_2x1_bfloat16")

    def differs(kernel: Kernel, seed: int) -> bool:
        want, got = (attention(k, g, q, key, v, 0.1, rows=2, seed=seed) for k in (whole, kernel))
        return not np.array_equal(want, got)

    kernel = whole if pattern == "nothing" else without(whole, pattern)
    assert any(differs(kernel, seed) for seed in range(4)) == (pattern != "nothing")


def needs(
    whole: Kernel,
    pattern: str,
    reported: type[Exception] | None,
    result: Callable[[Kernel], Array],
) -> None:
    """Demands that a kernel without an instruction is reported, or gives something else."""
    kernel = without(whole, pattern)
    if reported:
        match = "all wait at" if reported is Deadlock else "nobody fenced"
        with pytest.raises(reported, match=match):
            result(kernel)
    else:
        want = result(whole)
        try:
            got = result(kernel)
        except (AccessError, Deadlock):
            return  # a stage that was filled too early: too many arrivals, or none left
        assert not np.array_equal(want, got)


@pytest.mark.parametrize(
    ("pattern", "reported"),
    [
        (r"mbarrier\.try_wait", None),
        (r"wgmma\.wait_group", None),
        (r"mbarrier\.arrive\.shared", Deadlock),
        (r"cp\.async\.bulk\.tensor\.3d", Deadlock),
        (r"bar\.arrive", Deadlock),
    ],
)
def test_hopper_attention_needs_its_waits(
    find: Find, pattern: str, reported: type[Exception] | None
) -> None:
    rng, g, tile = np.random.default_rng(1), Heads(1, 400, 784, 1, 64), (3, 80, 9)
    shapes = ((1, 400, 64), (1, 784, 64), (1, 784, 64))
    q, k, v = (rounded(rng.standard_normal(shape), "bfloat16") for shape in shapes)
    whole = find("attention_hopper_64_3x80x9_bfloat16")

    def result(kernel: Kernel) -> Array:
        return hopper_attention(kernel, g, tile, q, k, v, 0.1, period=3, processors=1)

    needs(whole, pattern, reported, result)


@pytest.mark.parametrize(
    ("pattern", "reported"),
    [
        (r"mbarrier\.try_wait", None),
        (r"wgmma\.wait_group", None),
        (r"mbarrier\.arrive\.shared", Deadlock),
        (r"cp\.async\.bulk\.tensor\.[23]d\.shared", Deadlock),
        (r"bar\.sync", None),
    ],
)
def test_attention_linear_needs_its_waits(
    find: Find, pattern: str, reported: type[Exception] | None
) -> None:
    rng, g = np.random.default_rng(1), Heads(2, 150, 50, 6, 64)
    given = [rounded(rng.standard_normal((2, t, 384)), "bfloat16") for t in (150, 50, 50)]
    linear = (
        rounded(rng.standard_normal((384, 384)) / 20, "bfloat16"),
        np.zeros(384, np.float32),
        rounded(np.zeros((300, 384)), "bfloat16"),
    )
    whole = find("attention_linear_hopper_64x384x3x6_bfloat16")

    def result(kernel: Kernel) -> Array:
        return attention_linear(kernel, g, given, linear, 0.1)[0]

    needs(whole, pattern, reported, result)


@pytest.mark.parametrize("tile", [TILES[4], TILES[2], TILES[5]], ids=lambda tile: tile.label)
@pytest.mark.parametrize(
    ("pattern", "reported"),
    [
        (r"mbarrier\.try_wait", None),
        (r"wgmma\.wait_group", None),
        (r"mbarrier\.arrive\.shared", Deadlock),
        (r"cp\.async\.bulk\.tensor\.3d", Deadlock),
        (r"barrier\.cluster\.wait", None),
        (r"fence\.proxy\.async", AccessError),
    ],
)
def test_hopper_needs_its_waits(
    find: Find, tile: Tile, pattern: str, reported: type[Exception] | None
) -> None:
    split = tile.kind == "split"
    if ("cluster" in pattern and not split) or ("fence" in pattern and split):
        pytest.skip("the tile has no clusters, or no stores of the copy engine")
    rng, g = np.random.default_rng(1), Conv(1, 70, 1, 2048, 72)
    x, w = rng.standard_normal((1, 70, 1, 2048)), rng.standard_normal((72, 1, 1, 2048))
    bias, residual = np.zeros(72, np.float32), rounded(np.zeros((70, 72)), "bfloat16")
    p = Product(g, rounded(x, "bfloat16"), rounded(w, "bfloat16"), bias, residual)
    whole = find(f"gemm_hopper_{tile.label}_none_1x1_bfloat16")

    def result(kernel: Kernel) -> Array:
        splits = 2 if split else 1
        return hopper(kernel, tile, [p], dtype="bfloat16", splits=splits, processors=1)[0]

    needs(whole, pattern, reported, result)
