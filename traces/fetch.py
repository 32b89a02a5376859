"""Download published traces, each from a fixed commit of its repository where it has one.

Sources: kvcache-ai/Mooncake (FAST'25, Apache-2.0), Azure/AzurePublicDataset (Splitwise, ISCA'24,
CC-BY-4.0), the ZeroSCROLLS archives of tau/zero_scrolls (Findings of EMNLP 2023).
"""

import hashlib
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final

from forebay.traces.errors import InputError
from forebay.traces.output import whole_file

GITHUB: Final = "https://raw.githubusercontent.com"
MOONCAKE: Final = (
    f"{GITHUB}/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces"
)
AZURE: Final = f"{GITHUB}/Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c/data"
ZEROSCROLLS: Final = "https://huggingface.co/datasets/tau/zero_scrolls/resolve/main"
TASKS: Final = (
    *("gov_report", "summ_screen_fd", "qmsum", "squality", "qasper", "narrative_qa", "quality"),
    *("musique", "space_digest", "book_sum_sort"),
)

TIMEOUT_S: Final = 30.0  # without a byte
MOST_BYTES: Final = 2 << 30
STEP_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Published:
    """A published file.

    Attributes:
        then: the command that reads it, with {} in place of its path.
        sha256: hash of the file, None if it is not known.
    """

    url: str
    licence: str
    then: str
    sha256: str | None = None

    @property
    def file_name(self) -> str:
        return self.url.rpartition("/")[2]


def _mooncake(name: str) -> Published:
    return Published(
        f"{MOONCAKE}/{name}_trace.jsonl", "Apache-2.0", "forebay traces import mooncake {} -o T"
    )


def _azure(name: str, sha256: str | None = None) -> Published:
    url = f"{AZURE}/AzureLLMInferenceTrace_{name}.csv"
    return Published(url, "CC-BY-4.0", "forebay traces import azure {} -o T", sha256)


PUBLISHED: Final[dict[str, Published]] = {
    "mooncake-conversation": _mooncake("conversation"),
    "mooncake-synthetic": _mooncake("synthetic"),
    "mooncake-toolagent": _mooncake("toolagent"),
    "azure-code": _azure(
        "code", "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6"
    ),
    "azure-conv": _azure("conv"),
    **{
        f"zeroscrolls-{task}": Published(
            f"{ZEROSCROLLS}/{task}.zip",
            "as of each task's own data",
            "forebay traces zeroscrolls {} -o T",
        )
        for task in TASKS
    },
}


def published(name: str) -> Published:
    """Return the file called `name`; InputError lists the names."""
    if name not in PUBLISHED:
        raise InputError(f"nothing called {name!r} to fetch; one of: {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


def fetch(
    one: Published,
    output: str,
    *,
    url: str | None = None,
) -> dict[str, Any]:
    """Download to `output`, completely or not at all; returns facts about the file.

    Raises InputError if the download fails or its hash is wrong.

    Args:
        url: the URL of a mirror.
    """
    source = url or one.url
    digest, size = hashlib.sha256(), 0
    try:
        request = urllib.request.Request(source, headers={"user-agent": "forebay"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer, whole_file(output) as to:
            length = answer.headers.get("content-length", "")
            whole = int(length) if length.isdecimal() else None
            while data := answer.read(STEP_BYTES):
                size += len(data)
                if size > MOST_BYTES:
                    raise InputError(f"{source}: more than {MOST_BYTES >> 30} GiB; not fetched")
                digest.update(data)
                to.write(data)
            if whole is not None and size < whole:
                raise InputError(f"{source}: ended after {size:,} of {whole:,} bytes; try again")
            if one.sha256 is not None and digest.hexdigest() != one.sha256:
                raise InputError(f"{source}: its SHA-256 is {digest.hexdigest()}, not {one.sha256}")
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        why = getattr(error, "reason", None) or error
        raise InputError(
            f"{source}: cannot be fetched ({why}); download it where there is a network, or give "
            "--url of a copy"
        ) from error
    except ValueError as error:  # the source is not a URL
        raise InputError(f"--url {source}: {error}; give https://...") from error
    return {
        "url": source,
        "file": os.fspath(output),
        "bytes": size,
        "sha256": digest.hexdigest(),
        "licence": one.licence,
    }
