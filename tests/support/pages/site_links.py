"""A hook of MkDocs: links to files outside docs/ lead to the repository's page of that file.

In a checkout, and where Git hosts show Markdown, the same links are relative paths. On the site
they begin with the address in FOREBAY_REPOSITORY. Without it they are plain text.
"""

import os
import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+)((?!\.\.)[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace each link that leaves docs/."""
    depth = page.file.src_uri.count("/")
    repository = os.environ.get("FOREBAY_REPOSITORY", "")

    def replaced(link: re.Match[str]) -> str:
        if link[2].count("../") <= depth:
            return link[0]
        return f"[{link[1]}]({repository}/{link[3]}{link[4] or ''})" if repository else link[1]

    return OUTSIDE.sub(replaced, markdown)
