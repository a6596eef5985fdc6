// zod's schemas: they are those that the tests keep, and what is answered under them is valid.
// `ENVIRONMENT=.clients/zod node tests/clients/node/zod.mjs --keep` writes them anew.

import { conform, installed } from "./schemas.mjs";
import { types } from "./zod_types.mjs";

const z = installed("zod");
const schemas = Object.fromEntries(
  Object.entries(types(z)).map(([name, type]) => {
    const { $schema, ...schema } = z.toJSONSchema(type, { io: "input" });
    return [name, schema];
  }),
);

await conform("zod", schemas);
