"""`forebay engine`: a simulated server, and its subcommands `calibrate` and `validate`."""

from forebay.replay.engine.server.cli import app
from forebay.replay.validation.calibrate_cli import HELP as CALIBRATE_HELP
from forebay.replay.validation.calibrate_cli import calibrate_command
from forebay.replay.validation.validate_cli import HELP as VALIDATE_HELP
from forebay.replay.validation.validate_cli import validate_command

__all__ = ["app"]

app.command("calibrate", help=CALIBRATE_HELP)(calibrate_command)
app.command("validate", help=VALIDATE_HELP)(validate_command)
