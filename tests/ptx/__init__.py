"""GPU kernels run without a GPU: their PTX, in an interpreter on numpy.

It mirrors nothing in the source, since a kernel's PTX is what the compiler makes of several files.
ptx.py reads it, translate.py turns it into functions by semantics.py, machine.py runs them on the
memory of memory.py and tensormaps.py; launches.py holds the kernels' arguments.
"""
