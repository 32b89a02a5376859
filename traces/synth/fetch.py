"""Download the published traces of `published.csv`, from a fixed commit where there is one.

Sources: kvcache-ai/Mooncake (FAST'25), Azure/AzurePublicDataset (Splitwise, ISCA'24; DynamoLLM,
HPCA'25; ModServe, SoCC'25), HPMLL/BurstGPT (KDD'25), alibaba-edu/qwen-bailian-usagetraces-anon
(ATC'25), alibaba/ServeGen, callanjfox/kv-cache-tester, microsoft/vidur, microsoft/sarathi-serve,
the ZeroSCROLLS archives of tau/zero_scrolls (Findings of EMNLP 2023), ShareGPT.
"""

import csv
import hashlib
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO, Final

from forebay.traces.ground.errors import InputError
from forebay.traces.ground.whole_file import whole_file

TIMEOUT_S: Final = 30.0  # longest wait for the next bytes
MOST_BYTES: Final = 2 << 30
STEP_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Published:
    """A published file.

    Attributes:
        form: the format in which `traces import` reads it, or zeroscrolls.
        sha256: hash of the file, or None if unknown.
        bytes: size of the file, or None if unknown.
    """

    url: str
    licence: str
    form: str
    sha256: str | None = None
    bytes: int | None = None

    @property
    def packed(self) -> bool:
        """True for the archive of a whole repository."""
        return "/tar.gz/" in self.url

    @property
    def file_name(self) -> str:
        return f"{self.url.split('/')[4]}.tar.gz" if self.packed else self.url.rpartition("/")[2]

    @property
    def then(self) -> str:
        """The command that reads the file, with {} in place of its path."""
        if self.form == "zeroscrolls":
            return "forebay traces zeroscrolls {} -o T"
        if self.packed:
            return f"tar xzf {{}}, then forebay traces import {self.form} FOLDER -o T"
        return f"forebay traces import {self.form} {{}} -o T"


def _listed() -> dict[str, Published]:
    with open(Path(__file__).with_name("published.csv"), encoding="utf-8", newline="") as file:
        return {
            row["name"]: Published(
                row["url"],
                row["licence"],
                row["form"],
                row["sha256"] or None,
                int(row["bytes"]) if row["bytes"] else None,
            )
            for row in csv.DictReader(file)
        }


PUBLISHED: Final = _listed()


def published(name: str) -> Published:
    """Return the file called `name` (InputError: unknown, with the list of names)."""
    if name not in PUBLISHED:
        raise InputError(f"nothing called {name!r} to fetch; one of: {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


def fetch(file: Published, output: str, *, url: str | None = None) -> dict[str, Any]:
    """Download the whole file or nothing to `output`, and return facts about it.

    Args:
        url: the URL of a mirror.

    Raises:
        InputError: the download fails, or its size or hash is wrong.
    """
    source = url or file.url
    digest, size = hashlib.sha256(), 0
    try:
        request = urllib.request.Request(source, headers={"user-agent": "forebay"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer, whole_file(output) as to:
            length = answer.headers.get("content-length", "")
            whole = int(length) if length.isdecimal() else None
            # Hash while writing: the file may be larger than memory.
            while data := _more(answer, source):
                size += len(data)
                if size > MOST_BYTES:
                    raise InputError(f"{source}: more than {MOST_BYTES >> 30} GiB; not fetched")
                digest.update(data)
                to.write(data)
            # A wrong file is never left behind: it gets its name after these checks.
            if whole is not None and size < whole:
                raise InputError(f"{source}: ended after {size:,} of {whole:,} bytes; try again")
            if file.sha256 is not None and digest.hexdigest() != file.sha256:
                wrong = digest.hexdigest()
                raise InputError(f"{source}: its SHA-256 is {wrong}, not {file.sha256}")
            if file.bytes is not None and size != file.bytes:
                raise InputError(f"{source}: is {size:,} bytes long, not {file.bytes:,}")
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise _not_fetched(source, error) from error
    except ValueError as error:  # the source is not a URL
        raise InputError(f"--url {source}: {error}; give https://...") from error
    facts = {"url": source, "file": output, "bytes": size, "sha256": digest.hexdigest()}
    return {**facts, "licence": file.licence}


def _more(answer: BinaryIO, source: str) -> bytes:
    """Read on. A network error must not be reported as an error of the output file."""
    try:
        return answer.read(STEP_BYTES)
    except OSError as error:
        raise _not_fetched(source, error) from error


def _not_fetched(source: str, error: Exception) -> InputError:
    why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return InputError(
        f"{source}: cannot be fetched ({why}); download it where there is a network, or give "
        "--url of a copy"
    )
