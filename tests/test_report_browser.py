"""The report in a real browser: sliders, classes that light up, the keyboard, phones, paper, and no network."""

from __future__ import annotations

import pytest

from sdrseg.reporting import write_report

from browser import Browser, find_browser

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no chromium, chromium-browser or google-chrome on PATH")

TAB, ENTER, ESCAPE, HOME, LEFT, RIGHT, SPACE = 9, 13, 27, 36, 37, 39, 32

# The colours of the truth of the first image, as they are on the screen: {"r,g,b,a": pixels}.
COLOURS = """(async () => {
  const mask = document.querySelector("#grid .row img.mask");
  await mask.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [mask.naturalWidth, mask.naturalHeight];
  const pen = canvas.getContext("2d");
  pen.drawImage(mask, 0, 0);
  const data = pen.getImageData(0, 0, canvas.width, canvas.height).data, found = {};
  for (let i = 0; i < data.length; i += 4) {
    const colour = [...data.slice(i, i + 4)].join();
    found[colour] = (found[colour] || 0) + 1;
  }
  return found;
})()"""
VISIBLE = "[...document.querySelectorAll('#grid img.mask')].filter((i) => i.checkVisibility())"
SHOWN = f"{VISIBLE}.map((i) => i.dataset.step).filter((step) => step !== undefined)"


@pytest.fixture(scope="module")
def report(report_runs, tmp_path_factory):
    file = tmp_path_factory.mktemp("browser") / "report.html"
    write_report([report_runs["ft"], report_runs["sdr"]], file, images=3)
    return file


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    browser = Browser(find_browser() or "", tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(running, report):
    """The report, freshly loaded; at the end nothing may have gone wrong and nothing may have been asked for."""
    running.problems.clear()
    running.requests.clear()
    running.open(report)
    yield running
    running.run("new Promise((done) => setTimeout(done, 50))")
    assert running.problems == []
    assert {url for url in running.requests if not url.startswith(("data:", "blob:"))} == {report.resolve().as_uri()}


def focus(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector({selector!r}).focus()")


def test_the_step_slider_moves_all_predictions(browser):
    assert browser.run(SHOWN) == ["2"] * 6  # two runs, three images
    focus(browser, "#step")
    browser.press("ArrowLeft", LEFT)
    assert browser.run(SHOWN) == ["1"] * 6
    assert browser.run("document.getElementById('step-now').textContent") == "1"
    assert "New in step 1: arrow" in browser.run("document.getElementById('step-new').textContent")
    assert browser.run("[...new Set([...document.querySelectorAll('.when')].map((e) => e.textContent))]") == ["step 1"]
    browser.press("Home", HOME)
    assert browser.run(SHOWN) == ["0"] * 6
    browser.click("#step")  # the middle
    assert browser.run(SHOWN) == ["1"] * 6


def test_the_opacity_slider_changes_what_is_seen(browser):
    def seen() -> float:
        return float(browser.run("getComputedStyle(document.querySelector('#grid img.mask')).opacity"))

    assert seen() == 0.75
    focus(browser, "#opacity")
    browser.press("ArrowRight", RIGHT)
    assert seen() == pytest.approx(0.8)
    browser.press("Home", HOME)
    assert seen() == 0
    assert browser.run("document.getElementById('opacity-now').textContent") == "0 %"


def test_a_click_on_a_class_lights_it_up_and_dims_the_others(browser):
    before = browser.run(COLOURS)
    chips = browser.run(
        "[...document.querySelectorAll('#pictures .chip')].map((c) => getComputedStyle(c).backgroundColor)"
    )
    colours = [",".join(part.strip() for part in chip[4:-1].split(",")) + ",255" for chip in chips]
    channel = next(c for c in range(1, 11) if colours[c] in before)  # a class that the first image holds
    button = f"#pictures button[data-channel='{channel}']"
    browser.click(button)
    assert browser.run(f"document.querySelector({button!r}).getAttribute('aria-pressed')") == "true"
    after = browser.run(COLOURS)
    assert after[colours[channel]] == before[colours[channel]]
    assert len(after) == 2 and sum(after.values()) == sum(before.values())
    (other,) = after.keys() - {colours[channel]}
    assert [int(v) for v in other.split(",")][3] == 200
    dimmed = "[...document.querySelectorAll('.cloud')].filter((c) => !c.classList.contains('dim'))"
    assert browser.run(f"[...new Set({dimmed}.map((c) => c.dataset.channel))]") in ([str(channel)], [])
    # The other legend follows, the step slider keeps the light, and "Show all" puts everything back.
    assert browser.run(f"document.querySelector(\"#latent button[data-channel='{channel}']\").ariaPressed") == "true"
    focus(browser, "#step")
    browser.press("ArrowLeft", LEFT)
    assert browser.run(f"{VISIBLE}.map((i) => i.dataset.lit)") == [str(channel)] * 9
    browser.click("#pictures .clear")
    assert browser.run(COLOURS) == before
    assert browser.run("document.querySelectorAll('[aria-pressed=true], .dim').length") == 0


def test_everything_can_be_done_with_the_keyboard(browser):
    focus(browser, "#opacity")
    browser.press("Tab", TAB)
    assert browser.run("document.activeElement.dataset.channel") == "0"
    assert browser.run("getComputedStyle(document.activeElement).outline").endswith("solid 3px")
    browser.press("Tab", TAB)
    browser.press(" ", SPACE)
    browser.press("Tab", TAB)
    browser.press("Enter", ENTER)
    pressed = "[...document.querySelectorAll('#pictures [aria-pressed=true]')].map((b) => b.dataset.channel)"
    assert browser.run(pressed) == ["1", "2"]
    browser.press("Escape", ESCAPE)
    assert browser.run(pressed) == []
    assert browser.run("document.activeElement.closest('.legend') !== null")
    focus(browser, "#steps summary")
    browser.press("Enter", ENTER)
    assert browser.run("document.querySelector('#steps details').open")


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_does_not_scroll_sideways(browser, report, width):
    browser.open(report, width=width)
    browser.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert browser.run("document.documentElement.scrollWidth") <= width
    outside = """[...document.querySelectorAll("body *")].filter((e) => !e.closest(".scroll, .skip, .only-read, svg") &&
      e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""
    assert browser.run(outside) == []


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_in_light_and_dark(browser, report, dark):
    browser.open(report, dark=dark)
    ratios = browser.run("""(() => {
      const luminance = (colour) => {
        const parts = colour.match(/[\\d.]+/g).map((v) => v / 255);
        const [r, g, b] = parts.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const paper = luminance(getComputedStyle(document.body).backgroundColor);
      const places = [".lead", "p.small", "h2", ".plain td", ".plain thead th", "nav a", "summary", ".heat tbody th"];
      return places.map((place) => {
        const ink = luminance(getComputedStyle(document.querySelector(place)).color);
        return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
      });
    })()""")
    assert min(ratios) >= 4.5


def test_it_prints(browser):
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000


def test_a_report_without_pictures_has_no_errors(running, report_runs, tmp_path):
    write_report([report_runs["ft"]], tmp_path / "plain.html", images=0)
    running.problems.clear()
    running.open(tmp_path / "plain.html")
    assert running.run("document.querySelector('#pictures p').textContent").startswith("This report has no pictures")
    assert running.problems == []
