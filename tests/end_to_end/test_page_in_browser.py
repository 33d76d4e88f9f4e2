"""Pages in a real browser: they render, react, make no requests, and show untrusted text as text.

Opening a page is slow, so most tests share one page and leave it as they found it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qkflow.cli import main
from qkflow.experiment.result import ExperimentResult
from qkflow.probes import attention_maps as model_maps
from qkflow.report import write_report
from qkflow.report.figures import forest, learning_curves, loss_strips, reach
from qkflow.report.palette import DARK, LIGHT
from qkflow.training import load_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed")

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
SIZES = {"phone": (360, 740), "desktop": (1280, 900)}
ARMS = ("standard", "differential", "coupled")
TOO_WIDE = "document.documentElement.scrollWidth - window.innerWidth"
REDRAWN = "Promise.all([...document.querySelectorAll('.js-plotly-plot')].map((plot) => Plotly.Plots.resize(plot)))"
OPEN_ALL = "document.querySelectorAll('details').forEach((item) => { item.open = true; })"


@dataclass(frozen=True, kw_only=True)
class Study:
    result: ExperimentResult
    path: Path
    runs: dict[str, Path]


class OpenPage:
    """A page in its own browser context, with its console messages and requests."""

    def __init__(self, browser: Any, path: Path, size: str = "desktop", **options: Any) -> None:
        width, height = SIZES[size]
        view = {"width": width, "height": height}
        self.context = browser.new_context(viewport=view, has_touch=size == "phone", **options)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.failed: dict[str, str] = {}
        self.context.on("request", lambda request: self.requests.append(request.url))
        self.context.on("requestfailed", lambda request: self.failed.update({request.url: request.failure}))
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.messages.append(f"error: {error}"))
        self.address = path.as_uri()
        self.page.goto(self.address)
        if options.get("java_script_enabled", True):
            self.page.wait_for_selector("html[data-ready]", state="attached")

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: object) -> None:
        try:
            assert self.messages == []
            assert [url for url in self.requests if not url.startswith(("data:", "blob:"))] == [self.address]
        finally:
            self.context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def study(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("study")
    result = replace(synthetic.study(ARMS, tuned=True, failed=[("coupled", 2)]), folder=str(folder))
    runs = synthetic.folder(folder, ARMS, layers=2, excerpts=2, width=32)
    return Study(result=result, path=write_report(result, folder / "report.html", runs=runs), runs=runs)


@pytest.fixture(scope="module")
def page(browser: Any, study: Study) -> Iterator[Any]:
    """The page of the study on a desktop, shared by the tests that leave it as they found it."""
    with OpenPage(browser, study.path) as page:
        yield page


@pytest.fixture(scope="module")
def hostile(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("hostile")
    bad = synthetic.HOSTILE
    names = (*bad, "standard")
    result = synthetic.study(names, seeds=3, failed=[(names[2], 0)])
    notes = tuple(replace(result.notes[0], name=text, value=text, meaning=text) for text in bad)
    result = replace(result, folder=str(folder), data=bad[2], command=bad, remarks=bad, notes=notes)
    runs = synthetic.folder(folder, names, layers=2, excerpts=2, width=32)
    return Study(result=result, path=write_report(result, folder / "report.html", runs=runs), runs=runs)


@pytest.fixture(scope="module")
def unfinished(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("unfinished")
    result = replace(synthetic.study(ARMS, seeds=1, unfinished=True), folder=str(folder))
    return Study(result=result, path=write_report(result, folder / "report.html", runs={}), runs={})


def drawn(page: Any, name: str) -> list[dict[str, Any]]:
    return json.loads(page.evaluate(f"JSON.stringify(document.getElementById('plot-{name}').data)"))


def resize(page: Any, size: str) -> None:
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.evaluate(REDRAWN)


def check_width(page: Any) -> None:
    """Nothing is wider than the screen, with details closed and open."""
    assert page.evaluate(TOO_WIDE) <= 0
    page.evaluate(OPEN_ALL)
    assert page.evaluate(TOO_WIDE) <= 0


def hover(page: Any, figure: str, x: float, y: float) -> None:
    plot = page.locator(f"#plot-{figure} .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])


def test_every_figure_is_drawn_with_every_trace(page: Any, study: Study) -> None:
    result = study.result
    figures = {"forest": forest(result), "strips": loss_strips(result), "reach": reach(result)}
    figures["curves"] = learning_curves(result)["loss by tokens"]
    for name, figure in figures.items():
        assert len(drawn(page, name)) == len(figure["data"])
        assert page.locator(f"#plot-{name} .scatterlayer .trace").count() == len(figure["data"])
        assert page.locator(f"#plot-{name} .main-svg").first.bounding_box()["height"] > 100
    assert page.locator("#plot-diagnostic-0 .barlayer .trace").count() == 2
    assert page.locator("#plot-map-first .heatmaplayer image").count() >= 1


def test_variants_change_the_axes_and_buttons_hide_an_arm(page: Any) -> None:
    axis = "document.getElementById('plot-curves').layout.{}axis.title.text"
    choice = page.locator("#curves-variant")
    assert page.evaluate(axis.format("x")) == "training tokens"
    choice.select_option(label="loss by seconds")
    assert page.evaluate(axis.format("x")) == "seconds of training"
    choice.select_option(label="difference by seconds")
    assert "minus the baseline" in page.evaluate(axis.format("y"))
    assert {trace["meta"]["arm"] for trace in drawn(page, "curves")} == {1, 2}
    before = page.locator("#plot-curves .scatterlayer .trace").count()
    button = page.get_by_role("button", name="coupled")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert page.locator("#plot-curves .scatterlayer .trace").count() == before - 2
    button.click()
    assert page.locator("#plot-curves .scatterlayer .trace").count() == before
    choice.select_option(label="loss by tokens")


@pytest.mark.parametrize(("layer", "head", "excerpt"), [(1, 1, 1), (0, 0, 0)])
def test_the_maps_on_the_page_are_those_of_the_models(
    page: Any, study: Study, layer: int, head: int, excerpt: int
) -> None:
    tokens = json.loads((study.path.parent / "corpus.json").read_text())["excerpts"][excerpt]["tokens"]
    page.select_option("#map-excerpt", index=excerpt)
    page.fill("#map-layer", str(layer))
    page.fill("#map-head", str(head))
    expected = [model_maps(load_run(study.runs[name]).model, tokens)[layer][head].numpy() for name in ARMS[:2]]
    largest = max(abs(weights).max() for weights in expected)
    for side, weights in zip(("first", "second"), expected, strict=True):
        z = np.array(drawn(page, f"map-{side}")[0]["z"], dtype=float)
        assert np.isnan(z[np.triu_indices(len(tokens), 1)]).all()
        shown = np.nan_to_num(np.sign(z) * z**2) * largest
        assert abs(shown - weights).max() < largest / 100
    assert (expected[1] < 0).any()
    assert page.text_content("#scale-low").startswith("\N{MINUS SIGN}")


def test_pointing_at_a_cell_and_choosing_a_token_show_the_pair(page: Any) -> None:
    hover(page, "map-first", 0.3, 0.7)
    page.wait_for_selector("#plot-map-first .hovertext")
    assert " to " in page.text_content("#plot-map-first .hovertext")
    page.locator("#map-first-words span").nth(9).click()
    assert page.text_content("#map-token-text") == "10, “(”"
    assert page.text_content("#map-second-readout").startswith("Token 10, “(”, attends most to ")
    assert page.locator("#map-first-words .here").text_content() == "("


def test_controls_have_names_and_headings_descend(page: Any) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, button, summary, a")].filter((item) =>
            !(item.labels && item.labels.length) && !item.textContent.trim()).map((item) => item.outerHTML)"""
    )
    assert nameless == []
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((item) => Number(item.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, select, summary, input[type=range]")]
            .filter((item) => item.offsetHeight && item.offsetHeight < 18).map((item) => item.outerHTML)"""
    )
    assert small == []
    for box in page.locator(".scroll").all():
        wide = box.evaluate("(item) => item.scrollWidth > item.clientWidth + 1")
        assert (box.get_attribute("tabindex") == "0") == wide


def test_a_figure_can_be_saved(page: Any) -> None:
    with page.expect_download() as saved:
        page.click("[data-save=forest]")
    assert saved.value.suggested_filename == "qkflow-forest.svg"
    assert "<svg" in Path(saved.value.path()).read_text()


def test_the_page_fits_a_desktop_and_a_phone(page: Any) -> None:
    check_width(page)
    resize(page, "phone")
    check_width(page)
    resize(page, "desktop")
    page.evaluate(OPEN_ALL.replace("true", "false"))


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_colors_follow_the_system_and_the_button(page: Any, scheme: str) -> None:
    themes = {"light": LIGHT, "dark": DARK}

    def check(name: str) -> None:
        page.wait_for_selector(f"html[data-drawn='{themes[name]['paper']}']", state="attached")
        paper = "getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()"
        assert page.evaluate(paper) == themes[name]["paper"]
        assert page.evaluate("document.getElementById('plot-curves').layout.font.color") == themes[name]["soft"]

    page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    page.emulate_media(color_scheme=scheme)
    check(scheme)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor").startswith("rgb(")
    for choice in ("light", "dark"):
        page.click("#theme")
        check(choice)
    page.click("#theme")
    check(scheme)


def test_printing_opens_everything_and_fits_the_paper(page: Any) -> None:
    font = "document.getElementById('plot-curves').layout.font.color"
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector(f"html[data-drawn='{DARK['paper']}']", state="attached")
    closed = page.locator("details:not([open])").count()
    assert closed > 3
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator("details:not([open])").count() == 0
    assert not page.is_visible("nav")
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()") == "#ffffff"
    assert page.evaluate(font) == LIGHT["soft"]
    widest = page.evaluate("Math.max(...[...document.querySelectorAll('.main-svg')].map((s) => s.clientWidth))")
    assert widest <= 680
    page.emulate_media(media="screen")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() == closed
    assert page.evaluate(font) == DARK["soft"]
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    page.emulate_media(color_scheme="light")


def test_the_keyboard_reaches_and_moves_the_sliders(browser: Any, study: Study) -> None:
    with OpenPage(browser, study.path) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        focused = set()
        for _ in range(80):
            page.keyboard.press("Tab")
            focused.add(page.evaluate("document.activeElement.id"))
            if "map-layer" in focused:
                break
        assert {"curves-variant", "map-first", "map-second", "map-excerpt", "map-layer"} <= focused
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        before = drawn(page, "map-first")[0]["z"]
        assert "layer 1" in page.text_content("#map-first-title")
        page.keyboard.press("ArrowRight")
        assert "layer 2" in page.text_content("#map-first-title")
        assert page.get_attribute("#map-layer", "aria-valuetext") == "2 of 2"
        assert drawn(page, "map-first")[0]["z"] != before
        page.keyboard.press("Tab")
        page.keyboard.press("End")
        assert "head 4 of 4" in page.text_content("#map-first-title")
        assert "head 2 of 2" in page.text_content("#map-second-title")  # differential has half as many


def test_untrusted_text_stays_text(browser: Any, hostile: Study) -> None:
    with OpenPage(browser, hostile.path, "phone") as page:
        assert page.is_visible("h1")
        check_width(page)
        resize(page, "desktop")
        check_width(page)
        for name in ("forest", "strips", "curves"):
            for position in (0.2, 0.5, 0.8):
                hover(page, name, position, position)
        page.select_option("#map-second", index=2)
        assert page.evaluate("window.__pwned") is None
        assert page.locator("script").count() == 3
        assert page.locator("img, iframe, object, embed, form").count() == 0
        assert page.locator("a:not([href^='#'])").count() == 0
        text = page.text_content("main")
        expected = ("<script>window.__pwned=1</script>", '"><img src=x onerror="window.__pwned=2">', "\\u202e", "\\x00")
        assert all(part in text for part in expected)
        assert "</script><script>" in page.text_content("#map-second-title")
        labels = page.locator("#plot-forest .annotation-text").all_text_contents()
        assert any(label.startswith('"><img src') for label in labels)
        assert page.title().endswith(f"on {hostile.result.data}")


def test_the_policy_blocks_other_scripts_and_requests(browser: Any, study: Study) -> None:
    opened = OpenPage(browser, study.path)
    blocked, pwned = opened.page.evaluate(
        """async () => {
            const blocked = [];
            document.addEventListener("securitypolicyviolation", (event) => blocked.push(event.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.__pwned = 5";
            document.body.append(script);
            const image = document.createElement("img");
            image.src = "http://example.invalid/x.png";
            document.body.append(image);
            await fetch("http://example.invalid/").catch(() => null);
            await new Promise((done) => setTimeout(done, 50));
            return [blocked, window.__pwned];
        }"""
    )
    opened.context.close()
    assert sorted(blocked) == ["connect-src", "img-src", "script-src-elem"]
    assert pwned is None
    urls = [url for url in opened.requests if url.startswith("http")]
    assert [opened.failed.get(url) for url in urls] == ["csp"] * len(urls)  # blocked before the network


def test_without_scripts_the_tables_have_all_numbers(browser: Any, study: Study) -> None:
    with OpenPage(browser, study.path, "phone", java_script_enabled=False) as page:
        for width, height in SIZES.values():
            page.set_viewport_size({"width": width, "height": height})
            assert page.is_visible("#verdicts table")
            assert not page.is_visible("#theme")
        page.locator("#learning summary").click()
        assert page.is_visible("#learning table")


def test_a_study_without_weights_has_no_maps(browser: Any, unfinished: Study) -> None:
    with OpenPage(browser, unfinished.path, "phone") as page:
        assert page.is_visible("h1")
        check_width(page)
        resize(page, "desktop")
        check_width(page)
        assert "no attention maps" in page.text_content("#attention")
        assert "no finished run" in page.text_content("#attention .list")
        assert "preliminary" in page.text_content("header")


def test_the_page_of_a_task_draws_accuracy_by_length_and_depth(
    browser: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    arms = ("standard", *synthetic.HOSTILE[:3])
    result = replace(synthetic.task(arms, name="s-niah-2"), folder=str(tmp_path))
    path = write_report(result, tmp_path / "report.html", runs={})
    with OpenPage(browser, path, "phone", color_scheme="dark") as page:
        check_width(page)
        resize(page, "desktop")
        assert page.evaluate(TOO_WIDE) <= 0
        assert page.locator("#plot-recall .scatterlayer .trace").count() == 2 * len(arms)
        for n in range(len(arms)):
            (trace,) = drawn(page, f"recall-{n}")
            shown = page.locator(f"#plot-recall-{n} .heatmap-label text").all_text_contents()
            assert sorted(shown) == sorted(text for row in trace["text"] for text in row)
            color = f"document.getElementById('plot-recall-{n}').data[0].textfont.color"
            assert page.evaluate(color) == DARK["ink"]
        page.locator("#recall .keys button").nth(1).click()
        assert page.locator("#plot-recall .scatterlayer .trace").count() == 2 * (len(arms) - 1)
        assert page.locator("#learning .keys button").nth(1).get_attribute("aria-pressed") == "false"
        page.click("#theme")
        assert page.evaluate("document.getElementById('plot-recall-0').data[0].textfont.color") == LIGHT["ink"]
        hover(page, "recall-0", 0.4, 0.5)
        page.wait_for_selector("#plot-recall-0 .hovertext")
        assert "512 tokens, depth 50%: " in page.text_content("#plot-recall-0 .hovertext")
        assert page.evaluate("window.__pwned") is None
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.evaluate("document.querySelector('#plot-recall-0 .main-svg').clientWidth") <= 340
        assert page.evaluate(TOO_WIDE) <= 0


def test_the_page_on_rationales_draws_its_figures_and_shows_text_as_text(
    browser: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    bad = synthetic.HOSTILE
    result = synthetic.rationale_study(("r = 1", "r = 20", *bad[:3]), seeds=2, words=bad)
    path = write_report(replace(result, answer=bad[0], remarks=bad, notes=bad), tmp_path / "report.html")
    with OpenPage(browser, path, "phone", color_scheme="dark") as page:
        check_width(page)
        resize(page, "desktop")
        assert page.evaluate(TOO_WIDE) <= 0
        for name, count in (("path", 15), ("curve", 5), ("strips-mass", 12), ("strips-performance", 12)):
            assert page.locator(f"#plot-{name} .scatterlayer .trace").count() == count
        page.locator("#training .keys").get_by_role("button", name="r = 20").click()
        assert page.locator("#plot-path .scatterlayer .trace").count() == 12
        assert page.locator("#plot-curve .scatterlayer .trace").count() == 4
        page.click("#theme")
        assert page.evaluate("document.getElementById('plot-path').layout.font.color") == LIGHT["soft"]
        colors = "[...document.querySelectorAll('.colored .word')].map((w) => getComputedStyle(w).backgroundColor)"
        assert len(set(page.evaluate(colors))) > 5
        assert page.evaluate("window.__pwned") is None
        assert page.locator("img, iframe, object, embed, form").count() == 0
        assert bad[0] in page.text_content("#examples")


def test_the_page_of_a_probe_has_every_head_and_shows_text_as_text(
    browser: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    (run,) = synthetic.folder(tmp_path, ["standard"], layers=2, width=32).values()
    text = "<script>window.__pwned=1</script> \"quoted\" 'x' \x00\x1b \u202e שלום 😀"
    assert main(["probe", str(run), text, "--rationale", "quoted"]) == 0
    with OpenPage(browser, run / "probe.html", "phone") as page:
        assert page.evaluate(TOO_WIDE) <= 0
        resize(page, "desktop")
        page.fill("#map-layer", "1")
        page.fill("#map-head", "3")
        assert "layer 2, head 4 of 4" in page.text_content("#map-first-title")
        assert page.text_content("#map-second-title") == "mean over heads, layer 2"
        tokens = [256, *text.encode()]
        layer = model_maps(load_run(run).model, tokens)[1]
        largest = max(float(layer[3].max()), float(layer.mean(0).max()))
        for side, expected in (("first", layer[3]), ("second", layer.mean(0))):
            z = np.nan_to_num(np.array(drawn(page, f"map-{side}")[0]["z"], dtype=float))
            assert abs(np.sign(z) * z**2 * largest - expected.numpy()).max() < largest / 100
        assert page.text_content("#map-token-text").startswith(f"{len(tokens)},")
        assert page.locator(".colored .rationale").count() == 3 * len("quoted")
        assert page.evaluate("window.__pwned") is None
        assert "<script>window.__pwned=1</script>" in page.text_content(".colored tbody tr")
        assert not {"\x00", "\x1b", "\u202e"} & set(page.text_content("body"))
