"""Download published traces, from a fixed commit where a repository has them.

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
from typing import Any, BinaryIO, Final

from forebay.traces.errors import InputError
from forebay.traces.whole_file import whole_file

GITHUB: Final = "https://raw.githubusercontent.com"
LFS: Final = "https://media.githubusercontent.com/media"  # files in Git's large file storage
TARBALL: Final = "https://codeload.github.com"
MOONCAKE: Final = (
    f"{GITHUB}/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces"
)
AZURE: Final = f"{GITHUB}/Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c/data"
AZURE_WEEK: Final = "https://github.com/Azure/AzurePublicDataset/releases/download/dataset-llm-2024"
BURSTGPT: Final = "https://github.com/HPMLL/BurstGPT/releases/download/v2.0"
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
    "https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve"
    "/bcd32a724d8460ebe14e1d05b0195e30e9a46cb1/ShareGPT_V3_unfiltered_cleaned_split.json"
)
WEKA: Final = (
    "https://huggingface.co/datasets/semianalysisai/cc-traces-weka-062126-256k/resolve"
    "/8fecd2fc56694469f758f0afbbb6335ad3043740/traces.jsonl"
)
TASKS: Final = (
    *("gov_report", "summ_screen_fd", "qmsum", "squality", "qasper", "narrative_qa", "quality"),
    *("musique", "space_digest", "book_sum_sort"),
)

TIMEOUT_S: Final = 30.0  # for the next bytes
MOST_BYTES: Final = 2 << 30
STEP_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Published:
    """A published file.

    Attributes:
        then: the command that reads it, with {} in place of its path.
        sha256: hash of the file, or None if unknown.
        bytes: size of the file, or None if unknown.
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


def _burstgpt(name: str, sha256: str, size: int) -> Published:
    return _one("burstgpt", CC_BY, f"{BURSTGPT}/BurstGPT_{name}.csv", sha256, size)


def _bailian(name: str, sha256: str, size: int) -> Published:
    return _one("bailian", APACHE, f"{BAILIAN}/qwen_{name}_blksz_16.jsonl", sha256, size)


