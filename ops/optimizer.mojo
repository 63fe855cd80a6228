"""Steps of optimizers: all parameters of a network in one launch, where torch's tensors lie.

Stochastic gradient descent, for parameters with one state or none, where g' = sign g + decay w:

    w -= lr d;  d = m, or g' + look m (Nesterov);  m = keep m + take g';  without m, d = g'

Adam, for those with two or three (Kingma and Ba 2015, arXiv:1412.6980); the third is the largest v so
far (Reddi et al. 2018, arXiv:1904.09237), and shrink is AdamW's (Loshchilov and Hutter 2019,
arXiv:1711.05101):

    w -= shrink w;  m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2
    w -= step m / (root sqrt(v or the largest v) + eps)

Row t of places[T, 7] says where parameter t lies, then its gradient and its three states, as
addresses, 0 for states that are not there; then how many numbers each of these has, and how many
chunks those before it have together. Row t of settings[T, 10] has the numbers of the formulas: lr,
sign, decay, keep, take and look, or step, sign, decay, shrink, beta1, 1 - beta1, beta2, 1 - beta2,
root and eps. So neither a schedule of the learning rate, nor another step, nor another network is
compiled anew.

Computed in float32, or in float64 where the tensors are, and rounded once. Bound by memory. A CPU
computes chunks on all cores. A GPU's blocks take chunks by turns, and search places for whose they are.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu import block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.primitives.grid_controls import launch_dependent_grids, wait_on_dependent_grids
from std.math import ceildiv, sqrt
from std.sys import simd_width_of, size_of
from std.utils.static_tuple import StaticTuple

from .device import Device
from .launch import launch
from .operands import F32, ON_CPU, Data, Global, data, narrowed, widened
from .parallel import over_cores

comptime F64 = DType.float64
"""What some tensors on a CPU are."""
comptime CHUNK = 4096
"""Numbers that a block of a GPU, or a core, updates at a time; bridge/optimizers.py counts in these."""
comptime THREADS = 256
"""Threads of a GPU's block."""
comptime BLOCKS = 8
"""Blocks of a multiprocessor: as many as it has room for."""
comptime STATES = 3
"""Of a parameter, at most."""
comptime PLACES = 4 + STATES
"""Numbers of a row of places."""
comptime SETTINGS = 10
"""Numbers of a row of settings."""
comptime Places = Data[DType.int64]
"""Where parameters lie."""
comptime Settings[work: DType] = StaticTuple[Scalar[work], SETTINGS]
"""The settings of a parameter.

Parameters:
    work: What is computed in.
"""
comptime WORK[dtype: DType] = F64 if dtype == F64 else F32
"""What tensors are computed in, and settings come in.

Parameters:
    dtype: Of the tensors.
"""


struct Chunk[dtype: DType](TrivialRegisterPassable):
    """A part of a parameter, and of what belongs to it.

    Parameters:
        dtype: Of the tensors.
    """

    var tensor: Int
    """Which parameter it is of."""
    var length: Int
    """Numbers of the part."""
    var states: Int
    """How many the parameter has."""
    var aligned: Bool
    """Whether vectors of 16 bytes may be read."""
    var tensors: StaticTuple[Global[Self.dtype], 2 + STATES]
    """The parts of the parameter, of its gradient and of its states."""

    @always_inline
    def __init__(out self, places: Places, tensors: Int, number: Int):
        """Finds it.

        Args:
            places: Of all parameters.
            tensors: How many parameters there are.
            number: Of the chunk.
        """
        var low, high = 0, tensors - 1
        while low < high:
            var middle = (low + high + 1) // 2
            if Int(places[unsafe_offset=middle * PLACES + PLACES - 1]) <= number:
                low = middle
            else:
                high = middle - 1
        var row = places.unsafe_offset(low * PLACES)
        var first = (number - Int(row[unsafe_offset=PLACES - 1])) * CHUNK
        self.tensor, self.states, self.aligned = low, 0, True
        self.length = min(CHUNK, Int(row[unsafe_offset=PLACES - 2]) - first)
        self.tensors = StaticTuple[Global[Self.dtype], 2 + STATES](
            fill=Global[Self.dtype](unsafe_from_address=Int(row[unsafe_offset=0]))
        )
        comptime for i in range(2 + STATES):
            var address = Int(row[unsafe_offset=i])
            if address != 0:
                self.aligned &= address % 16 == 0
                self.states += Int(i >= 2)
                var place = Global[Self.dtype](unsafe_from_address=address)
                self.tensors[i] = place.unsafe_offset(first)


