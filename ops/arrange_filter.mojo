"""A filter that is computed, laid out for the kernels of a convolution; weights are when they load.

    w[F, C / groups, R, S], or [F, R, S, C / groups]   as torch and the gradients have it
    y                                                  as graphs/arrange.py describes it:

| form           | y                                         | for                                |
| -------------- | ----------------------------------------- | ---------------------------------- |
| `panels`       | [groups, panels, R * S * C, 64]           | a CPU in float32                   |
| `tiles`        | [groups, panels, steps, 2, 16, 16, 2]     | a CPU in bfloat16                  |
| `filter_major` | [F, R, S, C]                              | a GPU                              |
| `taps`         | [R, S, C, F]                              | a CPU's depthwise and small groups |

Turned, it is the filter of the gradient of x: the taps in reverse, and channels as filters.
Bound by memory, and a small part of it: a filter is read once for all images.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv

from .gemm.tiles import SIDE, STEP
from .gemm.cpu import PANEL
from .kernel_argument import KernelArgument
from .launch import launch
from .operands import Data, data
from .parallel import over_cores

comptime THREADS = 256
"""Threads of a GPU's block."""


struct FilterView(KernelArgument, TrivialRegisterPassable):
    """How the numbers of a filter lie in w: where the first is, and from one to the next."""

    comptime device_type: AnyType = Self
    """A kernel receives it as it is."""

    var groups: Int
    """Groups of channels."""
    var f: Int
    """Filters of a group."""
    var c: Int
    """Channels of a group."""
    var r: Int
    """Window height, taps."""
    var s: Int
    """Window width, taps."""
    var first: Int
    """Where the first number is."""
    var group_step: Int
    """From a group to the next; the others are of filters, channels and taps."""
    var f_step: Int
    """See `group_step`."""
    var c_step: Int
    """See `group_step`."""
    var r_step: Int
    """See `group_step`."""
    var s_step: Int
    """See `group_step`."""

    def __init__(out self, sizes: Data[DType.int64], *, channels_last: Bool, turned: Bool):
        """Reads the sizes.

        Args:
            sizes: In host memory: F, C / groups, R, S and the groups of w.
            channels_last: Whether w is [F, R, S, C / groups].
            turned: Whether channels are to be filters, and the taps reversed.
        """
        self.groups = Int(sizes[unsafe_offset=4])
        self.f = Int(sizes[unsafe_offset=0]) // self.groups
        self.c = Int(sizes[unsafe_offset=1])
        self.r, self.s = Int(sizes[unsafe_offset=2]), Int(sizes[unsafe_offset=3])
        self.first = 0
        self.f_step = self.c * self.r * self.s
        self.group_step = self.f * self.f_step
        self.c_step = 1 if channels_last else self.r * self.s
        self.s_step = self.c if channels_last else 1
        self.r_step = self.s * self.s_step
        if turned:
            self.first = (self.r - 1) * self.r_step + (self.s - 1) * self.s_step
            self.r_step, self.s_step = -self.r_step, -self.s_step
            swap(self.f, self.c)
            swap(self.f_step, self.c_step)

    @always_inline
    def at(self, group: Int, f: Int, c: Int, r: Int, s: Int) -> Int:
        """Finds a number in w.

        Args:
            group: Its group.
            f: Its filter, in the group.
            c: Its channel, in the group.
            r: Its tap, down.
            s: Its tap, across.

        Returns:
            Its place.
        """
        return (
            self.first
            + group * self.group_step
            + f * self.f_step
            + c * self.c_step
            + r * self.r_step
            + s * self.s_step
        )


def arrange_cpu[
    dtype: DType, //, form: StaticString
](y: Data[dtype], w: Data[dtype], view: FilterView):
    """Lays a filter out on all cores.

    Parameters:
        dtype: Of both.
        form: See above; not `filter_major`.

    Args:
        y: The result.
        w: The filter.
        view: How it lies there.
    """
    comptime if form == "taps":

        def tap(index: Int) {imm}:
            _taps(y, w, view, index)

        over_cores(tap, view.r * view.s)
    else:
        comptime columns = PANEL if form == "panels" else STEP
        var panels = ceildiv(view.f, columns)

        def panel(index: Int) {imm}:
            var group, number = divmod(index, panels)
            comptime if form == "panels":
                _panel(y, w, view, index, group, number * PANEL)
            else:
                _tile(y, w, view, index, group, number * STEP)

        over_cores(panel, view.groups * panels)


