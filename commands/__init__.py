"""The command lines: parse, call, print."""
