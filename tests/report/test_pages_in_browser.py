"""Reports and live pages in a real Chromium, as a phone and a desktop show them, by day and by night."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import DESKTOP, PHONE, Browser
from recorded import Plan, Recording, record_run
from waitress.wasyncore import close_all

from evo.lineage.store import Store
from evo.report.live import LivePages, open_server, server_url

pytestmark = pytest.mark.slow

SIZES = pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
SCHEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])

SHADES = "return [document.body, ...document.querySelectorAll('h1')].map(e => getComputedStyle(e))" + (
    ".map(s => [s.color, s.backgroundColor])"
)


@pytest.fixture(scope="module")
def folder(rendered: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name, page in rendered.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return folder


@SCHEMES
@SIZES
def test_reports_open_without_complaint_and_fit(
    browser: Browser, folder: Path, size: tuple[int, int], dark: bool
) -> None:
    browser.view(size, dark=dark)
    for page in sorted(folder.iterdir()):
        browser.open(page.as_uri())
        assert browser.run("return document.querySelector('h1').textContent")
        assert browser.foreign() == []
        assert browser.overflow() <= 0
        (ink, paper), _ = browser.run(SHADES)
        assert (_brightness(paper) < _brightness(ink)) is dark
        assert browser.complaints() == []


def _brightness(colour: str) -> int:
    return sum(int(part) for part in colour.strip("rgba()").split(",")[:3])


@SIZES
def test_focus_and_pointer_show_the_change_and_the_gain(browser: Browser, folder: Path, size: tuple[int, int]) -> None:
    browser.view(size)
    browser.open((folder / "one.html").as_uri())
    shown = "const t = document.getElementById('tip'); return t.hidden ? '' : t.textContent"
    assert browser.run(shown) == ""
    link = "[...document.querySelectorAll('.fig a:has([aria-label*=gain])')].find(a => a.checkVisibility())"
    browser.run(f"{link}.focus()")
    told = browser.run(shown)
    assert "→" in told
    assert "gain over its first parent" in told
    box = browser.run("const b = document.getElementById('tip').getBoundingClientRect(); return [b.left, b.right]")
    assert 0 <= box[0] < box[1] <= size[0]
    browser.run(f"{link}.blur()")
    assert browser.run(shown) == ""
    browser.run("document.querySelector('details.steps').open = false")
    browser.run(f"{link}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    assert browser.run("return document.querySelector('details.steps').open") is True, "it leads to its row in the list"
    bar = "document.querySelector('[aria-label^=Importance] [role=graphics-symbol]')"
    browser.run(f"{bar}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.run("return new Promise(done => requestAnimationFrame(done))")  # the frame that tells the page it scrolled
    x, y = browser.run(f"const b = {bar}.getBoundingClientRect(); return [b.left + 5, b.top + 5]")
    browser.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert "%" in browser.run(shown)
    assert browser.complaints() == []


def test_paper_shows_what_is_closed_on_the_screen(browser: Browser, folder: Path) -> None:
    browser.view(DESKTOP)
    browser.open((folder / "one.html").as_uri())
    assert len(browser.cdp("Page.printToPDF", printBackground=True)["data"]) > 50_000
    closed = "return [...document.querySelectorAll('details:not([open]) table')].map(t => t.checkVisibility())"
    assert set(browser.run(closed)) == {False}
    browser.cdp("Emulation.setEmulatedMedia", media="print")
    assert set(browser.run(closed)) == {True}
    browser.cdp("Emulation.setEmulatedMedia", media="")


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address at which pages are served within the block. No thread outlives it: one that still answers writes into a
    descriptor that is another test's by then."""
    server = open_server("127.0.0.1", 0, app)
    loop = threading.Thread(target=server.run, daemon=True)
    loop.start()
    try:
        yield server_url(server)
    finally:
        server.task_dispatcher.shutdown()
        assert not server.task_dispatcher.threads
        opened = dict(server._map)
        server.trigger.pull_trigger(server._map.clear)  # in the loop's own thread, which ends then
        loop.join(30)
        assert not loop.is_alive()
        close_all(opened)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A database of its own, and the address at which its pages are served."""
    path = tmp_path / "lineage.db"
    with Store.open(path, write=True):
        pass
    with serving(LivePages(str(path), "127.0.0.1")) as url:
        yield path, url


def test_a_phone_shows_whole_figures_with_legible_text(browser: Browser, folder: Path) -> None:
    browser.view(PHONE)
    browser.open((folder / "one.html").as_uri())
    drawn = browser.run("""
        return [...document.querySelectorAll('.fig')].filter(f => f.checkVisibility()).map(f => {
          const texts = [...f.querySelectorAll('text')], boxes = [f, ...texts].map(t => t.getBoundingClientRect());
          const size = parseFloat(getComputedStyle(texts[0]).fontSize) * f.getScreenCTM().a;
          const ends = [Math.min(...boxes.map(b => b.left)), Math.max(...boxes.map(b => b.right))];
          return [f.getAttribute('aria-label'), ...ends, size];
        })""")
    assert sum(label.startswith("Lineage") for label, *_ in drawn) == 1
    for label, left, right, size in drawn:
        assert 0 <= left < right <= PHONE[0], label
        assert size >= 11, label


WAIT = """
const [what, done] = [arguments[0], arguments[1]];
const look = () => document.body.textContent.includes(what) ? done(true) : setTimeout(look, 50);
look();
"""


def test_what_is_known_stands_where_the_first_part_of_a_live_page_will_have_it(browser: Browser, tmp_path: Path) -> None:
    path, come = tmp_path / "lineage.db", threading.Event()
    long = "a-run-with-a-very-long-name-for-which-no-phone-has-any-room"
    with Store.open(path, write=True) as store:
        record_run(store, Plan(name=long, evaluations=30))
    pages = LivePages(str(path), "127.0.0.1")

    def waiting(environ: Any, start: Any) -> Any:
        if environ["PATH_INFO"].endswith("/body"):
            come.wait(30)
        return pages(environ, start)

    places = "return ['#pause', '.kicker', 'h1', '.lede'].map(s => document.querySelector(s).getBoundingClientRect())"
    with serving(waiting) as url:
        for size in (PHONE, DESKTOP):
            browser.view(size)
            for address, what in (("", "The latest first"), (f"run/{long}", "How to reproduce")):
                come.clear()
                browser.open(url + address)
                before = [(r["top"], r["left"]) for r in browser.run(places)]
                assert browser.run("return document.getElementById('page').getAttribute('aria-busy')") == "true"
                assert browser.run("return document.querySelector('#page').innerText").strip()
                come.set()
                assert browser.driver.execute_async_script(WAIT, what)
                assert [(r["top"], r["left"]) for r in browser.run(places)] == before
                assert browser.run("return document.querySelector('[aria-busy], .bone')") is None
                if not address:
                    cells = "return [...document.querySelectorAll('tbody tr > *')].map(c => c.getBoundingClientRect())"
                    cells = browser.run(cells)
                    assert cells[1]["right"] <= size[0], "the speed-up, beside the name"
                    assert cells[0]["width"] > 100


def test_a_live_page_follows_the_search_unless_it_is_paused(browser: Browser, served: tuple[Path, str]) -> None:
    path, url = served
    host = url.split("/")[2]
    browser.driver.set_script_timeout(200)
    with Store.open(path, write=True) as store:
        browser.view(PHONE)
        browser.open(url)
        assert browser.driver.execute_async_script(WAIT, "No run is recorded here")
        search = Recording(store, Plan(name="live", evaluations=90, failing={}))
        search.advance(30)
        browser.open(f"{url}run/live")
        assert browser.driver.execute_async_script(WAIT, "How to reproduce")
        assert browser.overflow() <= 0
        shown = "[...document.querySelectorAll('.fig a')].find(a => a.checkVisibility())"
        browser.run(f"document.querySelector('details').open = true; {shown}.focus()")
        search.advance(30)
        assert browser.driver.execute_async_script(WAIT, "60 candidates")
        assert browser.run("return document.querySelector('details').open") is True
        assert browser.run("return document.activeElement.closest('svg') !== null") is True
        pause = "document.getElementById('pause').click()"
        browser.run(pause)
        search.advance(30)
        search.finish()
        browser.run("return new Promise(done => setTimeout(done, 3000))")
        assert "60 candidates" in browser.run("return document.body.textContent")
        browser.run(pause)
        assert browser.driver.execute_async_script(WAIT, "the winner against a second copy")
        browser.open(url)
        assert browser.driver.execute_async_script(WAIT, "finished")
    assert browser.overflow() <= 0
    browser.view(DESKTOP)
    assert browser.overflow() <= 0
    assert browser.foreign(host) == []
    assert browser.complaints() == []
