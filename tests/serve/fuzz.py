"""Fuzzes a server by its description and its socket: ``python -m tests.serve.fuzz --seconds 600``.

Exit code 1 if it answered 5xx, hung, restarted its model or is not ready afterwards.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.serve.attacks import attack
from tests.serve.conftest import MODEL
from tests.serve.dialects import JSON
from tests.serve.dialects import MODEL as MODEL_NAME
from tests.serve.started import Server, picture, serving

PARALLEL = 4


def operations(server: Server) -> list[Any]:
    """Lists what the description of a server offers, without what is not its business."""
    import schemathesis

    described = server.client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(described)
    schema.config.update(base_url=server.url)
    return [each.ok() for each in schema.get_all_operations()]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Lists the paths of all values within JSON."""
    if not isinstance(value, (dict, list)):
        return [at]
    within = value.items() if isinstance(value, dict) else enumerate(value)
    return [at] * bool(at) + [path for key, each in within for path in places(each, (*at, key))]


def changed(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """Puts another value at a path of JSON, or none: Ellipsis takes it away."""
    if not path:
        return other
    made = value.copy()
    if len(path) == 1 and other is ...:
        del made[path[0]]
    else:
        made[path[0]] = changed(value[path[0]], path[1:], other)
    return made


def nearly_right(operation: Any) -> Any:
    """Makes the strategy of an operation's example with one value changed; None without one."""
    from hypothesis import strategies as st

    content = operation.definition.raw.get("requestBody", {}).get("content", {})
    example = content.get(JSON, {}).get("example")
    if example is None:
        return None
    leaf = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text()
    )
    other = st.just(...) | st.recursive(
        leaf, lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=8
    )
    bodies = st.builds(changed, st.just(example), st.sampled_from(places(example)), other)
    model = {"model": MODEL_NAME} if "{model}" in operation.path else None
    return bodies.map(
        lambda body: operation.Case(body=body, media_type=JSON, path_parameters=model)
    )


def try_operation(operation: Any, examples: int, seed: int) -> None:
    """Asks an operation for what its description allows, what it does not, and nearly an example.

    Raises:
        Exception: schemathesis's, if an answer is 5xx or not as described.
    """
    import hypothesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    either = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if operation.method != "get":
        either |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    if (near := nearly_right(operation)) is not None:
        either |= near

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @hypothesis.seed(seed)
    @given(case=either)
    def run(case: Any) -> None:
        case.call_and_validate(checks=checks, timeout=30)

    run()


def try_sockets(server: Server, seeds: range) -> Counter[str]:
    """Sends what belongs to each seed, several at once; counts the statuses of each kind.

    Raises:
        AssertionError: If a status is 5xx, or the server does not answer afterwards.
    """
    host, port = server.url.removeprefix("http://").split(":")
    seen: Counter[str] = Counter()
    with ThreadPoolExecutor(PARALLEL) as pool:
        for seed, (kind, came) in zip(
            seeds, pool.map(lambda seed: attack((host, int(port)), seed), seeds), strict=True
        ):
            assert all(status < 500 for status in came), f"seed {seed}, {kind}: {came}"
            seen.update(f"{kind} {status}" for status in came or ["closed"])
    check(server)
    return seen


def check(server: Server) -> None:
    """Looks whether a server is as it should be after an attack.

    Raises:
        AssertionError: If it is not.
    """
    answer = server.client.post("/", content=picture((9, 9, 9)))
    assert answer.status_code == 200, answer.text
    assert server.metric("maxvision_worker_starts") == 1
    server.until(lambda: server.metric("maxvision_images_in_flight") == 0, "an end of images", 10)
    log = server.log.read_text()
    assert "Traceback" not in log, log
    assert "Error" not in log, log


def main() -> int:
    """Fuzzes for a time; says what was done."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--examples", type=int, default=50, help="of an operation and round")
    parser.add_argument("--attacks", type=int, default=1000, help="on the socket, a round")
    options = parser.parse_args()
    begun, rounds, seen = time.monotonic(), 0, Counter[str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving([*MODEL, "--body-timeout=2"], Path(folder, "log")) as server,
    ):
        every = operations(server)
        while time.monotonic() - begun < options.seconds:
            seed = options.seed + rounds
            seen += try_sockets(server, range(seed * options.attacks, (seed + 1) * options.attacks))
            for operation in every:
                try_operation(operation, options.examples, seed)
            check(server)
            rounds += 1
    print(f"{rounds} rounds, {rounds * options.attacks:,} attacks on the socket and up to")
    print(f"{rounds * options.examples * len(every):,} requests by the description: nothing failed")
    for kind, count in sorted(seen.items()):
        print(f"  {count:6,}  {kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