@no_inline
def _taps[dtype: DType, //](y: Data[dtype], w: Data[dtype], view: FilterView, tap: Int):
    """Writes the numbers of a tap: [C, F]."""
    var r, s = divmod(tap, view.s)
    var to = y.unsafe_offset(tap * view.c * view.groups * view.f)
    for c in range(view.c):
        for group in range(view.groups):
            for f in range(view.f):
                to[unsafe_offset=(c * view.groups + group) * view.f + f] = w[
                    unsafe_offset=view.at(group, f, c, r, s)
                ]


@no_inline
def _panel[
    dtype: DType, //
](y: Data[dtype], w: Data[dtype], view: FilterView, panel: Int, group: Int, first: Int):
    """Writes a panel of 64 filters: [R * S * C, 64]; zeros where there are fewer."""
    var to = y.unsafe_offset(panel * view.r * view.s * view.c * PANEL)
    var count = min(PANEL, view.f - first)
    var k = 0
    for r in range(view.r):
        for s in range(view.s):
            for c in range(view.c):
                var row = to.unsafe_offset(k * PANEL)
                var start = view.at(group, first, c, r, s)
                for f in range(count):
                    row[unsafe_offset=f] = w[unsafe_offset=start + f * view.f_step]
                for f in range(count, PANEL):
                    row[unsafe_offset=f] = 0
                k += 1


@no_inline
def _tile[
    dtype: DType, //
](y: Data[dtype], w: Data[dtype], view: FilterView, panel: Int, group: Int, first: Int):
    """Writes a panel of 32 filters: [steps, 2, 16 pairs of K, 16, 2]; zeros where there are fewer.

    Unless C is a multiple of 32, each row of S * C is filled up to one.
    """
    var whole = view.c % STEP == 0
    var rows = 1 if whole else view.r
    var depth = view.s * view.c * (view.r if whole else 1)
    var steps = ceildiv(depth, STEP)
    var to = y.unsafe_offset(panel * rows * steps * STEP * STEP)
    var count = min(STEP, view.f - first)
    for row in range(rows):
        for k in range(steps * STEP):
            var tap, c = divmod(k, view.c)
            var r, s = divmod(tap, view.s)
            var start = view.at(group, first, c, r + row, s)
            var pair = to.unsafe_offset(
                (row * steps + k // STEP) * STEP * STEP + k % STEP // 2 * STEP + k % 2
            )
            for f in range(STEP):
                var place = f // SIDE * SIDE * STEP + f % SIDE * 2
                pair[unsafe_offset=place] = (
                    w[unsafe_offset=start + f * view.f_step] if k < depth and f < count else 0
                )


@__name(t"arrange_filter_{dtype}")
def arrange_kernel[dtype: DType](y: Data[dtype], w: Data[dtype], view: FilterView, numbers: UInt32):
    """Writes a number of [F, R, S, C] in each thread.

    Parameters:
        dtype: Of both.

    Args:
        y: The result.
        w: The filter.
        view: How it lies there.
        numbers: How many there are.
    """
    wait_on_dependent_grids()
    launch_dependent_grids()
    var index = UInt32(block_idx.x) * THREADS + UInt32(thread_idx.x)
    if index >= numbers:
        return
    var rest, c = divmod(index, UInt32(view.c))
    var f, tap = divmod(rest, UInt32(view.r * view.s))
    var r, s = divmod(tap, UInt32(view.s))
    var group, member = divmod(f, UInt32(view.f))
    y[unsafe_offset=Int(index)] = w[
        unsafe_offset=view.at(Int(group), Int(member), Int(c), Int(r), Int(s))
    ]


def arrange_gpu[
    dtype: DType, //
](y: Data[dtype], w: Data[dtype], view: FilterView, ctx: DeviceContext) raises:
    """Enqueues the layout of a filter as [F, R, S, C].

    Parameters:
        dtype: Of both.

    Args:
        y: The result.
        w: The filter.
        view: How it lies there.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    var numbers = view.groups * view.f * view.c * view.r * view.s
    launch[arrange_kernel[dtype]](
        ctx,
        y,
        w,
        view,
        UInt32(numbers),
        grid_dim=ceildiv(numbers, THREADS),
        block_dim=THREADS,
    )


@register("arrange_filter")
struct ArrangeFilter:
    """Lays out a filter that is computed."""

    @staticmethod
    def execute[
        target: StaticString, form: StaticString, channels_last: Bool, turned: Bool
    ](
        y: OutputTensor[rank=1, ...],
        w: InputTensor[dtype=y.dtype, rank=4, ...],
        sizes: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            form: What the kernel reads: `panels`, `tiles`, `filter_major` or `taps`.
            channels_last: Whether w is [F, R, S, C / groups], else [F, C / groups, R, S].
            turned: Whether it is for the gradient of x.

        Args:
            y: The result, flat.
            w: The filter.
            sizes: F, C / groups, R, S and the groups of w, in host memory.
            ctx: The device.

        Raises:
            If the launch fails.
        """
        if y.size() == 0:
            return
        var view = FilterView(data(sizes), channels_last=channels_last, turned=turned)
        comptime if target == "cpu":
            comptime assert form != "filter_major", "arrange_filter: a GPU's kernels read that"
            arrange_cpu[form](data(y), data(w), view)
        else:
            comptime assert form == "filter_major", "arrange_filter: a CPU's kernels read that"
            arrange_gpu(data(y), data(w), view, ctx)
