"""The page in a real browser: headless Chromium, on screens of several sizes."""

import html
import io
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.report.page import write_page
from tests.benchmarks.report.test_report import BAD, BASELINE, CONTROL, FAILED, GOOD, make_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
if CHROMIUM is None:
    pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs Playwright: pip install playwright"
)
image = pytest.importorskip("matplotlib.image", reason="needs matplotlib")

Page = Any  # playwright has no types that hold where it is missing
Picture = npt.NDArray[np.float32]

LONG = "topk:density=0.0222+local_adamw:local_steps=30:outer_lr=2"
HOSTILE = '</script><img src="http://example.com/x.png" onerror="throw 1">'
RUNS = [
    BASELINE,
    make_run("all_reduce", 2.1, 20_000_000, seed=1),
    CONTROL,
    GOOD,
    make_run(LONG, 2.55, 5_000),
    FAILED,
    BAD,
    make_run(HOSTILE, 2.7, 1_000_000_000),
]
FINISHED = ["all_reduce", "none", GOOD.method, LONG, "topk", HOSTILE]
NOTHING = ["nothing to show"] * 3
SCREENS = [(1280, 900), (390, 844), (360, 640)]
in_all_colours = pytest.mark.parametrize("page", ["light", "dark"], indirect=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # Without its sandbox where it refuses to have one, which is for root.
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(RUNS, path)
    return path


def open_page(browser: Any, file: Path, size: tuple[int, int], **options: Any) -> Page:
    """Open the page, and make whatever it complains of or asks for a failure of the test."""
    viewport = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=viewport, **options)
    page = context.new_page()
    page.troubles = []
    page.on("console", lambda message: page.troubles.append(message.text))
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("request", lambda request: page.troubles.append(request.url))
    page.goto(file.as_uri())
    assert page.troubles.pop(0) == file.as_uri()
    return page


