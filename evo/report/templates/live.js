// Asks the server for the page's part again and again, and exchanges it when it has changed.
(() => {
  "use strict";
  const page = document.getElementById("page"), state = document.getElementById("state");
  const button = document.getElementById("pause");
  if (!page) return; // it says that it cannot be shown
  let tag = null, paused = false, timer = null, failures = 0;

  // What the reader has opened, focused and scrolled stays so when a newer state of the page takes the place of the older.
  const exchange = (text) => {
    const open = new Map([...page.querySelectorAll("details")].map((d, i) => [i + d.querySelector("summary").textContent.replace(/\d+/g, ""), d.open]));
    const active = document.activeElement;
    const href = active && page.contains(active) ? active.getAttribute("href") : null;
    const strips = [...page.querySelectorAll(".scroll")].map((d) => d.scrollLeft);
    const parsed = new DOMParser().parseFromString(text, "text/html");
    page.replaceChildren(...parsed.body.childNodes);
    page.removeAttribute("aria-busy");
    page.querySelectorAll("details").forEach((d, i) => {
      const was = open.get(i + d.querySelector("summary").textContent.replace(/\d+/g, ""));
      if (was !== undefined) d.open = was;
    });
    page.querySelectorAll(".scroll").forEach((d, i) => { if (strips[i]) d.scrollLeft = strips[i]; });
    if (href) {
      const again = [...page.querySelectorAll("a[href]")].find((a) => a.getAttribute("href") === href && a.checkVisibility());
      if (again) again.focus({ preventScroll: true });
    }
    const title = page.querySelector("h1");
    if (title) document.title = title.textContent;
    if (tag === null && location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
  };

  const say = (text) => { state.textContent = text; };
  const later = (seconds) => {
    clearTimeout(timer);
    if (!paused) timer = setTimeout(ask, 1000 * seconds);
  };
  const selecting = () => !getSelection().isCollapsed && page.contains(getSelection().anchorNode);

  async function ask() {
    if (document.hidden && tag !== null) return; // asked again as soon as the page is visible
    if (selecting()) return later(2);
    const began = performance.now();
    try {
      const answer = await fetch(page.dataset.source, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        exchange(await answer.text());
        tag = answer.headers.get("ETag");
      } else if (answer.status !== 304) {
        const said = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main p");
        throw new Error(said ? said.textContent : "the server answered " + answer.status);
      }
      failures = 0;
      say((answer.status === 200 ? "updated " : "unchanged, looked at ") + new Date().toLocaleTimeString());
      later(Math.min(60, Math.max(3, (performance.now() - began) / 100))); // ten times what it took: a search needs the cores
    } catch (error) {
      failures += 1;
      say(error instanceof TypeError ? "the server does not answer; is evo dashboard still running?" : error.message);
      later(Math.min(30, 2 * failures));
    }
  }

  button.addEventListener("click", () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    button.textContent = paused ? "Resume updates" : "Pause updates";
    if (paused) { clearTimeout(timer); say("paused"); } else ask();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !paused) later(0); });
  ask();
})();
