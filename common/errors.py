"""The mistakes a user can make, each told in one sentence and never as a traceback."""


class UserError(Exception):
    """Says what is wrong and what to do, in one sentence for the user."""


class ModelError(UserError):
    """A model that cannot be found, read, or run as asked."""


class DeviceError(UserError):
    """A device or dtype that this machine or this build does not have."""


class ImageError(UserError):
    """An image that cannot be read. The other images of a batch are not affected."""


class TooLargeError(ImageError):
    """An image that is larger than what is decoded."""


class ArgumentError(UserError):
    """An argument outside of what the function or command takes."""
