"""Commands of the service."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard.commands.arguments import RegistryOption


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    registry: RegistryOption = None,
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that make plans, one plan at a time each.")
    ] = 2,
    grace: Annotated[
        float, typer.Option(min=0, max=86400, help="Seconds that running requests may take to end after SIGTERM.")
    ] = 10.0,
) -> None:
    """Serves plans over REST until SIGTERM or SIGINT; logs go to standard error.

    POST /v1/plans makes a plan, /docs describes the service, /livez and /readyz report its state.

    Example:
        autoshard serve --registry registry
        curl -sH 'content-type: application/json' localhost:8000/v1/plans -d @request.json
    """
    from server.service import run_service
    from server.settings import ServerSettings

    run_service(ServerSettings(registry=registry, num_workers=workers), host=host, port=port, grace_s=grace)
