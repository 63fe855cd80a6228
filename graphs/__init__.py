"""MAX graphs of maxvision's ops: the networks, what feeds them and what runs them."""

from typing import Any

__all__ = ["Features", "Model", "Prediction", "load"]


def __getattr__(name: str) -> Any:
    """Imports the session, and with it MAX, when one of its names is first used."""
    if name in __all__:
        from graphs import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
