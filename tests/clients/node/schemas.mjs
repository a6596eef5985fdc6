// For scripts of libraries that write schemas: keeps what they write, or compares it with that, and
// lets the daemon answer under it.

import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";

export const installed = createRequire(`${process.env.ENVIRONMENT}/package.json`);

const MAX_TOKENS = 64;

/** `schemas` by the expression that makes them. */
export async function conform(generator, schemas) {
  const kept = new URL(`../../unit/grammar/generated/${generator}.json`, import.meta.url);
  if (process.argv.includes("--keep")) return writeFileSync(kept, lines(schemas));
  const { daemon, main } = await import("./checks.mjs");
  await main(
    {
      async "schemas as kept"() {
        assert.equal(lines(schemas), readFileSync(kept, "utf-8"));
        return `${Object.keys(schemas).length} schemas`;
      },
    },
    {},
  );
}

/** One schema a line, so that changes are read easily. */
function lines(schemas) {
  const rows = Object.entries(schemas).map(
    ([name, schema]) => `${JSON.stringify(name)}: ${JSON.stringify(schema)}`,
  );
  return `{\n${rows.join(",\n")}\n}\n`;
}
