"""Settings of the service, which its operator chooses, and its limits."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from autoshard.commands.arguments import RegistryOption
from autoshard.commands.options import Needs, command_options
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_SECONDS: Final = {"h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
_BYTES: Final = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@command_options()
class ServerSettings:
    """Address, limits and models of one service."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            show_default="all; without keys, those of this machine",
            help="Name by which clients may call the service; may be repeated.",
        ),
    ] = None
    trusted_proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            metavar="ADDRESS",
            show_default="none",
            help="Address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto are believed; may be "
            "repeated.",
        ),
    ] = None
    oidc_issuer: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Takes tokens of this issuer of OpenID Connect beside keys; without a key or token, nothing is open.",
        ),
    ] = None
    oidc_audience: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of this service in tokens."),
    ] = None
    oidc_scopes: Annotated[
        str,
        typer.Option(metavar="CLAIM", help="Claim of tokens that names their scopes: read, plan, train, admin."),
        Needs("--oidc-issuer", lambda settings: settings.oidc_issuer is not None),
    ] = "scope"
    oidc_team: Annotated[
        str | None,
        typer.Option(
            metavar="CLAIM", show_default="none", help="Claim of tokens that names their team; else they are of none."
        ),
        Needs("--oidc-issuer", lambda settings: settings.oidc_issuer is not None),
    ] = None
    first_key: Annotated[
        bool,
        typer.Option("--first-key", help="If there are no keys yet, make one with all scopes, and log it this once."),
    ] = False
    registry: RegistryOption = None
    num_workers: Annotated[
        int, typer.Option("--workers", min=1, max=64, help="Processes that make plans, one plan at a time each.")
    ] = 2
    per_client: Annotated[
        int | None,
        typer.Option(
            min=1, show_default="all but one", help="Planning processes that one client may hold at the same time."
        ),
    ] = None
    max_waiting: Annotated[
        int,
        typer.Option("--queue", min=1, max=10_000, help="Requests that may wait for a process; of one client, half."),
    ] = 32
    num_jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            min=1,
            max=64,
            help="Jobs that run at the same time, in processes of their own; of one client, all but one.",
        ),
    ] = 2
    data: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            show_default="~/.local/share/autoshard",
            help="Folder of the samples that jobs collect and train from, and of their logs and checkpoints.",
        ),
    ] = None
    keep_plans: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            show_default="for ever",
            help="Deletes plans for good that were last asked for longer ago, such as 30d; also h, w.",
        ),
    ] = None
    keep_jobs: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            show_default="for ever",
            help="Deletes jobs that ended longer ago, their folders, and files in quarantine.",
        ),
    ] = None
    client_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default="unlimited",
            help="Bytes that plans and jobs of one client may take, such as 10GiB; also MiB, TiB.",
        ),
    ] = None
    rate: Annotated[
        float,
        typer.Option(
            min=0.01, max=1e6, help="Requests per second of one client, on average; for a moment, twice as many."
        ),
    ] = 500.0
    shadow: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the plans that a cost model that is the candidate prices, too, afterwards."
        ),
    ] = 0.1
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace", min=0, max=3600, help="Seconds that running and waiting requests may take to end after SIGTERM."
        ),
    ] = 30.0
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain",
            min=0,
            max=600,
            help="Seconds after SIGTERM in which requests are still taken in while /readyz answers `draining`, so that "
            "load balancers send no more.",
        ),
    ] = 0.0
    stranger_rate: float = 2.0
    """Requests per second of one address, on average, without a key or with a wrong one."""
    max_wait_s: float = 30.0
    """Longest time that a request waits for a planning process."""
    max_body_bytes: int = 16 << 20
    """Largest request body, where its endpoint takes no shorter ones only."""
    body_timeout_s: float = 30.0
    """Longest time that a client may take to send its body."""
    max_buffered_bytes: int = 64 << 20
    """Bytes of all requests' bodies and answers together; one client may hold half of them."""
    free_body_bytes: int = 64 << 10
    """First bytes of each body, which do not count to `max_buffered_bytes`: connections are limited."""
    max_connections: int = 256
    """Open requests, and connections; one address may have half of them."""
    spare_connections: int = 32
    """Connections beyond these, from which probes and metrics are answered."""
    head_timeout_s: float = 10.0
    """Longest time from the start of a connection to the end of its first request's head."""
    write_timeout_s: float = 30.0
    """Longest time that a client may leave an answer unread."""
    max_tables: int = 2048
    """Tables of one task."""
    max_ranks: int = 16_384
    """Ranks of one task."""
    max_placements: int = 1 << 18
    """Tables times ranks of one task, which the time of all planners grows with, whatever the time limit."""
    max_shards: int = 1 << 16
    """Shards of a plan that a client sends. Reading and pricing take about 0.15 ms of each."""
    max_points: int = 256
    """Points of one simulation; their tables times ranks together are bounded as those of one task."""
    max_knots: int = 1_000_000
    """Knots of all access curves of one task."""
    base_overtime_s: float = 20.0
    """Seconds beyond its time limit that any planner may take, for reading and pricing a task. At a limit of 0.1 s,
    `auto` takes 7.8 s in all for 2,000 tables on 128 ranks, 3.7 s for 26 on 8,192 and 0.2 s for 80 on 8 (one core of
    a shared machine, November 2026)."""
    overtime_factor: float = 10.0
    """Seconds beyond its time limit that a planner may take more, per second of the limit."""
    overtime_s: float = 30.0
    """Most seconds beyond its time limit at which a planner that does not keep it is ended."""

    def __post_init__(self) -> None:
        if (self.oidc_issuer is None) != (self.oidc_audience is None):
            raise InvalidOptionError("needs --oidc-issuer and --oidc-audience", field="oidc_issuer")
        if self.oidc_issuer is not None:
            check_secure(self.oidc_issuer, "--oidc-issuer")
        for proxy in self.trusted_proxies or ():
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                raise InvalidOptionError(
                    f"must be an address or a network, such as 10.0.0.0/8, got {shown(proxy)}", field="--trusted-proxy"
                ) from None
        _ = self.plans_kept_s, self.jobs_kept_s, self.max_client_bytes

    @property
    def plans_kept_s(self) -> int | None:
        """Seconds for which plans are kept since they were last asked for; None for ever."""
        return _amount(self.keep_plans, _SECONDS, "--keep-plans")

    @property
    def jobs_kept_s(self) -> int | None:
        """Seconds for which jobs are kept since they ended; None for ever."""
        return _amount(self.keep_jobs, _SECONDS, "--keep-jobs")

    @property
    def max_client_bytes(self) -> int | None:
        """Bytes that plans and jobs of one client may take; None for any number."""
        return _amount(self.client_bytes, _BYTES, "--client-bytes")

    def is_proxy(self, address: str) -> bool:
        """Whether an address is that of a trusted proxy."""
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(found in ipaddress.ip_network(proxy) for proxy in self.trusted_proxies or ())

    @property
    def samples_folder(self) -> Path:
        """Store of the samples that jobs collect."""
        return self._data_folder / "samples"

    @property
    def quarantine_folder(self) -> Path:
        """Folder of the files of samples that were sent and refused."""
        return self._data_folder / "quarantine"

    def quarantine_folders(self) -> Iterator[Path]:
        """The same folder of those of no team and of every team."""
        yield self.quarantine_folder
        for folder in sorted(self._data_folder.glob("teams/*")):
            yield self.of_team(folder.name).quarantine_folder

    @property
    def calibration_folder(self) -> Path:
        """Store of the samples that cost models are calibrated on."""
        return self._data_folder / "calibration"

    @property
    def jobs_folder(self) -> Path:
        """Folder with one of each job that runs."""
        return self._data_folder / "jobs"

    def of_team(self, team: str) -> ServerSettings:
        """These settings with the folders of a team's samples; empty for those of no team."""
        return replace(self, data=self._data_folder / "teams" / team) if team else self

    def without_folders(self, text: str) -> str:
        """A text in which the service's own folders have names that say nothing of where they are."""
        for folder, name in ((self._data_folder, "DATA"), (self.registry, "REGISTRY"), (Path.home(), "~")):
            text = text if folder is None else text.replace(str(folder), name)
        return text

    @property
    def _data_folder(self) -> Path:
        return self.data or Path.home() / ".local" / "share" / "autoshard"

    @property
    def max_running_per_client(self) -> int:
        """Planning processes that one client may hold at the same time."""
        return self.per_client or max(1, self.num_workers - 1)

    def overtime_of(self, time_limit_s: float) -> float:
        """Seconds after its time limit at which a planner is ended."""
        return min(self.base_overtime_s + self.overtime_factor * time_limit_s, self.overtime_s)


def _amount(text: str | None, units: Mapping[str, int], field: str) -> int | None:
    """Seconds or bytes of a whole number with a unit.

    Raises:
        InvalidOptionError: If it is none.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,5})([A-Za-z]+)", text)
    if match is None or match[2] not in units:
        accepted = ", ".join(units)
        raise InvalidOptionError(
            f"must be a whole number from 1 to 999999 with one of {accepted}, got {shown(text)}", field=field
        )
    return int(match[1]) * units[match[2]]


def check_secure(url: str, field: str) -> None:
    """Checks that nobody between the service and an address can change what it answers.

    Raises:
        InvalidOptionError: If it is neither `https` nor on this machine.
    """
    try:
        parts = urlsplit(url)
        is_secure = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
        is_plain = bool(parts.hostname) and not parts.query and not parts.fragment
    except ValueError:
        is_secure = is_plain = False
    if not is_secure or not is_plain:
        raise InvalidOptionError(f"must be an address that begins with https://, got {shown(url)}", field=field)
