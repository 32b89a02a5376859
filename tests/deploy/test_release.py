"""What a release consists of builds, and the files around it are valid."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from checkout import copy_of_tracked
from deploy_tools import check, needs_tool, tool
from locks import LOCKS, pinned
from paths import ROOT
from release_version import versions

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
MIKE = ROOT / ".docs-tools" / "bin" / "mike"
REPOSITORY = "https://example.org/o/r/blob/v1"
LINES = [line for file in WORKFLOWS for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_file_has_the_same_version() -> None:
    assert len({version for _, version in versions()}) == 1, versions()


@needs_tool("check-jsonschema")
@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", FORMS),
        ("dependabot", [GITHUB / "dependabot.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
        ("compose-spec", [ROOT / "deploy" / "compose.yaml"]),
    ],
)
def test_the_file_matches_its_schema(schema: str, files: list[Path]) -> None:
    check("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files))


@needs_tool("zizmor")
def test_the_workflows_are_safe() -> None:
    check("zizmor", "--offline", "--no-progress", str(GITHUB))


def test_actions_are_pinned_by_commit() -> None:
    used = [match[1] for line in LINES if (match := re.search(r"uses: (.*)", line))]
    assert used
    for action in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), action


def test_the_workflows_run_what_is_here() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"run: make ([\w-]+)", "\n".join(LINES)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for file in re.findall(r"(?<!\S)(?:deploy|tests|\.ci)/[\w./-]+", "\n".join(LINES)):
        assert (ROOT / file).exists(), file


@needs_tool("hadolint")
def test_the_containerfile_is_clean() -> None:
    check("hadolint", str(ROOT / "deploy" / "Containerfile"))


@needs_tool("cibuildwheel")
def test_wheels_are_built_for_every_python() -> None:
    words = (tool("cibuildwheel"), "--print-build-identifiers", "--platform", "linux")
    done = subprocess.run(
        [*words, "--archs", "x86_64,aarch64", str(ROOT)], capture_output=True, text=True
    )
    assert set(done.stdout.split()) == {
        f"cp3{minor}-manylinux_{machine}"
        for minor in (11, 12, 13, 14)
        for machine in ("x86_64", "aarch64")
    }


@pytest.mark.parametrize("lock", LOCKS)
def test_every_lock_has_the_hashes_of_every_archive(lock: str) -> None:
    """The locks agree, and name no index: an archive is what it is wherever it comes from."""
    every = pinned("requirements-all.lock") | pinned("requirements-dev.lock")
    pins = pinned(lock)
    assert len(pins) > 50
    assert all(hashes == every[pin] for pin, hashes in pins.items())
    assert [pin for pin, hashes in pins.items() if not hashes] == []
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if "://" in line or line.startswith("-")] == []
    assert sum(not line.startswith("    --hash=") for line in lines) == len(pins)


@needs_tool("cyclonedx-py")
def test_the_bill_of_materials_lists_the_lock(tmp_path: Path) -> None:
    """With the command of the release workflow, and the hashes of each package."""
    line = next(line for line in LINES if "cyclonedx-py" in line)
    words = re.sub(r"^.*cyclonedx-py ", "", line).split()
    out = tmp_path / words[-1]
    command = [tool("cyclonedx-py"), *words[:-1], str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    listed = {
        (part["name"].lower(), part["version"]): {
            digest["content"] for place in part["externalReferences"] for digest in place["hashes"]
        }
        for part in json.loads(out.read_text())["components"]
    }
    assert listed == pinned("requirements-all.lock")
    assert pinned("requirements.lock").keys() <= listed.keys()


def script(job: str, step: str) -> str:
    """Return the script of the step of the release workflow with this `id`."""
    release = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text(encoding="utf-8"))
    (found,) = (each for each in release["jobs"][job]["steps"] if each.get("id") == step)
    return str(found["run"])


def test_the_image_of_a_release_is_built_on_the_digest_of_its_base(tmp_path: Path) -> None:
    digest = f"sha256:{'5' * 64}"
    program, output = tmp_path / "docker", tmp_path / "output"
    program.write_text(f'#!/bin/sh\n[ "$4" = python:3.12-slim ] && echo {digest}\n')
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(output)}
    words = ("bash", "-e", "-c", script("image", "base"))
    subprocess.run(words, cwd=ROOT, env=environ, check=True)
    assert output.read_text() == f"base=python:3.12-slim@{digest}\n"
    program.write_text("#!/bin/sh\nexit 1\n")
    assert subprocess.run(words, cwd=ROOT, env=environ).returncode != 0


@pytest.mark.skipif(not MIKE.exists(), reason="needs mike: make docs-tools")
@pytest.mark.timeout(300)
def test_each_version_has_its_own_documentation(tmp_path: Path) -> None:
    """With the commands of the release workflow, for two releases in turn, to a repository here."""
    checkout = copy_of_tracked(tmp_path / "checkout")
    names = ("GIT_AUTHOR", "GIT_COMMITTER")
    who = {f"{name}_{part}": "a@b.example" for name in names for part in ("NAME", "EMAIL")}
    origin = {"GITHUB_SERVER_URL": str(tmp_path), "GITHUB_REPOSITORY": "origin", "TOKEN": "x"}
    environ = {**os.environ, **who, **origin}

    def run(where: str, *words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path / where, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("checkout", "git", "init", "-q")
    run("checkout", "git", "add", "--all")
    run("checkout", "git", "commit", "-q", "-m", "all")
    run(".", "git", "clone", "-q", "--bare", str(checkout), "origin")
    for version in ("0.1.0", "0.2.0"):
        run(".", "git", "clone", "-q", "origin", version)
        (tmp_path / version / ".docs-tools").symlink_to(ROOT / ".docs-tools")
        environ["GITHUB_REF_NAME"] = f"v{version}"
        run(version, "bash", "-e", "-c", script("docs", "versions"))
        run(version, "bash", "-e", "-c", script("publish", "pages"))

    def page(name: str) -> str:
        return run("origin", "git", "show", f"gh-pages:{name}")

    told = [(each["version"], each["aliases"]) for each in json.loads(page("versions.json"))]
    assert told == [("0.2.0", ["latest"]), ("0.1.0", [])]
    assert '"provider": "mike"' in page("0.1.0/index.html")
    assert '"provider": "mike"' in page("0.2.0/how-to/install.html")
    assert "0.2.0/how-to/install.html" in page("latest/how-to/install.html")
    assert "latest/" in page("index.html")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the pure wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    checkout = copy_of_tracked(folder / "checkout")
    build = "from setuptools.build_meta import build_{0}; build_{0}('{1}')"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["FOREBAY_REPOSITORY"] = REPOSITORY

    def run(what: str, where: Path) -> None:
        words = [sys.executable, "-c", build.format(what, folder)]
        subprocess.run(words, cwd=where, check=True, capture_output=True, env=environ)

    run("sdist", checkout)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    run("wheel", next((folder / "unpacked").iterdir()))
    return folder


def test_the_wheel_holds_the_packages_only(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[1] for name in names if name.startswith("forebay/")}
    assert tops == {"analysis", "proxy", "replay", "traces"}
    assert any(name.endswith("proxy/py.typed") for name in names)
    sources = {
        f"forebay/{path.relative_to(ROOT)}"
        for top in tops
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".html", ".json")
    }
    assert sources <= set(names)


def test_the_description_leads_to_the_files_of_the_repository(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(name).decode()
    assert "Description-Content-Type: text/markdown" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert f"{REPOSITORY}/docs/how-to/install.md" in links
    images = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert f"{REPOSITORY.replace('blob', 'raw')}/docs/assets/report-dark.png" in images
    assert [link for link in (*links, *images) if not link.startswith(("https://", "#"))] == []


def test_the_sdist_can_be_compiled(dist: Path) -> None:
    """mypyc finds the same modules there as here."""
    (unpacked,) = (dist / "unpacked").iterdir()
    find = runpy.run_path(str(unpacked / "setup.py"))["compiled_modules"]
    assert find(str(unpacked)) == find(str(ROOT))
    assert all((unpacked / path).exists() for path in find(str(unpacked)))


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_the_wheel_runs_from_a_bare_environment(dist: Path, tmp_path: Path, compiled: bool) -> None:
    """Its dependencies are those of this environment, so that no package is fetched."""
    wheels = [*(ROOT / ".compiled" if compiled else dist).glob("*.whl")]
    if compiled and not wheels:
        pytest.skip("needs a compiled wheel: make compiled")
    (wheel,) = wheels
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    here = {"base": str(venv), "platbase": str(venv)}
    packages = Path(sysconfig.get_path("purelib", vars=here))
    install = (sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install")
    words = (*install, "-q", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel))
    subprocess.run(words, check=True)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PATH"] = f"{venv / 'bin'}:{environ['PATH']}"

    def run(command: str) -> "subprocess.CompletedProcess[str]":
        words = ("bash", "-o", "pipefail", "-c", command)
        return subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environ)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for command in project["tool"]["cibuildwheel"]["test-command"]:
        done = run(command)
        assert (done.returncode == 0) is (compiled or "grep compiled" not in command), done.stderr
    assert yaml.safe_load(run("forebay proxy --print-config").stdout)["listen"]["port"] == 8080
    proxy, shaper = run(
        "python -c 'import forebay.proxy as p, forebay.proxy.core.shaper as s;"
        "print(p.__file__, s.__file__)'"
    ).stdout.split()
    assert proxy.startswith(str(packages))
    assert shaper.startswith(str(packages))
    assert shaper.endswith(".so") is compiled


def install(tmp_path: Path, *programs: str) -> "subprocess.CompletedProcess[str]":
    """`make install` where only `programs` and a pipx that prints its words are found."""
    found = tmp_path / "bin"
    found.mkdir()
    for name in ("make", "sh", "echo", "python3"):
        (found / name).symlink_to(shutil.which(name) or sys.executable)
    for name in programs:
        (found / name).write_text('#!/bin/sh\necho "$0" "$@"\n')
        (found / name).chmod(0o755)
    words = [str(found / "make"), "--no-print-directory", "install", f"PYTHON={sys.executable}"]
    environ = {"PATH": str(found), "HOME": str(tmp_path)}
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environ)


def test_make_install_uses_pipx(tmp_path: Path) -> None:
    done = install(tmp_path, "pipx")
    assert done.returncode == 0, done.stderr
    assert "pipx install --force" in done.stdout


def test_make_install_says_how_without_pipx(tmp_path: Path) -> None:
    done = install(tmp_path)
    assert done.returncode != 0
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert len(lines) == 2
    assert lines[0].endswith(f"pip install '{ROOT}[lab]'")
    assert lines[1].endswith("~/.local/bin/")
