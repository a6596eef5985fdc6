// The places of tokens along the width: to scale, except where a long prompt next to short ones would make
// slivers of these: then long stretches in which nothing begins or ends are cut short.

const ENDS = [1, 1.1, 1.25, 1.4, 1.6, 1.8, 2, 2.25, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9, 10];
const STEPS = [1, 2, 2.5, 5, 10];
const MOST_TYPICAL = 24; // bars of a typical length, one after the other, are legible

/**
 * An axis from token `from` on. `stops` are the tokens at which something begins or ends, `typical`
 * is how long a bar typically is: to that length stretches are cut. Places count tokens as they are
 * drawn: the axis is `length` long, `knots` are the tokens whose places are known, and between two it
 * is linear. `cuts` are the stretches that are shorter than their tokens.
 */
export function axisOf(from, stops, typical) {
  const inner = [...new Set(stops)].filter((token) => token > from).sort((one, two) => one - two);
  const stretches = inner.map((to, index) => ({ from: inner[index - 1] ?? from, to }));
  const isTooLong = (inner.at(-1) ?? from) - from > typical * MOST_TYPICAL;
  const limit = isTooLong ? roundedUp(typical, ENDS) : Infinity;
  const knots = [{ token: from, place: 0 }];
  for (const stretch of stretches) {
    knots.push({ token: stretch.to, place: knots.at(-1).place + Math.min(lengthOf(stretch), limit) });
  }
  const cuts = stretches.filter((stretch) => lengthOf(stretch) > limit);
  return { from, knots, cuts, length: Math.max(1, knots.at(-1).place) };
}

/** The axis with room at its end, so that it does not change with every token. */
export function rounded(axis) {
  return { ...axis, length: roundedUp(axis.length, ENDS) };
}

/** The place of a token; after the last knot it is to scale. */
export function placeOf({ knots }, token) {
  let [low, high] = [0, knots.length];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (knots[middle].token <= token) low = middle;
    else high = middle;
  }
  const [here, next] = [knots[low], knots[high]];
  const scale = next ? (next.place - here.place) / (next.token - here.token) : 1;
  return here.place + (token - here.token) * scale;
}

/** Tokens that have a line: where cuts end, and round numbers where it is to scale; not too close. */
export function ticks(axis, most) {
  const step = Math.max(1, roundedUp(axis.length / most, STEPS));
  const ends = axis.cuts.map((cut) => cut.to);
  const places = [];
  const isFree = (token) => {
    const place = placeOf(axis, token);
    const isSo = places.every((other) => Math.abs(other - place) >= axis.length / most / 2);
    if (isSo) places.push(place);
    return isSo;
  };
  const tokens = [...ends.reverse(), ...scaled(axis).flatMap((run) => multiples(run, step))];
  return tokens.filter(isFree).sort((one, two) => one - two);
}


/** The runs between cuts; the last one goes on to the end of the axis. */
function scaled({ from, knots, cuts, length }) {
  const last = knots.at(-1);
  const end = last.token + length - last.place;
  const starts = [from, ...cuts.map((cut) => cut.to)];
  return starts.map((start, index) => ({ from: start, to: cuts[index]?.from ?? end }));
}

function multiples({ from, to }, step) {
  const [first, last] = [Math.ceil(from / step), Math.floor(to / step)];
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => (first + index) * step);
}

function lengthOf({ from, to }) {
  return to - from;
}

/** The first of `steps`, times a power of ten, that is not below. */
function roundedUp(number, steps) {
  const power = 10 ** Math.floor(Math.log10(number));
  return power * steps.find((step) => step * power >= number);
}