PUBLISHED: Final[dict[str, Published]] = {
    "mooncake-conversation": _one(
        "mooncake",
        APACHE,
        f"{MOONCAKE}/conversation_trace.jsonl",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        3_029_533,
    ),
    "mooncake-synthetic": _one(
        "mooncake",
        APACHE,
        f"{MOONCAKE}/synthetic_trace.jsonl",
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        1_136_313,
    ),
    "mooncake-toolagent": _one(
        "mooncake",
        APACHE,
        f"{MOONCAKE}/toolagent_trace.jsonl",
        "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
    ),
    "azure-code": _one(
        "azure",
        CC_BY,
        f"{AZURE}/AzureLLMInferenceTrace_code.csv",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        320_117,
    ),
    "azure-conv": _one("azure", CC_BY, f"{AZURE}/AzureLLMInferenceTrace_conv.csv", None, 719_188),
    "azure-code-week": _one(
        "azure",
        CC_BY,
        f"{AZURE_WEEK}/AzureLLMInferenceTrace_code_1week.csv",
        "71de5c55cbc35f8f1ed0b6b7806b4cd1e9764b0058469725a6aac98023a1448f",
        691_989_454,
    ),
    "azure-conv-week": _one(
        "azure",
        CC_BY,
        f"{AZURE_WEEK}/AzureLLMInferenceTrace_conv_1week.csv",
        "a0cc9b969a9bbf0fd811802cbf4323edd3a209ace791e3799ad4f9207f213941",
        1_135_195_393,
    ),
    "azure-multimodal": _one(
        "azure",
        CC_BY,
        f"{GITHUB}/Azure/AzurePublicDataset/517b239f163af1a15d4f2b6f0ca47c64e8d5d398"
        "/data/AzureLMMInferenceTrace_multimodal.csv.gz",
    ),
    "burstgpt-1": _burstgpt(
        "1", "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122", 52_283_111
    ),
    "burstgpt-2": _burstgpt(
        "2", "44bf5942b03fca42c01a226a545ad3a750ec62688faecd67b6831c56a8928bf7", 144_819_209
    ),
    "burstgpt-3": _burstgpt(
        "3", "2299986a07388aa303ec2c41d1131e756db650a39ed6ef9dfe7cc3d7f9a43b8f", 231_682_327
    ),
    "burstgpt-without-fails-1": _burstgpt(
        "without_fails_1",
        "a4d068a7113ec0290e74063a1b3447dc6001a30e4298eb313581b71006dda1f4",
        51_429_517,
    ),
    "burstgpt-without-fails-2": _burstgpt(
        "without_fails_2",
        "56193aa9b2bb26128ded43d2d29a960df6bf5af062bcfc9b005f3fcaa4e6e501",
        142_376_815,
    ),
    "burstgpt-without-fails-3": _burstgpt(
        "without_fails_3",
        "3326259f9efb11845bc5ef85fa97e6f691050b0974621c91ef22acd566c43a40",
        217_312_026,
    ),
    "bailian-a": _bailian(
        "traceA", "07cedc9ed8aff301994ac68ed4aede8123b7603673575eeba9dd677de663db17", 56_354_493
    ),
    "bailian-b": _bailian(
        "traceB", "68e3f98e2d601d60d0abf4b89bc8a3654372abab7b1cde6373a13d0054379d59", 96_209_982
    ),
    "bailian-coder": _bailian(
        "coder", "3d74974cebb7bccb69b1ca6ea210a44d9a3033443c0271ed015327284dea1aff", 132_054_902
    ),
    "bailian-thinking": _bailian(
        "thinking", "41ac36d9d1b54d084eeb6b05e9d142ba9d02f8bf79cfc9fff418d8ab7cdee906", 27_901_454
    ),
    "vidur-arxiv": _one(
        "vidur",
        "MIT",
        f"{VIDUR}/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
        "9d3580538d915ca75e4aaaa54590b42dbb17abc6d74c8913310cf07c232adcdc",
        884_932,
    ),
    "vidur-splitwise-code": _one("vidur", "MIT", f"{VIDUR}/splitwise_code.csv", None, 166_195),
    "vidur-splitwise-conv": _one("vidur", "MIT", f"{VIDUR}/splitwise_conv.csv", None, 382_729),
    "sarathi-sharegpt": _one(
        "vidur",
        APACHE,
        f"{SARATHI}/sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
        None,
        949_600,
    ),
    "sharegpt": _one(
        "sharegpt",
        "not stated",
        SHAREGPT,
        "35f0e213ce091ed9b9af2a1f0755e9d39f9ccec34ab281cd4ca60d70f6479ba4",
        672_837_942,
    ),
    "kv-cache-tester": _tarball(
        "kv-cache-tester",
        APACHE,
        "callanjfox/kv-cache-tester",
        "94f6046dfd9c0c8bc0cdb24a5aa6579bac8669bf",
    ),
    "weka": _one(
        "kv-cache-tester",
        APACHE,
        WEKA,
        "e39cd2ff3eba21d4a3664be51da743ac3d2149a1933898cafc7bfeac8147eeef",
        568_864_747,
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
    """Return the file called `name` (InputError: unknown, with the list of names)."""
    if name not in PUBLISHED:
        raise InputError(f"nothing called {name!r} to fetch; one of: {', '.join(PUBLISHED)}")
    return PUBLISHED[name]


def fetch(
    file: Published,
    output: str,
    *,
    url: str | None = None,
) -> dict[str, Any]:
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
                raise InputError(
                    f"{source}: its SHA-256 is {digest.hexdigest()}, not {file.sha256}"
                )
            if file.bytes is not None and size != file.bytes:
                raise InputError(f"{source}: is {size:,} bytes long, not {file.bytes:,}")
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise _not_fetched(source, error) from error
    except ValueError as error:  # the source is not a URL
        raise InputError(f"--url {source}: {error}; give https://...") from error
    return {
        "url": source,
        "file": os.fspath(output),
        "bytes": size,
        "sha256": digest.hexdigest(),
        "licence": file.licence,
    }


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
