"""The PTX instructions of Hopper that the kernels need, one function each (PTX ISA 8.0, section 9).

Shared memory is named by its 32-bit address, barriers too; barrier.mojo has what is done with these.
"""

from std.sys import _RegisterPackType
from std.sys._assembly import inlined_assembly

comptime NOTHING = NoneType
"""What an instruction without a result gives."""


@always_inline
def fence_barrier_init():
    """Makes prepared barriers visible to the copy engine and the cluster."""
    inlined_assembly["fence.mbarrier_init.release.cluster;", NOTHING, constraints="~{memory}"]()


@always_inline
def fence_async():
    """Orders this thread's writes to shared memory before the copy engine's reads of it."""
    inlined_assembly["fence.proxy.async.shared::cta;", NOTHING, constraints="~{memory}"]()


@always_inline
def load_im2col(
    to: UInt32,
    map: UInt64,
    barrier: UInt32,
    c: Int32,
    w: Int32,
    h: Int32,
    n: Int32,
    s: UInt16,
    r: UInt16,
):
    """Starts copying a column of pixels, from (n, h, w) on, displaced by the tap (r, s).

    Args:
        to: Where to, in shared memory.
        map: Address of the tensor map.
        barrier: Told of the bytes that have come.
        c: First channel.
        w: Column of the first window's corner; negative in the padding.
        h: Row of the first window's corner.
        n: Image.
        s: Columns from the corner to the tap.
        r: Rows from the corner to the tap.
    """
    inlined_assembly[
        (
            "cp.async.bulk.tensor.4d.shared::cluster.global.im2col"
            ".mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5, $6}], [$2], {$7, $8};"
        ),
        NOTHING,
        constraints="r,l,r,r,r,r,r,h,h,~{memory}",
    ](to, map, barrier, c, w, h, n, s, r)


@always_inline
def load_bytes(to: UInt32, source: Pointer, bytes: UInt32, barrier: UInt32):
    """Starts copying bytes to shared memory.

    Args:
        to: Where to, in shared memory; a multiple of 16.
        source: Where from; a multiple of 16.
        bytes: How many; a multiple of 16.
        barrier: Told of the bytes that have come.
    """
    inlined_assembly[
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        NOTHING,
        constraints="r,l,r,r,~{memory}",
    ](to, source, bytes, barrier)


@always_inline
def load_2d(to: UInt32, map: UInt64, barrier: UInt32, x: Int32, y: Int32):
    """Starts copying a box of a matrix to shared memory.

    Args:
        to: Where to, in shared memory.
        map: Address of the tensor map.
        barrier: Told of the bytes that have come.
        x: First column.
        y: First row.
    """
    inlined_assembly[
        (
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile"
            ".mbarrier::complete_tx::bytes [$0], [$1, {$3, $4}], [$2];"
        ),
        NOTHING,
        constraints="r,l,r,r,r,~{memory}",
    ](to, map, barrier, x, y)


@always_inline
def load_3d(to: UInt32, map: UInt64, barrier: UInt32, x: Int32, y: Int32, z: Int32):
    """Starts copying a box of a tensor of rank 3 to shared memory.

    Args:
        to: Where to, in shared memory.
        map: Address of the tensor map.
        barrier: Told of the bytes that have come.
        x: First index along the last axis.
        y: First index along the middle axis.
        z: First index along the first axis.
    """
    inlined_assembly[
        (
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile"
            ".mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5}], [$2];"
        ),
        NOTHING,
        constraints="r,l,r,r,r,r,~{memory}",
    ](to, map, barrier, x, y, z)


@always_inline
def load_4d(to: UInt32, map: UInt64, barrier: UInt32, x: Int32, y: Int32, z: Int32, n: Int32):
    """Starts copying a box of a tensor of rank 4 to shared memory; zeros for what lies outside.

    Args:
        to: Where to, in shared memory.
        map: Address of the tensor map.
        barrier: Told of the bytes that have come.
        x: First index along the last axis.
        y: First index along the axis before it.
        z: First index along the second axis.
        n: First index along the first axis.
    """
    inlined_assembly[
        (
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile"
            ".mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5, $6}], [$2];"
        ),
        NOTHING,
        constraints="r,l,r,r,r,r,r,~{memory}",
    ](to, map, barrier, x, y, z, n)


