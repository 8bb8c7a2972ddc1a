// One frame on a canvas. An event is as wide as it is long. What is shorter than a pixel is not stretched:
// a column of pixels is filled as high as the share of its time that such events take.

class Painter {
  constructor(canvas, data) {
    Object.assign(this, { canvas, data, context: canvas.getContext("2d", { alpha: false }) });
    this.shownRows = data.head.groups.map((group) => Math.min(group.rows, MOST_ROWS));
    this.rowY = new Float64Array(data.rows);
    this.place();
  }

  // y of each row (-1: folded away), and the height of all.
  place() {
    let y = 4;
    this.groupY = [];
    this.data.head.groups.forEach((group, g) => {
      if (g && group.side !== "calls" && group.side !== "gpu_marks") y += GROUP_GAP;
      this.groupY[g] = y;
      for (let r = 0; r < group.rows; r++) {
        const shown = r < this.shownRows[g];
        this.rowY[group.first_row + r] = shown ? y : -1;
        if (shown) y += ROW;
      }
    });
    this.contentHeight = y + 6;
  }

  resize(width, height, ratio) {
    Object.assign(this, { width, height, ratio });
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.plot = Math.max(width - GUTTER, 50);
  }

  theme(colours, dark, by) {
    this.colours = colours;
    this.palette = this.data.head.palettes[by];
    this.fills = this.palette.map((paint) => (dark && paint.dark) || paint.colour);
    this.inks = this.fills.map(inkOn);
    this.paint = this.data[`paint_${by}`];
    this.hatches = this.palette.map((paint, p) => paint.hatch && hatching(this.context, paint.hatch, this.inks[p]));
    const gaps = this.data.head.gap_paints;
    this.gapFills = gaps.map((paint) => (dark && paint.dark) || paint.colour);
    this.gapHatches = gaps.map((paint) => paint.hatch && hatching(this.context, paint.hatch, colours.soft));
  }

  x(t) {
    return GUTTER + (t - this.left) * this.scale;
  }

