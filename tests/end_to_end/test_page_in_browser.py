"""The page in a real browser: it renders, it answers, it asks for nothing, and what others wrote stays text."""

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
from qkflow.experiment.summary import ExperimentResult
from qkflow.probes import attention_maps
from qkflow.report import write_report, write_sharpened
from qkflow.report.figures import curves, forest, reach, strips
from qkflow.report.palette import DARK, LIGHT
from qkflow.training import load_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed")

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
SIZES = {"phone": (360, 740), "desktop": (1280, 900)}
ARMS = ("standard", "differential", "coupled")


@dataclass(frozen=True, kw_only=True)
class Made:
    summary: ExperimentResult
    path: Path
    runs: dict[str, Path]


class Shown:
    """A page in a fresh profile, with everything it said and asked for."""

    def __init__(self, browser: Any, path: Path, size: str = "desktop", **options: Any) -> None:
        width, height = SIZES[size]
        view = {"width": width, "height": height}
        self.context = browser.new_context(viewport=view, has_touch=size == "phone", **options)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.failed: dict[str, str] = {}
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.context.on("requestfailed", lambda request: self.failed.update({request.url: request.failure}))
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.address = path.as_uri()
        self.page.goto(self.address)
        if options.get("java_script_enabled", True):
            self.page.wait_for_selector("html[data-ready]", state="attached")

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: object) -> None:
        try:
            assert self.said == []
            assert [url for url in self.asked if not url.startswith(("data:", "blob:"))] == [self.address]
        finally:
            self.context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def study(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("study")
    summary = synthetic.study(ARMS, tuned=True, failed=[("coupled", 2)])
    runs = synthetic.folder(folder, ARMS, layers=2, excerpts=2, width=32)
    return Made(summary=summary, path=write_report(summary, folder, folder / "report.html", runs=runs), runs=runs)


@pytest.fixture(scope="module")
def hostile(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("hostile")
    bad = synthetic.HOSTILE
    names = (bad[0], *bad[1:], "standard")
    summary = synthetic.study(names, seeds=3, failed=[(names[2], 0)])
    note = summary.notes[0]
    notes = tuple(replace(note, name=text, value=text, meaning=text) for text in bad)
    summary = replace(summary, folder=bad[1], corpus=bad[2], command=bad, remarks=bad, notes=notes)
    runs = synthetic.folder(folder, names, layers=2, excerpts=2, width=32)
    return Made(summary=summary, path=write_report(summary, folder, folder / "report.html", runs=runs), runs=runs)


@pytest.fixture(scope="module")
def little(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("little")
    summary = synthetic.study(ARMS, seeds=1, unfinished=True)
    path = write_report(summary, folder, folder / "report.html", runs={})
    return Made(summary=summary, path=path, runs={})


def drawn(page: Any, name: str) -> list[dict[str, Any]]:
    return json.loads(page.evaluate(f"JSON.stringify(document.getElementById('plot-{name}').data)"))


def layer_text(page: Any) -> str:
    return page.text_content("#map-first-title")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", ["study", "hostile", "little"])
def test_it_opens_in_silence_and_fits_the_screen(
    browser: Any, request: pytest.FixtureRequest, which: str, size: str
) -> None:
    with Shown(browser, request.getfixturevalue(which).path, size) as page:
        page.wait_for_load_state("load")
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        assert page.is_visible("h1")
        page.evaluate("document.querySelectorAll('details').forEach((item) => { item.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_every_figure_is_drawn_with_every_trace(browser: Any, study: Made) -> None:
    wanted = {"forest": forest(study.summary), "strips": strips(study.summary), "reach": reach(study.summary)}
    wanted["curves"] = curves(study.summary)["tokens-loss"]
    with Shown(browser, study.path) as page:
        for name, figure in wanted.items():
            assert len(drawn(page, name)) == len(figure["data"])
            assert page.locator(f"#plot-{name} .scatterlayer .trace").count() == len(figure["data"])
            assert page.locator(f"#plot-{name} .main-svg").first.bounding_box()["height"] > 100
        assert page.locator("#plot-exhibit-0 .barlayer .trace").count() == 2
        assert page.locator("#plot-map-first .heatmaplayer image").count() >= 1


def test_toggles_change_the_axes_and_keys_hide_an_arm(browser: Any, study: Made) -> None:
    with Shown(browser, study.path) as page:
        axis = "document.getElementById('plot-curves').layout.{}axis.title.text"
        assert page.evaluate(axis.format("x")) == "training tokens"
        page.get_by_label("seconds", exact=True).check()
        assert page.evaluate(axis.format("x")) == "seconds of training"
        page.get_by_label("difference to the baseline").check()
        assert "minus the baseline" in page.evaluate(axis.format("y"))
        assert {trace["meta"]["arm"] for trace in drawn(page, "curves")} == {1, 2}
        before = page.locator("#plot-curves .scatterlayer .trace").count()
        key = page.get_by_role("button", name="coupled")
        key.click()
        assert key.get_attribute("aria-pressed") == "false"
        assert page.locator("#plot-curves .scatterlayer .trace").count() == before - 2
        key.click()
        assert page.locator("#plot-curves .scatterlayer .trace").count() == before


def test_the_keyboard_alone_reaches_and_moves_the_sliders(browser: Any, study: Made) -> None:
    with Shown(browser, study.path) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        reached = set()
        for _ in range(80):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
            if "map-layer" in reached:
                break
        assert {"across", "shown", "map-first", "map-second", "map-excerpt", "map-layer"} <= reached
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        before = drawn(page, "map-first")[0]["z"]
        assert "layer 1" in layer_text(page)
        page.keyboard.press("ArrowRight")
        assert "layer 2" in layer_text(page)
        assert page.get_attribute("#map-layer", "aria-valuetext") == "2 of 2"
        assert drawn(page, "map-first")[0]["z"] != before
        page.keyboard.press("Tab")
        page.keyboard.press("End")
        assert "head 4 of 4" in layer_text(page)
        assert "head 2 of 2" in page.text_content("#map-second-title")  # differential has half as many


@pytest.mark.parametrize(("layer", "head", "excerpt"), [(0, 0, 0), (1, 1, 1)])
def test_the_maps_on_the_page_are_those_of_the_models(
    browser: Any, study: Made, layer: int, head: int, excerpt: int
) -> None:
    tokens = json.loads((study.path.parent / "corpus.json").read_text())["excerpts"][excerpt]["tokens"]
    with Shown(browser, study.path) as page:
        page.select_option("#map-excerpt", index=excerpt)
        page.fill("#map-layer", str(layer))
        page.fill("#map-head", str(head))
        truth = [attention_maps(load_run(study.runs[name]).model, tokens)[layer][head].numpy() for name in ARMS[:2]]
        most = max(abs(one).max() for one in truth)
        for side, weights in zip(("first", "second"), truth, strict=True):
            z = np.array(drawn(page, f"map-{side}")[0]["z"], dtype=float)
            assert np.isnan(z[np.triu_indices(len(tokens), 1)]).all()
            shown = np.nan_to_num(np.sign(z) * z**2) * most
            assert abs(shown - weights).max() < most / 100
        assert (truth[1] < 0).any()
        assert page.text_content("#scale-low").startswith("\N{MINUS SIGN}")


def test_hovering_a_cell_and_choosing_a_token_name_the_pair(browser: Any, study: Made) -> None:
    with Shown(browser, study.path) as page:
        place = page.locator("#plot-map-first .nsewdrag").first
        place.scroll_into_view_if_needed()
        box = place.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.7)
        page.wait_for_selector("#plot-map-first .hovertext")
        assert "takes" in page.text_content("#plot-map-first .hovertext")
        page.locator("#map-first-text span").nth(9).click()
        assert page.text_content("#map-token-told") == "10, “(”"
        assert page.text_content("#map-second-told").startswith("Token 10, “(”, takes most from ")
        assert page.locator("#map-first-text .here").text_content() == "("


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(browser: Any, study: Made, scheme: str) -> None:
    def paper(page: Any) -> str:
        return page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()")

    def written(page: Any) -> str:
        return page.evaluate("document.getElementById('plot-curves').layout.font.color")

    themes = {"light": LIGHT, "dark": DARK}
    with Shown(browser, study.path, color_scheme=scheme) as page:
        assert paper(page) == themes[scheme]["paper"]
        assert written(page) == themes[scheme]["soft"]
        assert page.evaluate("getComputedStyle(document.body).backgroundColor").startswith("rgb(")
        for wanted in ("light", "dark"):
            page.click("#theme")
            assert paper(page) == themes[wanted]["paper"]
            assert written(page) == themes[wanted]["soft"]
        page.click("#theme")
        assert paper(page) == themes[scheme]["paper"]
        other = "light" if scheme == "dark" else "dark"
        page.emulate_media(color_scheme=other)
        page.wait_for_selector(f"html[data-drawn='{themes[other]['paper']}']", state="attached")
        assert written(page) == themes[other]["soft"]


def test_names_and_texts_of_others_stay_text(browser: Any, hostile: Made) -> None:
    with Shown(browser, hostile.path) as page:
        for name in ("forest", "strips", "curves"):
            place = page.locator(f"#plot-{name} .nsewdrag").first
            place.scroll_into_view_if_needed()
            box = place.bounding_box()
            for part in (0.2, 0.5, 0.8):
                page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] * part)
        page.select_option("#map-second", index=2)
        assert page.evaluate("window.__pwned") is None
        assert page.locator("script").count() == 3
        assert page.locator("img, iframe, object, embed, form").count() == 0
        assert page.locator("a:not([href^='#'])").count() == 0
        body = page.text_content("main")
        for text in (
            "<script>window.__pwned=1</script>",
            '"><img src=x onerror="window.__pwned=2">',
            "\\u202e",
            "\\x00",
        ):
            assert text in body
        assert "</script><script>" in page.text_content("#map-second-title")
        labels = page.locator("#plot-forest .annotation-text").all_text_contents()
        assert any(text.startswith('"><img src') for text in labels)
        assert page.title().endswith(f"on {hostile.summary.corpus}")


def test_the_policy_stops_scripts_and_requests_that_are_not_ours(browser: Any, study: Made) -> None:
    shown = Shown(browser, study.path)
    stopped = shown.page.evaluate(
        """async () => {
            const stopped = [];
            document.addEventListener("securitypolicyviolation", (event) => stopped.push(event.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.__pwned = 5";
            document.body.append(script);
            const image = document.createElement("img");
            image.src = "http://example.invalid/x.png";
            document.body.append(image);
            await fetch("http://example.invalid/").catch(() => null);
            await new Promise((done) => setTimeout(done, 50));
            return [stopped, window.__pwned];
        }"""
    )
    shown.context.close()
    assert sorted(stopped[0]) == ["connect-src", "img-src", "script-src-elem"]
    assert stopped[1] is None
    tried = [url for url in shown.asked if url.startswith("http")]
    assert [shown.failed.get(url) for url in tried] == ["csp"] * len(tried)  # stopped before the network


def test_everything_to_use_has_a_name_and_headings_descend(browser: Any, study: Made) -> None:
    with Shown(browser, study.path) as page:
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("input, select, button, summary, a")].filter((item) =>
                !(item.labels && item.labels.length) && !item.textContent.trim()).map((item) => item.outerHTML)"""
        )
        assert nameless == []
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((item) => Number(item.tagName[1]))")
        assert levels[0] == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))
        small = page.evaluate(
            """() => [...document.querySelectorAll("button, select, summary, fieldset label, input[type=range]")]
                .filter((item) => item.offsetHeight && item.offsetHeight < 18).map((item) => item.outerHTML)"""
        )
        assert small == []
        for box in page.locator(".scroll").all():
            wide = box.evaluate("(item) => item.scrollWidth > item.clientWidth + 1")
            assert (box.get_attribute("tabindex") == "0") == wide


def test_on_paper_everything_is_open_and_fits(browser: Any, study: Made) -> None:
    with Shown(browser, study.path, color_scheme="dark") as page:
        closed = page.locator("details:not([open])").count()
        assert closed > 3
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.locator("details:not([open])").count() == 0
        assert not page.is_visible("nav")
        assert (
            page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()") == "#ffffff"
        )
        assert page.evaluate("document.getElementById('plot-curves').layout.font.color") == LIGHT["soft"]
        widest = page.evaluate("Math.max(...[...document.querySelectorAll('.main-svg')].map((s) => s.clientWidth))")
        assert widest <= 680
        page.emulate_media(media="screen")
        page.evaluate("window.dispatchEvent(new Event('afterprint'))")
        assert page.locator("details:not([open])").count() == closed
        assert page.evaluate("document.getElementById('plot-curves').layout.font.color") == DARK["soft"]
        assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")


def test_a_figure_can_be_saved(browser: Any, study: Made) -> None:
    with Shown(browser, study.path) as page:
        with page.expect_download() as saved:
            page.click("[data-save=forest]")
        assert saved.value.suggested_filename == "qkflow-forest.svg"
        assert "<svg" in Path(saved.value.path()).read_text()


@pytest.mark.parametrize("size", SIZES)
def test_without_scripts_the_tables_tell_everything(browser: Any, study: Made, size: str) -> None:
    with Shown(browser, study.path, size, java_script_enabled=False) as page:
        assert page.is_visible("table.verdicts")
        assert not page.is_visible("#theme")
        page.locator("#learning summary").click()
        assert page.is_visible("#learning table")


def test_a_study_without_weights_says_so(browser: Any, little: Made) -> None:
    with Shown(browser, little.path) as page:
        assert "no attention maps" in page.text_content("#attention")
        assert "no run is finished" in page.text_content("#attention .missing")
        assert "provisional" in page.text_content("header")


def test_the_page_of_a_task_draws_accuracies_by_length_and_depth(
    browser: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    arms = ("standard", *synthetic.HOSTILE[:3])
    summary = synthetic.task(arms, name="s-niah-2")
    path = write_report(summary, tmp_path, tmp_path / "report.html", runs={})
    with Shown(browser, path, "phone") as page:
        page.evaluate("document.querySelectorAll('details').forEach((item) => { item.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    with Shown(browser, path, color_scheme="dark") as page:
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        assert page.locator("#plot-recall .scatterlayer .trace").count() == 2 * len(arms)
        for n in range(len(arms)):
            (trace,) = drawn(page, f"recall-{n}")
            shown = page.locator(f"#plot-recall-{n} .heatmap-label text").all_text_contents()
            assert sorted(shown) == sorted(text for row in trace["text"] for text in row)
            colour = f"document.getElementById('plot-recall-{n}').data[0].textfont.color"
            assert page.evaluate(colour) == DARK["ink"]
        keys = page.locator("#recall .keys button")
        keys.nth(1).click()
        assert page.locator("#plot-recall .scatterlayer .trace").count() == 2 * (len(arms) - 1)
        assert page.locator("#learning .keys button").nth(1).get_attribute("aria-pressed") == "false"
        page.click("#theme")
        assert page.evaluate("document.getElementById('plot-recall-0').data[0].textfont.color") == LIGHT["ink"]
        place = page.locator("#plot-recall-0 .nsewdrag").first
        place.scroll_into_view_if_needed()
        box = place.bounding_box()
        page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
        page.wait_for_selector("#plot-recall-0 .hovertext")
        assert "512 tokens, 50 % deep: " in page.text_content("#plot-recall-0 .hovertext")
        assert page.evaluate("window.__pwned") is None
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.evaluate("document.querySelector('#plot-recall-0 .main-svg').clientWidth") <= 340
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_the_page_of_sharper_attention_draws_answers_and_obeys_nobody(
    browser: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    bad = synthetic.HOSTILE
    found = synthetic.beside("synthetic_sharpened").study(("r = 1", "r = 20", *bad[:3]), seeds=2, words=bad)
    path = write_sharpened(replace(found, answer=bad[0], remarks=bad, notes=bad), tmp_path / "sharpen.html")
    with Shown(browser, path, "phone") as page:
        page.evaluate("document.querySelectorAll('details').forEach((item) => { item.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    with Shown(browser, path, color_scheme="dark") as page:
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        for name, count in (("path", 15), ("curve", 5), ("strips-mass", 12), ("strips-performance", 12)):
            assert page.locator(f"#plot-{name} .scatterlayer .trace").count() == count
        page.get_by_role("button", name="r = 20").click()
        assert page.locator("#plot-path .scatterlayer .trace").count() == 12
        assert page.locator("#plot-curve .scatterlayer .trace").count() == 4
        page.click("#theme")
        assert page.evaluate("document.getElementById('plot-path').layout.font.color") == LIGHT["soft"]
        colours = "[...document.querySelectorAll('.coloured .word')].map((w) => getComputedStyle(w).backgroundColor)"
        assert len(set(page.evaluate(colours))) > 5
        assert page.evaluate("window.__pwned") is None
        assert page.locator("img, iframe, object, embed, form").count() == 0
        assert bad[0] in page.text_content("#examples")


def test_the_page_of_a_probe_has_every_head_and_obeys_nobody(
    browser: Any, synthetic: ModuleType, tmp_path: Path
) -> None:
    (run,) = synthetic.folder(tmp_path, ["standard"], layers=2, width=32).values()
    text = "<script>window.__pwned=1</script> \"quoted\" 'x' \x00\x1b \u202e שלום 😀"
    assert main(["probe", str(run), text, "--rationale", "quoted"]) == 0
    with Shown(browser, run / "probe.html", "phone") as page:
        assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    with Shown(browser, run / "probe.html") as page:
        page.fill("#map-layer", "1")
        page.fill("#map-head", "3")
        assert "layer 2, head 4 of 4" in layer_text(page)
        assert page.text_content("#map-second-title") == "mean of the heads, layer 2"
        tokens = [256, *text.encode()]
        layer = attention_maps(load_run(run).model, tokens)[1]
        for side, truth in (("first", layer[3]), ("second", layer.mean(0))):
            z = np.nan_to_num(np.array(drawn(page, f"map-{side}")[0]["z"], dtype=float))
            most = max(float(layer[3].max()), float(layer.mean(0).max()))
            assert abs(np.sign(z) * z**2 * most - truth.numpy()).max() < most / 100
        assert page.text_content("#map-token-told").startswith(f"{len(tokens)},")
        assert page.locator(".coloured .because").count() == 3 * len("quoted")
        assert page.evaluate("window.__pwned") is None
        assert "<script>window.__pwned=1</script>" in page.text_content(".coloured tbody tr")
        assert not {"\x00", "\x1b", "\u202e"} & set(page.text_content("body"))
