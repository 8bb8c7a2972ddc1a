// What the mouse and the keys do; explorer.js says what that looks like.

const HELP = [
  ["drag, ← →", "move"], ["wheel, + −", "zoom (the wheel: after a click, or with Ctrl)"], ["↑ ↓", "scroll the rows"],
  ["0", "everything"], ["F", "zoom to the selected event"], ["/", "search"], ["N, Shift + N", "next, previous match"],
  ["Enter", "from a kernel to its launch and back"], [", and .", "previous, next event of the row"],
  ["Shift + ↑ ↓", "event of the row above, below"], ["click on a label", "fold or unfold its rows"], ["Esc", "nothing selected"],
];

class Input {
  listen() {
    const { canvas } = this;
    this.undo = [];
    const on = (target, type, act, options) => {
      target.addEventListener(type, act, options);
      this.undo.push(() => target.removeEventListener(type, act, options));
    };
    on(this.search, "input", () => this.find(this.search.value.trim()));
    on(this.search, "keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") this.step(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") this.canvas.focus();
    });
    on(canvas, "wheel", (event) => this.wheel(event), { passive: false });
    on(canvas, "pointerdown", (event) => this.press(event));
    on(canvas, "pointermove", (event) => this.hover(event));
    on(canvas, "pointerleave", () => (this.tip.hidden = true));
    on(canvas, "keydown", (event) => this.key(event));
    on(this.overview, "pointerdown", (event) => this.dragOverview(event));
    const themed = () => this.setTheme();
    on(matchMedia("(prefers-color-scheme: dark)"), "change", themed);
    const body = new MutationObserver(themed);
    body.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
    const size = new ResizeObserver(() => this.resize());
    size.observe(this.root);
    this.undo.push(() => body.disconnect(), () => size.disconnect());
  }

  remove() {
    this.undo.forEach((undo) => undo());
    cancelAnimationFrame(this.asked);
    this.root.remove();
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const { left, right } = this.state;
    return { x, y, t: left + ((x - GUTTER) / this.painter.plot) * (right - left) };
  }

  rowAt(y) {
    const inside = y - AXIS + this.state.scroll;
    return this.painter.rowY.findIndex((top) => top >= 0 && inside >= top && inside < top + ROW);
  }

  eventUnder({ x, y, t }) {
    const row = x > GUTTER && y > AXIS ? this.rowAt(y) : -1;
    return row < 0 ? -1 : eventAt(this.data, row, t, 3 / this.painter.scale);
  }

  wheel(event) {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const ours = event.ctrlKey || event.metaKey || sideways || document.activeElement === this.canvas || this.inShadowFocus();
    if (!ours) return;
    event.preventDefault();
    if (event.shiftKey || sideways) this.pan((event.deltaX || event.deltaY) / 1200);
    else this.zoom(Math.exp(Math.min(Math.max(event.deltaY, -240), 240) / 400), this.point(event).t);
  }

  inShadowFocus() {
    return this.canvas.getRootNode().activeElement === this.canvas;
  }

  press(event) {
    if (event.button) return;
    this.canvas.focus({ preventScroll: true });
    const begun = this.point(event);
    const { left, right, scroll } = this.state;
    let moved = false;
    const move = (next) => {
      const [dx, dy] = [next.clientX - event.clientX, next.clientY - event.clientY];
      if (!moved && Math.hypot(dx, dy) < 4) return;
      moved = true;
      this.tip.hidden = true;
      this.canvas.classList.add("cgx-drag");
      const by = -dx / this.painter.scale;
      this.scroll(scroll - dy - this.state.scroll);
      this.show(left + by, right + by);
    };
    const up = () => {
      this.canvas.removeEventListener("pointermove", move);
      this.canvas.classList.remove("cgx-drag");
      if (!moved) this.click(begun);
    };
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", up, { once: true });
  }

  click(point) {
    if (point.x < GUTTER) {
      const row = this.rowAt(point.y);
      if (row < 0) return;
      const g = this.data.groupOfRow[row];
      const { rows } = this.data.head.groups[g];
      const shown = this.painter.shownRows[g];
      this.unfold(g, shown === rows ? 1 : shown === 1 ? Math.min(rows, MOST_ROWS) : rows);
      return;
    }
    this.select(this.eventUnder(point), false);
  }

  dragOverview(event) {
    const box = this.overview.getBoundingClientRect();
    const go = (next) => {
      const t = ((next.clientX - box.left - GUTTER) / this.painter.plot) * this.data.end;
      const half = (this.state.right - this.state.left) / 2;
      this.show(t - half, t + half);
    };
    go(event);
    this.overview.setPointerCapture(event.pointerId);
    this.overview.addEventListener("pointermove", go);
    const stop = () => this.overview.removeEventListener("pointermove", go);
    this.overview.addEventListener("pointerup", stop, { once: true });
  }

  hover(event) {
    if (event.buttons) return;
    const point = this.point(event);
    const i = this.eventUnder(point);
    this.canvas.style.cursor = i >= 0 || point.x < GUTTER ? "pointer" : "grab";
    this.tip.hidden = i < 0;
    if (i < 0) return;
    const { data } = this;
    const piece = data.head.texts.piece[data.piece[i]];
    this.tip.replaceChildren();
    add(this.tip, "b", {}, fit(data.nameOf(i), 90));
    const short = data.dur[i] * this.painter.scale < 1 ? " (shorter than a pixel here)" : "";
    add(this.tip, "span", {}, `${duration(data.dur[i])}${short}${piece ? ` · ${piece}` : ""}`);
    const left = Math.min(point.x + 14, this.painter.width - this.tip.offsetWidth - 6);
    this.tip.style.left = `${Math.max(left, 4)}px`;
    this.tip.style.top = `${point.y + 18}px`;
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const act = event.shiftKey ? this.shiftKeys()[event.key] : this.plainKeys()[event.key];
    const either = { "+": () => this.zoom(1 / 1.6), "?": () => this.toggleHelp() }[event.key];
    const found = act || either;
    if (!found) return;
    event.preventDefault();
    event.stopPropagation();
    found();
  }

  plainKeys() {
    return {
      ArrowLeft: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15),
      ArrowUp: () => this.scroll(-ROW), ArrowDown: () => this.scroll(ROW),
      a: () => this.pan(-0.15), d: () => this.pan(0.15), w: () => this.zoom(1 / 1.6), s: () => this.zoom(1.6),
      "=": () => this.zoom(1 / 1.6), "-": () => this.zoom(1.6),
      0: () => this.show(0, this.data.end), Home: () => this.show(0, this.data.end),
      f: () => this.fitSelected(), "/": () => this.search.focus(), n: () => this.step(1),
      Enter: () => this.partner(), ".": () => this.neighbour(1), ",": () => this.neighbour(-1),
      Escape: () => this.select(-1),
    };
  }

  shiftKeys() {
    return {
      N: () => this.step(-1), ArrowUp: () => this.otherRow(-1), ArrowDown: () => this.otherRow(1),
      ArrowLeft: () => this.neighbour(-1), ArrowRight: () => this.neighbour(1),
    };
  }

  fitSelected() {
    const i = this.state.selected;
    if (i < 0) return;
    const { start, dur } = this.data;
    const margin = Math.max(dur[i] * 0.3, 0.05);
    this.show(start[i] - margin, start[i] + dur[i] + margin);
  }

  // With nothing selected: the event in the middle of the first row.
  neighbour(by) {
    const { data, state } = this;
    const i = state.selected;
    if (i < 0) {
      const first = eventAt(data, 0, (state.left + state.right) / 2, Infinity);
      return this.select(first);
    }
    const next = i + by;
    if (next >= data.rowFirst[data.row[i]] && next < data.rowFirst[data.row[i] + 1]) this.select(next);
  }

  otherRow(by) {
    const { data, state } = this;
    const i = state.selected;
    if (i < 0) return this.neighbour(by);
    for (let row = data.row[i] + by; row >= 0 && row < data.rows; row += by) {
      const found = this.painter.rowY[row] < 0 ? -1 : eventAt(data, row, data.start[i] + data.dur[i] / 2, Infinity);
      if (found >= 0) return this.select(found);
    }
  }

  toggleHelp() {
    this.helpBox.hidden = !this.helpBox.hidden;
    this.helpButton.setAttribute("aria-expanded", `${!this.helpBox.hidden}`);
  }
}
