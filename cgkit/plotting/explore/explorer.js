// The explorer: toolbar, overview, canvas, panel; what the mouse and the keys do.

async function mount(element, bytes, { height = 440 } = {}) {
  const data = await readBlock(bytes);
  return new Explorer(element, data, height);
}

class Explorer extends Input {
  constructor(element, data, height) {
    super();
    Object.assign(this, { data, height });
    this.state = { left: 0, right: data.end, scroll: 0, selected: -1, hit: null };
    this.found = [];
    this.at = -1;
    this.by = data.head.has_pieces ? "piece" : "kind";
    this.build(element);
    this.painter = new Painter(this.canvas, data);
    this.listen();
    this.setTheme();
    this.resize();
    this.describe();
  }

  // ---- the elements

  build(element) {
    // the attribute: JupyterLab leaves the keys to us (D, D would delete the cell)
    const own = { class: "cgx", "data-ready": "", "data-lm-suppress-shortcuts": "true" };
    const root = (this.root = add(element, "div", own));
    if (this.data.head.about) add(root, "div", { class: "cgx-about" }, this.data.head.about);
    const bar = add(root, "div", { class: "cgx-bar", role: "toolbar", "aria-label": "Timeline" });
    this.search = add(bar, "input", { type: "search", placeholder: "search names", "aria-label": "Search event names" });
    this.matches = add(bar, "output", { class: "cgx-count", "aria-live": "polite" });
    this.button(bar, "‹", "Previous match", () => this.step(-1));
    this.button(bar, "›", "Next match", () => this.step(1));
    add(bar, "span", { class: "cgx-space" });
    if (this.data.head.steps.length > 1) this.stepChoice(bar);
    if (this.data.head.has_pieces) this.colourChoice(bar);
    this.button(bar, "−", "Zoom out", () => this.zoom(1.6));
    this.button(bar, "+", "Zoom in", () => this.zoom(1 / 1.6));
    this.button(bar, "all", "Show everything", () => this.show(0, this.data.end));
    this.helpButton = this.button(bar, "?", "Keys", () => this.toggleHelp());
    this.helpBox = add(root, "dl", { class: "cgx-help", hidden: "" });
    for (const [keys, what] of HELP) {
      const pair = add(this.helpBox, "div");
      add(pair, "dt", {}, keys);
      add(pair, "dd", {}, what);
    }
    this.overview = add(root, "canvas", { class: "cgx-overview", "aria-hidden": "true" });
    const stage = add(root, "div", { class: "cgx-stage" });
    this.canvas = add(stage, "canvas", { class: "cgx-canvas", tabindex: "0", role: "application" });
    this.canvas.setAttribute("aria-label", `Interactive timeline. ${this.summary()} Press question mark for the keys.`);
    this.tip = add(stage, "div", { class: "cgx-tip", role: "tooltip", hidden: "" });
    this.range = add(root, "div", { class: "cgx-range" });
    this.legend = add(root, "div", { class: "cgx-legend", "aria-label": "Colours" });
    this.panel = add(root, "div", { class: "cgx-panel", "aria-live": "polite" });
    this.notes(root);
  }

  // How complete the trace is: the first sentence, the others folded.
  notes(root) {
    const [first, ...others] = this.data.head.notes;
    if (!first) return;
    const box = add(root, others.length ? "details" : "div", { class: "cgx-notes" });
    add(box, others.length ? "summary" : "span", {}, first);
    for (const note of others) add(box, "div", {}, note);
  }

  button(parent, text, label, act) {
    const button = add(parent, "button", { type: "button", title: label, "aria-label": label }, text);
    button.addEventListener("click", act);
    return button;
  }

  stepChoice(bar) {
    const choice = add(bar, "select", { "aria-label": "Step" });
    add(choice, "option", { value: "-1" }, `all ${this.data.head.steps.length} steps`);
    this.data.head.steps.forEach((step, i) => add(choice, "option", { value: i }, step.name));
    choice.addEventListener("change", () => {
      const step = this.data.head.steps[choice.value];
      if (step) this.show(step.start - 0.01 * step.dur, step.start + 1.01 * step.dur);
      else this.show(0, this.data.end);
    });
  }

