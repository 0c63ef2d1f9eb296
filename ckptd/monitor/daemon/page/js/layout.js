// Where the cell of each rank lies: pure geometry, in pixels.

const LABEL = 40;
const TOP = 20;
const ASIDE = 14;

/**
 * Nodes as small blocks in reading order.
 * Returns {x, y, size, width, height, labels, boxes}: x and y one for each row of `ranks`.
 */
export function byNode(ranks, width) {
  const members = ranks.nodes.map(() => []);
  for (let row = 0; row < ranks.length; row += 1) members[ranks.node[row]]?.push(row);
  for (const rows of members) rows.sort((a, b) => ranks.rank[a] - ranks.rank[b]);
  const most = Math.max(1, ...members.map((m) => m.length));
  const across = most <= 8 ? Math.min(4, most) : Math.ceil(Math.sqrt(most));
  const down = Math.ceil(most / across);
  const nodes = ranks.nodes.length;
  const named = nodes <= 64;
  const head = named ? 16 : 0;
  const shape = (size) => {
    const gap = named ? 12 : Math.max(3, Math.round(size / 2));
    const block = named ? Math.max(across * size, 84) : across * size;
    const columns = Math.max(1, Math.min(nodes || 1, Math.floor((width + gap) / (block + gap))));
    const lines = Math.ceil(nodes / columns);
    return { gap, block, columns, height: lines * (down * size + head + gap) };
  };
  const size = largest(shape, nodes > 64 ? 620 : 560, 44);
  const { gap, block, columns, height } = shape(size);
  const x = new Float32Array(ranks.length).fill(-1), y = new Float32Array(ranks.length).fill(-1);
  const labels = [], boxes = [];
  members.forEach((rows, node) => {
    const left = (node % columns) * (block + gap);
    const top = Math.floor(node / columns) * (down * size + head + gap);
    if (named) labels.push({ x: left, y: top + 11, text: ranks.nodes[node], width: block, side: "left" });
    rows.forEach((row, i) => {
      x[row] = left + (i % across) * size;
      y[row] = top + head + Math.floor(i / across) * size;
    });
  });
  return { x, y, size, width, height: Math.max(height, size), labels, boxes };
}

/** The first axis as bands, the second as columns (in several lines where there is no room), the last as rows. */
export function byMesh(ranks, width) {
  const { axes, coords } = ranks.mesh;
  const [a, b, c] = [0, 1, 2].map((i) => axes.length - 3 + i);
  const at = (row, axis) => (axis < 0 ? 0 : coords[row]?.[axis] ?? 0);
  const extent = (axis) => {
    let most = 0;
    for (let row = 0; row < ranks.length; row += 1) most = Math.max(most, at(row, axis));
    return most + 1;
  };
  const [bands, columns, rows] = [extent(a), extent(b), extent(c)];
  // Bands below each other, or several beside each other where cells are larger for that: many
  // bands of few columns would else be a thin strip on a wide card.
  const arranged = (beside) => {
    const room = Math.max(40, Math.floor((width - (beside - 1) * ASIDE) / beside) - LABEL);
    const shape = (size) => {
      const lines = Math.ceil(columns / Math.max(1, Math.floor(room / size)));
      const perLine = Math.ceil(columns / lines); // lines of one length
      const between = Math.max(2, Math.round(size / 3));
      const band = lines * rows * size + (lines - 1) * between;
      const gap = Math.max(6, Math.round(size / 2));
      return { perLine, lines, between, band, gap, height: TOP + Math.ceil(bands / beside) * (band + gap) };
    };
    const least = room / columns >= 4 ? Math.floor((2 * room) / columns) / 2 : 5;
    const size = largest(shape, 640, 44, Math.min(5, least));
    return { beside, room, size, ...shape(size) };
  };
  let s = arranged(1);
  for (let beside = 2; beside <= Math.min(bands, 8); beside += 1) {
    const other = arranged(beside);
    const fits = beside * (other.room + LABEL) + (beside - 1) * ASIDE <= width && other.height <= 640;
    if (fits && other.size > s.size) s = other;
  }
  const size = s.size;
  const left = (band) => (band % s.beside) * (s.room + LABEL + ASIDE);
  const top = (band) => TOP + Math.floor(band / s.beside) * (s.band + s.gap);
  const x = new Float32Array(ranks.length), y = new Float32Array(ranks.length);
  for (let row = 0; row < ranks.length; row += 1) {
    const column = at(row, b);
    const line = Math.floor(column / s.perLine);
    x[row] = left(at(row, a)) + LABEL + (column % s.perLine) * size;
    y[row] = top(at(row, a)) + line * (rows * size + s.between) + at(row, c) * size;
  }
  const labels = [];
  if (a >= 0) for (let band = 0; band < bands; band += 1) {
    labels.push({ x: left(band), y: top(band) + Math.min(s.band / 2 + 4, 14), text: `${axes[a]} ${band}`, width: LABEL - 4, side: "left" });
  }
  const step = [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100].find((n) => n * size >= 28) ?? 128;
  if (b >= 0) for (let band = 0; band < s.beside; band += 1) for (let column = 0; column < s.perLine; column += step) {
    labels.push({ x: left(band) + LABEL + column * size, y: 12, text: column ? String(column) : `${axes[b]} 0`, width: 60, side: "left" });
  }
  return { x, y, size, width, height: s.height, labels, boxes: [] };
}

/** The largest size of a cell with which the whole is not higher than `height`; never below `least` pixels. */
function largest(shape, height, most, least = 5) {
  for (let size = most; size > least; size -= 1) if (shape(size).height <= height) return size;
  return least;
}

/** The cell that is nearest to `from` in a direction; -1 where there is none. */
export function towards(place, from, dx, dy) {
  let best = -1, least = Infinity;
  for (let i = 0; i < place.x.length; i += 1) {
    const along = (place.x[i] - place.x[from]) * dx + (place.y[i] - place.y[from]) * dy;
    if (along <= 0.5 || place.x[i] < 0) continue;
    const aside = Math.abs((place.x[i] - place.x[from]) * dy) + Math.abs((place.y[i] - place.y[from]) * dx);
    // Rather straight on and far than near and aside.
    const cost = along + 4 * aside;
    if (cost < least) { least = cost; best = i; }
  }
  return best;
}

/** The row of the cell at a point; -1 between cells. */
export function cellAt(place, px, py) {
  for (let i = 0; i < place.x.length; i += 1) {
    const dx = px - place.x[i], dy = py - place.y[i];
    if (dx >= 0 && dy >= 0 && dx < place.size && dy < place.size) return i;
  }
  return -1;
}
