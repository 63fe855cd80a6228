"""Measurements: each prints a table, writes JSON, and names its peers."""
