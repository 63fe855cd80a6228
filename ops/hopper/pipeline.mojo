"""A ring of stages in shared memory between a producer and its consumers.

Each stage has two barriers. `full` completes a phase when the producer has arrived and the bytes
it announced have come; `empty` when all consumers have read the stage. A producer goes

    acquire, expect, loads, advance          of the copy engine (TMA)
    acquire, stores, fence, commit, advance  by its own hand

and a consumer `wait, products, release, advance`. Both walk over the stages in the same order, each
with a copy of the ring that says where it is: the stage's index, and the parity of its phase.

CUTLASS calls this PipelineTmaAsync with its PipelineState; PTX ISA 8.0, section 9.7.12.15 (mbarrier).
"""

from .ptx import barrier_arrive, barrier_expect, barrier_init, barrier_wait, stores_read


struct Pipeline(TrivialRegisterPassable):
    """A ring of stages, and where a warp is in it."""

    comptime BARRIERS = 16
    """Bytes of a stage's two barriers."""

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
    var index: UInt32
    """The stage that is next."""
    var phase: UInt32
    """Parity of the next stage's `full`; its `empty` is a phase behind."""
    var prefetched: Int32
    """Of a producer: stages that it need not wait for, as `prefetch` began to fill them."""

    @always_inline
    def __init__(out self, data: UInt32, barriers: UInt32, *, stages: Int32, bytes: UInt32):
        """Begins at the first stage.

        Args:
            data: Address of the stages.
            barriers: Address of the barriers, `BARRIERS` bytes a stage.
            stages: How many stages there are.
            bytes: From a stage to the next.
        """
        self.data, self.bytes, self.stages = data, bytes, UInt32(stages)
        self.full, self.empty = barriers, barriers + 8 * UInt32(stages)
        self.index = self.phase = 0
        self.prefetched = 0

    @always_inline
    def init(self, *, consumers: Int, producers: Int = 1):
        """Prepares the barriers, by one thread; `fence_barrier_init` has to follow.

        Args:
            consumers: How many arrivals release a stage.
            producers: How many arrivals fill it.
        """
        for i in range(self.stages):
            barrier_init(self.full + 8 * i, UInt32(producers))
            barrier_init(self.empty + 8 * i, UInt32(consumers))

    @always_inline
    def stage(self) -> UInt32:
        """Gives the address of the next stage.

        Returns:
            In shared memory.
        """
        return self.data + self.index * self.bytes

    @always_inline
    def barrier(self) -> UInt32:
        """Gives the address of the next stage's `full`, which loads are to tell of their bytes.

        Returns:
            In shared memory.
        """
        return self.full + 8 * self.index

    @always_inline
    def advance(mut self):
        """Goes on to the stage after."""
        self.index += 1
        if self.index == self.stages:
            self.index = 0
            self.phase ^= 1

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
        barrier_wait(self.empty + 8 * self.index, self.phase ^ 1)

    @always_inline
    def expect(self, bytes: UInt32):
        """Announces what loads will bring into the stage.

        Args:
            bytes: Of all of them.
        """
        barrier_expect(self.barrier(), bytes)

    @always_inline
    def commit(self):
        """Declares the stage filled, or its part of it, where nothing was announced."""
        barrier_arrive(self.barrier())

    @always_inline
    def prefetch(mut self, stages: Int32) -> Int32:
        """Allows the first stages to be filled before the kernel ahead is done.

        What is loaded then has to be constant, such as weights: the kernel ahead must not write it.
        `acquire_or_prefetched` tells later which stages have that part already.

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
        barrier_wait(self.barrier(), self.phase)

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
        barrier_arrive(self.empty + 8 * index)


struct Storing[count: Int](TrivialRegisterPassable):
    """The stages from which the copy engine still stores a result.

    A consumer's first thread releases them late, under the next tile's first products.

    Parameters:
        count: How many stages a result takes.
    """

    var first: UInt32
    """The first of them, and one more; 0 if there are none."""

    @always_inline
    def __init__(out self):
        """Begins with none."""
        self.first = 0

    @always_inline
    def begin(mut self, pipeline: Pipeline):
        """Notes that the next stages will be stored.

        Args:
            pipeline: Where the consumer is.
        """
        self.first = pipeline.index + 1

    @always_inline
    def release(mut self, pipeline: Pipeline):
        """Gives the stages back, once the copy engine has read them.

        Args:
            pipeline: Of the stages.
        """
        if self.first != 0:
            stores_read()
            comptime for i in range(Self.count):
                pipeline.release((self.first - 1 + UInt32(i)) % pipeline.stages)
            self.first = 0


struct StoringStage(TrivialRegisterPassable):
    """The stage, of any ring, from which the copy engine still stores a result.

    For a consumer that stores a stage at a time: its first thread releases each before the next.
    """

    var empty: UInt32
    """Address of the stage's `empty`; 0 if there is none."""

    @always_inline
    def __init__(out self):
        """Begins with none."""
        self.empty = 0

    @always_inline
    def begin(mut self, pipeline: Pipeline):
        """Notes that the next stage is being stored.

        Args:
            pipeline: Where the consumer is.
        """
        self.empty = pipeline.empty + 8 * pipeline.index

    @always_inline
    def release(self):
        """Gives the stage back, once the copy engine has read it."""
        if self.empty != 0:
            stores_read()
            barrier_arrive(self.empty)
