"""What the GPU that is compiled for can do."""

from max.gpu.host.info import GPUInfo
from std.sys.info import _accelerator_arch

comptime IS_HOPPER = "sm_90" in _accelerator_arch()
"""Whether it has wgmma and the copy engine's im2col mode (H100, H200)."""
comptime IS_NVIDIA = "sm_" in _accelerator_arch()
"""Whether it is one of NVIDIA's."""
comptime HAS_MMA = _has_mma()
"""Whether it multiplies 16-bit numbers and TF32 by mma.sync: NVIDIA's from sm_80 on."""
comptime HAS_MFMA = "gfx942" in _accelerator_arch()
"""Whether it multiplies 16-bit numbers by mfma, in warps of 64 (CDNA3: MI300)."""


def _has_mma() -> Bool:
    """Looks the architecture up; false where the target is no GPU."""
    comptime if IS_NVIDIA:
        return GPUInfo.from_name[_accelerator_arch()]().compute >= 8.0
    else:
        return False
