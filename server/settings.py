"""Settings of the service, which its operator chooses."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard.commands.arguments import RegistryOption
from autoshard.commands.options import command_options


@command_options()
class ServerSettings:
    """Address, limits and models of one service."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000
    registry: RegistryOption = None
    num_workers: Annotated[
        int, typer.Option("--workers", min=1, max=64, help="Processes that make plans, one plan at a time each.")
    ] = 2
    grace_s: Annotated[
        float,
        typer.Option("--grace", min=0, max=3600, help="Seconds that running requests may take to end after SIGTERM."),
    ] = 10.0
    max_body_bytes: int = 16 << 20
    """Largest request body. The 856 tables of MetaSyn take about 3 MB."""
    body_timeout_s: float = 30.0
    """Longest time that a client may take to send its body."""
    overtime_s: float = 30.0
    """Seconds after its time limit at which a planner that does not keep it is ended."""
