// Measures, colours, hatches, and the columns of what is shorter than a pixel.

const GUTTER = 172, AXIS = 26, ROW = 22, BAR = 17, GROUP_GAP = 9, MOST_ROWS = 5;
const FONT = '12.5px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';
const CHAR = 7; // pixels, about, of one character

// Collects what is shorter than a pixel: events come sorted, so one column is open at a time.
class Columns {
  constructor(boxes) {
    Object.assign(this, { boxes, amount: new Float64Array(boxes.length), touched: [], column: -1 });
  }

  begin(bottom) {
    Object.assign(this, { bottom, column: -1 });
  }

  add(x, wide, paint) {
    const column = Math.floor(x);
    const here = Math.min(wide, column + 1 - x);
    this.put(column, here, paint);
    if (wide > here) this.put(column + 1, wide - here, paint);
  }

  put(column, amount, paint) {
    if (column !== this.column) {
      this.flush();
      this.column = column;
    }
    if (this.amount[paint] === 0) this.touched.push(paint);
    this.amount[paint] += amount;
  }

  flush() {
    let y = this.bottom;
    if (this.touched.length > 1) this.touched.sort((a, b) => a - b); // the same order in each column, idle on top
    for (const paint of this.touched) {
      const height = Math.min(this.amount[paint], 1) * BAR;
      this.amount[paint] = 0;
      y -= height;
      const box = this.boxes[paint], last = box.length - 4;
      const joins = last >= 0 && box[last] + box[last + 2] === this.column && Math.abs(box[last + 1] - y) < 0.2;
      if (joins && Math.abs(box[last + 3] - height) < 0.2) box[last + 2]++;
      else box.push(this.column, y, 1, height);
    }
    this.touched.length = 0;
  }
}

// The idle times of a row, drawn as the events come by, so that both are in order of time.
class Gaps {
  constructor(painter, row, columns, firstPaint) {
    const { data } = painter;
    const to = data.gapFirst[row + 1], from = data.gapFirst[row];
    const at = Math.max(from, upperBound(data.gap_start, painter.left, from, to) - 1);
    Object.assign(this, { painter, columns, firstPaint, to, at, y: painter.rowY[row] });
    this.next = at < to ? data.gap_start[at] : Infinity;
  }

  until(t) {
    const { painter, columns } = this;
    const { gap_start: start, gap_dur: dur, gap_cause: cause } = painter.data;
    for (; this.at < this.to && start[this.at] < t; this.at++) {
      const paint = this.firstPaint + cause[this.at];
      const x = painter.x(start[this.at]), wide = dur[this.at] * painter.scale;
      if (wide < 1) {
        columns.add(x, wide, paint);
        continue;
      }
      const [left, width] = clipped(x, wide, painter.width);
      if (width > 0) painter.boxes[paint].push(left, this.y, width, BAR);
    }
    this.next = this.at < this.to ? start[this.at] : Infinity;
  }
}

function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.3 * r + 0.59 * g + 0.11 * b < 128 ? "#ffffff" : "#1b1f24";
}

// matplotlib's hatches as a small repeated tile, so that both pictures look alike.
function hatching(context, hatch, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.strokeStyle = pen.fillStyle = colour;
  pen.globalAlpha = 0.55;
  const stroke = (x0, y0, x1, y1) => {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  };
  if ("/x".includes(hatch[0])) [-8, 0, 8].forEach((at) => stroke(at, 8, at + 8, 0));
  if ("\\x".includes(hatch[0])) [-8, 0, 8].forEach((at) => stroke(at, 0, at + 8, 8));
  if (hatch[0] === "-") stroke(0, 4, 8, 4);
  if (hatch[0] === ".") pen.fillRect(3, 3, 1.6, 1.6);
  return context.createPattern(tile, "repeat");
}
