"""The saved page in headless Chromium: elements and numbers, not pixels. The timelines are synthetic."""

import pytest

from cgkit.plotting import About
from cgkit.plotting.explore import explore
from tests.plotting import timelines
from tests.plotting.browser import tab


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    events = timelines.pieces(6)
    path = tmp_path_factory.mktemp("page") / "timeline.html"
    explore(events, About("toy, synthetic", "PIECEWISE"), notes=["all kernels tied"]).save(path)
    with tab() as page:
        page.goto(path.as_uri())
        page.wait_for_selector(".cgx[data-ready=yes]")
        page.events = events
        yield page


@pytest.fixture(autouse=True)
def from_the_start(page):
    page.fill("input[type=search]", "")
    page.focus("canvas.cgx-canvas")
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    frame(page)
    yield
    assert page.errors == []
    assert len([url for url in page.requests if not url.startswith("data:")]) == 1  # the file itself


def frame(page):
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def view(page):
    frame(page)
    root = page.locator(".cgx")
    return float(root.get_attribute("data-left")), float(root.get_attribute("data-right"))


def selected(page):
    frame(page)
    return int(page.get_attribute(".cgx", "data-selected"))


def place(page, i):
    """Where event i (of the packed order) is on the screen."""
    x, y = page.evaluate(
        "(i) => { const e = document.querySelector('[id^=cgx]').explorer, d = e.data, p = e.painter;"
        "return [p.x(d.start[i] + d.dur[i] / 2), p.rowY[d.row[i]] - e.state.scroll + 26 + 8] }",
        i,
    )
    box = page.locator("canvas.cgx-canvas").bounding_box()
    return box["x"] + x, box["y"] + y


def first_of(page, kind):
    return page.evaluate(
        "(kind) => { const d = document.querySelector('[id^=cgx]').explorer.data;"
        "return d.kind.findIndex((_, i) => d.kindOf(i) === kind) }",
        kind,
    )


def test_it_opens_and_draws(page):
    assert "Timeline" in page.title()
    assert "toy, synthetic" in page.inner_text(".lead") and "all kernels tied" in page.inner_text("main")
    colours = page.evaluate(
        "(() => { const c = document.querySelector('.cgx-canvas');"
        "const p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();"
        "for (let i = 0; i < p.length; i += 4) seen.add(p[i] << 16 | p[i + 1] << 8 | p[i + 2]);"
        "return [0xd55e00, 0x009e73, 0xe69f00, 0x0072b2].map((colour) => seen.has(colour)) })()"
    )
    assert colours == [True] * 4  # launch, graph launch, attention, first piece


def test_keys_buttons_and_wheel_change_what_is_in_view(page):
    everything = view(page)
    page.keyboard.press("+")
    closer = view(page)
    assert closer[1] - closer[0] < everything[1] - everything[0]
    page.keyboard.press("ArrowRight")
    assert view(page)[0] > closer[0] and view(page)[1] - view(page)[0] == pytest.approx(closer[1] - closer[0])
    page.click("button[aria-label='Show everything']")
    assert view(page) == everything
    box = page.locator("canvas.cgx-canvas").bounding_box()
    page.mouse.move(box["x"] + 700, box["y"] + 90)
    before = page.evaluate("document.querySelector('[id^=cgx]').explorer.point({clientX: 700, clientY: 0}).t")
    page.focus("canvas.cgx-canvas")
    page.mouse.wheel(0, -240)
    after = page.evaluate("document.querySelector('[id^=cgx]').explorer.point({clientX: 700, clientY: 0}).t")
    assert view(page)[1] - view(page)[0] < everything[1] - everything[0]
    assert abs(after - before) < 0.06 * (everything[1] - everything[0])  # about the mouse


def test_dragging_moves_the_view_with_the_mouse(page):
    page.keyboard.press("+")
    left, _ = view(page)
    box = page.locator("canvas.cgx-canvas").bounding_box()
    page.mouse.move(box["x"] + 700, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 90, steps=4)
    page.mouse.up()
    scale = page.evaluate("document.querySelector('[id^=cgx]').explorer.painter.scale")
    assert view(page)[0] - left == pytest.approx(100 / scale, rel=0.02)
    assert selected(page) == -1


def test_search_counts_and_goes_from_match_to_match(page):
    page.keyboard.press("/")
    page.keyboard.type("paged_att")
    attention = (page.events["name"] == "paged_attention_kernel").sum()
    assert page.inner_text(".cgx-count") == f"{attention} found"
    page.keyboard.press("Enter")
    assert page.inner_text(".cgx-count") == f"1 of {attention}"
    first = selected(page)
    page.click("button[aria-label='Next match']")
    assert page.inner_text(".cgx-count") == f"2 of {attention}" and selected(page) != first
    page.fill("input[type=search]", "no such kernel")
    assert page.inner_text(".cgx-count") == "0 found"