@pytest.fixture
def page(browser: Any, file: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    scheme = getattr(request, "param", "light")
    page = open_page(browser, file, SCREENS[0], color_scheme=scheme)
    yield page
    assert page.troubles == []
    page.context.close()


@pytest.mark.parametrize("size", SCREENS)
def test_nothing_but_the_table_scrolls_sideways(
    browser: Any, file: Path, size: tuple[int, int]
) -> None:
    page = open_page(browser, file, size)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    table = page.locator(".scroll")
    if size[0] < 1000:
        assert table.evaluate("box => box.scrollWidth > box.clientWidth")
        table.evaluate("box => box.scrollLeft = 200")
        assert 0 <= page.locator("tbody th").first.bounding_box()["x"] < 60  # names stay
    for name in ("figure", "#legend button", ".warning", ".scroll", "dl"):
        for box in page.locator(name).all():
            bounds = box.bounding_box()
            assert bounds["x"] >= 0
            assert bounds["x"] + bounds["width"] <= size[0], name
    assert page.troubles == []
    page.context.close()


def names(page: Page) -> list[str]:
    """The methods in the order of the table."""
    values = page.locator("tbody tr:first-child th").all()
    return [value.get_attribute("data-value") for value in values]


def test_headers_sort_by_mouse_and_keyboard(page: Page) -> None:
    original = names(page)
    assert original == [*FINISHED[:4], "powersgd", *FINISHED[4:]]
    losses = {"all_reduce": 2.25, "none": 2.6, GOOD.method: 2.45, "topk": 3.1, LONG: 2.55}
    losses[HOSTILE] = 2.7
    header = page.get_by_role("columnheader", name="loss")
    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    ranked = sorted(FINISHED, key=lambda name: losses[name])
    assert names(page) == [*ranked, "powersgd"]
    header.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "descending"
    assert names(page) == [*sorted(FINISHED, key=lambda name: -losses[name]), "powersgd"]
    page.keyboard.press("Space")
    assert header.get_attribute("aria-sort") is None
    assert names(page) == original


def test_bytes_are_sorted_as_numbers_and_names_as_text(page: Page) -> None:
    sent = {run.method: run.figures.sent_per_step for run in RUNS if run.figures}
    loss = page.get_by_role("columnheader", name="loss")
    loss.get_by_role("button").click()
    header = page.get_by_role("columnheader", name="sent/step")
    header.get_by_role("button").click()
    assert loss.get_attribute("aria-sort") is None
    assert names(page) == [*sorted(FINISHED, key=lambda name: sent[name]), "powersgd"]
    page.get_by_role("columnheader", name="method").get_by_role("button").click()
    assert names(page)[1:] == sorted([*FINISHED[:-1], "powersgd"])


def test_numbers_stand_right_and_have_units(page: Page) -> None:
    for cell in page.locator("td.number").all():
        assert cell.evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    columns = [header.inner_text().strip() for header in page.locator("thead th").all()]
    sent = columns.index("sent/step")
    for row in page.locator("tbody:not(.failed) tr").all():
        assert re.fullmatch(r"[\d.]+ [kMGT]?B", row.locator("td").nth(sent - 1).inner_text())


def test_seeds_fold_and_are_all_on_paper(page: Page) -> None:
    seeds = page.locator("tr.seed")
    assert [seed.is_visible() for seed in seeds.all()] == [False, False]
    button = page.get_by_role("button", name="2 seeds")
    assert button.get_attribute("aria-expanded") == "false"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert all(seed.is_visible() for seed in seeds.all())
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not any(seed.is_visible() for seed in seeds.all())
    button.focus()
    page.keyboard.press("Enter")
    assert [seed.locator("td").first.inner_text() for seed in seeds.all()] == ["2.400", "2.100"]
    assert button.get_attribute("aria-expanded") == "true"


def test_a_failed_method_is_shown_with_its_reason(page: Page) -> None:
    row = page.locator("tbody.failed tr")
    assert row.locator("td").first.inner_text() == "failed"
    assert row.locator("td").last.inner_text() == "ValueError: rank <4> & more"


def photograph(page: Page, figure: int) -> Picture:
    """A chart as pixels: height x width x (red, green, blue), from 0 to 1."""
    data = page.locator("figure .plot").nth(figure).screenshot()
    return image.imread(io.BytesIO(data), format="png")[:, :, :3]


def colour_of(page: Page, series: int) -> tuple[float, ...]:
    line = page.locator("#legend .swatch line").nth(series)
    text = line.evaluate("line => getComputedStyle(line).stroke")
    return tuple(int(part) / 255 for part in re.findall(r"\d+", text)[:3])


def pixels(picture: Picture, colour: tuple[float, ...]) -> int:
    """How many pixels have a colour, to two steps of 255."""
    return int((np.abs(picture - np.array(colour)).max(axis=2) <= 2.5 / 255).sum())


@in_all_colours
def test_every_method_is_drawn_in_every_chart_until_it_is_switched_off(page: Page) -> None:
    buttons = page.locator("#legend button")
    shown = [button.inner_text() for button in buttons.all()]
    assert shown == [*FINISHED[:4], "powersgd", *FINISHED[4:]]
    for figure in range(3):
        picture = photograph(page, figure)
        for series, name in enumerate(shown):
            drawn = pixels(picture, colour_of(page, series))
            assert (drawn > 25) == (name != "powersgd"), (figure, name, drawn)
    topk = shown.index("topk")
    buttons.nth(topk).focus()
    page.keyboard.press("Space")
    assert buttons.nth(topk).get_attribute("aria-pressed") == "false"
    for figure in range(3):
        assert pixels(photograph(page, figure), colour_of(page, topk)) == 0
    for button in buttons.all():
        if button.get_attribute("aria-pressed") == "true":
            button.click()
    assert page.locator(".plot text.annotation-text").all_text_contents() == NOTHING
    buttons.nth(topk).click()
    assert pixels(photograph(page, 0), colour_of(page, topk)) > 25


def points(page: Page, figure: int, method: str) -> Any:
    """The marks of a method's points in a chart."""
    trace = page.evaluate(
        "([figure, name]) => plots[figure].data.filter(each => each.x.length)"
        ".findIndex(each => each.name.replace(/: 0 bytes$/, '') == name)",
        [figure, method],
    )
    return page.locator("figure").nth(figure).locator(".trace").nth(trace).locator(".point")


def tip(page: Page, figure: int) -> list[str]:
    """The lines of what a chart shows of a point; none if nothing is read."""
    lines = page.locator("figure").nth(figure).locator(".hoverlayer .nums .line")
    return lines.all_text_contents()


def test_what_sends_nothing_is_a_level_in_the_chart_of_bytes(page: Page) -> None:
    levels = page.evaluate("plots.map(p => p.data.filter(t => new Set(t.y).size == 1).length)")
    assert levels == [0, 1, 0]
    ends = points(page, 1, "none").all()
    left, right = (end.bounding_box() for end in ends)
    assert left["y"] == right["y"]
    assert right["x"] - left["x"] > 300
    ends[0].hover(force=True)
    playwright.expect(page.locator("figure").nth(1).locator(".hoverlayer")).to_contain_text(
        "none: 0 bytes"
    )


def test_a_point_can_be_read_with_the_mouse(page: Page) -> None:
    figure = page.locator("figure").first
    figure.scroll_into_view_if_needed()
    dot = points(page, 0, "topk").first.bounding_box()
    page.mouse.move(dot["x"] + 2, dot["y"] + 5)
    playwright.expect(figure.locator(".hoverlayer .nums")).to_have_count(1)
    point = BAD.curve[0]
    read = ["topk", f"loss {point.loss:.3f}", f"step {point.step}", "sent 4 MB", "received 4 MB"]
    bounds = figure.locator(".hoverlayer .hovertext").bounding_box()
    outer = figure.bounding_box()
    assert bounds["x"] >= outer["x"]
    assert bounds["x"] + bounds["width"] <= outer["x"] + outer["width"]
    assert [tip(page, each) for each in range(3)] == [[*read, "time 25 s"]] * 3
    page.mouse.move(2, 2)
    playwright.expect(page.locator(".hoverlayer .nums")).to_have_count(0)


def test_points_can_be_read_with_the_keyboard(page: Page) -> None:
    chart = page.locator("figure .plot").first
    chart.focus()
    reading = page.locator("#reading")
    heard = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
        heard.append(reading.inner_text().split(", sent")[0])
    assert heard == [
        "all_reduce, mean: loss 2.270, step 50",
        "all_reduce, mean: loss 2.260, step 100",
        "all_reduce, mean: loss 2.260, step 100",
        "none: loss 2.610, step 100",
        "none: loss 2.620, step 50",
    ]
    page.keyboard.press("ArrowUp")
    assert "loss, seed 0 2.420, loss, seed 1 2.120" in reading.inner_text()
    # Plotly draws some time after it was asked to.
    shown = page.locator("figure").first.locator(".hoverlayer .nums")
    playwright.expect(shown).to_contain_text("all_reduce, meanloss 2.270")
    page.keyboard.press("Escape")
    playwright.expect(page.locator(".hoverlayer .nums")).to_have_count(0)


def test_the_start_of_the_curves_can_be_left_out(page: Page) -> None:
    dots = page.locator("figure").first.locator(".point")
    assert dots.count() == 2 * len(FINISHED)
    page.locator("#start").focus()
    page.keyboard.press("End")
    assert page.locator("#first").inner_text() == "95"
    assert dots.count() == len(FINISHED)


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


BEHIND = """element => {
  const property = element.matches("svg *") ? "fill" : "color";
  const colour = getComputedStyle(element)[element.matches("line") ? "stroke" : property];
  let behind = element;
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") {
    behind = behind.parentElement;
  }
  return [colour, getComputedStyle(behind).backgroundColor];
}"""


@in_all_colours
def test_text_and_lines_stand_out_from_what_is_behind_them(page: Page) -> None:
    page.get_by_role("button", name="2 seeds").click()
    for kind, least in {
        "h1, h2, p, li, dt, dd, td, th, button, figcaption, strong, label, .plot text": 4.5,
        "#legend .swatch line": 3.0,
    }.items():
        found = page.locator(kind)
        assert found.count() > 5
        for colour, behind in found.evaluate_all(f"all => all.map({BEHIND})"):
            assert contrast(colour, behind) >= least, (kind, colour, behind)


def test_without_javascript_the_table_is_complete(browser: Any, file: Path) -> None:
    page = open_page(browser, file, SCREENS[0], java_script_enabled=False)
    assert all(seed.is_visible() for seed in page.locator("tr.seed").all())
    assert page.locator("noscript").inner_text().startswith("The curves are drawn by JavaScript")
    assert not page.locator("#legend").is_visible()
    page.context.close()


def test_a_page_of_failures_alone_has_no_errors(browser: Any, tmp_path: Path) -> None:
    write_page([FAILED, replace(FAILED, method="other")], tmp_path / "failed.html")
    page = open_page(browser, tmp_path / "failed.html", SCREENS[1])
    assert page.locator(".plot text.annotation-text").all_text_contents() == NOTHING
    page.locator("figure .plot").first.hover()
    assert page.troubles == []
    page.context.close()


def test_names_are_text_and_nothing_else(page: Page) -> None:
    assert HOSTILE in page.locator("#legend").inner_text()
    assert page.locator("img").count() == 0
    points(page, 0, html.escape(HOSTILE, quote=False)).first.hover(force=True)
    playwright.expect(page.locator("figure").first.locator(".hoverlayer")).to_contain_text(HOSTILE)
    assert tip(page, 0)[0] == HOSTILE
