"""Which tests run, where, and in which order.

A test marked ``nightly`` takes minutes and is skipped, unless pytest runs with ``--all``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # before any test imports triton; see test_levels.py

# The files that take longest where nothing is compiled yet, the longest first: pytest-xdist hands
# out files in this order (--no-loadscope-reorder), and the short ones fill the gaps at the end.
LONGEST = (
    "ops/test_targets.py",
    "ops/test_ops.py",
    "ptx/test_kernels.py",
    "graphs/test_models.py",
    "runtime/test_classifier.py",
    "test_bundled.py",
    "bridge/test_convert.py",
    "serve/test_server.py",
    "test_third_family.py",
    "graphs/test_lower.py",
    "bench/test_models.py",
    "test_levels.py",
    "bench/test_sparse.py",
    "bench/test_ops.py",
    "graphs/test_sparsity.py",
    "bridge/test_models.py",
    "serve/test_start.py",
    "serve/test_soak.py",
    "test_docs.py",
    "bridge/test_onnx_file.py",
    "bridge/test_aten.py",
    "bridge/test_programs.py",
    "runtime/test_executor.py",
    "bench/test_serve.py",
    "serve/test_dialects.py",
    "serve/test_fuzz.py",
    "serve/test_fronts.py",
    "test_install.py",
    "commands/test_weights.py",
    "commands/test_run_graph.py",
)
LAST = ("tests/ptx/test_machine.py", "tests/ptx/test_parts.py")
"""Their kernels are those of test_kernels.py: sooner, they would wait for their build."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the nightly tests too")
    parser.addoption("--gpu", action="store_true", help="run tests/ptx on the GPU that is here")
    parser.addoption("--kernels", type=Path, help="the program that tests/ptx/gpu.py says to build")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: takes minutes; needs --all")
    config.addinivalue_line("markers", "interpreter: of tests/ptx; a GPU does not report this")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ranks = {f"tests/{name}": rank for rank, name in enumerate(LONGEST)}
    others = len(ranks)
    ranks |= dict.fromkeys(LAST, others + 1)
    items.sort(key=lambda item: ranks.get(item.location[0], others))  # stable
    skipped = {}
    if not config.getoption("all"):
        skipped["nightly"] = "nightly: pytest --all runs it"
    if config.getoption("gpu"):
        skipped["interpreter"] = "a GPU does not report this"
    for item in items:
        for name, reason in skipped.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
