"""Attention without a score matrix in memory."""
