// Shows what a mark of a figure means beside the pointer or the focus; opens what is linked to and, for paper, everything.
(() => {
  "use strict";
  const MARK = '.fig [role="graphics-symbol"][aria-label]';
  const tip = () => document.getElementById("tip");
  let shown = null;
  const show = (mark, x, y) => {
    const box = tip();
    if (!box) return;
    if (shown !== mark) {
      box.textContent = mark.getAttribute("aria-label");
      box.hidden = false;
      shown = mark;
    }
    const w = box.offsetWidth, h = box.offsetHeight, edge = 8;
    const left = Math.max(edge, Math.min(x + 14, innerWidth - w - edge));
    const top = y + 16 + h + edge > innerHeight ? Math.max(edge, y - h - 12) : y + 16;
    box.style.left = left + "px";
    box.style.top = top + "px";
  };
  const hide = () => {
    const box = tip();
    if (box) box.hidden = true;
    shown = null;
  };
  const focused = () => shown && document.activeElement.contains(shown) && document.activeElement.matches(".fig a");
  const beside = (mark) => {
    const box = mark.getBoundingClientRect();
    show(mark, box.left + box.width / 2, box.top + box.height / 2);
  };
  const marked = (event) => {
    const at = event.target instanceof Element ? event.target : null;
    return at && (at.closest(MARK) || (at.closest(".fig a") && at.querySelector(MARK)));
  };
  const over = (event) => {
    const mark = marked(event);
    if (mark) show(mark, event.clientX, event.clientY);
    else if (shown && !focused()) hide();
  };
  document.addEventListener("pointermove", over);
  document.addEventListener("pointerdown", over);
  document.addEventListener("focusin", (event) => {
    const mark = marked(event);
    if (mark) beside(mark);
    else hide();
  });
  document.addEventListener("focusout", hide);
  // Focus scrolls its mark into view: what it shows goes along.
  const moved = () => (focused() ? beside(shown) : hide());
  document.addEventListener("scroll", moved, { passive: true, capture: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  // A link into a closed list opens it.
  document.addEventListener("click", (event) => {
    const link = event.target instanceof Element ? event.target.closest('a[href^="#"]') : null;
    const goal = link && document.getElementById(decodeURIComponent(link.getAttribute("href").slice(1)));
    for (let at = goal; at; at = at.parentElement) if (at instanceof HTMLDetailsElement) at.open = true;
  });
  const closed = [];
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details:not([open])").forEach((d) => { d.open = true; closed.push(d); });
  });
  addEventListener("afterprint", () => closed.splice(0).forEach((d) => { d.open = false; }));
})();
