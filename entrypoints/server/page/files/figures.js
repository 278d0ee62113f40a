// What the board shows, from the looks that were taken: pure functions.

export const HISTORY = 301; // looks, a second apart

/** The value of a counter's growth per second between two looks; null: nothing to compare. */
export function rate(before, after, read) {
  const seconds = before && after ? after.at_s - before.at_s : 0;
  return seconds > 0 ? (read(after) - read(before)) / seconds : null;
}

export function ratio(part, whole) {
  return whole > 0 ? part / whole : null;
}

/** A look after which counters begin anew: another process answers. */
export const isRestart = (before, after) => after.at_s < before.at_s || after.stats.steps < before.stats.steps;

/** The latest look that is at least `seconds` older than the last, else the first. */
export function ago(looks, seconds) {
  const last = looks.at(-1);
  let found = looks[0];
  for (const look of looks) {
    if (last.at_s - look.at_s < seconds) break;
    found = look;
  }
  return found;
}

/** The distribution of what came between two looks. */
export function between(before, after) {
  return {
    bounds: after.bounds,
    counts: after.counts.map((count, i) => count - before.counts[i]),
    sum: after.sum - before.sum,
  };
}

export const total = (distribution) => distribution.counts.reduce((sum, count) => sum + count, 0);

/** As Prometheus' histogram_quantile: evenly spread within a bucket; above all bounds it is the last of them. */
export function quantile({ bounds, counts }, share) {
  const all = total({ counts });
  if (all === 0) return null;
  let upto = 0;
  for (const [i, bound] of bounds.entries()) {
    const low = i === 0 ? 0 : bounds[i - 1];
    if (counts[i] > 0 && upto + counts[i] >= share * all)
      return low + ((bound - low) * (share * all - upto)) / counts[i];
    upto += counts[i];
  }
  return bounds.at(-1);
}

/** p50 and p95 of the last minute's requests; where there was none, of all since the start. */
export function latency(looks, name) {
  const last = looks.at(-1);
  const recent = between(ago(looks, 60)[name], last[name]);
  const lately = total(recent) > 0;
  const used = lately ? recent : last[name];
  return { p50: quantile(used, 0.5), p95: quantile(used, 0.95), count: total(used), lately };
}

/** Columns for a chart: times, then what each of `reads` makes of a look and the one before. */
export function columns(looks, reads) {
  const times = looks.map((look) => look.time);
  return [times, ...reads.map((read) => looks.map((look, i) => (i === 0 ? null : read(looks[i - 1], look))))];
}

/** Milliseconds of a step by part, over some seconds; in the order of `order`, without those that took nothing. */
export function stepParts(before, after, name, order) {
  const steps = after.stats.steps - before.stats.steps;
  if (steps <= 0) return [];
  const grown = (part) => (after.stats[name][part] ?? 0) - (before.stats[name][part] ?? 0);
  return order.map((part) => ({ part, ms: (1000 * grown(part)) / steps })).filter(({ ms }) => ms > 0);
}

/** How many blocks of each kind there are; together they are all. Pinned ones are a part of those in use. */
export function blocks({ stats, engine }) {
  const all = stats.kv_blocks_total || engine.num_blocks;
  const pinned = Math.min(stats.kv_blocks_pinned, stats.kv_blocks_used);
  const cached = stats.kv_blocks_cached;
  return { all, pinned, used: stats.kv_blocks_used - pinned, cached, free: all - stats.kv_blocks_used - cached };
}

/** The kinds of `cells` cells that stand for all blocks, in proportion; a kind that there is has one at least. */
export function cellKinds(counts, cells) {
  const kinds = ["pinned", "used", "cached"];
  const shown = [];
  for (const kind of kinds) {
    const share = Math.round((counts[kind] / counts.all) * cells);
    shown.push(...Array(counts[kind] > 0 ? Math.max(1, share) : 0).fill(kind));
  }
  while (shown.length < cells) shown.push("free");
  return shown.slice(0, cells);
}
