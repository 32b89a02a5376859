"""Download published traces, each from a fixed commit of its repository where it has one.

Sources: kvcache-ai/Mooncake (FAST'25), Azure/AzurePublicDataset (Splitwise, ISCA'24; DynamoLLM,
HPCA'25; ModServe, SoCC'25), HPMLL/BurstGPT (KDD'25), alibaba-edu/qwen-bailian-usagetraces-anon
(ATC'25), alibaba/ServeGen, callanjfox/kv-cache-tester, microsoft/vidur, microsoft/sarathi-serve,
the ZeroSCROLLS archives of tau/zero_scrolls (Findings of EMNLP 2023), ShareGPT.
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
LFS: Final = "https://media.githubusercontent.com/media"  # files in Git's large file storage
TARBALL: Final = "https://codeload.github.com"
MOONCAKE: Final = (
    f"{GITHUB}/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces"
)
AZURE: Final = f"{GITHUB}/Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c/data"
AZURE_WEEK: Final = (
    "https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace"
)
BURSTGPT: Final = f"{LFS}/HPMLL/BurstGPT"
BAILIAN: Final = (
    f"{LFS}/alibaba-edu/qwen-bailian-usagetraces-anon/0b4273a1d8a83935b9d9356e78f95c31f2ac64cf"
)
VIDUR: Final = (
    f"{GITHUB}/microsoft/vidur/7d47513363ec447a741ac5e47241580b47724fbf/data/processed_traces"
)
SARATHI: Final = (
    f"{GITHUB}/microsoft/sarathi-serve/72339db5b120614033b317880ad3a05a5e4c9415"
    "/data/processed_traces"
)
ZEROSCROLLS: Final = "https://huggingface.co/datasets/tau/zero_scrolls/resolve/main"
SHAREGPT: Final = (
    "https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve/main"
    "/ShareGPT_V3_unfiltered_cleaned_split.json"
)
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
        bytes: size of the file, None if it is not known.
    """

    url: str
    licence: str
    then: str
    sha256: str | None = None
    bytes: int | None = None

    @property
    def file_name(self) -> str:
        name = self.url.rpartition("/")[2]
        return f"{self.url.split('/')[4]}.tar.gz" if "/tar.gz/" in self.url else name


IMPORT: Final = "forebay traces import {} {{}} -o T"
UNPACK: Final = "tar xzf {{}}, then forebay traces import {} FOLDER -o T"
APACHE: Final = "Apache-2.0"
CC_BY: Final = "CC-BY-4.0"


def _one(
    form: str, licence: str, url: str, sha256: str | None = None, size: int | None = None
) -> Published:
    return Published(url, licence, IMPORT.format(form), sha256, size)


def _tarball(form: str, licence: str, repository: str, commit: str) -> Published:
    url = f"{TARBALL}/{repository}/tar.gz/{commit}"
    return Published(url, licence, UNPACK.format(form))


def _burstgpt(name: str, commit: str, sha256: str, size: int) -> Published:
    url = f"{BURSTGPT}/{commit}/data/BurstGPT_{name}.csv"
    return _one("burstgpt", CC_BY, url, sha256, size)


PUBLISHED: Final[dict[str, Published]] = {
    **{
        f"mooncake-{name}": _one("mooncake", APACHE, f"{MOONCAKE}/{name}_trace.jsonl")
        for name in ("conversation", "synthetic", "toolagent")
    },
    "azure-code": _one(
        "azure",
        CC_BY,
        f"{AZURE}/AzureLLMInferenceTrace_code.csv",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        320_117,
    ),
    "azure-conv": _one("azure", CC_BY, f"{AZURE}/AzureLLMInferenceTrace_conv.csv"),
    "azure-code-week": _one("azure", CC_BY, f"{AZURE_WEEK}/AzureLLMInferenceTrace_code_1week.csv"),
    "azure-conv-week": _one("azure", CC_BY, f"{AZURE_WEEK}/AzureLLMInferenceTrace_conv_1week.csv"),
    "azure-multimodal": _one(
        "azure",
        CC_BY,
        f"{GITHUB}/Azure/AzurePublicDataset/517b239f163af1a15d4f2b6f0ca47c64e8d5d398"
        "/data/AzureLMMInferenceTrace_multimodal.csv.gz",
    ),
    "burstgpt-1": _burstgpt(
        "1",
        "5d93d820d9b6bee4e26914df003e5713538164ae",
        "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
        52_283_111,
    ),
    "burstgpt-2": _burstgpt(
        "2",
        "5d93d820d9b6bee4e26914df003e5713538164ae",
        "44bf5942b03fca42c01a226a545ad3a750ec62688faecd67b6831c56a8928bf7",
        144_819_209,
    ),
    "burstgpt-without-fails-1": _burstgpt(
        "without_fails_1",
        "5d93d820d9b6bee4e26914df003e5713538164ae",
        "a4d068a7113ec0290e74063a1b3447dc6001a30e4298eb313581b71006dda1f4",
        51_429_517,
    ),
    "burstgpt-without-fails-2": _burstgpt(
        "without_fails_2",
        "1f52bc81aab7392cc30cc10b244396d9480b245d",
        "56193aa9b2bb26128ded43d2d29a960df6bf5af062bcfc9b005f3fcaa4e6e501",
        142_376_815,
    ),
    "bailian-a": _one("bailian", APACHE, f"{BAILIAN}/qwen_traceA_blksz_16.jsonl"),
    "bailian-b": _one("bailian", APACHE, f"{BAILIAN}/qwen_traceB_blksz_16.jsonl"),
    "bailian-coder": _one(
        "bailian",
        APACHE,
        f"{BAILIAN}/qwen_coder_blksz_16.jsonl",
        "3d74974cebb7bccb69b1ca6ea210a44d9a3033443c0271ed015327284dea1aff",
        132_054_902,
    ),
    "bailian-thinking": _one(
        "bailian",
        APACHE,
        f"{BAILIAN}/qwen_thinking_blksz_16.jsonl",
        "41ac36d9d1b54d084eeb6b05e9d142ba9d02f8bf79cfc9fff418d8ab7cdee906",
        27_901_454,
    ),
    "vidur-arxiv": _one(
        "vidur",
        "MIT",
        f"{VIDUR}/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
        "9d3580538d915ca75e4aaaa54590b42dbb17abc6d74c8913310cf07c232adcdc",
        884_932,
    ),
    "vidur-splitwise-code": _one("vidur", "MIT", f"{VIDUR}/splitwise_code.csv"),
    "vidur-splitwise-conv": _one("vidur", "MIT", f"{VIDUR}/splitwise_conv.csv"),
    "sarathi-sharegpt": _one(
        "vidur", APACHE, f"{SARATHI}/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
    ),
    "sharegpt": _one("sharegpt", "not stated", SHAREGPT),
    "kv-cache-tester": _tarball(
        "kv-cache-tester",
        APACHE,
        "callanjfox/kv-cache-tester",
        "94f6046dfd9c0c8bc0cdb24a5aa6579bac8669bf",
    ),
    "servegen": _tarball(
        "servegen", APACHE, "alibaba/ServeGen", "f891d1189eb32b3868dfc443800c4150548c282a"
    ),
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
