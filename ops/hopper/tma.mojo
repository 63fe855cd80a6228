"""Tiles copied by the copy engine (TMA): tensor maps, and loads and stores through them.

The host describes a tensor and the box of a copy (`tensor_map`, `im2col_map`), the kernel receives
the maps as one argument, and one thread starts each copy. Boxes are 128 bytes wide, or 64, and
swizzled in shared memory as wgmma reads them; what lies outside a tensor is zero on the way in, and
dropped on the way out. CUDA's driver API, cuTensorMapEncodeTiled and -Im2col; PTX ISA 8.0, section 5.5.
"""

from max.gpu.host import DeviceBuffer, DeviceContext
from std.sys import size_of

from ..geometry import Geometry
from ..kernel_argument import KernelArgument
from ..operands import F32, Data
from .barrier import Barrier
from .ptx import load_2d, load_3d, load_4d, load_im2col, prefetch_map, store_2d, store_3d, store_4d
from .shared import ROW

comptime MAP = 128
"""Bytes of a tensor map."""


struct TensorMap(TrivialRegisterPassable):
    """A tensor map: `MAP` bytes at a multiple of 64.

    In vectors: MAX's `TMADescriptor` is an array of bytes, which the host copies byte by byte
    wherever a map is handed on. 9 of the 42 s of `mojo build` of ResNet-50's program went into that
    (2026-11-28; docs/adding-an-op.md has the command).
    """

    var low: SIMD[DType.uint64, 8]
    """The first half."""
    var high: SIMD[DType.uint64, 8]
    """The other half."""

    @always_inline
    def __init__(out self):
        """Makes room for one."""
        self.low = 0
        self.high = 0


struct Maps:
    """Which tensor map of a product is which: a kernel has the first ones, as many as it needs.

    Those of several products follow one another.
    """

    comptime X = 0
    """Of the activations."""
    comptime W = 1
    """Of the filters."""
    comptime Y = 2
    """Of the result."""
    comptime RESIDUAL = 3
    """Of the residual."""
    comptime COUNT = 4
    """How many a product has."""
    comptime X2 = Self.COUNT
    """Of a second source's activations, where there is one product."""
    comptime W2 = Self.COUNT + 1
    """Of its filters."""


struct TensorMaps[count: Int](Copyable, KernelArgument):
    """The tensor maps of a kernel, a `grid_constant` argument.

    Parameters:
        count: How many there are.
    """

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var maps: Array[TensorMap, Self.count]
    """In the kernel's order."""

    def __init__(out self):
        """Makes room for them."""
        self.maps = Array[TensorMap, Self.count](fill=TensorMap())

    @always_inline
    def address(self) -> UInt64:
        """Gives the address of the first map, for a kernel's `TileLoader` and `TileStore`.

        Returns:
            The others follow, `MAP` bytes each.
        """
        return UInt64(Int(Pointer(to=self)))


@always_inline
def nth_map(maps: UInt64, index: Int32) -> UInt64:
    """Finds a map.

    Args:
        maps: Address of the first.
        index: Which.

    Returns:
        Its address.
    """
    return maps + UInt64(index) * UInt64(MAP)


