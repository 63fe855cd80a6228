"""The dialects that the server speaks, one module each, with a ``router``."""
