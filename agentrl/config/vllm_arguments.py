"""The user's own arguments of vLLM servers: which of them other keys, or agentrl itself, set."""

from __future__ import annotations

EXTRA_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"
"""The config key of the user's own vLLM arguments."""

SET_BY = {
    "host": "the servers' addresses are agentrl's to choose",
    "port": "the servers' addresses are agentrl's to choose",
    "uds": "the servers' addresses are agentrl's to choose",
    "model": "set actor_rollout_ref.model.path",
    "served_model_name": "agentrl asks for the model by its path",
    "tensor_parallel_size": "set actor_rollout_ref.rollout.tensor_model_parallel_size",
    "gpu_memory_utilization": "set actor_rollout_ref.rollout.gpu_memory_utilization",
    "max_model_len": "set actor_rollout_ref.rollout.max_model_len",
    "max_num_seqs": "set actor_rollout_ref.rollout.max_num_seqs",
    "weight_transfer_config": "agentrl sends the weights",
    "worker_extension_cls": "agentrl sends the weights",
    "logprobs_mode": "agentrl trains on log-probs of softmax(logits / temperature)",
    "scheduling_policy": "agentrl lets the earliest prompt go first",
    "middleware": "agentrl gives each of its servers a key",
    "api_key": "agentrl gives each of its servers a random key",
    "api_server_count": "requests are ended at one API server",
    "data_parallel_size": "set actor_rollout_ref.rollout.num_servers",
    "headless": "agentrl speaks HTTP to it",
    "grpc": "agentrl speaks HTTP to it",
    "nnodes": "a server of agentrl's is on one host",
    "node_rank": "a server of agentrl's is on one host",
    "ssl_keyfile": "agentrl speaks plain HTTP to it",
    "ssl_certfile": "agentrl speaks plain HTTP to it",
}
"""vLLM's arguments that a user may not give, each with the alternative."""
