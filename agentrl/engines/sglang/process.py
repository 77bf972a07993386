"""An SGLang server process of ours."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Container, Sequence
from pathlib import Path

import httpx

from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.sglang.client import key_header
from agentrl.engines.sglang.options import ServerArguments
from agentrl.system.proxies import spare_own_addresses

GPU_GRACE = 15.0
"""Seconds that a server on GPUs has to end by itself, so that their memory is given back in order."""


class SGLangProcess(ServerProcess):
    """An SGLang server at 127.0.0.1, or the host that its arguments name."""

    software = "SGLang"
    stages = (
        (re.compile(r"server_args="), "configured"),
        (re.compile(r"Load weight begin"), "loading weights"),
        (re.compile(r"[Ll]oading.*shards: +(\d+)% Completed"), "loading weights: {}%"),
        (re.compile(r"Load weight end\. elapsed=([\d.]+) s"), "weights loaded in {} s"),
        (re.compile(r"KV Cache is allocated\..*#tokens: (\d+)"), "KV cache of {} tokens"),
        (re.compile(r"Capture (?:\w+ )*(?:CUDA|cuda) graph.* begin"), "capturing CUDA graphs"),
        (re.compile(r"fired up and ready"), "ready"),
    )
    aftermath = "scheduler died during initialization"
    module = "agentrl.engines.sglang.launch"
    """Main module of the process."""

    def __init__(
        self,
        arguments: ServerArguments,
        port: int | None,
        log: Path,
        *,
        key: str | None = None,
        pass_env: Sequence[str] = (),
    ) -> None:
        """See `ServerProcess.__init__`. `pass_env`: variables that the server sees besides `PASSED`."""
        grace = 0.0 if arguments.device == "cpu" else GPU_GRACE
        super().__init__(arguments.model_path, port, log, host=arguments.host, grace=grace, key=key)
        self.arguments = arguments
        self._pass_env = frozenset(pass_env)

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-m", self.module, *self.arguments.argv(port)]

    def environment(self) -> dict[str, str]:
        return environment(self.arguments.device, self._pass_env)

    async def served_model(self, http: httpx.AsyncClient) -> str | None:
        if (await http.get(f"{self.url}/health")).status_code != 200:
            return None
        told = await http.get(f"{self.url}/model_info", headers=key_header(self.key))
        # SGLang (0.5.23) asks itself for this before it listens, where there is no warm-up. Without it, to empty a
        # cache on a CPU is to go over all objects of the process: half a second of each update of the weights. One
        # that does not know it serves as well.
        await http.post(f"{self.url}/freeze_gc", headers=key_header(self.key))
        return str(told.raise_for_status().json()["model_path"])


PASSED = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_.*|TZ|TERM|TMPDIR|TEMP|TMP|HOSTNAME|XDG_.*|PYTHON.*|VIRTUAL_ENV"
    "|CONDA_PREFIX|LD_LIBRARY_PATH|LD_PRELOAD|LIBRARY_PATH|CC|CXX|CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|MAX_JOBS"
    "|CUDA.*|NVIDIA_.*|CUBLAS.*|CUDNN.*|CUTE_.*|NCCL_.*|NVSHMEM_.*|GLOO_.*|UCX_.*|FI_.*|IBV_.*|OMP_.*|GOMP_.*|KMP_.*"
    "|MKL_.*|OPENBLAS_.*|MALLOC_.*|TORCH.*|PYTORCH_.*|TRITON_.*|SGLANG_.*|SGL_.*|FLASHINFER_.*|TVM_.*|TRTLLM_.*|DG_.*"
    "|VLLM_.*|ROCM_.*|ROCR_.*|HIP_.*|HSA_.*|MIOPEN_.*|AITER_.*|MC_.*|ASCEND_.*|ZE_.*|PROMETHEUS_MULTIPROC_DIR"
    "|HF_.*|TRANSFORMERS_.*|TOKENIZERS_.*|SAFETENSORS_.*|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    "|(?i:HTTP_PROXY|HTTPS_PROXY|ALL_PROXY|NO_PROXY)"
)
"""Variables of the trainer's environment that a server sees: those by which shell, compilers, drivers, libraries and
the loading of models are set up."""

SECRET = re.compile(
    r"(?i:(.*_)?(KEY|APIKEY|TOKEN|AUTH)(_(FILE|PATH|ID))?|(.*_)?(SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_.*)?)"
)
"""Variables that hold secrets, by their names."""
HUB = ("HF_TOKEN", "HF_TOKEN_PATH")
"""Secrets that pass, for models that are gated at the hub."""


def is_passed(name: str) -> bool:
    """Say whether a server sees the variable without being asked for it."""
    return PASSED.fullmatch(name) is not None and (name in HUB or SECRET.fullmatch(name) is None)


def environment(device: str, pass_env: Container[str] = ()) -> dict[str, str]:
    """Build the environment of a server process; the user's variables stay if a server may see them.

    A server answers requests; an intruder must not find keys of trackers, clouds and other services there.
    """
    ours = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        # A scheduler that crashed would keep its server from ending for more than a minute.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        # Places reserved at a context's end may lie beyond the model's last position; no token ever does.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if device == "cpu":
        ours["OMP_NUM_THREADS"] = "1"  # threads of one server; a small model is slower with more
    passed = {name: value for name, value in os.environ.items() if is_passed(name) or name in pass_env}
    made = {**ours, **passed}
    spare_own_addresses(made)  # a server asks itself
    return made
