"""Runs whose conversations are compacted: killed and gone on, at every bound."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import forked_command
from tests.e2e.taught import teach
from tests.e2e.test_resume import kill_after, numbers
from tests.e2e.test_train import lines
from tests.runs import Overrides

TALK = """
from agentrl.interaction import Interaction, InteractionResponse


class Talk(Interaction):
    async def start_interaction(self, instance_id, **kwargs):
        pass

    async def generate_response(self, instance_id, messages, **kwargs):
        return InteractionResponse(should_end=False, text="And then? " * 6)
"""
STEPS = 4
PROMPT = [{"role": "user", "content": "And then?"}]
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def overrides(small_run: Overrides, folder: Path, name: str, bound: int) -> list[str]:
    """Make a run of dialogues of six turns, whose windows hold about three."""
    return small_run(
        *(f"data.train_files={folder}/rows.parquet", f"data.val_files={folder}/rows.parquet"),
        *("data.max_prompt_length=40", "data.max_response_length=160", "actor_rollout_ref.rollout.max_model_len=200"),
        *(f"actor_rollout_ref.model.path={folder}/policy", f"{MULTI_TURN}.tool_config_path=null"),
        *(f"{MULTI_TURN}.interaction_config_path={folder}/talk.yaml", f"{MULTI_TURN}.max_assistant_turns=6"),
        *(f"{MULTI_TURN}.compaction.threshold=0.6", f"{MULTI_TURN}.compaction.max_summary_tokens=16"),
        *(f"{MULTI_TURN}.compaction.prompt_file={folder}/request.txt", f"{MULTI_TURN}.max_user_turns=6"),
        *(f"{MULTI_TURN}.max_tokens_per_turn=16", "actor_rollout_ref.actor.optim.lr=1e-5"),
        *(f"async_training.max_staleness={bound}", f"trainer.total_training_steps={STEPS}"),
        run_dir=folder / name,
    )


@pytest.mark.slice(1, "kill")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_killed_runs_go_on_with_their_summaries(small_run: Overrides, tmp_path: Path, bound: int) -> None:
    """With a bound of 0 they end with the numbers of an undisturbed run, bit for bit."""
    row = {"prompt": PROMPT, "data_source": "quickstart/talk", "agent_name": "tool_agent"}
    talk = {"interaction_kwargs": {"name": "talk"}}
    rows = [{**row, "reward_model": {"style": "rule", "ground_truth": str(k)}, "extra_info": talk} for k in range(16)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "request.txt").write_text("Sum up.")
    (tmp_path / "talk.py").write_text(TALK)
    entry = {"name": "talk", "class_name": f"{tmp_path}/talk.py:Talk", "on_resume": "answers"}
    (tmp_path / "talk.yaml").write_text(json.dumps({"interaction": [entry]}))
    teach(tmp_path / "policy", ["It was so.<|im_end|>"], [], PROMPT)

    killed = overrides(small_run, tmp_path, "killed", bound)
    for last in (1, 3):
        assert kill_after(killed, tmp_path / "killed", 200, last, signal.SIGKILL)
    resumed = forked_command(killed, tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    found = lines(tmp_path / "killed")[1:]
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert all(line["trajectory/compactions"] > 1 and line["trajectory/compaction_failed"] < 1 for line in found)
    assert max(line.get("async/staleness_max", 0) for line in found) <= bound
    if bound:
        batches = [json.loads(line) for line in (tmp_path / "killed" / "ledger.jsonl").read_text().splitlines()]
        ordinals = [one for batch in batches for first, end in batch["trained"] for one in range(first, end)]
        assert sorted(ordinals) == list(range(4 * STEPS))
    else:
        whole = forked_command(overrides(small_run, tmp_path, "whole", bound), tmp_path)
        assert whole.returncode == 0, whole.stderr
        assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
        one, other = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "killed"))
        assert all((one[name] == other[name]).all() for name in one)
