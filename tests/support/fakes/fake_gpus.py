"""Stand-ins for `nvidia-smi` and `vllm` on a machine without a GPU.

The vllm command serves with the simulated engine, and its help lists what vLLM's does. The folder
gets a line in `starts` for every server: its GPU and its flags.
"""

import sys
from collections.abc import Collection
from pathlib import Path

FLAGS = [
    "--host",
    "--port",
    "--served-model-name",
    "--max-model-len",
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--max-num-batched-tokens",
    "--long-prefill-token-threshold",
    "--scheduling-policy",
    "--max-num-seqs",
    "--gpu-memory-utilization",
    "--enable-prompt-tokens-details",
    "--enable-request-id-headers",
    "--disable-uvicorn-access-log",
    "--shutdown-timeout",
    "--kv-events-config",
]
NOT_SIMULATED = ("--disable-uvicorn-access-log",)
SMI = """\
#!/bin/sh
case "$*" in
  *memory*) for gpu in {indexes}; do echo "$gpu, NVIDIA H200, 143771"; done ;;
  *) for gpu in {indexes}; do echo "$gpu, NVIDIA H200, 580.159.04"; done ;;
esac
"""
VLLM = """\
#!{python}
import os, sys

words = sys.argv[1:]
if words == ["--version"]:
    print("0.26.0")
    sys.exit()
if words[-1] == "--help=all":
    print("usage: vllm serve [model]\\\\n" + "\\\\n".join({listed!r}))
    sys.exit()
with open({starts!r}, "a") as out:
    out.write(" ".join([os.environ["CUDA_VISIBLE_DEVICES"], *words]) + "\\\\n")
words = [word for word in words[2:] if word not in {dropped!r}]
engine = [{python!r}, "-m", "forebay.proxy", "engine", "--time-scale", "{time_scale}"]
os.execv({python!r}, [*engine, "--model", "llama-3-8b", "--gpu", "h200", *words])
"""


def install_gpus(
    folder: Path, *, gpus: int = 2, time_scale: float = 1.0, lacks: Collection[str] = ()
) -> Path:
    """Write both commands into `folder`, and return the vllm command.

    Args:
        lacks: flags that this vLLM does not have.
    """
    smi, vllm = folder / "nvidia-smi", folder / "vllm"
    smi.write_text(SMI.format(indexes=" ".join(map(str, range(gpus)))))
    text = VLLM.replace("\\\\n", "\\n").format(
        python=sys.executable,
        listed=[f"  {flag}" for flag in FLAGS if flag not in lacks],
        starts=str(folder / "starts"),
        dropped=NOT_SIMULATED,
        time_scale=time_scale,
    )
    vllm.write_text(text)
    for command in (smi, vllm):
        command.chmod(0o755)
    return vllm


def starts(folder: Path) -> list[str]:
    """Return a line for each started server: its GPU and its words."""
    log = folder / "starts"
    return log.read_text().splitlines() if log.exists() else []