  draw(state) {
    const { context, ratio, width, height } = this;
    Object.assign(this, { left: state.left, scale: this.plot / (state.right - state.left), right: state.right });
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = this.colours.paper;
    context.fillRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    this.grid();
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, this.plot, height - AXIS);
    context.clip();
    context.translate(0, AXIS - state.scroll);
    this.events(state);
    this.arrows(state);
    context.restore();
    this.steps();
    this.labels(state);
  }

  grid() {
    const { context, colours } = this;
    const [unit, name] = timeUnit(this.right - this.left);
    const step = niceStep(((this.right - this.left) / unit) * (110 / this.plot));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    context.textAlign = "center";
    for (let k = Math.ceil(this.left / unit / step); k * step * unit <= this.right; k++) {
      const x = Math.round(this.x(k * step * unit)) + 0.5;
      context.fillStyle = colours.grid;
      context.fillRect(x - 0.5, AXIS - 4, 1, this.height);
      context.fillStyle = colours.soft;
      if (x > GUTTER + 24 && x < this.width - 34) context.fillText(`${(k * step).toFixed(digits)} ${name}`, x, 11);
    }
  }

  events(state) {
    const { data } = this;
    const paints = this.palette.length;
    // per paint: events, events that a search dims, idle times
    this.boxes = Array.from({ length: 2 * paints + this.gapFills.length }, () => []);
    this.texts = [];
    this.kernels = [];
    this.inColumns = 0;
    const columns = new Columns(this.boxes);
    for (let row = 0; row < data.rows; row++) {
      if (this.rowY[row] < 0 || this.rowY[row] + ROW < state.scroll) continue;
      if (this.rowY[row] > state.scroll + this.height) break;
      this.row(row, state, columns, paints);
    }
    this.fill(paints);
    this.write(state.hit);
  }

  row(row, state, columns, paints) {
    const { data, scale, left, right } = this;
    const { start, dur, name } = data;
    const to = data.rowFirst[row + 1], y = this.rowY[row];
    const onGpu = data.head.groups[data.groupOfRow[row]].side === "gpu";
    let i = Math.max(data.rowFirst[row], upperBound(start, left, data.rowFirst[row], to) - 1);
    columns.begin(y + BAR);
    const gaps = new Gaps(this, row, columns, 2 * paints);
    let merged = 0;
    for (; i < to && start[i] < right; i++) {
      if (start[i] > gaps.next) gaps.until(start[i]);
      const wide = dur[i] * scale;
      const x = GUTTER + (start[i] - left) * scale;
      const paint = this.paint[i] + (state.hit && !state.hit[name[i]] ? paints : 0);
      if (wide < 1) {
        merged++;
        columns.add(x, wide, paint);
        continue;
      }
      const [from, width] = clipped(x, wide, this.width);
      if (width <= 0) continue;
      this.boxes[paint].push(from, y, width > 4 ? width - 0.6 : width, BAR);
      if (width > 30) this.texts.push(i, from, y, width);
      if (onGpu && this.kernels.length <= 120) this.kernels.push(i);
    }
    gaps.until(right);
    columns.flush();
    this.inColumns += merged;
  }

  fill(paints) {
    const { context } = this;
    this.boxes.forEach((box, b) => {
      if (!box.length) return;
      const gap = b - 2 * paints;
      const [colour, hatch] = gap < 0
        ? [this.fills[b % paints], this.hatches[b % paints]]
        : [this.gapFills[gap], this.gapHatches[gap]];
      context.globalAlpha = b < paints || gap >= 0 ? 1 : 0.22;
      context.fillStyle = colour;
      for (let k = 0; k < box.length; k += 4) context.fillRect(box[k], box[k + 1], box[k + 2], box[k + 3]);
      if (!hatch) return;
      context.fillStyle = hatch;
      for (let k = 0; k < box.length; k += 4) {
        if (box[k + 2] > 5) context.fillRect(box[k], box[k + 1], box[k + 2], box[k + 3]);
      }
    });
    context.globalAlpha = 1;
  }

  write(hit) {
    const { context, texts, data } = this;
    context.textAlign = "left";
    for (let k = 0; k < texts.length; k += 4) {
      const [i, x, y, width] = texts.slice(k, k + 4);
      const room = Math.floor((width - 8) / CHAR);
      const name = data.short[data.name[i]];
      const text = name.length <= room ? name : room >= 4 ? `${name.slice(0, room - 1)}…` : "";
      if (!text) continue;
      const paint = this.paint[i];
      if (hit && !hit[data.name[i]]) {
        context.fillStyle = this.colours.soft;
        context.fillText(text, x + 4, y + BAR / 2 + 0.5);
        continue;
      }
      if (this.hatches[paint]) {
        context.fillStyle = this.fills[paint];
        context.fillRect(x + 2, y + 1, Math.min(width - 4, text.length * CHAR + 5), BAR - 2);
      }
      context.fillStyle = this.inks[paint];
      context.fillText(text, x + 4, y + BAR / 2 + 0.5);
    }
  }

  // Launch to kernel: always of the selected event; of all others while there are few in view.
  arrows(state) {
    if (this.kernels.length <= 80) this.fewArrows();
    const chosen = state.selected;
    if (chosen < 0) return;
    const call = this.data.launched_by[chosen] >= 0 ? this.data.launched_by[chosen] : chosen;
    if (this.data.numChildren(call) > 1) this.bracket(call, this.colours.accent, 2);
    else for (const kernel of this.data.childrenOf(call)) this.arrow(kernel, this.colours.accent, 2);
    if (call !== chosen) this.arrow(chosen, this.colours.accent, 2);
    this.outline(call, 1.5);
    this.outline(chosen, 2.5);
  }

  fewArrows() {
    const graphs = new Set();
    for (const i of this.kernels) {
      if (this.data.graph_launch[i] >= 0) graphs.add(this.data.graph_launch[i]);
      else this.arrow(i, this.colours.soft, 0.9);
    }
    for (const call of graphs) this.bracket(call, this.colours.soft, 1);
  }

  arrow(kernel, colour, width) {
    const call = this.data.launched_by[kernel];
    if (call < 0) return;
    const from = this.rowY[this.data.row[call]], to = this.rowY[this.data.row[kernel]];
    if (from < 0 || to < 0) return;
    const x0 = this.x(this.data.start[call]), x1 = this.x(this.data.start[kernel]);
    if (Math.max(x0, x1) < GUTTER || Math.min(x0, x1) > this.width) return;
    const { context } = this;
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(x0, from + BAR);
    context.lineTo(x1, to - 1);
    context.stroke();
    context.beginPath();
    context.moveTo(x1, to);
    context.lineTo(x1 - 3.2, to - 5);
    context.lineTo(x1 + 3.2, to - 5);
    context.fill();
  }

  bracket(call, colour, width) {
    const { data, context } = this;
    const kernels = data.childrenOf(call);
    if (!kernels.length) return;
    const from = this.rowY[data.row[call]], to = this.rowY[data.row[kernels[0]]];
    if (from < 0 || to < 0) return;
    let last = 0;
    for (const kernel of kernels) last = Math.max(last, data.start[kernel] + data.dur[kernel]);
    const x = this.x(data.start[call]), x0 = this.x(data.start[kernels[0]]), x1 = this.x(last);
    context.fillStyle = colour;
    context.globalAlpha = 0.12;
    context.beginPath();
    context.moveTo(x, from + BAR);
    context.lineTo(x0, to);
    context.lineTo(x1, to);
    context.fill();
    context.globalAlpha = 1;
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(x, from + BAR);
    context.lineTo(x0, to - 1);
    context.lineTo(x1, to - 1);
    context.lineTo(x1, to + 4);
    context.stroke();
  }

  outline(i, width) {
    const y = this.rowY[this.data.row[i]];
    if (y < 0) return;
    const x = this.x(this.data.start[i]);
    const [from, wide] = clipped(x, this.data.dur[i] * this.scale, this.width);
    if (wide < 0) return;
    this.context.strokeStyle = this.colours.ink;
    this.context.lineWidth = width;
    this.context.strokeRect(from - 1, y - 1, wide + 2, BAR + 2);
  }

  steps() {
    const { context, colours } = this;
    context.textAlign = "left";
    context.strokeStyle = colours.soft;
    context.lineWidth = 1;
    context.setLineDash([3, 3]);
    for (const step of this.data.head.steps) {
      const x = Math.round(this.x(step.start)) + 0.5;
      if (x < GUTTER + 1 || x > this.width) continue;
      context.beginPath();
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, this.height);
      context.stroke();
    }
    context.setLineDash([]);
  }

  labels(state) {
    const { context, colours, data } = this;
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, GUTTER, this.height);
    context.save();
    context.beginPath();
    context.rect(0, AXIS, this.width, this.height - AXIS);
    context.clip();
    context.translate(0, AXIS - state.scroll);
    context.textAlign = "left";
    data.head.groups.forEach((group, g) => {
      const y = this.groupY[g];
      const main = group.side === "work" || group.side === "gpu";
      if (main) {
        context.fillStyle = colours.line;
        context.fillRect(0, y - (g ? 6 : 3), this.width, 1);
      }
      const folded = group.rows - this.shownRows[g];
      const room = Math.floor((GUTTER - 24) / CHAR);
      context.fillStyle = main ? colours.ink : colours.soft;
      context.fillText(fit(group.label, room), 18, y + BAR / 2 + 0.5);
      if (group.rows > 1) {
        context.fillStyle = colours.soft;
        context.fillText(folded ? "▸" : "▾", 4, y + BAR / 2 + 0.5);
        if (folded && this.shownRows[g] > 1) context.fillText(`${folded} more ${folded === 1 ? "row" : "rows"}`, 18, y + ROW + BAR / 2);
      }
    });
    context.restore();
    context.fillStyle = colours.line;
    context.fillRect(GUTTER - 1, 0, 1, this.height);
    context.fillRect(0, AXIS - 1, this.width, 1);
  }
}

function clipped(x, width, right) {
  const from = Math.max(x, GUTTER - 2);
  return [from, Math.min(x + width, right + 2) - from];
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((digit) => digit * power >= rough) || 10);
}

function fit(text, room) {
  return text.length <= room ? text : `${text.slice(0, room - 1)}…`;
}
