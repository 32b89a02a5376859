"""A stand-in for the base image, which no registry serves where CI runs: this machine's Python."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PROGRAMS = ("sh", "env", "ls", "cat", "true")
PASSWD = "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"


def write_base(root: Path) -> None:
    """Write a root file system with a shell and `python`, as in python:3.12-slim, to `root`."""
    for name in ("bin", "etc", "tmp", "proc", "dev", "usr/local/bin", "lib64"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text(PASSWD)
    programs = [Path(place) for name in PROGRAMS if (place := shutil.which(name))]
    for program in programs:
        shutil.copy2(program, root / "bin" / program.name)
    python = Path(sys.base_prefix, "bin", f"python{sysconfig.get_python_version()}").resolve()
    standard = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    skipped = shutil.ignore_patterns("test", "site-packages", "__pycache__", "*.a", "idlelib")
    shutil.copytree(standard, _inside(root, standard), symlinks=True, ignore=skipped)
    _copy(root, python)
    (root / "usr/local/bin/python").symlink_to(python)
    modules = [*(standard / "lib-dynload").glob("*.so")]
    for library in _libraries([*programs, python, *modules]):
        _copy(root, library)
    for path in root.rglob("*/"):
        path.chmod(path.stat().st_mode | 0o755)  # a parent such as /root may be closed


def _libraries(files: list[Path]) -> set[Path]:
    output = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True).stdout
    # Wheels may count on these (PEP 600), and python:3.12-slim has them.
    every = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    names = r"lib(?:stdc\+\+|gcc_s|pthread|rt|dl|util|m|c)\.so\.\d+"
    extra = re.findall(rf"=> (/\S+/{names})$", every, re.MULTILINE)
    return {Path(name) for name in [*re.findall(r"(/\S+\.so\S*)(?= \(0x)", output), *extra]}


def _inside(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _copy(root: Path, path: Path) -> None:
    target = _inside(root, path)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, target)
