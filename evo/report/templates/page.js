// Shows what a mark of a figure means beside the pointer or the focus; opens what is linked to.
(() => {
  "use strict";
  const MARK = '.fig [role="graphics-symbol"][aria-label]';
  const tip = document.getElementById("tip");
  let shown = null;
  const show = (mark, x, y) => {
    if (shown !== mark) {
      tip.textContent = mark.getAttribute("aria-label");
      tip.hidden = false;
      shown = mark;
    }
    const w = tip.offsetWidth, h = tip.offsetHeight, edge = 8;
    const left = Math.max(edge, Math.min(x + 14, innerWidth - w - edge));
    const top = y + 16 + h + edge > innerHeight ? Math.max(edge, y - h - 12) : y + 16;
    tip.style.left = left + "px";
    tip.style.top = top + "px";
  };
  const hide = () => {
    tip.hidden = true;
    shown = null;
  };
  const focused = () => document.activeElement.matches(".fig a") && document.activeElement.querySelector(MARK);
  // What has the focus is told where it is, also when it scrolls into view.
  const follow = () => {
    const mark = focused();
    if (!mark) return hide();
    const box = mark.getBoundingClientRect();
    show(mark, box.left + box.width / 2, box.top + box.height / 2);
  };
  const over = (event) => {
    const mark = event.target instanceof Element && event.target.closest(MARK);
    if (mark) show(mark, event.clientX, event.clientY);
    else if (!focused()) hide();
  };
  document.addEventListener("pointermove", over);
  document.addEventListener("pointerdown", over);
  document.addEventListener("focusin", follow);
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", follow, { passive: true, capture: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  // A link into a closed list opens it.
  document.addEventListener("click", (event) => {
    const link = event.target instanceof Element ? event.target.closest('a[href^="#"]') : null;
    const goal = link && document.getElementById(decodeURIComponent(link.getAttribute("href").slice(1)));
    for (let at = goal; at; at = at.parentElement) if (at instanceof HTMLDetailsElement) at.open = true;
  });
})();
