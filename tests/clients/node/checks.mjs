// What checks.py is for Python: how a client's script is run, and what it reports.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

const PATIENCE_MS = 30_000;

const [root, model] = process.argv.slice(2);

export const scenario = JSON.parse(process.env.SCENARIO);
export const daemon = { root, baseURL: `${root}/v1`, model };

/** A package of this client's environment. */
export const installed = createRequire(`${process.env.ENVIRONMENT}/package.json`);

export async function main(checks, { scripted = {} }) {
  const all = model === scenario.scripted ? { ...checks, ...scripted } : checks;
  const results = [];
  for (const [name, check] of Object.entries(all)) results.push(await passed(name, check));
  process.exit(results.every(Boolean) ? 0 : 1);
}

/** The weather station of scenario.py. */
export class WeatherStation {
  asked = [];

  getWeather({ city, day }) {
    this.asked.push({ city, day });
    return scenario.weather;
  }

  check(answer) {
    assert.deepEqual(this.asked, [scenario.asked]);
    assert.ok(answer.includes(scenario.sky), answer);
    assert.ok(answer.includes(String(scenario.degrees)), answer);
    return answer;
  }
}

/** An answer that has begun and never ends is given up, and with it what the engine does. */
export async function stopped(close) {
  await waitUntilItRuns(1);
  close();
  await waitUntilItRuns(0);
  return "nothing runs any more";
}

async function waitUntilItRuns(count) {
  const deadline = performance.now() + PATIENCE_MS;
  let running;
  while ((running = await countRunning()) !== count) {
    assert.ok(performance.now() < deadline, `${running} requests run, and not ${count}`);
    await sleep(20);
  }
}

async function countRunning() {
  const answer = await fetch(`${root}/admin/requests`);
  return (await answer.json()).requests.length;
}

async function passed(name, check) {
  const report = { check: name, passed: true, detail: "" };
  try {
    report.detail = await check();
  } catch (error) {
    console.error(error);
    report.passed = false;
    report.detail = String(error);
  }
  // Written as Python writes it: the run knows a report by how it begins.
  process.stdout.write(`{"check": ${JSON.stringify(report).slice('{"check":'.length)}\n`);
  return report.passed;
}
