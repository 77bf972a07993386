"""`python -m agentrl.config.verl.page > docs/verl.md`: what each of verl's keys is here, from the table."""

from __future__ import annotations

from agentrl.config.verl.entries import VerlKey
from agentrl.config.verl.table import VERL_KEYS

HEAD = """\
# Commands made for verl

A launch script made for verl runs here with one change, the module's name:

| in the script | here |
|---|---|
| `python3 -m verl.trainer.main_ppo` (Search-R1's fork, too) | `python3 -m agentrl.verl.main_ppo` |
| `python3 -m recipe.dapo.main_dapo` | `python3 -m agentrl.verl.main_dapo` |
| `verl.experimental.fully_async_policy.fully_async_main` | `agentrl.verl.fully_async_main` |
| `verl.experimental.one_step_off_policy.main_ppo` | `agentrl.verl.one_step_off_main` |

The command then trains with the numbers that verl's code takes from it, as far as [they were compared](#measured), or
all that it cannot do is told in one message. verl's defaults hold (those of 0.9.1), and its units: PPO with GAE, one
trajectory a prompt, 30 epochs, `max_tool_response_length` in characters.
`python -m agentrl.train --config-name=ppo_trainer` is the same (`ppo_megatron_trainer`, `dapo_trainer`,
`dapo_megatron_trainer`, `search_r1_trainer`, ...), and so is a YAML file of yours that says
`defaults: [ppo_trainer, _self_]`. `python -m agentrl.train` without one of these keeps agentrl's own defaults and
guesses nothing: keys of verl's that have no effect are accepted, its spellings of other keys are refused with the name
of ours.

## Which release's defaults hold

Releases of verl take other things from the same keys. A command shows its age by its keys, and the first lines of the
run say which defaults hold:

| a command with | has the defaults of |
|---|---|
| `max_turns`, `do_search`, `retriever.*`, `rollout.n_agent`, `data.max_start_length`, `data.max_obs_length` | \
Search-R1's fork (`search_r1_trainer`) |
| `ppo_micro_batch_size` or `log_prob_micro_batch_size` without `_per_gpu`, `fsdp_config.grad_offload`, \
`val_generations_to_log_to_wandb`, `remove_previous_ckpt_in_save`, and no key that came later | \
verl 0.2 (`ppo_0_2_trainer`) |
| `algorithm.use_kl_in_reward`, or none of these | verl 0.9.1 (`ppo_trainer`) |

| | 0.9.1 | 0.1 to 0.3.0 | Search-R1's fork |
|---|---|---|---|
| the KL divergence is subtracted from the reward | if `algorithm.use_kl_in_reward` | \
unless `actor.use_kl_loss` | unless `actor.use_kl_loss` |
| `actor.entropy_coeff` | 0 | 0.001 | 0.001 |
| bounds of the ratio | `clip_ratio_low`, `clip_ratio_high`, dual clip `clip_ratio_c` | `clip_ratio` | `clip_ratio` |
| the policy's `ppo_mini_batch_size` counts | prompts | prompts | trajectories |
| the critic's counts | prompts | trajectories | trajectories |
| passes over a batch | `ppo_epochs` | one in 0.2 | one |
| courses of the learning rate | constant, cosine | constant | constant |
| overlong prompts | `data.filter_overlong_prompts` | left out | cut to `max_start_length` |
| after the last step, with `test_freq=-1` | no validation | validation | validation |

- **A key of the first releases beside later ones** is refused: which KL term the command means is not clear. It says so
  by `algorithm.use_kl_in_reward=true` or `false`, and then has the defaults of 0.9.1.
- **`algorithm.kl_ctrl.kl_coef` is no sign of age.** verl's own quickstart sets it, and has no KL term in the reward.
- **Release 0.3.0 and commands of 0.2 with `_per_gpu`** cannot be told from later ones. Write
  `--config-name=ppo_0_2_trainer` for those.
- **Mini-batches hold whole prompts here.** Search-R1's 256 trajectories of 512 prompts x 5 are 10 optimizer steps in
  both, of 51 or 52 prompts here. Sizes that do not come out so are refused.

## Before it runs

    python -m agentrl.verl check run_gsm8k_ppo.sh

prints for each training command of a script, or for one command, what is the same here, translated, noted and refused,
and the equivalent command in our own words. Nothing is run: of a script only variables are substituted
(`${X:-default}`, arrays, `$((...))`, and `$(pwd)`, the folder that you are in); what it would compute, what comes from
outside and what is set under a condition is shown as not known. The exit status is 0 where every command runs here, 1
where one does not.

## Measured

Every training command in the scripts and documents of verl (22 August and 29 January 2026), its recipes (5 August 2026)
and Search-R1's fork (29 October 2025), each once (`python -m benchmarks.verl.launch_commands`):

| | commands | accepted | waits | rightly refused | own code | wrong |
|---|---|---|---|---|---|---|
| main_ppo on FSDP | 220 | 197 | 0 | 10 | 1 | 12 |
| main_ppo on Megatron and others | 103 | 86 | 4 | 6 | 5 | 2 |
| main_dapo | 30 | 12 | 0 | 16 | 0 | 2 |
| asynchronous mains | 66 | 55 | 0 | 4 | 0 | 7 |
| Search-R1's fork | 11 | 11 | 0 | 0 | 0 | 0 |
| recipes' own mains | 30 | 0 | 0 | 0 | 30 | 0 |

*Accepted* says that the command starts. What was compared:

- **By key, all accepted commands of verl and its recipes**: 59 values that decide the algorithm, with those of the
  config that verl composes of the command, by the YAML of August 2026 or, for other mains, of their own release. They
  are equal for all 361, the mean of `gspo`, `sapo` and `geo_mean` aside, which verl does not take from its key. Equal
  keys prove nothing where releases read a key otherwise: the next comparison is for that.
- **By what the code does** (`benchmarks/verl/quantities.py`): optimizer steps of policy and critic a batch, the
  reward of a sample token with its KL term, the losses of ten sample tokens with clip, KL and entropy terms, learning
  rates after the warm-up, and the steps after which validation runs. Ours are computed by the code that trains,
  verl's by formulas of the release: main, 0.2, Search-R1's fork, DAPO's recipe, and the asynchronous mains. They are
  equal for all 361 commands, for 15 commands of these families in a test (`tests/verl/test_quantities.py`), and for 30
  of 33 accepted commands of verl 0.2 in TinyZero, ToolRL and simpleRL-reason; the other 3, of Megatron, were not
  compared.
- **By the update itself**: four estimators, with formulas of verl 0.9.1 ([algorithms.md](algorithms.md)).

No public command was trained in both.

What is refused, by reason; a command with several counts under the last kind that it has here:

| refused for | | commands |
|---|---|---|
| routing replayed of experts that SGLang chose | waits | 4 |
| another device (trainer.device=npu) | rightly refused | 20 |
| quantised training or rollouts | rightly refused | 9 |
| float16 | rightly refused | 2 |
| weights divided by the mean of each micro-batch, whose size would count | rightly refused | 2 |
| steps that generate nothing | rightly refused | 1 |
| keys of two ages of verl's | rightly refused | 2 |
| the recipe's own code | own code | 34 |
| code of another project | own code | 2 |
| a placeholder, or a slip of the shell's | wrong | 11 |
| a file that is not there | wrong | 5 |
| a key, a value or a size that verl refuses, too | wrong | 7 |

*Waits*: could be here, and is not. *Wrong*: no command that verl itself would run from that folder, e.g. with `...` in
it, a misspelled value, or a YAML file that is not there.

Five projects with copies of verl, counted apart (ZeroSearch, MemAgent, TinyZero, Skywork-OR1, simpleRL-reason), have
112 further commands: 82 are accepted, 27 ask for code of their own (a main, or keys that no release of verl has), and
3 are wrong. By their keys the commands of TinyZero, ToolRL and simpleRL-reason that name a micro-batch in the first
way are told as verl 0.2's. A fork that changed the code behind a key of verl's is not seen.

## What is told at the start

- how many of the command's keys have no effect here; `trainer.show_verl_notes=true` lists them with the reasons;
- what is arranged otherwise than the command says: a policy that Megatron, VeOmni or TorchTitan would hold is sharded
  by FSDP2, with the tensor and sequence sizes that divide the ranks;
- every value that is not agentrl's default and that the command does not name.

A run's `config.yaml` is in our own words, and metrics have verl's names beside ours (`trainer.verl_metric_names`).

## What a run of verl's leaves

- **Its policy** is a model for `actor_rollout_ref.model.path` once it is in Hugging Face's format: the folder
  `global_step_N/actor/huggingface`, where `actor.checkpoint.save_contents` had `hf_model`. The shards of FSDP
  (`model_world_size_*_rank_*.pt`) and of Megatron (`dist_ckpt/`) are pickles, in part or whole, and are not read here;
  verl's own tool `verl.model_merger` makes a model of them, a critic's for `critic.path`, too.
- **Optimizers, the position in the data, and steps** are not taken over: training goes on from the weights, as a run of
  its own. `trainer.resume_mode=auto` looks for agentrl's checkpoints alone.
- **LoRA adapters** in peft's format are `actor_rollout_ref.model.lora_adapter_path`.
- **Dumps**: `trainer.rollout_data_dir` and `validation_data_dir` write STEP.jsonl with verl's `input`, `output`, `gts`,
  `score`, `step` and the scorer's numbers. Here the texts have their special tokens, `gts` of more than 10,000
  characters (tests of programs) is null, texts that a scorer returns are left out, and `acc` is there only where it is
  returned; `uid`, `status`, `reward` and others stand beside them.

## What differs

- Scores: those of verl, but for numina and geometry3k (math-verify) and programs (the share of all tests);
  [verl_classes.md](verl_classes.md#rewards).
- Faults of a reward model's servers cost a trajectory time, and at last its score, never a reward of zero; in verl they
  are the reward function's to catch.
- Warm-up over w steps rises from 1 / (w + 1) in the first step; verl's first step has the rate 0.
- Validation samples where `val_kwargs.temperature` is above 0, as in verl; `val_kwargs.do_sample` says nothing there.
- `clip_ratio` alone changes nothing in verl, whose `clip_ratio_low` and `clip_ratio_high` are 0.2 unless set; so here.
- Parameters that learn are float32 with bfloat16 autocast, whatever `model_dtype` says.
- Calls beyond `multi_turn.max_parallel_calls` get an error as their answer; verl leaves them without one.
- A tool answer's marker counts towards `max_tool_response_length`; in verl it comes on top.
- Engines of vLLM, TensorRT-LLM and Hugging Face are SGLang's servers here, as many as the machine's GPUs hold.
- `trainer.total_training_steps` and `rollout.total_rollout_steps` hold where they are given; verl ends after
  `total_epochs`, too.
- The clip counts the gradients of the policy alone; verl's counts those of layers that predict further tokens, too.
- verl up to 0.3.0 and Search-R1's fork take the mean over the tokens of each micro-batch, and then over
  micro-batches; here each token of a mini-batch weighs the same. verl 0.9.1 does as is done here.
- verl up to 0.2 and Search-R1's fork end one step before `total_training_steps`.
- The critic and the advantages of Search-R1's fork see the tokens of search results, too; here only sampled tokens have
  values and advantages.
- `train_max_samples` takes the first rows; verl draws them where `data.shuffle` is set.
- Random numbers are others: order of the data, mini-batches and samples differ from verl's run by run.

## Every key

The first line that fits a key holds; `*` stands for anything. A key of [docs/config.md](config.md) that no line fits is
the same in both. *noted*: accepted, without effect on the result; *refused*: it would change the result, and is not
here.
"""


def page() -> str:
    """Write the whole page, in Markdown."""
    lines = [HEAD, "| verl's key | here | what stands for it |", "|---|---|---|"]
    lines += [f"| `{entry.pattern}` | {_here(entry)} | {_text(entry)} |" for entry in VERL_KEYS]
    return "\n".join(lines) + "\n"


def _here(entry: VerlKey) -> str:
    if entry.kind == "noted" and entry.accepted is not None:
        return f"noted: {', '.join(f'`{_shown(value)}`' for value in entry.accepted)}; others refused"
    return entry.kind


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _text(entry: VerlKey) -> str:
    ours = ", ".join(f"`{name}`" for name in entry.ours if name != entry.pattern and name not in entry.text)
    return f"{entry.text}{f' ({ours})' if ours else ''}".replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
