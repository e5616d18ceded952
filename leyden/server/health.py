"""Whether the engine really generates: a request for one token. /health?generate=1 asks for it."""

import asyncio
import itertools
import time

from leyden.errors import EngineDead, RequestError
from leyden.server.service import Service
from leyden.types import Request, SamplingParams

PATIENCE = 30.0  # seconds that a token may take
_numbers = itertools.count()


async def health_check(service: Service) -> bool:
    """False if the engine refuses, fails, or takes longer than PATIENCE. A full queue is no illness: it passes by."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = [service.tokenizer.eos_token_id]
    request = Request(id=f"health-{next(_numbers)}", prompt=prompt, params=params, arrival=time.monotonic())
    try:
        async with asyncio.timeout(PATIENCE):
            with await service.client.generate(request) as stream:
                return any([delta.token_ids async for delta in stream])
    except (RequestError, EngineDead, TimeoutError):
        return False
