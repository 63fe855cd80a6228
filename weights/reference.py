"""torch and transformers, which networks are compared with, and what to say if they are missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from maxvision.common.console import way_to
from maxvision.common.errors import ModelError

PACKAGES = ("torch", "transformers")


@contextmanager
def references(what: str) -> Iterator[None]:
    """Runs what imports torch and transformers, and tells in one sentence if that fails.

    transformers imports its networks when they are first named, and torchvision with them if it is
    there; one that was made for another torch raises a RuntimeError in the middle of that.

    Args:
        what: What needs them, such as "weights verify"; it begins the sentence.

    Raises:
        ModelError: If one is missing, or they do not fit each other.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        chain: list[BaseException] = [error]
        while cause := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(cause)
        missing = next((e.name for e in chain if isinstance(e, ImportError) and e.name), None)
        if missing in PACKAGES:
            raise ModelError(
                f"{what} needs torch and transformers but {missing} is not installed;"
                f" {way_to('torch')}"
            ) from None
        reason = str(chain[-1]).partition("\n")[0]
        if "torchvision" in " ".join(map(str, chain)):
            raise ModelError(
                f"{what}: the installed torchvision does not fit torch {_version('torch')}"
                f" ({reason}); install the torchvision of that torch, or uninstall it: nothing here"
                " needs it"
            ) from error
        if not isinstance(error, ImportError):
            raise
        raise ModelError(
            f"{what}: transformers {_version('transformers')} cannot be imported ({reason});"
            f" {way_to('torch')}"
        ) from error


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
