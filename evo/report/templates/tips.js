(() => {
  "use strict";
  const tip = () => document.getElementById("tip");
  let shown = null;
  const show = (mark, x, y) => {
    const box = tip();
    if (!box) return;
    if (shown !== mark) {
      box.textContent = mark.getAttribute("data-tip");
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
  const beside = (mark) => {
    const box = mark.getBoundingClientRect();
    show(mark, box.left + box.width / 2, box.top + box.height / 2);
  };
  const marked = (event) => (event.target instanceof Element ? event.target.closest("[data-tip]") : null);
  const over = (event) => {
    const mark = marked(event);
    if (mark) show(mark, event.clientX, event.clientY);
    else if (shown && document.activeElement !== shown) hide();
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
  const moved = () => (shown && document.activeElement === shown ? beside(shown) : hide());
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
