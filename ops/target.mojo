"""What the GPU that is compiled for can do."""

from std.sys.info import _accelerator_arch

comptime IS_HOPPER = "sm_90" in _accelerator_arch()
"""Whether it has wgmma and the copy engine's im2col mode (H100, H200)."""
comptime IS_NVIDIA = "sm_" in _accelerator_arch()
"""Whether it is one of NVIDIA's."""
