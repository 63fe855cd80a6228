"""Sums, largest and smallest numbers over an axis: y[outer, inner] of x[outer, reduced, inner].

    sum   y = sum(x)        amax  y = max(x), NaN if there is one
    mean  y = sum(x) / n    amin  y = min(x), the same

Pixels of NHWC images are [N, H * W, C], tokens [N, T, C], rows [rows, C, 1]. Bound by memory, and by
latency where there is little of it. Everything is float32, or float64 on a CPU, and rounded once.

`reduce_terms` reduces expressions of several tensors (graphs/elementwise.py), up to three at once: a
batch norm's `x0 ; x0 x1 x2 sub mul` of dy, x and its mean. Nothing of full size is written.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext
from std.utils.static_tuple import StaticTuple

from ..expression import inputs_of
from ..operands import CHECKED, Data, data
from ..pointwise import MOST, Sources, bytes_of, in_memory
from .cpu import reduce_cpu
from .gpu import reduce_gpu
from .values import MOST_RESULTS, Terms


@always_inline
def _reduce[
    into: DType, //, target: StaticString, kind: StaticString, terms: Terms
](
    sources: Sources[len(terms.dtypes)],
    results: StaticTuple[Data[into], len(terms.words)],
    outer: Int,
    reduced: Int,
    inner: Int,
    ctx: DeviceContext,
) raises:
    comptime join: StaticString = "sum" if kind == "mean" else kind
    comptime assert join in ["sum", "amax", "amin"], "reduce: no such kind"
    var divisor = reduced if kind == "mean" else 1
    comptime if target == "cpu":
        comptime assert (
            CHECKED[terms.narrowest()] and CHECKED[into]
        ), "reduce: a CPU expects float32, bfloat16 or float64"
        reduce_cpu[join, terms](sources, results, outer, reduced, inner, divisor)
    else:
        reduce_gpu[join, terms](sources, results, outer, reduced, inner, Float32(divisor), ctx)


@register("reduce")
struct Reduce:
    """Reduces the middle axis of x[outer, reduced, inner]."""

    @staticmethod
    def execute[
        target: StaticString, kind: StaticString
    ](y: OutputTensor[rank=2, ...], x: InputTensor[rank=3, ...], ctx: DeviceContext) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            kind: What is left of the axis: sum, mean, amax or amin.

        Args:
            y: Result [outer, inner], of the dtype of x or float32.
            x: [outer, reduced, inner].
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if y.size() == 0:
            return
        comptime terms = Terms(x.dtype)
        var outer, reduced, inner = x.shape()[0], x.shape()[1], x.shape()[2]
        var sources = Sources[len(terms.dtypes)](fill=bytes_of(x))
        var results = StaticTuple[Data[y.dtype], len(terms.words)](fill=data(y))
        _reduce[target, kind, terms](sources, results, outer, reduced, inner, ctx)


@register("reduce_terms")
struct ReduceTerms:
    """Reduces the middle axis of expressions of x0, x1, ... [outer, reduced, inner]."""

    @staticmethod
    def execute[
        target: StaticString, kind: StaticString, expression: StaticString, lies: StaticString
    ](
        y0: OutputTensor[rank=2, ...],
        y1: OutputTensor[dtype=y0.dtype, rank=2, ...],
        y2: OutputTensor[dtype=y0.dtype, rank=2, ...],
        x0: InputTensor,
        x1: InputTensor,
        x2: InputTensor,
        x3: InputTensor,
        x4: InputTensor,
        x5: InputTensor,
        x6: InputTensor,
        x7: InputTensor,
        reduced: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            kind: What is left of the axis: sum, mean, amax or amin.
            expression: What is reduced, of each result; they stand apart by `;`.
            lies: The axes along which each tensor moves: of the letters o, r and i.

        Args:
            y0: Result [outer, inner], of the dtype of the tensors or float32.
            y1: Another one, of the same dtype; those without an expression are not written.
            y2: See `y1`.
            x0: A tensor, dense along the axes that it moves along: 16 bits, float32 or bool.
            x1: Another one; of those that the expressions do not name nothing is read.
            x2: See `x1`.
            x3: See `x1`.
            x4: See `x1`.
            x5: See `x1`.
            x6: See `x1`.
            x7: See `x1`.
            reduced: Size of the axis; in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if y0.size() == 0:
            return
        comptime all: List[DType] = [
            x0.dtype,
            x1.dtype,
            x2.dtype,
            x3.dtype,
            x4.dtype,
            x5.dtype,
            x6.dtype,
            x7.dtype,
        ]
        comptime terms = Terms(expression, lies, in_memory(all, inputs_of(expression)))
        comptime assert terms.is_known(MOST), "reduce_terms: no expressions of x0 to x7"
        var all_sources = Sources[MOST](fill=bytes_of(x0))
        all_sources[1], all_sources[2], all_sources[3] = bytes_of(x1), bytes_of(x2), bytes_of(x3)
        all_sources[4], all_sources[5], all_sources[6] = bytes_of(x4), bytes_of(x5), bytes_of(x6)
        all_sources[7] = bytes_of(x7)
        var all_results = StaticTuple[Data[y0.dtype], MOST_RESULTS](fill=data(y0))
        all_results[1], all_results[2] = data(y1), data(y2)
        var sources = Sources[len(terms.dtypes)](fill=all_sources[0])
        comptime for i in range(len(terms.dtypes)):
            sources[i] = all_sources[i]
        var results = StaticTuple[Data[y0.dtype], len(terms.words)](fill=all_results[0])
        comptime for k in range(len(terms.words)):
            results[k] = all_results[k]
        var outer, rows, inner = y0.shape()[0], Int(data(reduced)[unsafe_offset=0]), y0.shape()[1]
        _reduce[target, kind, terms](sources, results, outer, rows, inner, ctx)
