"""The pages in a real browser: what a user sees, with mouse, keyboard and screen reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="pip install '.[serve]'")
pytest.importorskip("httpx")

from maxvision.serve.routes import page
from tests.serve import browser
from tests.serve.conftest import EXAMPLES, KEY
from tests.serve.started import Server

FILES = {path: name for path, name in page._FILES.items() if path != "/favicon.ico"}


def test_files_have_sane_headers(plain: Server) -> None:
    for path in page.PATHS:
        answer = plain.client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = plain.client.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert plain.client.get("/page/..%2f__init__.py").status_code == 404
    assert plain.client.get("/page/missing.js").status_code == 404


def test_nothing_is_loaded_from_elsewhere(plain: Server) -> None:
    for path in FILES:
        text = plain.client.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", ""), path
        assert "@import" not in text
        assert "style=" not in text  # the policy would drop it


# --- in Chromium ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window() -> Iterator[Any]:
    pytest.importorskip("selenium", reason=browser.MISSING)
    if browser.programs() is None:
        pytest.skip(browser.MISSING)
    with browser.browsing() as driver:
        yield driver


@pytest.fixture
def opened(window: Any, plain: Server) -> Any:
    window.get("about:blank")
    requests(window)
    window.get_log("browser")
    window.get(f"{plain.url}/")
    browser.until(window, lambda: "resnet-cifar10 on cpu" in text(window, "#model"))
    return window


def find(window: Any, selector: str) -> list[Any]:
    return window.find_elements("css selector", selector)


def text(window: Any, selector: str) -> str:
    return find(window, selector)[0].text


def choose(window: Any, *paths: Path) -> None:
    find(window, "#files")[0].send_keys("\n".join(map(str, paths)))
    noun = "picture" if len(paths) == 1 else "pictures"
    browser.until(window, lambda: text(window, "#status") == f"{len(paths)} {noun} answered.")


def requests(window: Any) -> list[str]:
    """Takes the addresses that the browser has asked for."""
    events = [json.loads(each["message"])["message"] for each in window.get_log("performance")]
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]


def test_pictures_are_shown_with_their_labels(
    opened: Any, plain: Server, expected: list[dict]
) -> None:
    choose(opened, *EXAMPLES)
    cards = find(opened, "#pictures > li")
    assert len(cards) == len(EXAMPLES)
    for card, path, predictions in zip(reversed(cards), EXAMPLES, expected, strict=True):
        lines = card.text.splitlines()
        assert lines[0] == path.name
        for i, prediction in enumerate(predictions):
            percent = f"{100 * prediction['score']:.1f} %"
            assert lines[1 + 2 * i : 3 + 2 * i] == [prediction["label"], percent]
        assert lines[-1].endswith("ms in the model")
        shown = card.find_element("css selector", "img")
        assert shown.get_property("naturalWidth") > 100
        assert shown.accessible_name == f"{path.name}: {predictions[0]['label']}"
        bars = card.find_elements("css selector", "rect")
        assert len(bars) == len(predictions)
        whole = card.find_element("css selector", ".labels svg").rect["width"]
        share = bars[0].rect["width"] / whole
        assert share == pytest.approx(predictions[0]["score"], abs=0.02)
    assert not [each for each in opened.get_log("browser") if each["level"] == "SEVERE"]
    for address in requests(opened):
        assert address.startswith((plain.url, "blob:", "about:", "data:", "chrome:")), address


def test_errors_are_sentences(opened: Any, plain: Server, tmp_path: Path) -> None:
    wrong = tmp_path / "a<b>.jpg"
    wrong.write_text("hello")
    choose(opened, wrong)
    card = find(opened, "#pictures > li")[0]
    assert card.text.startswith("a<b>.jpg\nThis is text and not a JPEG, PNG, WebP")
    assert card.text.endswith(".")
    assert not card.find_elements("css selector", "img")  # there is nothing to show
    opened.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    opened.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    find(opened, "#files")[0].send_keys(str(EXAMPLES[0]))
    browser.until(opened, lambda: "2 pictures" in text(opened, "#status"))
    opened.execute_cdp_cmd("Network.emulateNetworkConditions", {**offline, "offline": False})
    assert "The server cannot be reached" in find(opened, "#pictures > li")[0].text


def test_pictures_can_be_dropped_and_pasted(opened: Any) -> None:
    for count, kind in enumerate(("drop", "paste"), 1):
        opened.execute_script(
            """
            const canvas = document.createElement("canvas");
            canvas.toBlob((blob) => {
              const carried = new DataTransfer();
              carried.items.add(new File([blob], "made.png", {type: "image/png"}));
              document.dispatchEvent(arguments[0] === "drop"
                ? new DragEvent("drop", {dataTransfer: carried, cancelable: true, bubbles: true})
                : new ClipboardEvent("paste", {clipboardData: carried, bubbles: true}));
            });
            """,
            kind,
        )
        noun = "picture" if count == 1 else "pictures"
        browser.until(opened, lambda: text(opened, "#status") == f"{count} {noun} answered.")  # noqa: B023
    assert len(find(opened, "#pictures img")) == 2


def test_a_keyboard_and_a_screen_reader_suffice(opened: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    reached = []
    for _ in range(2):
        ActionChains(opened).send_keys(Keys.TAB).perform()
        reached.append(opened.switch_to.active_element)
    assert reached[0].accessible_name == "The routes"
    assert reached[1].accessible_name.startswith("Choose pictures, drop them here")
    assert reached[1].aria_role in ("button", "Button")
    outline = "return getComputedStyle(document.querySelector('.drop')).outlineStyle"
    assert opened.execute_script(outline) == "solid"  # where the focus is, is seen
    assert find(opened, "html")[0].get_attribute("lang") == "en"
    assert find(opened, "#status")[0].aria_role == "status"
    choose(opened, EXAMPLES[1])
    assert find(opened, "#pictures")[0].accessible_name.startswith("Answers")


def test_a_phone_shows_it_without_scrolling_sideways(opened: Any) -> None:
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        choose(opened, *EXAMPLES[:2])
        wide = "return document.documentElement.scrollWidth"
        assert opened.execute_script(wide) == 360
        assert find(opened, ".drop")[0].rect["height"] >= 44
        assert find(opened, "#pictures > li")[0].rect["width"] > 300
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_every_route_is_described(window: Any, plain: Server) -> None:
    window.get_log("browser")
    window.get(f"{plain.url}/docs")
    paths = plain.client.get("/openapi.json").json()["paths"]
    count = sum(map(len, paths.values()))
    browser.until(window, lambda: len(find(window, "article")) == count)
    for summary in find(window, "summary"):
        summary.click()
    shown = text(window, "#routes")
    for path, operations in paths.items():
        assert path in shown
        for operation in operations.values():
            assert operation["summary"] in shown
    assert f"{plain.url}/v2/models/resnet-cifar10/infer" in shown
    assert "parameters.top_k" in shown
    assert not [each for each in window.get_log("browser") if each["level"] == "SEVERE"]


def test_a_key_is_asked_for(window: Any, server: Server) -> None:
    for path, done in (("/", "#model"), ("/docs", "#about")):
        window.get(f"{server.url}{path}")
        window.execute_script("sessionStorage.clear()")
        window.refresh()
        for key in ("wrong", KEY):
            form = browser.until(window, lambda: find(window, "#ask:not([hidden])"))[0]
            field = form.find_element("css selector", "input")
            assert field.accessible_name == "This server asks for its key:"
            field.clear()
            field.send_keys(key)
            form.find_element("css selector", "button").click()
        browser.until(window, lambda: "resnet-cifar10" in text(window, done))  # noqa: B023
        assert not find(window, "#ask:not([hidden])")
