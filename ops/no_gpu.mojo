"""What stands for kernels of a GPU in a build for a CPU, which need not read them.

There the modules no_gpu.mojo are in the place of gpu.mojo, with its functions: nothing may
instantiate them.
"""

comptime REASON = "these ops were compiled for a CPU; a GPU's graph takes the folder ops itself"
"""What whoever instantiates one is told."""
