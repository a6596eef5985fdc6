"""Dynamo's selector as a program: lines of JSON in, lines of JSON out. Runs in its environment.

The first line is a list of workers; each later one a list of token ids, which is answered with the
number of blocks that each worker has, by its id.
"""

import asyncio
import json
import sys
from typing import Any

from dynamo._core import SelectionService

MODEL = "fleet"


async def main() -> None:
    service = SelectionService(indexer_threads=1)
    for line in sys.stdin:
        given = json.loads(line)
        answer: Any = None
        if given and isinstance(given[0], dict):
            for worker in given:
                await service.upsert_worker({"model_name": MODEL, **worker})
        else:
            answer = await service.overlap_scores({"model_name": MODEL, "token_ids": given})
        print(json.dumps(answer), flush=True)
    await service.shutdown_async()


if __name__ == "__main__":
    asyncio.run(main())
