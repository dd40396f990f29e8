"""Where things are. Not in conftest.py: folders may have one of their own, of the same module name."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("GPU_LOGICMIX_SHARED", ROOT.parent / "shared"))
