// A layered drawing of a directed graph, after Sugiyama, Tagawa and Toda (1981): ranks by longest path, edges routed
// through a place in every rank that they cross, few crossings by barycentres, and then straight lines where there is
// room. Knows nodes by number, their widths, and edges as pairs; an edge to an earlier node is drawn against the flow.

const SPACE = 14, SWEEPS = 10, LONGEST = 40;

// With times, nodes are in the order of time, and none is above one that ended before it began.
function layered(widthOf, edges, times = null) {
  const n = widthOf.length, forward = edges.map(([a, b]) => (a < b ? [a, b] : [b, a]));
  const out = Array.from({ length: n }, () => []), into = Array.from({ length: n }, () => []);
  for (const [a, b] of forward) { out[a].push(b); into[b].push(a); }
  const rank = new Array(n).fill(0);
  for (let v = 0; v < n; v++) {
    for (const u of into[v]) rank[v] = Math.max(rank[v], rank[u] + 1);
    for (let u = 0; times && u < v; u++) if (times[u].ends <= times[v].begins) rank[v] = Math.max(rank[v], rank[u]);
  }
  for (let v = n - 1; v >= 0 && !times; v--) if (!into[v].length && out[v].length) rank[v] = Math.min(...out[v].map(w => rank[w])) - 1;
  // Nodes without edges are below all others, a few to a rank.
  const deepest = Math.max(-1, ...rank);
  const alone = times ? [] : rank.flatMap((_, v) => (out[v].length || into[v].length ? [] : [v]));
  const below = alone.length < n ? deepest + 1 : 0;
  alone.forEach((v, i) => { rank[v] = below + Math.floor(i / 4); });

  // Places: the nodes, and one for each rank that an edge crosses.
  const wide = [...widthOf], layers = [], near = wide.map(() => [[], []]);
  const put = (v, r) => { (layers[r] ??= []).push(v); };
  for (let v = 0; v < n; v++) put(v, rank[v]);
  const chains = forward.map(([a, b]) => {
    const chain = [a];
    if (rank[b] - rank[a] <= LONGEST) {
      for (let r = rank[a] + 1; r < rank[b]; r++) {
        wide.push(4);
        near.push([[], []]);
        put(wide.length - 1, r);
        chain.push(wide.length - 1);
      }
    }
    chain.push(b);
    for (let i = 1; i < chain.length; i++) { near[chain[i]][0].push(chain[i - 1]); near[chain[i - 1]][1].push(chain[i]); }
    return chain;
  });
  const filled = layers.map(layer => layer ?? []);

  const at = new Array(wide.length).fill(0);
  const mean = (v, side) => near[v][side].reduce((sum, u) => sum + at[u], 0) / near[v][side].length;
  const pack = layer => {
    let left = -layer.reduce((sum, v) => sum + wide[v] + SPACE, 0) / 2;
    for (const v of layer) { at[v] = left + wide[v] / 2; left += wide[v] + SPACE; }
  };
  filled.forEach(pack);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const side = sweep % 2;
    for (const layer of side ? [...filled].reverse() : filled) {
      const want = new Map(layer.map(v => [v, near[v][side].length ? mean(v, side) : at[v]]));
      layer.sort((a, b) => want.get(a) - want.get(b));
      pack(layer);
    }
  }
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const side = sweep % 2;
    for (const layer of side ? [...filled].reverse() : filled) {
      const both = v => [...near[v][0], ...near[v][1]];
      const want = layer.map(v => {
        if (sweep > SWEEPS - 3 && both(v).length) return both(v).reduce((sum, u) => sum + at[u], 0) / both(v).length;
        return near[v][side].length ? mean(v, side) : at[v];
      });
      spread(layer.map(v => wide[v]), want, layer.map(v => (v >= n ? 4 : 1))).forEach((x, i) => { at[layer[i]] = x; });
    }
  }
  const depth = [];
  filled.forEach((layer, r) => { for (const v of layer) depth[v] = r; });
  const left = Math.min(0, ...at.map((x, v) => x - wide[v] / 2));
  return {
    x: at.slice(0, n).map(x => x - left),
    rank,
    routes: chains.map((chain, i) => (edges[i][0] < edges[i][1] ? chain : [...chain].reverse()).map(v => [at[v] - left, depth[v]])),
    width: Math.max(0, ...at.map((x, v) => x + wide[v] / 2)) - left,
    ranks: filled.length,
  };
}

// The places nearest to those wanted (least squares) that keep the order and the room between neighbours: pool
// adjacent violators, on what is left when the room is taken out.
function spread(wide, want, weight) {
  const offset = [0];
  for (let i = 1; i < wide.length; i++) offset.push(offset[i - 1] + (wide[i - 1] + wide[i]) / 2 + SPACE);
  const pools = [];
  want.forEach((x, i) => {
    let pool = { sum: (x - offset[i]) * weight[i], weight: weight[i], size: 1 };
    while (pools.length && pools.at(-1).sum / pools.at(-1).weight >= pool.sum / pool.weight) {
      const last = pools.pop();
      pool = { sum: last.sum + pool.sum, weight: last.weight + pool.weight, size: last.size + pool.size };
    }
    pools.push(pool);
  });
  return pools.flatMap(pool => new Array(pool.size).fill(pool.sum / pool.weight)).map((x, i) => x + offset[i]);
}
