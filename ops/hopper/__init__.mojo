"""The parts of which kernels for Hopper (sm_90a) are made, one idea a file.

    ptx          the instructions, one function each
    barrier      a barrier in shared memory: arrivals, and the bytes that copies bring
    shared       a block's shared memory, how it is divided, and its 128-byte swizzle
    roles        which warps of a block multiply, and which bring what is multiplied
    pipeline     a ring of stages between a producer and consumers
    tma          tensor maps, and what copies tiles through them
    mma          wgmma: matrix descriptors, and products of a stage
    accumulator  which sums a thread holds
    epilogue     how the sums become the result, and leave through shared memory
    moments      sums of a result's rows, and the layer norm that the next product applies by them
    store        how a result leaves by the copy engine, and when its place is written again
    direct_store how results leave straight from the registers
    scheduler    which block computes what: persistent blocks, clusters that share a tile
    cluster      how blocks that share a tile add up their sums
    conv         an implicit GEMM's sizes, and how its tiles of pixels are loaded
    pixel_box    one box of pixels for all taps of a window
    window       the steps of K, and the producer, where x and filters have rings of their own
    mainloop     the loop over K of a consumer
    tile         a block that computes one tile: what it stages, and what its consumers do

Where CUTLASS 3 or the PTX manual has a name for a part, its file says which.
"""
