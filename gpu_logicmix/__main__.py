"""`gpu-logicmix` and `python -m gpu_logicmix`: the command line, or one line that says what it needs."""

import sys


def main() -> None:
    try:
        from gpu_logicmix.cli import main as command_line
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gpu_logicmix"):
            raise
        sys.exit(f'{error}; the commands need: pip install ".[train]" in a clone')
    command_line()


if __name__ == "__main__":
    main()
