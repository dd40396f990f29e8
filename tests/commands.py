"""A command in this process, the way `main` runs it."""

import contextlib
import io
from unittest import mock

from gpu_logicmix import cli
from gpu_logicmix.cli import screen


def run(*arguments) -> tuple[int, str]:
    """Exit code and output."""
    output = io.StringIO()
    with (
        mock.patch.object(screen, "console", screen.make_console(width=200)),
        mock.patch.dict("os.environ", {"COLUMNS": "200", "GPU_LOGICMIX_DEBUG": ""}),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            cli.main(list(map(str, arguments)))
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
    return code, output.getvalue()