  colourChoice(bar) {
    const choice = add(bar, "select", { "aria-label": "Colour kernels by" });
    add(choice, "option", { value: "piece" }, "colour: piece");
    add(choice, "option", { value: "kind" }, "colour: kind of kernel");
    choice.addEventListener("change", () => {
      this.by = choice.value;
      this.setTheme();
    });
  }

  summary() {
    const { data } = this;
    const gpu = data.head.groups.filter((group) => group.side === "gpu").length;
    const streams = `${gpu} GPU ${gpu === 1 ? "stream" : "streams"}`;
    return `${data.count.toLocaleString("en")} events over ${duration(data.end)}, ${streams}.`;
  }

  // ---- looks

  setTheme() {
    const dark = isDark();
    this.root.dataset.theme = dark ? "dark" : "light";
    const css = getComputedStyle(this.root);
    const colours = {};
    for (const name of ["paper", "ink", "soft", "line", "grid", "accent"]) {
      colours[name] = css.getPropertyValue(`--cgx-${name}`).trim();
    }
    this.painter.theme(colours, dark, this.by);
    this.drawLegend(dark);
    this.redrawOverview = true;
    this.request();
  }

  drawLegend(dark) {
    this.legend.replaceChildren();
    const used = new Set(this.data[`paint_${this.by}`]);
    const seen = new Set();
    const entry = (paint) => {
      if (seen.has(paint.label)) return;
      seen.add(paint.label);
      const item = add(this.legend, "span");
      const swatch = add(item, "canvas", { width: 22, height: 13, "aria-hidden": "true" });
      const pen = swatch.getContext("2d");
      const colour = (dark && paint.dark) || paint.colour;
      for (const fill of [colour, paint.hatch && hatching(pen, paint.hatch, inkOn(colour))]) {
        if (!fill) continue;
        pen.fillStyle = fill;
        pen.fillRect(0, 0, 22, 13);
      }
      add(item, "span", {}, paint.label);
    };
    const paints = this.painter.palette.filter((_, p) => used.has(p));
    const pieces = paints.filter((paint) => paint.label.startsWith("piece "));
    paints.filter((paint) => !pieces.includes(paint)).forEach(entry);
    pieces.slice(0, 4).forEach(entry);
    if (pieces.length > 4) add(this.legend, "span", {}, `and ${pieces.length - 4} more pieces`);
    new Set(this.data.gap_cause).forEach((cause) => entry(this.data.head.gap_paints[cause]));
  }

  resize() {
    const width = Math.max(this.root.clientWidth - 2, 320);
    const height = Math.min(this.height, Math.max(this.painter.contentHeight + AXIS, 150));
    this.painter.resize(width, height, window.devicePixelRatio || 1);
    this.redrawOverview = true;
    this.request();
  }

  request() {
    if (this.asked) return;
    this.asked = requestAnimationFrame(() => {
      this.asked = 0;
      this.draw();
    });
  }

  draw() {
    if (!this.painter.colours) return;
    const begun = performance.now();
    const { state, data } = this;
    this.painter.draw(state);
    this.drawOverview();
    const columns = this.painter.inColumns;
    const merged = columns
      ? ` · ${columns.toLocaleString("en")} events here are shorter than a pixel: a column's height is the share of its time that they fill`
      : "";
    this.range.textContent = `${duration(state.right - state.left)} of ${duration(data.end)}${merged}`;
    Object.assign(this.root.dataset, { left: state.left, right: state.right, selected: state.selected, merged: columns });
    this.root.dataset.ready = "yes";
    this.drawMs = performance.now() - begun;
  }

  // How busy the GPUs were over the whole trace, and which part of it is shown.
  drawOverview() {
    const { overview, painter, data } = this;
    const { width, ratio, colours } = painter;
    const height = 30;
    if (this.redrawOverview) {
      this.redrawOverview = false;
      overview.width = Math.round(width * ratio);
      overview.height = height * ratio;
      overview.style.width = `${width}px`;
      overview.style.height = `${height}px`;
      this.overviewAlone = this.busyPicture(overview, height);
    }
    const pen = overview.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.drawImage(this.overviewAlone, 0, 0);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const x = (t) => GUTTER + (t / data.end) * painter.plot;
    const [a, b] = [x(this.state.left), x(this.state.right)];
    pen.fillStyle = colours.paper;
    pen.globalAlpha = 0.6;
    pen.fillRect(GUTTER, 0, a - GUTTER, height);
    pen.fillRect(b, 0, width - b, height);
    pen.globalAlpha = 1;
    pen.strokeStyle = colours.accent;
    pen.lineWidth = 1.5;
    pen.strokeRect(a + 0.75, 1, Math.max(b - a - 1.5, 2), height - 2);
  }