@always_inline
def chunks(places: Places, tensors: Int) -> Int:
    """Counts the chunks of all parameters.

    Args:
        places: Of the parameters.
        tensors: How many they are; at least one.

    Returns:
        Their number.
    """
    var last = places.unsafe_offset((tensors - 1) * PLACES)
    return Int(last[unsafe_offset=PLACES - 1]) + ceildiv(Int(last[unsafe_offset=PLACES - 2]), CHUNK)


@always_inline
def of_tensor[work: DType, //](settings: Data[work], tensor: Int) -> Settings[work]:
    """Reads the settings of a parameter.

    Parameters:
        work: What is computed in.

    Args:
        settings: Of all.
        tensor: Which.

    Returns:
        The numbers.
    """
    var found = Settings[work](fill=0)
    comptime for i in range(SETTINGS):
        found[i] = settings[unsafe_offset=tensor * SETTINGS + i]
    return found


struct Values[work: DType, width: Int, states: Int](TrivialRegisterPassable):
    """Numbers of a parameter, of its gradient and of its states.

    Parameters:
        work: What is computed in.
        width: Lanes.
        states: Of the parameter.
    """

    var held: StaticTuple[SIMD[Self.work, Self.width], 2 + Self.states]
    """Them, in that order."""

    @always_inline
    def __init__[dtype: DType, //, align: Int](out self, chunk: Chunk[dtype], at: Int):
        """Loads them.

        Parameters:
            dtype: Of the tensors.
            align: Bytes that they are aligned to.

        Args:
            chunk: Where they are.
            at: The first one.
        """
        self.held = StaticTuple[SIMD[Self.work, Self.width], 2 + Self.states](fill=0)
        comptime for i in range(2 + Self.states):
            var place = chunk.tensors[i].unsafe_offset(at)
            var value = place.unsafe_load[width=Self.width, alignment=align]()
            comptime if Self.work == F32:
                self.held[i] = rebind[SIMD[Self.work, Self.width]](widened(value))
            else:
                self.held[i] = value.cast[Self.work]()

    @always_inline
    def store[dtype: DType, //, align: Int](self, chunk: Chunk[dtype], at: Int):
        """Stores the parameter and its states.

        Parameters:
            dtype: Of the tensors.
            align: Bytes that they are aligned to.

        Args:
            chunk: Where to.
            at: The first one.
        """
        comptime for i in range(2 + Self.states):
            comptime if i != 1:
                var place = chunk.tensors[i].unsafe_offset(at)
                comptime if Self.work == F32:
                    var wide = rebind[SIMD[F32, Self.width]](self.held[i])
                    place.unsafe_store[alignment=align](narrowed[dtype](wide))
                else:
                    place.unsafe_store[alignment=align](self.held[i].cast[dtype]())

    @always_inline
    def step(mut self, settings: Settings[Self.work]):
        """Updates them.

        Args:
            settings: Of the parameter.
        """
        var w, g = self.held[0], self.held[1] * settings[1]
        if settings[2] != 0:
            g += settings[2] * w
        comptime if Self.states < 2:
            comptime if Self.states > 0:
                var m = settings[3] * self.held[2] + settings[4] * g
                self.held[2] = m
                g = m if settings[5] == 0 else g + settings[5] * m
            w -= settings[0] * g
        else:
            if settings[3] != 0:
                w -= settings[3] * w
            var m = settings[4] * self.held[2] + settings[5] * g
            var v = settings[6] * self.held[3] + settings[7] * g * g
            self.held[2], self.held[3] = m, v
            comptime if Self.states > 2:
                var most = self.held[4]
                v = (most.gt(v) | most.ne(most)).select(most, v)
                self.held[4] = v
            w -= settings[0] * m / (settings[8] * sqrt(v) + settings[9])
        self.held[0] = w


def step_cpu[dtype: DType](places: Places, settings: Data[WORK[dtype]], tensors: Int):
    """Updates all parameters on all cores.

    Parameters:
        dtype: Of the tensors: float32, bfloat16 or float64.

    Args:
        places: Where they lie.
        settings: Of each.
        tensors: How many there are.
    """
    comptime work = WORK[dtype]
    comptime width = simd_width_of[work]()
    comptime align = size_of[dtype]()

    def task(number: Int) {imm}:
        var chunk = Chunk[dtype](places, tensors, number)
        var numbers = of_tensor(settings, chunk.tensor)
        comptime for states in range(1 + STATES):
            if chunk.states == states:
                var whole = chunk.length // width * width
                for at in range(0, whole, width):
                    var values = Values[work, width, states].__init__[align=align](chunk, at)
                    values.step(numbers)
                    values.store[align](chunk, at)
                for at in range(whole, chunk.length):
                    var values = Values[work, 1, states].__init__[align=align](chunk, at)
                    values.step(numbers)
                    values.store[align](chunk, at)

    over_cores(task, chunks(places, tensors))


@__name(t"optimizer_step_{dtype}")
def step_kernel[dtype: DType](places: Places, settings: Data[WORK[dtype]], tensors: Int32):
    """Updates chunks by turns.

    Parameters:
        dtype: Of the tensors.

    Args:
        places: Where the parameters lie.
        settings: Of each.
        tensors: How many there are.
    """
    comptime wide = 16 // size_of[dtype]()
    wait_on_dependent_grids()
    launch_dependent_grids()
    var end = chunks(places, Int(tensors))
    var number = Int(block_idx.x)
    while number < end:
        var chunk = Chunk[dtype](places, Int(tensors), number)
        var numbers = of_tensor(settings, chunk.tensor)
        comptime for states in range(1 + STATES):
            comptime for width in [wide, 1]:
                if chunk.states == states and chunk.aligned == (width == wide):
                    _update[dtype, states, width](chunk, numbers)
        number += Int(grid_dim.x)


@always_inline
def _update[
    dtype: DType, states: Int, width: Int
](chunk: Chunk[dtype], numbers: Settings[WORK[dtype]]):
    """Updates a chunk: vectors, then the single numbers that are left.

    A thread loads several vectors before it computes. What it lacks is the first vector again: with a
    branch around each load, loads would wait for one another.
    """
    comptime pieces = 4 if width * size_of[dtype]() == 16 and size_of[dtype]() == 4 else 2
    comptime align = width * size_of[dtype]()
    var t = Int(thread_idx.x)
    var vectors = chunk.length // width
    for first in range(0, vectors, pieces * THREADS):
        var places = Array[Int, pieces](fill=0)
        var values = Array[Values[WORK[dtype], width, states], pieces](
            fill=Values[WORK[dtype], width, states].__init__[align=align](chunk, 0)
        )
        comptime for piece in range(pieces):
            var vector = first + piece * THREADS + t
            places[piece] = vector
            var at = vector * width if vector < vectors else 0
            values[piece] = Values[WORK[dtype], width, states].__init__[align=align](chunk, at)
        comptime for piece in range(pieces):
            values[piece].step(numbers)
            if places[piece] < vectors:
                values[piece].store[align](chunk, places[piece] * width)
    var at = vectors * width + t
    if at < chunk.length:
        var value = Values[WORK[dtype], 1, states].__init__[align=size_of[dtype]()](chunk, at)
        value.step(numbers)
        value.store[size_of[dtype]()](chunk, at)


def step_gpu[
    dtype: DType
](places: Places, settings: Data[WORK[dtype]], tensors: Int, ctx: DeviceContext) raises:
    """Enqueues a step.

    Parameters:
        dtype: Of the tensors.

    Args:
        places: Where the parameters lie.
        settings: Of each.
        tensors: How many there are.
        ctx: The GPU.

    Raises:
        If the launch fails.
    """
    launch[step_kernel[dtype]](
        ctx,
        places,
        settings,
        Int32(tensors),
        grid_dim=BLOCKS * Device(ctx).multiprocessors,
        block_dim=THREADS,
    )


# Ops


@register("optimizer_step")
struct OptimizerStep:
    """Takes a step with all parameters; see above."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        done: OutputTensor[dtype=F32, rank=1, ...],
        places: InputTensor[dtype=DType.int64, rank=2, ...],
        settings: InputTensor[dtype=WORK[dtype], rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        """Runs the op.

        Parameters:
            target: "cpu" or "gpu".
            dtype: Of the parameters.

        Args:
            done: Nothing: a graph has to give something.
            places: Where the parameters lie [T, 7].
            settings: Of each [T, 10].
            ctx: The device.

        Raises:
            If a launch fails.
        """
        var tensors = places.shape()[0]
        if tensors == 0:
            return
        comptime if target == "cpu":
            comptime assert (
                ON_CPU[dtype] or dtype == F64
            ), "optimizer_step: a CPU expects float32, bfloat16 or float64"
            step_cpu[dtype](data(places), data(settings), tensors)
        else:
            comptime assert dtype != F64, "optimizer_step: a GPU expects no float64"
            step_gpu[dtype](data(places), data(settings), tensors, ctx)
