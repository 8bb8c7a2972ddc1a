// The block of bytes that pack.py wrote, as columns of numbers, and the questions that are asked of it.

async function readBlock(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const size = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const kinds = {
    float64: Float64Array, float32: Float32Array, int32: Int32Array,
    uint32: Uint32Array, uint16: Uint16Array, uint8: Uint8Array,
  };
  const data = { head, count: head.count };
  for (const [name, [kind, offset, count]] of Object.entries(head.columns)) {
    data[name] = new kinds[kind](buffer, 4 + size + offset, count);
  }
  return index(data);
}

function index(data) {
  const { head, count, row, start, dur } = data;
  data.rows = head.groups.reduce((sum, group) => sum + group.rows, 0);
  data.rowFirst = firstOfEachRow(row, data.rows);
  data.gapFirst = firstOfEachRow(data.gap_row, data.rows);
  data.end = 0;
  for (let i = 0; i < count; i++) data.end = Math.max(data.end, start[i] + dur[i]);
  data.end = data.end || 1;
  data.kindOf = (i) => head.texts.kind[data.kind[i]];
  data.nameOf = (i) => head.texts.name[data.name[i]];
  data.short = head.texts.name.map(shortName);
  data.groupOfRow = [];
  head.groups.forEach((group, g) => {
    for (let r = 0; r < group.rows; r++) data.groupOfRow[group.first_row + r] = g;
  });
  children(data);
  return data;
}

// Rows are sorted: the first event of each, and one entry more for the end.
function firstOfEachRow(row, rows) {
  const first = new Int32Array(rows + 1).fill(row.length);
  for (let i = row.length - 1; i >= 0; i--) first[row[i]] = i;
  for (let r = rows - 1; r >= 0; r--) if (first[r] > first[r + 1]) first[r] = first[r + 1];
  return first;
}

// One launch, many kernels: the kernels of launch i are childList[childFirst[i] .. childFirst[i + 1]], by start.
function children(data) {
  const by = data.launched_by;
  const first = new Int32Array(data.count + 1);
  for (let i = 0; i < data.count; i++) if (by[i] >= 0) first[by[i] + 1]++;
  for (let i = 0; i < data.count; i++) first[i + 1] += first[i];
  const list = new Int32Array(first[data.count]);
  const next = first.slice();
  for (let i = 0; i < data.count; i++) if (by[i] >= 0) list[next[by[i]]++] = i;
  data.childrenOf = (i) => list.subarray(first[i], first[i + 1]).slice().sort((a, b) => data.start[a] - data.start[b]);
  data.numChildren = (i) => first[i + 1] - first[i];
}

// The first place in [from, to) whose value is above `value`.
function upperBound(values, value, from, to) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] <= value) from = middle + 1;
    else to = middle;
  }
  return from;
}

// The event of a row at time t, else the nearest one within `slack` microseconds, else -1.
function eventAt(data, row, t, slack) {
  const from = data.rowFirst[row], to = data.rowFirst[row + 1];
  const after = upperBound(data.start, t, from, to);
  let best = -1, bestDistance = slack;
  for (const i of [after - 1, after]) {
    if (i < from || i >= to) continue;
    const distance = i < after ? Math.max(0, t - data.start[i] - data.dur[i]) : data.start[i] - t;
    if (distance <= bestDistance) [best, bestDistance] = [i, distance];
  }
  return best;
}

// Events whose name holds the text, by start; and for each name whether it does.
function searchNames(data, text) {
  const wanted = text.toLowerCase();
  const hit = data.head.texts.name.map((name) => name.toLowerCase().includes(wanted));
  const found = [];
  for (let i = 0; i < data.count; i++) if (hit[data.name[i]]) found.push(i);
  found.sort((a, b) => data.start[a] - data.start[b]);
  return { hit, found };
}

// The telling part of a name: no namespaces, template arguments or parameters; of Python "file.py(12): run" the function.
function shortName(name) {
  const python = name.match(/([^/]*)\(\d+\): (.+)$/);
  if (python) return `${python[2]} (${python[1]})`;
  const bare = name.split("(")[0].split("<")[0].replace(/^void /, "").trim();
  return bare.split("::").pop() || name;
}

function timeUnit(span) {
  if (span >= 2e6) return [1e6, "s"];
  return span >= 2e3 ? [1e3, "ms"] : [1, "µs"];
}

function duration(us) {
  if (us < 1) return `${Math.round(us * 1e3)} ns`;
  const [scale, unit] = timeUnit(us);
  const value = us / scale;
  return `${value.toFixed(value < 10 ? 3 : value < 100 ? 2 : 1)} ${unit}`;
}
