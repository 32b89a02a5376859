"""`forebay engine` as a process: its start line, its signals, its bad input."""

import re
import signal
import socket
import subprocess
from urllib.request import urlopen

from commands import refusal
from stages.engine_stage import COMMAND


def test_it_serves_until_sigterm_and_exits_0() -> None:
    words = [*COMMAND, "--model", "Phi-3-mini-128k", "--gpu", "h200-nvl", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            match = re.match(r"(http://127\.0\.0\.1:\d+)  phi-3-mini-128k on h200-nvl", line)
            assert match, line
            assert "GPU KV cache size: 320,560 tokens" in line
            assert "maximum concurrency for 131,072 tokens per request: 2.45x" in line
            with urlopen(f"{match[1]}/health", timeout=60) as response:
                assert response.status == 200
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_it_says_that_constants_were_not_measured_on_the_gpu() -> None:
    words = [*COMMAND, "--model", "llama-3-8b", "--gpu", "h100", "--port", "0"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert "llama-3-8b on h100-sxm" in process.stdout.readline()
            said = process.stderr.readline()
            assert said == "forebay engine: constants measured on h200-sxm; not on h100-sxm\n"
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal("engine", "--model", "llama-3-8b", "--port", str(port))
        assert f"--port {port}: cannot listen" in line
