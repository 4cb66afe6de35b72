"""The page of tools/report.py in a browser: no error, no request, and what clicks and filters show."""

import json
import shutil

import pytest

from tests.stored_run import TOKENS, save_run
from tools import report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def page(tmp_path):
    """Return the page of two runs, opened; afterwards it must have had no console message and no request."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    pytest.importorskip("plotly", reason="needs plotly: pip install 'lockstep-rl[report]'")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}: apt-get install chromium")
    runs = [save_run(tmp_path / "one"), save_run(tmp_path / "two", lr=0.3, agents=True)]
    report.main([*map(str, runs), "--html", str(tmp_path / "page.html"), "--png", str(tmp_path / "plot.png")])
    found = []
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = opened.new_page(viewport={"width": 390, "height": 800})
        page.on("console", lambda message: found.append(message.text))
        page.on("pageerror", lambda error: found.append(str(error)))
        page.on("request", lambda request: found.append(request.url))
        page.goto((tmp_path / "page.html").as_uri())
        page.wait_for_function("document.body.dataset.ready")
        yield page
        opened.close()
    assert [text for text in found if not text.startswith(("file:", "data:", "blob:"))] == []


COVERED = """() => {
  const found = (selector) => [...document.querySelectorAll(`#curves ${selector}`)];
  const boxes = (selector) => found(selector).map((e) => e.getBoundingClientRect());
  const bars = boxes(".modebar-container .modebar");
  return boxes(".gtitle").filter((t) => bars.some(
    (b) => t.left < b.right && b.left < t.right && t.top < b.bottom && b.top < t.bottom)).length;
}"""
"""Number of titles of curves that are below a mode bar."""


@pytest.mark.parametrize("width", [390, 1400])
def test_the_mode_bar_covers_no_title(width, page):
    page.set_viewport_size({"width": width, "height": 800})
    page.locator("#curve-charts").scroll_into_view_if_needed()
    page.locator("#curve-charts .gtitle").first.wait_for()
    page.locator("#curve-charts .js-plotly-plot").first.hover()
    assert page.evaluate(COVERED) == 0 and page.locator("#curve-charts .modebar").count() > 0


def test_clicks_filters_and_shades(page, tmp_path):
    assert page.evaluate("document.documentElement.scrollWidth") == 390  # no sideways scrolling on a phone
    assert page.locator("#curve-charts .chart[data-metric]").count() == 2
    page.locator("#curve-charts").scroll_into_view_if_needed()
    page.locator("#curve-charts .main-svg").first.wait_for()
    events = page.locator("#events").inner_text()
    assert "training.optimizer.lr: 0.1 -> 0.05" in events and "rank 1 failed in update" in events
    differences = page.locator("#config-table tbody tr").all_inner_texts()
    assert len(differences) == 2 and "training.optimizer.lr" in differences[1]

    assert "score" in page.locator("#curve-charts .gtitle").first.text_content()
    assert "an easier data set" in page.locator("#curve-charts .note").first.inner_text()
    rows = page.locator("#groups tbody tr")
    assert page.input_value("[name=run]") == "1" and rows.count() == 9  # the newest
    page.select_option("[name=run]", "0")
    page.fill("[name=step-low]", "2")
    page.select_option("[name=source]", "sums")
    page.click("#filters button >> text=Filter")
    page.wait_for_function("document.querySelectorAll('#groups tbody tr').length == 4")
    page.fill("[name=text]", "four, 1?")
    page.click("#filters button >> text=Filter")
    page.wait_for_function("document.querySelectorAll('#groups tbody tr').length == 2")
    page.click("#filters button[type=reset]")
    page.wait_for_function("document.querySelectorAll('#groups tbody tr').length == 9")
    page.select_option("[name=run]", "0")

    stored = json.loads((tmp_path / "one" / "tokens.json").read_text())
    assert stored == TOKENS
    rows.nth(4).click()
    page.locator(".card").first.wait_for()
    assert page.locator("#group-title").inner_text() == "Step 2, group 1, ground truth [6, 7]"
    assert page.locator(".card").count() == 2
    page.locator(".card i").first.click()
    assert "sample 0, token 1 of" in page.locator("#token").inner_text()
    for shading, word in (("advantage", "Strongest"), ("gap", "difference of 0.01"), ("none", "")):
        page.select_option("#shading", shading)
        assert word in page.locator("#legend").inner_text()
        marked = page.locator(".card i.up, .card i.down").count()
        assert (marked > 0) == (shading != "none")

    page.select_option("[name=run]", "1")
    page.wait_for_function("document.querySelector('#found').textContent.startsWith('18 samples in 9')")
    rows.first.click()
    page.locator(".given").first.wait_for()
    assert "tool" in page.locator(".card").first.inner_text()
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
