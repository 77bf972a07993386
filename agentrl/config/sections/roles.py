"""Keys of `actor_rollout_ref.rollout.roles.*`: who plays the roles of an episode."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.config.rules import OnlyWith, Place, Rule, Uses, Values
from agentrl.config.section import Section
from agentrl.system.json_value import JSON, as_mapping

POLICY = "policy"
"""A role's policy that means the run's own, with its present weights."""
FROZEN = OnlyWith("base_url")


class RoleConfig(Section):
    """`actor_rollout_ref.rollout.roles.<role>.*`"""

    policy: str = Field(POLICY, min_length=1)
    """Who plays the role. policy: the run's policy, with its present weights. Any other name is a frozen model: at
    base_url, by its name there, or an adapter."""
    trains: bool | None = None
    """Train on the role's tokens; null: where the run's policy plays it. false: the run's policy plays the role, and
    its tokens there are not trained on."""
    base_url: Annotated[str | None, Uses("a host")] = None
    """OpenAI-compatible endpoint of the frozen model, with its /v1."""
    adapter: str | None = None
    """Folder of a LoRA adapter in peft's format, e.g. policy/adapter of an earlier run. The run's servers serve it next
    to the policy's adapter. It is sampled with the policy's parameters."""
    api_key_env: Annotated[str | None, FROZEN, Uses("an environment variable of yours")] = None
    """Environment variable that holds the endpoint's key; null: no key is sent."""
    temperature: Annotated[float, FROZEN] = Field(1.0, ge=0)
    """Sampling temperature of the frozen model."""
    max_tokens: Annotated[int, FROZEN] = Field(256, gt=0)
    """Tokens of one turn of the frozen model."""
    timeout: Annotated[float, FROZEN] = Field(60.0, gt=0)
    """Seconds in which the endpoint answers, further tries included."""

    @property
    def trained(self) -> bool:
        """Say whether the role's tokens are trained on."""
        return self.policy == POLICY and self.trains is not False


class HoldsRoles(Rule):
    """The values of the mapping are roles: at least one is trained, and each other model has an address."""

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        found: list[str] = []
        folders: dict[JSON, JSON] = {}
        roles = {name: as_mapping(entry) for name, entry in values.mapping(key).items()}
        for name, keys in roles.items():
            at, policy = f"{key}.{name}", keys["policy"]
            if policy != POLICY and keys["trains"]:
                found.append(
                    f"{at}: trains=true needs policy={POLICY}, found policy={policy}. Two trained policies with "
                    "different weights are not supported: let both roles share the weights of the run's policy, or "
                    "freeze one of them (trains=null) and train it in another run"
                )
            elif policy != POLICY and keys["base_url"] is None and keys["adapter"] is None:
                found.append(
                    f"{at}: policy={policy} is no policy of this run, and has no base_url: set the address of the "
                    f"OpenAI-compatible endpoint that serves it, the folder of its adapter, or policy={POLICY}"
                )
            elif keys["base_url"] is not None and keys["adapter"] is not None:
                found.append(f"{at}: base_url and adapter name two models: leave one of them out")
            elif policy == POLICY and keys["base_url"] is not None:
                found.append(f"{at}: base_url needs policy, the name of the frozen model there")
            elif policy == POLICY and keys["adapter"] is not None:
                found.append(f"{at}: adapter needs policy, a name for the frozen adapter")
            elif folders.setdefault(policy, keys["adapter"]) != keys["adapter"]:
                found.append(
                    f"{at}: policy={policy} is the name of another role's model: give one of them another name"
                )
        trained = [name for name, keys in roles.items() if keys["policy"] == POLICY and keys["trains"] is not False]
        if roles and not trained and not found:
            found.append(f"{key}: none of {', '.join(roles)} is trained: let the run's policy play one of them")
        return found
