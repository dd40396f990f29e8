"""For mkdocs: files outside docs/ that pages link to (`../examples/plain_loop.py`) become part of the site.

In the repository such a link is right as it is; on the site the file is copied and the link points to the copy.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\]\(((?:\.\./)+)((?:examples|bench|studies)/[^)#\s]+)\)")


def on_files(files, config):
    for page in list(files.documentation_pages()):
        for _, target in _LINK.findall(Path(page.abs_src_path).read_text(encoding="utf-8")):
            if (ROOT / target).is_file() and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown, page, config, files):
    up = "../" * page.file.src_uri.count("/")
    return _LINK.sub(lambda link: f"]({up}{link[2]})", markdown)
