"""The geometry of a window that slides over x[N, H, W, C]: convolutions and pools.

One alphabet everywhere: N H W C come in, R S is the window, P Q F go out.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.utils import IndexList

comptime Data[dtype: DType] = Pointer[Scalar[dtype], MutUnsafeAnyOrigin]
"""A tensor's memory, dense and row-major."""


struct Geometry(DevicePassable, TrivialRegisterPassable):
    """Sizes of a sliding window, all at run time: one kernel serves every layer."""

    comptime device_type: AnyType = Self

    var n: Int
    var h: Int
    var w: Int
    var c: Int
    var r: Int
    var s: Int
    var p: Int
    var q: Int
    var f: Int
    var stride_h: Int
    var stride_w: Int
    var pad_h: Int
    var pad_w: Int
    var dilation_h: Int
    var dilation_w: Int
    var groups: Int

    def __init__(
        out self,
        x: IndexList[4],
        y: IndexList[4],
        window: Data[DType.int64],
    ):
        """Reads the shapes x[N, H, W, C], y[N, P, Q, F] and the window's nine numbers:
        R, S, stride, padding and dilation (height, then width), groups.
        """
        self.n, self.h, self.w, self.c = x[0], x[1], x[2], x[3]
        self.p, self.q, self.f = y[1], y[2], y[3]
        self.r = Int(window[unsafe_offset=0])
        self.s = Int(window[unsafe_offset=1])
        self.stride_h = Int(window[unsafe_offset=2])
        self.stride_w = Int(window[unsafe_offset=3])
        self.pad_h = Int(window[unsafe_offset=4])
        self.pad_w = Int(window[unsafe_offset=5])
        self.dilation_h = Int(window[unsafe_offset=6])
        self.dilation_w = Int(window[unsafe_offset=7])
        self.groups = Int(window[unsafe_offset=8])

    def __init__(out self, *, rows: Int, depth: Int, columns: Int):
        """Describes the product a[rows, depth] b[depth, columns] as a 1x1 convolution."""
        self.n, self.h, self.w, self.c = 1, rows, 1, depth
        self.p, self.q, self.f = rows, 1, columns
        self.r = self.s = 1
        self.stride_h = self.stride_w = 1
        self.pad_h = self.pad_w = 0
        self.dilation_h = self.dilation_w = 1
        self.groups = 1

    @always_inline
    def pixels(self) -> Int:
        """Returns the output pixels N * P * Q: a convolution's M."""
        return self.n * self.p * self.q

    @always_inline
    def group_c(self) -> Int:
        """Returns the input channels of one group."""
        return self.c // self.groups

    @always_inline
    def group_f(self) -> Int:
        """Returns the output channels of one group."""
        return self.f // self.groups

    @always_inline
    def depthwise(self) -> Bool:
        """Tells whether each channel is convolved by itself with one filter."""
        return self.groups == self.c and self.c == self.f and self.c > 1

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Returns the name that a launch shows in its errors."""
        return "Geometry"
