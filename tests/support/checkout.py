"""A copy of the files that git tracks here, as in a clone, with changes not yet committed."""

import shutil
import subprocess
from pathlib import Path

from paths import ROOT


def copy_of_tracked(folder: Path) -> Path:
    """Copy every tracked file below `folder`, which is made, and return it."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder
