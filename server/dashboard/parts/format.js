// Numbers as people read them.

const WHOLE = new Intl.NumberFormat("en");
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export function whole(number) {
  return WHOLE.format(number);
}

/** 950, 12.5K, 3.1M */
export function short(number) {
  return SHORT.format(number);
}

/** "1 token", "2 tokens" */
export function count(number, noun) {
  return `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** Two digits that matter: 0.35, 4.2, 37 */
export function rate(number) {
  if (number >= 9.95) return whole(Math.round(number));
  return number >= 0.995 || number === 0 ? String(Number(number.toFixed(1))) : number.toFixed(2);
}

export function percent(share) {
  return `${Math.round(share * 100)}%`;
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${rate(number)} ${units[unit]}`;
}

export function seconds(number) {
  return number < 1 ? `${Math.round(number * 1000)} ms` : `${rate(number)} s`;
}

export function age(number) {
  if (number < 2) return "just now";
  if (number < 120) return `${Math.floor(number)} s ago`;
  if (number < 7200) return `${Math.floor(number / 60)} min ago`;
  return `${Math.floor(number / 3600)} h ago`;
}

/** How long something has lasted: 0.4 s, 12 s, 3:07, 1:02:05 */
export function clock(number) {
  if (number < 60) return `${number < 10 ? number.toFixed(1) : Math.floor(number)} s`;
  const two = (part) => String(Math.floor(part)).padStart(2, "0");
  const [hours, minutes, rest] = [number / 3600, (number % 3600) / 60, number % 60];
  return hours >= 1 ? `${Math.floor(hours)}:${two(minutes)}:${two(rest)}`
    : `${Math.floor(minutes)}:${two(rest)}`;
}

const DAY_TIME = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

/** The time of day of a moment, in seconds since the epoch: 14:03:59 */
export function dayTime(number) {
  return DAY_TIME.format(number * 1000);
}