struct TileLoader(TrivialRegisterPassable):
    """Copies boxes of a tensor to shared memory. One thread calls it."""

    var map: UInt64
    """Address of the tensor map."""

    @always_inline
    def __init__(out self, maps: UInt64, index: Int32 = 0):
        """Chooses a tensor.

        Args:
            maps: Address of the first map.
            index: Which.
        """
        self.map = nth_map(maps, index)

    @always_inline
    def prefetch_descriptor(self):
        """Brings the map into its cache."""
        prefetch_map(self.map)

    @always_inline
    def load(self, to: UInt32, barrier: Barrier, x: Int32, y: Int32):
        """Starts copying a box of a matrix.

        Args:
            to: Where to, in shared memory.
            barrier: Told of the bytes that have come.
            x: First column.
            y: First row.
        """
        load_2d(to, self.map, barrier.address, x, y)

    @always_inline
    def load(self, to: UInt32, barrier: Barrier, x: Int32, y: Int32, z: Int32):
        """Starts copying a box of a tensor of rank 3.

        Args:
            to: Where to, in shared memory.
            barrier: Told of the bytes that have come.
            x: First index along the last axis.
            y: First index along the middle axis.
            z: First index along the first axis.
        """
        load_3d(to, self.map, barrier.address, x, y, z)

    @always_inline
    def load(self, to: UInt32, barrier: Barrier, x: Int32, y: Int32, z: Int32, n: Int32):
        """Starts copying a box of a tensor of rank 4.

        Args:
            to: Where to, in shared memory.
            barrier: Told of the bytes that have come.
            x: First index along the last axis.
            y: First index along the axis before it.
            z: First index along the second axis.
            n: First index along the first axis.
        """
        load_4d(to, self.map, barrier.address, x, y, z, n)

    @always_inline
    def load_im2col(
        self,
        to: UInt32,
        barrier: Barrier,
        c: Int32,
        w: Int32,
        h: Int32,
        n: Int32,
        s: Int32,
        r: Int32,
    ):
        """Starts copying what a tap sees of a run of windows.

        Args:
            to: Where to, in shared memory.
            barrier: Told of the bytes that have come.
            c: First channel.
            w: Column of the first window's corner; negative in the padding.
            h: Row of the first window's corner.
            n: Image.
            s: Columns from the corner to the tap.
            r: Rows from the corner to the tap.
        """
        load_im2col(to, self.map, barrier.address, c, w, h, n, UInt16(s), UInt16(r))


struct TileStore(TrivialRegisterPassable):
    """Copies boxes from shared memory into a matrix, or a tensor of rank 3 or 4.

    `sync_writes` comes before it; `stores_commit` and `stores_read` tell when shared memory may be
    written again (store.mojo). One thread calls it.
    """

    var map: UInt64
    """Address of the tensor map."""

    @always_inline
    def __init__(out self, maps: UInt64, index: Int32 = 0):
        """Chooses a matrix.

        Args:
            maps: Address of the first map.
            index: Which.
        """
        self.map = nth_map(maps, index)

    @always_inline
    def store(self, at: UInt32, x: Int32, y: Int32):
        """Starts copying a box.

        Args:
            at: Where from, in shared memory.
            x: First column.
            y: First row.
        """
        store_2d(self.map, at, x, y)

    @always_inline
    def store(self, at: UInt32, x: Int32, y: Int32, z: Int32):
        """Starts copying a box of a tensor of rank 3.

        Args:
            at: Where from, in shared memory.
            x: First index along the last axis.
            y: First index along the middle axis.
            z: First index along the first axis.
        """
        store_3d(self.map, at, x, y, z)

    @always_inline
    def store(self, at: UInt32, x: Int32, y: Int32, z: Int32, n: Int32):
        """Starts copying a box of a tensor of rank 4.

        Args:
            at: Where from, in shared memory.
            x: First index along the last axis.
            y: First index along the axis before it.
            z: First index along the second axis.
            n: First index along the first axis.
        """
        store_4d(self.map, at, x, y, z, n)


# The host's side


def tensor_map[
    dtype: DType, rank: Int, multiplied: Bool = False
](
    ctx: DeviceContext,
    at: Data[dtype],
    var sizes: Array[Int64, rank],
    var box: Array[Int32, rank],
) raises -> TensorMap:
    """Makes the tensor map of a dense tensor, its last axis first in `sizes` and `box`.

    Parameters:
        dtype: Of the tensor.
        rank: Axes.
        multiplied: Whether float32 is rounded to TF32 on its way.

    Args:
        ctx: The GPU.
        at: The tensor.
        sizes: Of the tensor.
        box: Of a copy; 128 or 64 bytes along the last axis, which name the swizzle.

    Returns:
        The map.

    Raises:
        If the driver refuses it.
    """
    comptime assert 2 <= rank <= 4, "tensor_map: a TileLoader takes 2 to 4 axes"
    var map = TensorMap()
    var strides = Array[Int64, rank](fill=0)
    var ones = Array[Int32, rank](fill=1)
    var bytes = Int64(size_of[dtype]())
    var swizzle = _swizzle(Int(box[0]) * size_of[dtype]())
    comptime for i in range(rank):
        bytes *= sizes[i]
        strides[i] = bytes
    DeviceBuffer[dtype](ctx, at, 1, owning=False)._tensor_map_encode_tiled(
        Pointer(to=map).unsafe_bitcast[NoneType](),
        _map_dtype[dtype, multiplied](),
        Int32(rank),
        sizes.unsafe_ptr(),
        strides.unsafe_ptr(),
        box.unsafe_ptr(),
        ones.unsafe_ptr(),
        0,
        swizzle,
        2,
        0,
    )
    return map