def test_a_click_on_a_kernel_shows_its_launch_and_the_launch_its_kernels(page):
    kernel = first_of(page, "kernel")
    page.mouse.click(*place(page, kernel))
    assert selected(page) == kernel
    panel = page.inner_text(".cgx-panel")
    for part in (
        "kernel",
        "took",
        "3.000 µs",
        "submod_0",
        "replay",
        "from launch to start",
        "One of 5 kernels of",
    ):
        assert part in panel
    page.click(".cgx-panel .cgx-link")
    assert selected(page) == first_of(page, "graph_launch")
    panel = page.inner_text(".cgx-panel")
    assert "cudaGraphLaunch" in panel and "their time, summed" in panel and "15.00 µs" in panel
    assert page.locator(".cgx-panel .cgx-link").count() == 5


def test_the_keys_alone_reach_an_event_its_launch_and_its_neighbours(page):
    page.keyboard.press(".")
    assert selected(page) >= 0
    for _ in range(4):
        page.keyboard.press("Shift+ArrowDown")
    frame(page)
    assert "kernel" in page.inner_text(".cgx-kind")
    kernel = selected(page)
    page.keyboard.press("Enter")
    assert "launch" in page.inner_text(".cgx-kind")
    page.keyboard.press("Enter")
    page.keyboard.press(".")
    assert selected(page) != kernel
    page.keyboard.press("f")
    assert view(page)[1] - view(page)[0] < 10
    page.keyboard.press("Escape")
    assert selected(page) == -1


def test_the_tooltip_names_what_the_mouse_is_over(page):
    launch = first_of(page, "graph_launch")
    page.mouse.move(*place(page, launch))
    frame(page)
    assert "cudaGraphLaunch" in page.inner_text(".cgx-tip") and "8.000 µs" in page.inner_text(".cgx-tip")


def test_it_can_be_read_by_a_screen_reader_and_says_its_keys(page):
    label = page.get_attribute("canvas.cgx-canvas", "aria-label")
    assert "events" in label and "GPU stream" in label
    assert page.get_attribute(".cgx-panel", "aria-live") == "polite"
    assert page.evaluate(
        "[...document.querySelectorAll('.cgx button, .cgx select')].every((b) => b.ariaLabel)"
    )
    page.keyboard.press("?")
    assert "zoom" in page.inner_text(".cgx-help")
    page.keyboard.press("?")
    sizes = page.evaluate(
        "[...document.querySelectorAll('.cgx *')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12.5


def test_light_and_dark(page):
    paper = "getComputedStyle(document.querySelector('.cgx')).backgroundColor"
    light = page.evaluate(paper)
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector(".cgx[data-theme=dark]")
    assert page.evaluate(paper) != light
    page.emulate_media(color_scheme="light")
    page.wait_for_selector(".cgx[data-theme=light]")


def test_short_events_are_filled_columns_of_their_true_area(tmp_path, page):
    path = explore(timelines.eager(20_000), height=300).save(tmp_path / "many.html")
    with page.context.browser.new_page() as many:
        many.goto(path.as_uri())
        many.wait_for_selector(".cgx[data-ready=yes]")
        assert int(many.get_attribute(".cgx", "data-merged")) > 70_000
        assert "shorter than a pixel" in many.inner_text(".cgx-range")
        area, expected = many.evaluate(
            "(() => { const e = document.querySelector('[id^=cgx]').explorer, p = e.painter, d = e.data;"
            "const row = d.rows - 1, y = p.rowY[row]; let area = 0, busy = 0;"
            "for (const box of p.boxes) for (let k = 0; k < box.length; k += 4)"
            "  if (box[k + 1] >= y && box[k + 1] < y + 17) area += box[k + 2] * box[k + 3];"
            "for (let i = d.rowFirst[row]; i < d.rowFirst[row + 1]; i++) busy += d.dur[i];"
            "return [area / 17, busy * p.scale] })()"
        )
        assert area == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("part", ["nothing", "cpu", "gpu"])
def test_a_trace_that_lacks_a_side_opens_too(part, tmp_path, page):
    events = timelines.pieces(3)
    on_gpu = events["stream"] >= 0
    events = {"nothing": events.iloc[:0], "cpu": events[~on_gpu], "gpu": events[on_gpu]}[part]
    path = explore(events).save(tmp_path / "part.html")
    errors = []
    with page.context.browser.new_page() as other:
        other.on("pageerror", lambda error: errors.append(str(error)))
        other.goto(path.as_uri())
        other.wait_for_selector(".cgx[data-ready=yes]")
        other.focus("canvas.cgx-canvas")
        for key in ("+", ".", "Enter", "Shift+ArrowDown", "f", "n", "0"):
            other.keyboard.press(key)
        frame(other)
    assert errors == []