@always_inline
def store_2d(map: UInt64, at: UInt32, x: Int32, y: Int32):
    """Starts copying a box from shared memory into a matrix; what lies outside is dropped.

    Args:
        map: Address of the tensor map.
        at: Where from, in shared memory.
        x: First column.
        y: First row.
    """
    inlined_assembly[
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [$0, {$2, $3}], [$1];",
        NOTHING,
        constraints="l,r,r,r,~{memory}",
    ](map, at, x, y)


@always_inline
def store_3d(map: UInt64, at: UInt32, x: Int32, y: Int32, z: Int32):
    """Starts copying a box from shared memory into a tensor of rank 3; what lies outside is dropped.

    Args:
        map: Address of the tensor map.
        at: Where from, in shared memory.
        x: First index along the last axis.
        y: First index along the middle axis.
        z: First index along the first axis.
    """
    inlined_assembly[
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [$0, {$2, $3, $4}], [$1];",
        NOTHING,
        constraints="l,r,r,r,r,~{memory}",
    ](map, at, x, y, z)


@always_inline
def store_4d(map: UInt64, at: UInt32, x: Int32, y: Int32, z: Int32, n: Int32):
    """Starts copying a box from shared memory into a tensor of rank 4; what lies outside is dropped.

    Args:
        map: Address of the tensor map.
        at: Where from, in shared memory.
        x: First index along the last axis.
        y: First index along the axis before it.
        z: First index along the second axis.
        n: First index along the first axis.
    """
    inlined_assembly[
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [$0, {$2, $3, $4, $5}], [$1];",
        NOTHING,
        constraints="l,r,r,r,r,r,~{memory}",
    ](map, at, x, y, z, n)


@always_inline
def stores_commit():
    """Makes the stores that this thread started a group."""
    inlined_assembly["cp.async.bulk.commit_group;", NOTHING, constraints="~{memory}"]()


@always_inline
def stores_read[pending: Int = 0]():
    """Waits until all groups of this thread's stores, or all but the last, have read shared memory.

    Parameters:
        pending: How many of the last groups are not waited for.
    """
    comptime wait: StaticString = String(t"cp.async.bulk.wait_group.read {pending};")
    inlined_assembly[wait, NOTHING, constraints="~{memory}"]()


@always_inline
def prefetch_map(map: UInt64):
    """Brings a tensor map into its cache.

    Args:
        map: Its address.
    """
    inlined_assembly["prefetch.tensormap [$0];", NOTHING, constraints="l,~{memory}"](map)


@always_inline
def prefetch_l2(source: Pointer):
    """Brings a line of global memory to the second-level cache.

    Args:
        source: An address in it.
    """
    inlined_assembly["prefetch.global.L2 [$0];", NOTHING, constraints="l,~{memory}"](source)


@always_inline
def sync_threads(id: UInt32, threads: UInt32):
    """Waits for some of a block's warps.

    Args:
        id: Which of the 16 barriers.
        threads: How many threads take part.
    """
    inlined_assembly["bar.sync $0, $1;", NOTHING, constraints="r,r,~{memory}"](id, threads)


@always_inline
def arrive_threads(id: UInt32, threads: UInt32):
    """Arrives where other warps wait, without waiting.

    Args:
        id: Which of the 16 barriers.
        threads: How many threads take part.
    """
    inlined_assembly["bar.arrive $0, $1;", NOTHING, constraints="r,r,~{memory}"](id, threads)


@always_inline
def cluster_sync():
    """Waits for all threads of the cluster; what they wrote to shared memory is visible after.

    Warps may have diverged, as a producer's has whose first lane drives the copy engine.
    """
    inlined_assembly[
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;",
        NOTHING,
        constraints="~{memory}",
    ]()


@always_inline
def cluster_arrive():
    """Arrives where the cluster waits; of writes, those that prepared barriers are seen after."""
    inlined_assembly["barrier.cluster.arrive.relaxed;", NOTHING, constraints="~{memory}"]()


@always_inline
def cluster_wait():
    """Waits until all threads of the cluster have arrived."""
    inlined_assembly["barrier.cluster.wait.acquire;", NOTHING, constraints="~{memory}"]()