def matrix_map[
    dtype: DType, multiplied: Bool = False
](
    ctx: DeviceContext, at: Data[dtype], *, rows: Int, columns: Int, box: Int, bytes: Int = ROW
) raises -> TensorMap:
    """Makes the tensor map of a matrix [rows, columns].

    Parameters:
        dtype: Of the matrix.
        multiplied: Whether float32 is rounded to TF32 on its way.

    Args:
        ctx: The GPU.
        at: The matrix.
        rows: Of the matrix.
        columns: Of the matrix.
        box: Rows of a copy.
        bytes: Of each of them: 128 or 64.

    Returns:
        The map.

    Raises:
        If the driver refuses it.
    """
    return tensor_map[dtype, 2, multiplied](
        ctx, at, [Int64(columns), Int64(rows)], [Int32(bytes // size_of[dtype]()), Int32(box)]
    )


def im2col_map[
    dtype: DType
](
    ctx: DeviceContext, at: Data[dtype], g: Geometry, rows: Int, bytes: Int = ROW
) raises -> TensorMap:
    """Makes the tensor map that reads x[N, H, W, C] window by window.

    Parameters:
        dtype: Of x.

    Args:
        ctx: The GPU.
        at: The tensor.
        g: Sizes.
        rows: Pixels of a copy.
        bytes: Of channels of each of them: 128 or 64.

    Returns:
        The map.

    Raises:
        If the driver refuses it.
    """
    var map = TensorMap()
    var stride = Int64(size_of[dtype]())
    var dims = Array[Int64, 4](fill=0)
    dims[0], dims[1], dims[2], dims[3] = Int64(g.c), Int64(g.w), Int64(g.h), Int64(g.n)
    var strides = Array[Int64, 4](fill=0)
    comptime for i in range(4):
        stride *= dims[i]
        strides[i] = stride
    var lower = Array[Int32, 2](fill=0)
    lower[0], lower[1] = Int32(-g.pad_w), Int32(-g.pad_h)
    var upper = Array[Int32, 2](fill=0)
    # The corner of the last window, as far from the image's end.
    upper[0] = Int32((g.q - 1) * g.stride_w - g.pad_w - (g.w - 1))
    upper[1] = Int32((g.p - 1) * g.stride_h - g.pad_h - (g.h - 1))
    var steps = Array[Int32, 4](fill=1)
    steps[1], steps[2] = Int32(g.stride_w), Int32(g.stride_h)
    DeviceBuffer[dtype](ctx, at, 1, owning=False)._tensor_map_encode_im2col(
        Pointer(to=map).unsafe_bitcast[NoneType](),
        _map_dtype[dtype, True](),
        4,
        dims.unsafe_ptr(),
        strides.unsafe_ptr(),
        lower.unsafe_ptr(),
        upper.unsafe_ptr(),
        Int32(bytes // size_of[dtype]()),
        Int32(rows),
        steps.unsafe_ptr(),
        0,
        _swizzle(bytes),
        2,
        0,
    )
    return map


def _swizzle(bytes: Int) -> Int32:
    """Numbers the swizzle of rows of 128 or 64 bytes as CUtensorMapSwizzle does."""
    return 2 if bytes == ROW // 2 else 3


def _map_dtype[dtype: DType, multiplied: Bool]() -> Int32:
    """Numbers a dtype as CUtensorMapDataType does; float32 to be multiplied is rounded to TF32."""
    comptime if dtype == F32:
        return 11 if multiplied else 7
    elif dtype == DType.float16:
        return 6
    elif dtype == DType.bfloat16:
        return 9
    else:
        comptime assert size_of[dtype]() == 1, "tma: 8-bit numbers are copied as bytes"
        return 0
