/* Two answers beside each other: where they part, and where they come together again. */

import { t } from "./strings.js";

const RUN = 6;
const AHEAD = 160;

/* The first place where two lists of tokens differ; null where they are the same. */
export function parting(ours, theirs) {
  const first = ours.findIndex((token, place) => token !== theirs[place]);
  if (first >= 0) return first;
  return ours.length === theirs.length ? null : ours.length;
}

/* The nearest places after the parting from where both go on alike for a few tokens; null where there are none. */
export function meeting(ours, theirs, from) {
  const alike = (a, b) => {
    for (let i = 0; i < RUN; i += 1) if (ours[a + i] === undefined || ours[a + i] !== theirs[b + i]) return false;
    return true;
  };
  for (let sum = 1; sum <= AHEAD; sum += 1) {
    for (let step = 0; step <= sum; step += 1) {
      const [a, b] = [from + step, from + sum - step];
      if (alike(a, b)) return [a, b];
    }
  }
  return null;
}

/* A sentence about two answers, and the marks that it speaks of. */
export function verdict(ours, full) {
  const first = parting(ours.ids, full.ids);
  if (first === null) return t("same", { pace: pace(ours, full) });
  const again = meeting(ours.ids, full.ids, first);
  ours.mark(first, again?.[0]);
  full.mark(first, again?.[1]);
  const met = again ? t("meets", { ours: again[0] + 1, full: again[1] + 1 }) : "";
  return t("parts", { place: first + 1, met, pace: pace(ours, full) });
}

function pace(ours, full) {
  const ratio = ours.speed / full.speed;
  return Number.isFinite(ratio) ? t("times", { ratio: ratio.toFixed(2) }) : "";
}
