"""Keep runs as named baselines in the folder `baselines/` of the working directory.

A baseline has all that `compare` reads of a run: three files of a run folder, or a result file. The
folder can be committed, so that a pull request is compared with the same run everywhere.
"""

import re
import shutil
from pathlib import Path
from tempfile import mkdtemp

from forebay.traces.ground.errors import InputError

FOLDER = Path("baselines")
RUN_FILES = ("summary.json", "run.json", "requests.parquet")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def baseline_path(name: str) -> Path:
    """Return the path of a baseline, or raise InputError if no baseline has that name."""
    folder = FOLDER / checked(name, "--baseline")
    if not folder.is_dir():
        there = sorted(entry.name for entry in FOLDER.iterdir()) if FOLDER.is_dir() else []
        hint = f"there are: {', '.join(there)}" if there else "there are none"
        raise InputError(
            f"--baseline {name}: not in {FOLDER}/ ({hint}); keep one with "
            f"`forebay compare RUN --save-baseline {name}`"
        )
    files = sorted(folder.iterdir())
    return files[0] if len(files) == 1 else folder


def save_baseline(run: Path, name: str) -> Path:
    """Copy a run to a baseline, in place of an earlier one. Raises InputError."""
    folder = FOLDER / checked(name, "--save-baseline")
    files = [run / file for file in RUN_FILES] if run.is_dir() else [run]
    try:
        FOLDER.mkdir(exist_ok=True)
        scratch = Path(mkdtemp(prefix=".", dir=FOLDER))
        for file in files:
            shutil.copyfile(file, scratch / file.name)
        scratch.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    except OSError as error:
        raise InputError(
            f"--save-baseline {name}: {folder} cannot be written ({error.strerror})"
        ) from error
    return folder


def checked(name: str, option: str) -> str:
    """Return the name of a baseline, or raise InputError if no folder can have it."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{option} {name!r}: give letters, digits, '.', '_' and '-', such as main")
    return name
