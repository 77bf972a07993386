"""TRL's side of `grpo_step`: one GRPO step for each line on stdin, its cost as a line of JSON on stdout.

Runs in an environment of its own, with TRL and without agentrl.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class OnRequest(TrainerCallback):
    """Holds the trainer before each step until it is asked for, and says afterwards what the step cost."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.response = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not sys.stdin.readline():
            os._exit(0)  # nobody asks any more
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        cost = {"cpu": time.process_time() - self.cpu, "wall": time.perf_counter() - self.wall}
        print(json.dumps(cost | {"response": self.response}), file=self.answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", required=True)
    parser.add_argument("--rows", type=Path, required=True, help="JSON: a list of {prompt, ground_truth}")
    parser.add_argument("--delay", type=float, required=True, help="seconds a tool call takes")
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--generations", type=int, required=True)
    parser.add_argument("--turn-tokens", type=int, required=True)
    parser.add_argument("--response-tokens", type=int, required=True)
    given = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = json.loads(given.rows.read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(given.policy)
    tokenizer.response_template = qwen3_template

    def calculator(expression: str) -> str:
        """Evaluate arithmetic.

        Args:
            expression: The sum.
        """
        time.sleep(given.delay)
        match = re.fullmatch(r"(\d+)([-+*])(\d+)", expression)
        if match is None:
            raise ValueError("not a sum of two numbers")
        return str(OPERATORS[match[2]](int(match[1]), int(match[3])))

    on_request = OnRequest(answers)

    def reward(completions: list[Any], ground_truth: list[str], completion_ids: list[Any], **rest: Any) -> list[float]:
        on_request.response = sum(map(len, completion_ids)) / len(completion_ids)
        texts = [str(completion[-1].get("content") or "") for completion in completions]
        return [float(text == f"#### {truth}") for text, truth in zip(texts, ground_truth, strict=True)]

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=given.prompts * given.generations,
            num_generations=given.generations,
            max_completion_length=given.response_tokens,
            generation_kwargs={"max_new_tokens": given.turn_tokens},
            max_tool_calling_iterations=1,
            max_steps=len(rows) // given.prompts,
            shuffle_dataset=False,
            temperature=1.0,
            learning_rate=1e-6,
            beta=0.0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given.policy, dtype=torch.float32),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            reward_funcs=reward,
            tools=[calculator],
            callbacks=[on_request],
        )
        trainer.train()


if __name__ == "__main__":
    main()
