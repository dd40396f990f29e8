"""A command in this process, the way `main` runs it."""

from unittest import mock

from rich.console import Console
from typer.testing import CliRunner

from gpu_logicmix import cli


def run(*arguments) -> tuple[int, str]:
    """Exit code and output."""
    with mock.patch.object(cli, "console", Console(width=200)):
        result = CliRunner().invoke(cli.app, list(map(str, arguments)), env={"COLUMNS": "200"})
    return result.exit_code, result.output + (f"error: {result.exception}" if result.exception else "")
