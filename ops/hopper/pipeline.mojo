"""A ring of stages in shared memory between a producer and its consumers.

Each stage has two barriers. `full` completes a phase when the producer has arrived and the bytes
it announced have come; `empty` when all consumers have read the stage. A producer goes

    acquire, expect, loads, advance          of the copy engine (TMA)
    acquire, stores, fence, commit, advance  by its own hand

and a consumer `wait, products, release, advance`. Both walk over the stages in the same order, each
with a copy of the ring that says where it is: the stage's index, and the parity of its phase.

A stage may have parts that consumers wait for one by one, such as keys and values: each part has a
`full` of its own, and is seen through `part`; the stage has one `empty`.

CUTLASS calls this PipelineTmaAsync with its PipelineState.
"""

from max.gpu import thread_idx

from .barrier import Barrier
from .ptx import arrive_threads, fence_barrier_init, sync_threads
from .shared import WARPGROUP, SharedAllocator, bytes_until


struct Pipeline(TrivialRegisterPassable):
    """A ring of stages, and where a warp is in it."""

    comptime BARRIERS = 2 * Barrier.BYTES
    """Bytes of a stage's two barriers."""
    comptime PART = Barrier.BYTES
    """Bytes of the `full` barrier of each part of a stage but the first."""

    var data: UInt32
    """Address of the first stage in shared memory."""
    var bytes: UInt32
    """From a stage to the next."""
    var full: UInt32
    """Address of the first stage's `full`; those of the other stages follow, 8 bytes each."""
    var empty: UInt32
    """Address of the first stage's `empty`, likewise."""
    var stages: UInt32
    """How many stages there are."""
    var parts: UInt32
    """How many parts a stage has; `full` of the next part follow those of all stages."""
    var index: UInt32
    """The stage that is next."""
    var phase: UInt32
    """Parity of the next stage's `full`; its `empty` is a phase behind."""
    var prefetched: Int32
    """Of a producer: stages that it need not wait for, as `prefetch` began to fill them."""

    @always_inline
    def __init__(
        out self,
        data: UInt32,
        barriers: UInt32,
        *,
        stages: Int32,
        bytes: UInt32,
        parts: Int32 = 1,
    ):
        """Begins at the first stage.

        Args:
            data: Address of the stages.
            barriers: Address of the barriers, `BARRIERS` bytes a stage, and `PART` for each part but
                the first.
            stages: How many stages there are.
            bytes: From a stage to the next.
            parts: How many parts of a stage have a `full` of their own.
        """
        self.data, self.bytes, self.stages = data, bytes, UInt32(stages)
        self.parts = UInt32(parts)
        self.full, self.empty = barriers, barriers + 8 * UInt32(parts * stages)
        self.index = self.phase = 0
        self.prefetched = 0

    @always_inline
    def __init__(
        out self,
        data: UInt32,
        mut memory: SharedAllocator,
        *,
        stages: Int32,
        bytes: UInt32,
        parts: Int = 1,
        rings: Int = 1,
    ):
        """Takes room for the barriers of a ring, or of several which follow one another.

        Args:
            data: Address of the stages; those of the next ring follow.
            memory: What the barriers are taken from.
            stages: How many stages each ring has.
            bytes: From a stage to the next.
            parts: How many parts of a stage have a `full` of their own.
            rings: How many rings there are; `of_consumer` finds those behind the first.
        """
        self = Self(data, memory.end, stages=stages, bytes=bytes, parts=Int32(parts))
        _ = memory.take(UInt32(rings) * self._barriers())

    @always_inline
    def _barriers(self) -> UInt32:
        """Counts the bytes of the ring's barriers."""
        return self.stages * (UInt32(Self.BARRIERS - Self.PART) + self.parts * UInt32(Self.PART))

    @staticmethod
    def block_bytes(*, stages: Int, bytes: Int) -> Int:
        """Counts the bytes of shared memory of a block that has nothing but a ring.

        Args:
            stages: How many stages there are.
            bytes: From a stage to the next.

        Returns:
            What `of_block` divides, and what aligning it may take.
        """
        var memory = SharedAllocator(0)
        _ = Self._alone(memory, stages=stages, bytes=bytes)
        return bytes_until(memory.end)

    @staticmethod
    @always_inline
    def _alone(mut memory: SharedAllocator, *, stages: Int, bytes: Int) -> Self:
        """Takes the stages, and the barriers behind them."""
        var data = memory.take(stages * bytes)
        return Self(data, memory, stages=Int32(stages), bytes=UInt32(bytes))

    @staticmethod
    @always_inline
    def of_block[stages: Int](data: UInt32, *, bytes: Int, consumers: Int, threads: Int) -> Self:
        """Makes the only ring of a block, by all threads.

        Parameters:
            stages: How many stages there are.

        Args:
            data: Address of the block's shared memory.
            bytes: From a stage to the next.
            consumers: How many arrivals release a stage.
            threads: Of the block; they meet.

        Returns:
            The ring, its barriers prepared.
        """
        var memory = SharedAllocator(data)
        var ring = Self._alone(memory, stages=stages, bytes=bytes)
        if thread_idx.x == 0:
            ring.init[stages](consumers=consumers)
            fence_barrier_init()
        sync_threads(0, UInt32(threads))
        return ring

    @always_inline
    def init[count: Int = 0](self, *, consumers: Int, producers: Int = 1):
        """Prepares the barriers, by one thread; `fence_barrier_init` has to follow.

        Parameters:
            count: The stages, if it is known at compile time how many there are: a loop would take
                longer.

        Args:
            consumers: How many arrivals release a stage.
            producers: How many arrivals fill it, or each of its parts.
        """
        comptime if count > 0:
            comptime for i in range(count):
                self._init(UInt32(i), consumers, producers)
        else:
            for i in range(self.stages):
                self._init(i, consumers, producers)

    @always_inline
    def _init(self, index: UInt32, consumers: Int, producers: Int):
        for part in range(self.parts):
            Barrier(self.full + 8 * (part * self.stages + index)).init(producers)
        Barrier(self.empty + 8 * index).init(consumers)

    @always_inline
    def part(self, number: UInt32, at: UInt32) -> Self:
        """Views a part of the stages, to fill it or to wait for it.

        Args:
            number: Of the part; this is the first, 0.
            at: Where it begins in a stage.

        Returns:
            The part's stages and `full`; `acquire` and `release` are of whole stages as before.
        """
        var view = self
        view.data += at
        view.full += 8 * number * self.stages
        return view

    @always_inline
    def of_consumer(self, number: UInt32) -> Self:
        """Finds the ring of another consumer, where each has one of its own.

        Args:
            number: Of the consumer; this ring is that of the first, 0.

        Returns:
            Its ring.
        """
        var ring = self
        ring.data += number * (self.stages * self.bytes)
        ring.full += number * self._barriers()
        ring.empty += number * self._barriers()
        return ring

    @always_inline
    def stage(self) -> UInt32:
        """Gives the address of the next stage.

        Returns:
            In shared memory.
        """
        return self.data + self.index * self.bytes

    @always_inline
    def barrier(self) -> Barrier:
        """Gives the next stage's `full`, which loads are to tell of their bytes.

        Returns:
            The barrier.
        """
        return Barrier(self.full + 8 * self.index)

    @always_inline
    def stage(self, index: Int32) -> UInt32:
        """Gives the address of a stage.

        Args:
            index: Which.

        Returns:
            In shared memory.
        """
        return self.data + UInt32(index) * self.bytes

    @always_inline
    def barrier(self, index: Int32) -> Barrier:
        """Gives a stage's `full`.

        Args:
            index: Which.

        Returns:
            The barrier.
        """
        return Barrier(self.full + 8 * UInt32(index))

    @always_inline
    def advance(mut self):
        """Goes on to the stage after."""
        self.index += 1
        if self.index == self.stages:
            self.index = 0
            self.phase ^= 1

    @always_inline
    def advance(mut self, count: UInt32):
        """Goes on by any number of stages.

        Args:
            count: How many.
        """
        var index = self.index + count
        self.index = index % self.stages
        self.phase ^= index // self.stages & 1

    @always_inline
    def follow(mut self, other: Self):
        """Goes to the stage at which another ring is.

        Args:
            other: Of as many stages.
        """
        self.index, self.phase = other.index, other.phase

    @always_inline
    def previous(self) -> UInt32:
        """Finds the stage before the next one.

        Returns:
            Its index, to `release`.
        """
        return self.index - 1 if self.index > 0 else self.stages - 1

    # The producer's side

    @always_inline
    def acquire(self):
        """Waits until the consumers have read what the stage held."""
        Barrier(self.empty + 8 * self.index).wait(self.phase ^ 1)

    @always_inline
    def expect(self, bytes: UInt32):
        """Announces what loads will bring into the stage.

        Args:
            bytes: Of all of them.
        """
        self.barrier().expect(bytes)

    @always_inline
    def expect(self, index: Int32, bytes: UInt32):
        """Announces what loads will bring into a stage.

        Args:
            index: Which.
            bytes: Of all of them.
        """
        self.barrier(index).expect(bytes)

    @always_inline
    def expect_first(self, bytes: UInt32, count: Int32) -> Int32:
        """Announces what loads will bring into the first stages, before there is anything to load.

        Args:
            bytes: Of the loads of a stage.
            count: How many stages the block will fill.

        Returns:
            How many of them have been announced: they are neither acquired nor expected again.
        """
        var stages = min(count, Int32(self.stages))
        for i in range(stages):
            self.expect(i, bytes)
        return stages

    @always_inline
    def commit(self):
        """Declares the stage filled, or its part of it, where nothing was announced."""
        self.barrier().arrive()

    @always_inline
    def prefetch(mut self, stages: Int32) -> Int32:
        """Allows the first stages to be filled before the kernel ahead is done.

        What is loaded then has to be constant, such as weights: the kernel ahead must not write it.
        For each of the stages 0, 1, ... the caller announces all that it will hold and loads what is
        constant; `acquire_or_prefetched` tells later which stages have that part already.

        Args:
            stages: How many stages the block will fill.

        Returns:
            How many of them there is room for.
        """
        self.prefetched = min(stages, Int32(self.stages))
        return self.prefetched

    @always_inline
    def acquire_or_prefetched(mut self) -> Bool:
        """Waits for the stage, unless it was prefetched.

        Returns:
            Whether it was not: then all of it is to be announced and loaded.
        """
        if self.prefetched > 0:
            self.prefetched -= 1
            return False
        self.acquire()
        return True

    # A consumer's side

    @always_inline
    def wait(self):
        """Waits until the stage is filled."""
        self.barrier().wait(self.phase)

    @always_inline
    def wait(self, index: Int32):
        """Waits until a stage is filled for the first time.

        Args:
            index: Which.
        """
        self.barrier(index).wait()

    @always_inline
    def wait_first(self, count: Int32):
        """Waits until the first stages are filled for the first time.

        Args:
            count: How many.
        """
        for i in range(count):
            self.barrier(i).wait()

    @always_inline
    def release(self):
        """Gives the stage back; by one thread of a consumer, when all of them have read it."""
        self.release(self.index)

    @always_inline
    def release(self, index: UInt32):
        """Gives a stage before this one back.

        Args:
            index: Which.
        """
        Barrier(self.empty + 8 * index).arrive()


