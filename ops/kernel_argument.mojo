"""What a struct needs so that a kernel can take it as an argument."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.reflection import reflect


trait KernelArgument(DevicePassable):
    """A struct that the host hands to a kernel byte by byte.

    A struct of nothing but pointers is best: LLVM then knows that those of a kernel's arguments
    are global memory. Each struct says itself that `device_type` is `Self`: where a trait does, `mojo
    doc` of Mojo 1.2.0 crashes.
    """

    def _to_device_type(self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        """Names the type for the errors of a launch.

        Returns:
            The name.
        """
        return String(reflect[Self].name())
