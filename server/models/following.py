"""Follows a registry on object storage, so that requests find what others published and promoted."""

from __future__ import annotations

import asyncio

import structlog
from starlette.concurrency import run_in_threadpool

from autoshard.core.errors import ModelError
from costmodel.registry.objects import RegistryObjects

_log = structlog.get_logger()

#: Seconds between two looks, half of the age from which planning processes would look for themselves.
EVERY_S = 5.0


async def follow(registry: RegistryObjects) -> None:
    """Brings the copy of a registry up to date again and again; what fails is logged, and tried again."""
    is_failing = False
    while True:
        try:
            if num_changed := await run_in_threadpool(registry.pull):
                _log.info("registry changed", registry=registry.address, num_changed=num_changed)
            is_failing = False
        except ModelError as error:
            if not is_failing:
                _log.warning("the registry does not answer; its copy is used", reason=str(error))
            is_failing = True
        await asyncio.sleep(EVERY_S)
