// Requests to the daemon that served this page. The key goes into a header, never into a URL.

const ROOT = new URL("../../", import.meta.url);
const KEY = "rootstock-api-key";

/** The daemon's refusal: its status, and its own words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** For this tab: the browser forgets it when the tab is closed. */
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

export function address(path) {
  return new URL(path, ROOT).href;
}

/**
 * An answer of status 200. Throws Refused for any other, and TypeError where nobody answers.
 * `options` are fetch's, but `json` is sent as the body.
 */
export async function ask(path, { json, ...options } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  if (json !== undefined) {
    headers["Content-Type"] = "application/json";
    options = { ...options, method: "POST", body: JSON.stringify(json) };
  }
  const response = await fetch(address(path), { ...options, headers, cache: "no-store" });
  if (!response.ok) throw new Refused(response.status, await refusal(response));
  return response;
}

/** What went wrong, for people. */
export function reason(error) {
  return error instanceof TypeError ? "The daemon does not answer." : error.message;
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The daemon answered with status ${response.status}.`;
}
