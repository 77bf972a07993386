"""Which of the trainer's environment variables a server process may see."""

from __future__ import annotations

import os
import re
from collections.abc import Container

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


def passed(pass_env: Container[str] = ()) -> dict[str, str]:
    """Return the variables that a server sees: by their names, or as the user asked with `pass_env`.

    A server answers requests; an intruder must not find keys of trackers, clouds and other services there.
    """
    return {name: value for name, value in os.environ.items() if is_passed(name) or name in pass_env}
