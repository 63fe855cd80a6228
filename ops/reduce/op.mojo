"""Sums, largest and smallest numbers over an axis: y[outer, inner] of x[outer, reduced, inner].

    sum   y = sum(x)        amax  y = max(x), NaN if there is one
    mean  y = sum(x) / n    amin  y = min(x), the same

Pixels of NHWC images are [N, H * W, C], tokens [N, T, C], rows [rows, C, 1]. Bound by memory, and by
latency where there is little of it. Everything is float32, or float64 on a CPU, and rounded once.

`reduce_terms` reduces expressions of several tensors (graphs/elementwise.py), up to three at once: a
batch norm's `x0 ; x0 x1 x2 sub mul` of dy, x and its mean. Nothing of full size is written.
`reduce_results` computes expressions of what is left, and of vectors of that size, in the same launch.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext

from ..expression import inputs_of
from ..operands import CHECKED, data
from ..pointwise import MOST, Sources, bytes_of, in_memory
from .cpu import reduce_cpu
from .gpu import reduce_gpu
from .results import MOST_RESULTS, MOST_VECTORS, Finish, Results
from .values import MOST_TERMS, Terms


@always_inline
def _reduce[
    finish: Finish, //, target: StaticString, kind: StaticString, terms: Terms
](
    sources: Sources[len(terms.dtypes)],
    results: Results[finish],
    outer: Int,
    reduced: Int,
    inner: Int,
    ctx: DeviceContext,
) raises:
    comptime join: StaticString = "sum" if kind == "mean" else kind
    comptime assert join in ["sum", "amax", "amin"], "reduce: no such kind"
    var divisor = reduced if kind == "mean" else 1
    comptime if target == "cpu":
        comptime assert CHECKED[terms.narrowest()], "reduce: a CPU has no float16"
        comptime for k in range(len(finish.dtypes)):
            comptime assert CHECKED[finish.dtypes[k]], "reduce: a CPU has no float16"
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
        comptime finish = Finish(y.dtype, 1)
        var results = Results[finish](Results[finish].Tensors(fill=bytes_of(y)))
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
        comptime terms = Terms(
            expression,
            lies,
            in_memory(
                [
                    x0.dtype,
                    x1.dtype,
                    x2.dtype,
                    x3.dtype,
                    x4.dtype,
                    x5.dtype,
                    x6.dtype,
                    x7.dtype,
                ],
                inputs_of(expression),
            ),
        )
        comptime assert terms.is_known(MOST), "reduce_terms: no expressions of x0 to x7"
        comptime finish = Finish(y0.dtype, len(terms.words))
        var sources = Sources[MOST](fill=bytes_of(x0))
        sources[1], sources[2], sources[3] = bytes_of(x1), bytes_of(x2), bytes_of(x3)
        sources[4], sources[5], sources[6] = bytes_of(x4), bytes_of(x5), bytes_of(x6)
        sources[7] = bytes_of(x7)
        var made = Sources[MOST_TERMS](fill=bytes_of(y0))
        made[1], made[2] = bytes_of(y1), bytes_of(y2)
        _reduce[target, kind, terms](
            _first[len(terms.dtypes)](sources),
            Results[finish](_first[Results[finish].TENSORS](made)),
            y0.shape()[0],
            Int(data(reduced)[unsafe_offset=0]),
            y0.shape()[1],
            ctx,
        )


@register("reduce_results")
struct ReduceResults:
    """Reduces the middle axis of expressions, and computes others of what is left."""

    @staticmethod
    def execute[
        target: StaticString,
        kind: StaticString,
        expression: StaticString,
        lies: StaticString,
        results: StaticString,
    ](
        y0: OutputTensor[rank=2, ...],
        y1: OutputTensor[rank=2, ...],
        y2: OutputTensor[rank=2, ...],
        y3: OutputTensor[rank=2, ...],
        y4: OutputTensor[rank=2, ...],
        y5: OutputTensor[rank=2, ...],
        x0: InputTensor,
        x1: InputTensor,
        x2: InputTensor,
        x3: InputTensor,
        x4: InputTensor,
        x5: InputTensor,
        x6: InputTensor,
        x7: InputTensor,
        v0: InputTensor,
        v1: InputTensor,
        v2: InputTensor,
        v3: InputTensor,
        v4: InputTensor,
        v5: InputTensor,
        reduced: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            kind: What is left of the axis: sum, mean, amax or amin.
            expression: What is reduced; several expressions stand apart by `;`.
            lies: The axes along which each tensor moves: of the letters o, r and i.
            results: What is computed: expressions of what is left, x0, x1, ..., and of the vectors,
                which are numbered behind that.

        Args:
            y0: Result [outer, inner], float32 or of 16 bits.
            y1: Another one, of any of these; those without an expression are not written.
            y2: See `y1`.
            y3: See `y1`.
            y4: See `y1`.
            y5: See `y1`.
            x0: A tensor, dense along the axes that it moves along: 16 bits, float32 or bool.
            x1: Another one; of those that the expressions do not name nothing is read.
            x2: See `x1`.
            x3: See `x1`.
            x4: See `x1`.
            x5: See `x1`.
            x6: See `x1`.
            x7: See `x1`.
            v0: A vector of as many numbers as a result, or more, of which the first are read.
            v1: Another one; of those that the results do not name nothing is read.
            v2: See `v1`.
            v3: See `v1`.
            v4: See `v1`.
            v5: See `v1`.
            reduced: Size of the axis; in host memory.
            ctx: The device.

        Raises:
            If a launch fails.
        """
        if y0.size() == 0:
            return
        comptime terms = Terms(
            expression,
            lies,
            in_memory(
                [
                    x0.dtype,
                    x1.dtype,
                    x2.dtype,
                    x3.dtype,
                    x4.dtype,
                    x5.dtype,
                    x6.dtype,
                    x7.dtype,
                ],
                inputs_of(expression),
            ),
        )
        comptime assert terms.is_known(MOST), "reduce_results: no expressions of x0 to x7"
        comptime left = len(terms.words)
        comptime finish = Finish(
            results,
            [y0.dtype, y1.dtype, y2.dtype, y3.dtype, y4.dtype, y5.dtype],
            in_memory(
                [v0.dtype, v1.dtype, v2.dtype, v3.dtype, v4.dtype, v5.dtype],
                max(0, inputs_of(results) - left),
            ),
        )
        comptime assert finish.is_known(left), "reduce_results: no expressions of v0 to v5"
        var sources = Sources[MOST](fill=bytes_of(x0))
        sources[1], sources[2], sources[3] = bytes_of(x1), bytes_of(x2), bytes_of(x3)
        sources[4], sources[5], sources[6] = bytes_of(x4), bytes_of(x5), bytes_of(x6)
        sources[7] = bytes_of(x7)
        var made = Sources[MOST_RESULTS](fill=bytes_of(y0))
        made[1], made[2], made[3] = bytes_of(y1), bytes_of(y2), bytes_of(y3)
        made[4], made[5] = bytes_of(y4), bytes_of(y5)
        var vectors = Sources[MOST_VECTORS](fill=bytes_of(v0))
        vectors[1], vectors[2], vectors[3] = bytes_of(v1), bytes_of(v2), bytes_of(v3)
        vectors[4], vectors[5] = bytes_of(v4), bytes_of(v5)
        var tensors = Results[finish].Tensors(fill=made[0])
        comptime for k in range(Results[finish].COUNT):
            tensors[k] = made[k]
        comptime for i in range(Results[finish].VECTORS):
            tensors[Results[finish].COUNT + i] = vectors[i]
        _reduce[target, kind, terms](
            _first[len(terms.dtypes)](sources),
            Results[finish](tensors),
            y0.shape()[0],
            Int(data(reduced)[unsafe_offset=0]),
            y0.shape()[1],
            ctx,
        )


@always_inline
def _first[most: Int, //, count: Int](given: Sources[most]) -> Sources[count]:
    """Takes the tensors that are there."""
    var found = Sources[count](fill=given[0])
    comptime for i in range(count):
        found[i] = given[i]
    return found