@always_inline
def shared_store_low(at: UInt32, bits: UInt32):
    """Stores the lower 2 of 4 bytes.

    Args:
        at: Address.
        bits: The bytes.
    """
    inlined_assembly[
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $1;
        st.shared.b16 [$0], low;
        }""",
        NOTHING,
        constraints="r,r,~{memory}",
    ](at, bits)


@always_inline
def shared_clear(at: UInt32):
    """Stores 16 bytes of zeros.

    Args:
        at: Address, a multiple of 16.
    """
    inlined_assembly[
        "st.shared.v4.b32 [$0], {$1, $1, $1, $1};", NOTHING, constraints="r,r,~{memory}"
    ](at, UInt32(0))


@always_inline
def shared_store(at: UInt32, bits: UInt32):
    """Stores 4 bytes.

    Args:
        at: Address.
        bits: The bytes.
    """
    inlined_assembly["st.shared.b32 [$0], $1;", NOTHING, constraints="r,r,~{memory}"](at, bits)


@always_inline
def shared_store4(at: UInt32, bits: SIMD[DType.uint32, 4]):
    """Stores 16 bytes.

    Args:
        at: Address, a multiple of 16.
        bits: The bytes.
    """
    inlined_assembly[
        "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", NOTHING, constraints="r,r,r,r,r,~{memory}"
    ](at, bits[0], bits[1], bits[2], bits[3])


@always_inline
def shared_load(at: UInt32) -> UInt32:
    """Loads 4 bytes.

    Args:
        at: Address.

    Returns:
        The bytes.
    """
    return inlined_assembly["ld.shared.b32 $0, [$1];", UInt32, constraints="=r,r,~{memory}"](at)


@always_inline
def shared_store_float(at: UInt32, value: Float32):
    """Stores a number.

    Args:
        at: Address.
        value: The number.
    """
    inlined_assembly["st.shared.f32 [$0], $1;", NOTHING, constraints="r,f,~{memory}"](at, value)


@always_inline
def shared_load_float(at: UInt32) -> Float32:
    """Loads a number.

    Args:
        at: Address.

    Returns:
        The number.
    """
    return inlined_assembly["ld.shared.f32 $0, [$1];", Float32, constraints="=f,r,~{memory}"](at)


@always_inline
def shared_load_matrices[
    turned: Bool = False, *, offset: Int = 0
](at: UInt32) -> SIMD[DType.uint32, 4]:
    """Loads four matrices of 8 rows of 16 bytes, each as the left side of a product holds it.

    Parameters:
        turned: Whether numbers of 16 bits change rows and columns.
        offset: Bytes from `at` to the row. As a part of the instruction they cost no register, so that
            all loads of a tile share a few addresses.

    Args:
        at: Address of a row: lanes 8 i to 8 i + 7 name those of the i-th matrix.

    Returns:
        4 bytes of each matrix: the (lane % 4)th of row lane / 4.
    """
    comptime order = "trans." if turned else ""
    comptime source = "[$4 + " + String(offset) + "]" if offset else "[$4]"
    var r = inlined_assembly[
        "ldmatrix.sync.aligned.m8n8.x4." + order + "shared.b16 {$0, $1, $2, $3}, " + source + ";",
        _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
        constraints="=r,=r,=r,=r,r,~{memory}",
    ](at)
    return SIMD[DType.uint32, 4](r[0], r[1], r[2], r[3])


@always_inline
def shared_store_matrices[turned: Bool = False](at: UInt32, bits: SIMD[DType.uint32, 4]):
    """Stores four matrices of 8 rows of 16 bytes, as `shared_load_matrices` loads them.

    Parameters:
        turned: Whether numbers of 16 bits change rows and columns.

    Args:
        at: Address of a row: lanes 8 i to 8 i + 7 name those of the i-th matrix.
        bits: 4 bytes of each matrix.
    """
    comptime order = "trans." if turned else ""
    inlined_assembly[
        "stmatrix.sync.aligned.m8n8.x4." + order + "shared.b16 [$0], {$1, $2, $3, $4};",
        NOTHING,
        constraints="r,r,r,r,r,~{memory}",
    ](at, bits[0], bits[1], bits[2], bits[3])


@always_inline
def shared_store2(at: UInt32, a: Float32, b: Float32):
    """Stores two numbers.

    Args:
        at: Address, a multiple of 8.
        a: The first.
        b: The second.
    """
    inlined_assembly["st.shared.v2.f32 [$0], {$1, $2};", NOTHING, constraints="r,f,f,~{memory}"](
        at, a, b
    )


@always_inline
def shared_load2(at: UInt32) -> SIMD[DType.float32, 2]:
    """Loads two numbers.

    Args:
        at: Address, a multiple of 8.

    Returns:
        The numbers.
    """
    var r = inlined_assembly[
        "ld.shared.v2.f32 {$0, $1}, [$2];",
        _RegisterPackType[Float32, Float32],
        constraints="=f,=f,r,~{memory}",
    ](at)
    return SIMD[DType.float32, 2](r[0], r[1])


@always_inline
def shared_load4(at: UInt32) -> SIMD[DType.float32, 4]:
    """Loads four numbers.

    Args:
        at: Address, a multiple of 16.

    Returns:
        The numbers.
    """
    var r = inlined_assembly[
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
        _RegisterPackType[Float32, Float32, Float32, Float32],
        constraints="=f,=f,=f,=f,r,~{memory}",
    ](at)
    return SIMD[DType.float32, 4](r[0], r[1], r[2], r[3])


@always_inline
def cluster_load4(at: UInt32, rank: UInt32) -> SIMD[DType.float32, 4]:
    """Loads four numbers from the shared memory of a block of the cluster.

    Args:
        at: Address in this block's memory that the other block's copy has too.
        rank: The other block's rank.

    Returns:
        The numbers.
    """
    var r = inlined_assembly[
        """{
        .reg .b32 there;
        mapa.shared::cluster.u32 there, $4, $5;
        ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [there];
        }""",
        _RegisterPackType[Float32, Float32, Float32, Float32],
        constraints="=f,=f,=f,=f,r,r,~{memory}",
    ](at, rank)
    return SIMD[DType.float32, 4](r[0], r[1], r[2], r[3])


@always_inline
def cluster_address(at: UInt32, rank: UInt32) -> UInt32:
    """Finds what is at an address of this block in a block of the cluster.

    Args:
        at: Address in this block's shared memory.
        rank: The other block's rank.

    Returns:
        The address there, among the cluster's.
    """
    return inlined_assembly[
        "mapa.shared::cluster.u32 $0, $1, $2;", UInt32, constraints="=r,r,r", has_side_effect=False
    ](at, rank)


@always_inline
def cluster_send[
    width: SIMDLength
](to: UInt32, values: SIMD[DType.float32, width], barrier: UInt32):
    """Starts storing numbers in the shared memory of a block of the cluster.

    Parameters:
        width: 1, 2 or 4.

    Args:
        to: `cluster_address`, a multiple of the numbers' bytes.
        values: The numbers.
        barrier: `cluster_address` of the barrier there that is told of the bytes that have come.
    """
    comptime assert width == 1 or width == 2 or width == 4, "st.async: 1, 2 or 4 numbers"
    comptime SEND = "st.async.shared::cluster.mbarrier::complete_tx::bytes"
    comptime if width == 1:
        inlined_assembly[SEND + ".f32 [$0], $1, [$2];", NOTHING, constraints="r,f,r,~{memory}"](
            to, values[0], barrier
        )
    elif width == 2:
        inlined_assembly[
            SEND + ".v2.f32 [$0], {$1, $2}, [$3];", NOTHING, constraints="r,f,f,r,~{memory}"
        ](to, values[0], values[1], barrier)
    else:
        inlined_assembly[
            SEND + ".v4.f32 [$0], {$1, $2, $3, $4}, [$5];",
            NOTHING,
            constraints="r,f,f,f,f,r,~{memory}",
        ](to, values[0], values[1], values[2], values[3], barrier)


@always_inline
def ballot(vote: Bool) -> UInt32:
    """Collects a bit of each lane of a warp.

    Args:
        vote: This lane's.

    Returns:
        Lane i's in bit i.
    """
    return inlined_assembly[
        """{
        .reg .pred vote;
        setp.ne.u32 vote, $1, 0;
        vote.sync.ballot.b32 $0, vote, 0xffffffff;
        }""",
        UInt32,
        constraints="=r,r",
    ](UInt32(1) if vote else UInt32(0))


@always_inline
def packed[dtype: DType, *, relu: Bool = False](low: Float32, high: Float32) -> UInt32:
    """Rounds a pair into a register.

    Parameters:
        dtype: Either bfloat16 or float16.
        relu: Whether what is below zero becomes zero.

    Args:
        low: The number of the lower half.
        high: The number of the upper half.

    Returns:
        The register.
    """
    comptime assert dtype.is_half_float(), "cvt: a pair is of bfloat16 or float16"
    comptime kind = "bf16x2" if dtype == DType.bfloat16 else "f16x2"
    return inlined_assembly[
        "cvt.rn." + ("relu." if relu else "") + kind + ".f32 $0, $1, $2;",
        UInt32,
        constraints="=r,f,f",
        has_side_effect=False,
    ](high, low)


@always_inline
def mma_sync[
    dtype: DType
](a: SIMD[DType.uint32, 4], b: SIMD[DType.uint32, 2], c: SIMD[DType.float32, 4]) -> SIMD[
    DType.float32, 4
]:
    """Adds a product of 16 x 32 bytes by 32 bytes x 8, by a warp.

    Parameters:
        dtype: One of bfloat16, float16, and float32, of which TF32 counts.

    Args:
        a: This thread's part of the left side.
        b: This thread's part of the right side.
        c: What the product is added to.

    Returns:
        The sums.
    """
    comptime assert (
        dtype.is_half_float() or dtype == DType.float32
    ), "mma: numbers are bfloat16, float16 or float32"
    comptime kind = "m16n8k16.row.col.f32.bf16.bf16" if dtype == DType.bfloat16 else (
        "m16n8k16.row.col.f32.f16.f16" if dtype
        == DType.float16 else "m16n8k8.row.col.f32.tf32.tf32"
    )
    var d = inlined_assembly[
        "mma.sync.aligned."
        + kind
        + ".f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        _RegisterPackType[Float32, Float32, Float32, Float32],
        constraints="=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effect=False,
    ](a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3])
    return SIMD[DType.float32, 4](d[0], d[1], d[2], d[3])


@always_inline
def mma_sync_short[
    dtype: DType
](a: SIMD[DType.uint32, 2], b: UInt32, c: SIMD[DType.float32, 4]) -> SIMD[DType.float32, 4]:
    """Adds a product of 16 x 16 bytes by 16 bytes x 8, by a warp.

    Parameters:
        dtype: Either bfloat16 or float16.

    Args:
        a: This thread's part of the left side.
        b: This thread's part of the right side.
        c: What the product is added to.

    Returns:
        The sums.
    """
    comptime assert dtype.is_half_float(), "mma: numbers are bfloat16 or float16"
    comptime kind = "bf16.bf16" if dtype == DType.bfloat16 else "f16.f16"
    var d = inlined_assembly[
        "mma.sync.aligned.m16n8k8.row.col.f32."
        + kind
        + ".f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};",
        _RegisterPackType[Float32, Float32, Float32, Float32],
        constraints="=f,=f,=f,=f,r,r,r,f,f,f,f",
        has_side_effect=False,
    ](a[0], a[1], b, c[0], c[1], c[2], c[3])
    return SIMD[DType.float32, 4](d[0], d[1], d[2], d[3])


@always_inline
def registers_give[count: Int]():
    """Gives registers of a warpgroup back, whose four warps all call this.

    Parameters:
        count: Registers that each thread keeps, a multiple of 8.
    """
    comptime assert count % 8 == 0 and 24 <= count <= 256, "setmaxnreg: eights, from 24 to 256"
    inlined_assembly["setmaxnreg.dec.sync.aligned.u32 $0;", NOTHING, constraints="n"](UInt32(count))


@always_inline
def registers_take[count: Int]():
    """Waits for registers that other warpgroups have given back; all four warps call this.

    Parameters:
        count: Registers that each thread has then, a multiple of 8.
    """
    comptime assert count % 8 == 0 and 24 <= count <= 256, "setmaxnreg: eights, from 24 to 256"
    inlined_assembly["setmaxnreg.inc.sync.aligned.u32 $0;", NOTHING, constraints="n"](UInt32(count))