  busyPicture(like, height) {
    const { painter, data } = this;
    const { ratio, colours } = painter;
    const picture = document.createElement("canvas");
    Object.assign(picture, { width: like.width, height: like.height });
    const pen = picture.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = colours.paper;
    pen.fillRect(0, 0, painter.width, height);
    pen.font = FONT;
    pen.fillStyle = colours.soft;
    pen.textBaseline = "middle";
    pen.fillText("GPU busy, whole trace", 18, height / 2);
    pen.fillStyle = "#0072b2";
    busyShare(data, painter.plot).forEach((share, x) => {
      if (share) pen.fillRect(GUTTER + x, height - 3 - share * (height - 8), 1, share * (height - 8));
    });
    return picture;
  }

  // ---- where one looks

  show(left, right) {
    const least = 0.02, most = this.data.end * 1.04;
    let span = Math.min(Math.max(right - left, least), most);
    left = Math.min(Math.max(left, -0.02 * this.data.end), 1.02 * this.data.end - span);
    Object.assign(this.state, { left, right: left + span });
    this.request();
  }

  zoom(factor, at = (this.state.left + this.state.right) / 2) {
    const { left, right } = this.state;
    this.show(at - (at - left) * factor, at + (right - at) * factor);
  }

  pan(share) {
    const by = share * (this.state.right - this.state.left);
    this.show(this.state.left + by, this.state.right + by);
  }

  scroll(by) {
    const most = Math.max(0, this.painter.contentHeight + AXIS - this.painter.height);
    this.state.scroll = Math.min(Math.max(this.state.scroll + by, 0), most);
    this.request();
  }

  // Brings an event into view without more zoom than needed to see that it is there.
  reveal(i) {
    const { data, state, painter } = this;
    const group = data.groupOfRow[data.row[i]];
    if (painter.rowY[data.row[i]] < 0) this.unfold(group, data.head.groups[group].rows);
    const y = painter.rowY[data.row[i]];
    if (y < state.scroll) this.scroll(y - state.scroll - 8);
    const below = y + ROW + AXIS - painter.height - state.scroll;
    if (below > 0) this.scroll(below + 8);
    const span = state.right - state.left;
    const middle = data.start[i] + data.dur[i] / 2;
    if (data.start[i] < state.left || data.start[i] + data.dur[i] > state.right) {
      this.show(middle - span / 2, middle + span / 2);
    }
  }

  unfold(group, rows) {
    this.painter.shownRows[group] = rows;
    this.painter.place();
    this.resize();
  }

  // ---- what is selected

  select(i, reveal = true) {
    this.state.selected = i;
    if (i >= 0 && reveal) this.reveal(i);
    this.describe();
    this.request();
  }

  partner() {
    const i = this.state.selected;
    if (i < 0) return;
    const call = this.data.launched_by[i];
    if (call >= 0) this.select(call);
    else if (this.data.numChildren(i)) this.select(this.data.childrenOf(i)[0]);
  }

  describe() {
    const { data, panel } = this;
    const i = this.state.selected;
    panel.replaceChildren();
    if (i < 0) {
      add(panel, "p", { class: "cgx-hint" }, "Drag to move, click and then use the wheel to zoom, click an event to see what launched it. Keys: ?");
      return;
    }
    const kind = data.kindOf(i);
    const heading = add(panel, "div", { class: "cgx-name" });
    add(heading, "span", { class: "cgx-kind" }, kind.replace("_", " "));
    add(heading, "code", {}, data.nameOf(i));
    const facts = add(panel, "dl", { class: "cgx-facts" });
    const fact = (what, value) => {
      if (value === "" || value === undefined) return;
      const pair = add(facts, "div");
      add(pair, "dt", {}, what);
      add(pair, "dd", {}, value);
    };
    fact("took", duration(data.dur[i]));
    fact("began at", `${(data.start[i] + data.head.origin_us).toLocaleString("en", { maximumFractionDigits: 3 })} µs`);
    fact("where", data.head.groups[data.groupOfRow[data.row[i]]].label);
    if (data.correlation[i] >= 0) fact("correlation", `${data.correlation[i]}`);
    fact("piece", data.head.texts.piece[data.piece[i]]);
    fact("stage", data.head.texts.stage[data.stage[i]]);
    this.describeTies(i, kind, fact);
  }

