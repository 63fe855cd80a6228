"""Copies into shared memory that a warp does not wait for: cp.async, from sm_80 on."""

from std.sys import inlined_assembly

from .operands import Data, Shared


@always_inline
def copy_async[
    dtype: DType, //, bytes: Int = 16, hint: StaticString = ""
](to: Shared[dtype], source: Data[dtype], inside: Bool):
    """Starts copying, or writes zeros.

    Parameters:
        dtype: Of the elements.
        bytes: 16, which pass the first-level cache by, or 8.
        hint: What the instruction says of the second-level cache.

    Args:
        to: Where to, aligned to the bytes.
        source: Where from, alike.
        inside: Whether there is anything to copy; else nothing is read.
    """
    comptime cache = "cg" if bytes == 16 else "ca"
    inlined_assembly[
        "cp.async." + cache + ".shared.global" + hint + " [$0], [$1], " + String(bytes) + ", $2;",
        NoneType,
        constraints="r,l,r,~{memory}",
    ](UInt32(Int(to)), source, Int32(bytes if inside else 0))


@always_inline
def commit_copies():
    """Ends a group of copies."""
    inlined_assembly["cp.async.commit_group;", NoneType, constraints="~{memory}"]()


@always_inline
def wait_copies[left: Int]():
    """Waits for groups of copies.

    Parameters:
        left: How many of the last ones are not waited for.
    """
    inlined_assembly[
        "cp.async.wait_group " + String(left) + ";", NoneType, constraints="~{memory}"
    ]()
