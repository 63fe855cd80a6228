"""Measurements: each prints a table, writes JSON, and names its peers."""

import os

# MAX takes its whole pool, 90 % of a GPU unless told otherwise, at the first capture; torch runs in
# the same process and needs its share, and up to three engines of a comparison have a pool each.
# Read when the device is opened, so it is set before.
os.environ.setdefault("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT", "30")

# Without a GPU Triton's kernels are interpreted (bench levels, which sees to --device cpu itself).
# Read when triton is imported, which torch does too, so it is set before.
if not any(os.path.exists(each) for each in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
