"""Reports and live pages in a real Chromium, as a phone and a desktop show them, by day and by night."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, Browser
from recorded import Plan, Recording

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
    link = "document.querySelector('.fig a:has([aria-label*=gain])')"
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


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A database of its own, and the address at which its pages are served."""
    path = tmp_path / "lineage.db"
    with Store.open(path, write=True):
        pass
    server = open_server("127.0.0.1", 0, LivePages(str(path), "127.0.0.1"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield path, server_url(server)
    server.close()


WAIT = """
const [what, done] = [arguments[0], arguments[1]];
const look = () => document.body.textContent.includes(what) ? done(true) : setTimeout(look, 50);
look();
"""


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
        assert browser.driver.execute_async_script(WAIT, "30 candidates")
        assert browser.overflow() <= 0
        browser.run("document.querySelector('details').open = true; document.querySelector('.fig a').focus()")
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
