"""How kernels are launched that may begin while the one ahead still runs."""

from max.gpu import grid_dim
from max.gpu.host import DeviceContext, Dim, FuncAttribute
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from std.builtin.device_passable import DevicePassable
from std.collections import OptionalReg

comptime FEW = 128
"""Blocks that a large GPU holds at once, about one a multiprocessor."""


@always_inline
def wait_ahead():
    """Waits for the kernel ahead, and lets the next one begin: before that beside few blocks.

    Beside many, blocks of the next kernel would take the place of this one's.
    """
    var few = Int32(grid_dim.x) <= Int32(FEW)
    if few:
        launch_dependent_grids()
    wait_on_dependent_grids()
    if not few:
        launch_dependent_grids()


@always_inline
def launch[
    Declared: TypeList[Trait=AnyType, ...],
    //,
    kernel: def(* args: * Declared) thin -> None,
    *Given: DevicePassable,
](
    ctx: DeviceContext,
    *args: *Given,
    grid_dim: Dim,
    block_dim: Dim,
    cluster_dim: OptionalReg[Dim] = None,
    shared: Int = 0,
    most_shared: Int = 0,
) raises:
    """Enqueues a kernel by programmatic dependent launch: it waits for the one ahead itself.

    Parameters:
        Declared: Types of the kernel's arguments.
        kernel: The kernel; `wait_on_dependent_grids` comes before it reads what others write.
        Given: Types of what is passed.

    Args:
        ctx: The GPU.
        args: The kernel's arguments.
        grid_dim: Blocks.
        block_dim: Threads of a block.
        cluster_dim: Blocks of a cluster.
        shared: Bytes of shared memory of a block, beside what the kernel declares.
        most_shared: Those of any launch of the kernel, if this one may take less.

    Raises:
        If the launch fails.
    """
    var limit = OptionalReg[FuncAttribute](None)
    if shared > 0:
        limit = FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(UInt32(max(shared, most_shared)))
    ctx.enqueue_function[kernel](
        *args,
        grid_dim=grid_dim,
        block_dim=block_dim,
        cluster_dim=cluster_dim,
        shared_mem_bytes=shared,
        attributes=pdl_launch_attributes(PDLLevel.OVERLAP_AT_END),
        func_attribute=limit,
    )
