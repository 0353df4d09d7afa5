"""What commands print with `--json`, where no other package has a type for it: published as schemas."""

from autoshard.commands.printed.checks import DOCTOR
from autoshard.commands.printed.files import EXPORTED, IMPORTED, INIT
from autoshard.commands.printed.names import CATALOGUE
from autoshard.commands.printed.served_jobs import JOB, JOBS

__all__ = ["CATALOGUE", "DOCTOR", "EXPORTED", "IMPORTED", "INIT", "JOB", "JOBS"]