  describeTies(i, kind, fact) {
    const { data, panel } = this;
    const call = data.launched_by[i];
    if (call >= 0) {
      fact("from launch to start", duration(Math.max(data.start[i] - data.start[call], 0)));
      const others = data.numChildren(call) - 1;
      const row = add(panel, "p", {}, others ? `One of ${others + 1} kernels of ` : "Launched by ");
      this.link(row, call);
      return;
    }
    if (["kernel", "memcpy", "memset"].includes(kind)) {
      add(panel, "p", {}, "No call in this trace is tied to it.");
      return;
    }
    const kernels = data.childrenOf(i);
    if (!kernels.length) return;
    const busy = kernels.reduce((sum, kernel) => sum + data.dur[kernel], 0);
    fact("kernels", kernels.length.toLocaleString("en"));
    fact("their time, summed", duration(busy));
    fact("from launch to first start", duration(Math.max(data.start[kernels[0]] - data.start[i], 0)));
    const row = add(panel, "p", { class: "cgx-links" }, "Launched ");
    for (const kernel of kernels.slice(0, 6)) this.link(row, kernel);
    if (kernels.length > 6) add(row, "span", {}, `and ${(kernels.length - 6).toLocaleString("en")} more`);
  }

  link(parent, i) {
    const text = fit(this.data.short[this.data.name[i]], 34);
    const button = this.button(parent, text, `Select ${this.data.nameOf(i)}`, () => this.select(i));
    button.className = "cgx-link";
  }

  // ---- search

  find(text) {
    const { hit, found } = text ? searchNames(this.data, text) : { hit: null, found: [] };
    Object.assign(this, { found, at: -1 });
    this.state.hit = hit;
    this.matches.textContent = text ? `${found.length.toLocaleString("en")} found` : "";
    this.request();
  }

  step(by) {
    if (!this.found.length) return;
    if (this.at < 0) {
      const from = this.found.findIndex((i) => this.data.start[i] >= this.state.left);
      this.at = by > 0 ? Math.max(from, 0) : (from <= 0 ? this.found.length : from) - 1;
    } else this.at = (this.at + by + this.found.length) % this.found.length;
    this.matches.textContent = `${(this.at + 1).toLocaleString("en")} of ${this.found.length.toLocaleString("en")}`;
    this.select(this.found[this.at]);
  }
}

function busyShare(data, width) {
  const share = new Float64Array(Math.ceil(width) + 2);
  const scale = width / data.end;
  const gpus = new Set();
  data.head.groups.filter((group) => group.side === "gpu").forEach((group) => {
    gpus.add(`${group.process}/${group.device}`);
    for (let i = data.rowFirst[group.first_row]; i < data.rowFirst[group.first_row + group.rows]; i++) {
      let x = data.start[i] * scale;
      const end = x + data.dur[i] * scale;
      for (; x < end; x = Math.floor(x) + 1) share[Math.floor(x)] += Math.min(end, Math.floor(x) + 1) - x;
    }
  });
  return share.map((value) => Math.min(value / Math.max(gpus.size, 1), 1));
}

function isDark() {
  const { body } = document;
  if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false";
  if (body.classList.contains("vscode-dark")) return true;
  if (body.classList.contains("vscode-light")) return false;
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function add(parent, tag, attributes = {}, text = "") {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return parent.appendChild(element);
}

// What anywidget calls: once for each view of the widget.
async function render({ model, el }) {
  const block = model.get("block");
  const bytes = new Uint8Array(block.buffer, block.byteOffset, block.byteLength);
  const explorer = await mount(el, bytes, { height: model.get("height") });
  return () => explorer.remove();
}

export { mount };
export default { render };