struct OrderedSequence(TrivialRegisterPassable):
    """Has consumers take turns, so that one's products run under what the others compute.

    A consumer goes `wait, products, arrive`. CUTLASS calls this OrderedSequenceBarrier.
    """

    comptime THREADS = UInt32(2 * WARPGROUP)
    """The consumer that waits, and the one before it, which arrives."""

    var own: UInt32
    """The barrier at which this consumer waits."""
    var next: UInt32
    """The barrier of the consumer after it."""

    @always_inline
    def __init__(out self, consumer: Int32, consumers: Int32):
        """Begins with the first consumer's turn, for which the last arrives.

        Args:
            consumer: Number of this one.
            consumers: How many there are; they take as many of `sync_threads`' barriers, from 1 on.
        """
        self.own, self.next = UInt32(consumer) + 1, UInt32(consumer) + 2
        if consumer == consumers - 1:
            self.next = 1
            self.arrive()

    @staticmethod
    @always_inline
    def own_barrier(consumer: Int32, consumers: Int32) -> UInt32:
        """Numbers a barrier of a consumer's own threads, after those at which it takes turns.

        Args:
            consumer: Its number.
            consumers: How many there are.

        Returns:
            One of `sync_threads`.
        """
        return UInt32(consumer) + UInt32(consumers) + 1

    @always_inline
    def wait(self):
        """Waits for this consumer's turn; all of its threads call it."""
        sync_threads(self.own, Self.THREADS)

    @always_inline
    def arrive(self):
        """Passes the turn on; all of the consumer's threads call it."""
        arrive_threads(self.next, Self.THREADS)
